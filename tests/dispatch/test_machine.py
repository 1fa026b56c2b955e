"""What kernels need of the machine, and what Triton's interpreter must not be asked."""

import os
import subprocess
import sys

import pytest
import torch

from blackwell_sparsek.core import torch_state
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.core.torch_state import bf16_is_exact, bf16_mended
from blackwell_sparsek.dispatch import machine

GPU, OLD = Arch("cuda", 90, 132, 232448, False), Arch("cuda", 75, 40, 65536, False)
CPU, INTERPRETED = Arch("cpu", 0, 1, 0, False), Arch("cpu", 0, 1, 0, True)
LOOKED_INTO = Arch("cuda", 90, 132, 232448, True)


@pytest.fixture(autouse=True)
def _triton_is_there(monkeypatch):
    monkeypatch.setattr(machine, "why_no_triton", lambda: None)
    monkeypatch.setattr(machine, "why_triton_fails", lambda: None)
    monkeypatch.setattr(machine, "bf16_is_exact", lambda: False)


@pytest.mark.parametrize(
    ("arch", "dtype", "reason"),
    [
        (GPU, torch.bfloat16, None),
        (OLD, torch.float16, "needs a CUDA GPU of sm_80 or newer, got sm_75"),
        (CPU, torch.float16, "needs a CUDA GPU of sm_80 or newer, got cpu"),
        (GPU, torch.float64, "needs float16, bfloat16 or float32, got torch.float64"),
        (INTERPRETED, torch.float16, None),
        (INTERPRETED, torch.bfloat16, "Triton's interpreter takes bfloat16 for integers"),
        (LOOKED_INTO, torch.float16, "TRITON_INTERPRET is set, and the tensors are on a GPU"),
    ],
)
def test_portable_kernels(arch, dtype, reason):
    found = machine.why_not_portable(arch, torch.float32, dtype)
    assert found is None if reason is None else reason in found


def test_a_torch_that_misses_the_gpu_is_named_with_tensors_on_the_cpu(monkeypatch):
    monkeypatch.setattr(machine, "why_torch_misses_gpu", lambda: "torch misses it")
    needed = "needs a CUDA GPU of sm_80 or newer"
    assert machine.why_not_portable(CPU) == f"{needed}, got cpu; torch misses it"
    assert machine.why_not_portable(OLD) == f"{needed}, got sm_75"


def test_triton_is_imported_only_where_its_kernels_may_run(monkeypatch):
    monkeypatch.setattr(machine, "why_triton_fails", lambda: "importing it fails")
    for arch in (GPU, INTERPRETED):
        assert machine.why_no_kernels(arch) == "importing it fails"
    assert machine.why_no_kernels(CPU) is None


def test_no_kernel_runs_on_a_gpu_while_kernels_are_interpreted():
    assert machine.why_no_kernels(GPU) is None and machine.why_no_kernels(INTERPRETED) is None
    assert machine.why_no_kernels(LOOKED_INTO) is not None


def test_who_mends_the_interpreter_says_so(monkeypatch):
    # where kernels are interpreted, the tests mend it around each of them
    monkeypatch.setattr(torch_state, "_mended", 0)
    assert bf16_is_exact() is False
    with bf16_mended():
        assert bf16_is_exact() is True
        with bf16_mended():
            pass
        assert bf16_is_exact() is True
    assert bf16_is_exact() is False


def test_interpreted_products_of_bf16_are_refused_where_nobody_mended_them():
    code = """
import torch, blackwell_sparsek as bsk
q = torch.randn(1, 2, 16, 16, dtype=torch.bfloat16)
w = bsk.BSRMatrix.from_dense(torch.randn(16, 16, dtype=torch.bfloat16), (16, 16))
attend = lambda: bsk.attention(q, q, q, impl="triton")
multiply = lambda: bsk.matmul(w, q, impl="triton")
for call in (attend, multiply):
    try:
        call()
    except bsk.Unsupported as error:
        assert "takes bfloat16 for integers" in str(error)
    else:
        raise AssertionError("computed")
"""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
