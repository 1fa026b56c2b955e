"""The package imports torch when a name needs it, and names stay what they are."""

import subprocess
import sys

import pytest


def fresh(program, *, stdout=""):
    """Run a program in a Python that has imported nothing."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.strip()) == (0, stdout), done.stderr


def test_importing_the_package_leaves_torch_alone():
    fresh("import sys, blackwell_sparsek; assert 'torch' not in sys.modules")


def test_the_planning_layers_leave_torch_alone():
    fresh("import sys, blackwell_sparsek.masks.band; assert 'torch' not in sys.modules")


def test_errors_need_no_torch():
    program = "import sys; from blackwell_sparsek import InvalidInput, Unsupported, __version__\n"
    fresh(program + "assert 'torch' not in sys.modules")


def test_operators_are_registered_at_once_where_torch_is_imported():
    fresh("import torch, blackwell_sparsek; torch.ops.bsk.attn_fwd")


@pytest.mark.parametrize("torch", ["torch", "torch.nn", "torch.utils.data"])
def test_operators_are_registered_with_torch_if_that_comes_later(torch):
    """Sorted imports put torch behind, and nothing else of the package may be touched."""
    program = f"import blackwell_sparsek, sys; assert 'torch' not in sys.modules; import {torch}\n"
    program += "import torch; torch.ops.bsk.attn_fwd; print(type(torch.__loader__).__name__)\n"
    program += "assert torch.__spec__.loader is torch.__loader__"
    fresh(program, stdout="SourceFileLoader")


def test_a_torch_that_is_missing_stays_missing():
    program = """
import sys, blackwell_sparsek
sys.path[:] = []
for attempt in range(2):
    try:
        import torch
    except ModuleNotFoundError as error:
        print(error.name)
"""
    fresh(program, stdout="torch\ntorch")


def test_the_first_name_imports_all():
    program = "import blackwell_sparsek as bsk; bsk.BSRMatrix\n"
    fresh(
        program + "assert set(bsk._PUBLIC) <= set(vars(bsk)); import torch; torch.ops.bsk.attn_fwd"
    )


@pytest.mark.parametrize("name", ["attention", "matmul"])
def test_a_package_does_not_take_the_name_of_its_function(name):
    program = f"import blackwell_sparsek.{name}.api, blackwell_sparsek as bsk\n"
    fresh(program + f"print(type(bsk.{name}).__name__)", stdout="function")


def test_masks_are_the_patterns():
    program = "import blackwell_sparsek.masks.band, blackwell_sparsek as bsk\n"
    fresh(program + "print(bsk.masks.__name__)", stdout="blackwell_sparsek.masks.patterns")


def test_every_public_name_is_listed():
    program = "import blackwell_sparsek as bsk\n"
    fresh(
        program + "assert set(bsk.__all__) <= set(dir(bsk)); [getattr(bsk, n) for n in bsk.__all__]"
    )


def test_an_unknown_name_is_refused_without_importing_torch():
    program = """
import sys, blackwell_sparsek as bsk
try:
    bsk.atention
except AttributeError as error:
    print(error)
assert 'torch' not in sys.modules
"""
    fresh(program, stdout="module 'blackwell_sparsek' has no attribute 'atention'")
