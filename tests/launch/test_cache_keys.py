"""Keys in Triton's cache that are the same in every program."""

import subprocess
import sys

import pytest

from blackwell_sparsek.core.env import environment_for_compiler

pytest.importorskip("triton")

# They call each other's functions: softmax, masks, schedule.
KERNELS = (
    "attention.triton.forward._attn_fwd_kernel",
    "attention.triton.backward._attn_dq_kernel",
)
# A launch, and a kernel that is compiled without one.
STARTS = ("variants._Kernel(nothing)", "signature.Signature(nothing, [])")
SCRIPT = """
import importlib, sys
from types import SimpleNamespace
from blackwell_sparsek.launch import signature, variants

nothing = SimpleNamespace(params=())
{start}
for place in sys.argv[1:]:
    module, name = place.rsplit(".", 1)
    kernel = getattr(importlib.import_module("blackwell_sparsek." + module), name)
    print(name, kernel.cache_key)
"""


def keys(start, *kernels):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(start=start), *kernels],
        env=environment_for_compiler(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split() for line in done.stdout.splitlines())


@pytest.mark.parametrize("start", STARTS)
def test_keys_do_not_depend_on_what_was_compiled_before(start):
    """Each kernel is the first in one of the programs."""
    first, second = KERNELS
    both = keys(start, first, second)
    assert len(both) == 2
    assert both == keys(start, second, first)
