"""Hopper kernels give right results in the emulator, whatever the order of warps and copies.

Calls run in processes in which Triton compiles for sm_90. It takes seconds until one of these has
imported what it needs, so that each makes several calls.
"""

import ast
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton.experimental.gluon", reason="Triton is not installed")

from blackwell_sparsek.core.env import environment_for_compiler

from ..architecture import source
from .emulated_calls import CALLS
from .test_releases import FOLDER, OTHERS, release

ROOT = pathlib.Path(__file__).parents[2]
# Part of every `make test`; the others take minutes.
QUICK = ("forward_mask_128x16", "product_128x128")
# For releases of Triton that are not installed.
ONE_OF_EACH = (
    *("forward_causal_window", "forward_mask_64x64", "backward", "backward_mask_64x64"),
    *("decode", "decode_latent", "ragged_pages", "forward_fp8"),
    *("product_128x128", "product_warps", "product_narrow", "product_strips", "sampled_product"),
    *("product_fp8_64x32", "product_fp8_few_tokens", "chosen_keys", "chosen_blocks_backward"),
)


def _run(seed: int, names: tuple[str, ...], **variables: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.testing.emulated_calls", str(seed), *names],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment_for_compiler() | variables,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[:-1] == [f"{name} ok" for name in names]


def test_every_hopper_kernel_is_reached_by_a_call():
    gluon, named = set(), set()
    for path in source.files(source.ROOT):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(
                "gluon.jit" in ast.unparse(x) for x in node.decorator_list
            ):
                gluon.add(node.name)
                named |= {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
    # what no other function of a kernel names is launched
    kernels = gluon - named
    assert len(kernels) > 20
    reached = {kernel for made in CALLS.values() for kernel in made.kernels}
    assert kernels <= reached, f"no call in emulated_calls.py reaches {kernels - reached}"


def test_calls():
    _run(1, QUICK)


MORE = sorted(set(CALLS) - set(QUICK))
PARTS = 8


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(PARTS))
def test_more_calls(part):
    _run(2, tuple(MORE[part::PARTS]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [3, 4])
def test_order_of_warps_and_copies(seed):
    _run(seed, ("forward_causal_window", "backward_deterministic", "decode", "product_64x64"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("version", OTHERS)
@pytest.mark.parametrize("half", [0, 1])
def test_releases(version, half):
    path = os.pathsep.join(filter(None, [str(release(version)), os.environ.get("PYTHONPATH", "")]))
    names = ONE_OF_EACH[half::2]
    _run(1, names, PYTHONPATH=path, TRITON_CACHE_DIR=str(FOLDER / "cache"))


@pytest.mark.exhaustive
def test_tests_for_gpus():
    names = ("one key", "no entries")
    tests = [f"tests/sparse_attention/sm90/test_latent_gpu.py::test_dense[{x}]" for x in names]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "sm90", *tests],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment_for_compiler() | {"BSK_EMULATE": "1"},
    )
    assert f"{len(names)} passed" in done.stdout, done.stdout[-3000:]
