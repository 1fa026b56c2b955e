"""Lowering for a CUDA GPU without one: kernels compile, and their parameters are those given."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

jax = pytest.importorskip("jax", reason="blackwell_sparsek.jax needs jax, which is not installed")

from blackwell_sparsek.core.env import environment_for_compiler  # noqa: E402
from blackwell_sparsek.jax import flat_kernels  # noqa: E402
from blackwell_sparsek.launch.description import ArraySpec  # noqa: E402

PROGRAM = pathlib.Path(__file__).with_name("lower_for_cuda.py")
EXPECTED = {
    "attention": [
        "_attn_fwd_kernel",
        "_attn_delta_kernel",
        "_attn_dq_kernel",
        "_attn_dkdv_kernel",
        "_sink_parts_kernel",
        "_sink_sum_kernel",
    ],
    "forward": ["_attn_fwd_kernel"],
    "decode": ["_attn_decode_kernel"],
    # the product itself is not part of its gradient
    "products": ["_bsr_sddmm_kernel", "_bsr_spmm_kernel"],
}


@pytest.mark.exhaustive
def test_everything_lowers_without_torch(tmp_path):
    if importlib.util.find_spec("jax_triton") is None:
        pytest.skip("jax-triton is not installed")
    environment = {**environment_for_compiler(), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, PROGRAM], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {case["name"]: case for case in json.loads(done.stdout.splitlines()[-1])}
    for name, kernels in EXPECTED.items():
        called = [call[0].removesuffix("_flat") for call in found[name]["calls"]]
        assert sorted(called) == sorted(kernels), name
        assert found[name]["custom_calls"] == len(kernels)
    # each mask adds where its list begins to both bounds of its rows, which XLA fuses; the rest are
    # views
    views = {"broadcast_in_dim", "constant", "reshape", "return"}
    assert set(found["forward"]["operations"]) - views == {"add", "concatenate", "custom_call"}
    assert set(found["decode"]["operations"]) - views == {"custom_call"}
    (decode,) = found["decode"]["calls"]
    zeroed = [p for p in decode[3] if p[0] == "array" and p[1] > 0]
    # the counters of all programs, and nothing else
    assert zeroed == [["array", 4 * decode[1]]]
    # scale and the like are fp32, as torch passes them
    floats = {p[0] for case in found.values() for call in case["calls"] for p in call[3]}
    assert floats <= {"array", "i32", "fp32"}


def test_numbers_as_arguments():
    text = flat_kernels._Text()
    array = ArraySpec.contiguous_of("x", "input", (4, 2), None)
    assert text.of((array, None, 1, 48, 7, 2**40, 0.5, True), False) == (
        "tuple(p_x, None, 1, n0 * 16, n1, tl.cast(n2, tl.int64) * 16, n3, True)"
    )
    assert text.numbers == [3, 7, 2**36, 0.5]
    # what a kernel does not specialise on is a number of 32 bits, whatever its value
    text = flat_kernels._Text()
    assert [text.of(n, True) for n in (1, 16)] == ["tl.cast(n0, tl.int32)", "tl.cast(n1, tl.int32)"]
    assert text.numbers == [1, 16]
