"""What the tuner chooses for the main problems is among what is compiled."""

import subprocess
import sys

import pytest

pytest.importorskip("triton")

from blackwell_sparsek.core.env import environment_for_compiler

PROGRAM = """
import torch
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.testing.cases import matmul
from blackwell_sparsek.matmul.triton.tuning import triton_stages
from blackwell_sparsek.matmul.triton.tuning import pair_config, sddmm_config, spmm_config
from blackwell_sparsek.calls.matmul import BsrProblem

LIMITS = {80: (108, 166912), 89: (128, 101376), 90: (132, 232448), 100: (148, 232448),
          120: (170, 101376)}
compiled = {
    (case.kernel.__name__, sm, case.args["BLOCK_H"], case.args["INPUT_PRECISION"],
     case.args["TILE_M"], case.args["TILE_N"], case.args["TILE_K"], case.num_warps, case.num_stages)
    for case in (*matmul.spmm_cases(), *matmul.sddmm_and_pair_cases())
    if {"TILE_K", "INPUT_PRECISION"} <= {*case.args}
    for sm in case.archs
}

def check(kernel, sm, config, block_h, index_loads):
    stages = triton_stages(config.num_stages, index_loads)
    key = (kernel, sm, block_h, config.input_precision, config.tile_m, config.tile_n,
           config.tile_k, config.num_warps, stages)
    if key not in compiled:
        print("not compiled:", key)

for sm, limits in LIMITS.items():
    arch = Arch("cuda", sm, *limits, False)
    for dtype, precision, side, n in [
        (torch.bfloat16, "ieee", 128, 8192),
        (torch.bfloat16, "ieee", 16, 8192),
        (torch.bfloat16, "ieee", 128, 1),
        (torch.float32, "ieee", 128, 8192),
        (torch.float32, "tf32", 128, 8192),
    ]:
        blocks = (8192 // side) ** 2 // 5
        def problem(kind):
            return BsrProblem(kind, arch, dtype, dtype, (8192, 8192), (side, side), blocks, n,
                              other_block_shape=(side, side))
        check("_bsr_spmm_kernel", sm, spmm_config(problem("matmul"), precision), side, 1)
        if precision == "ieee" and n > 1:
            check("_bsr_sddmm_kernel", sm, sddmm_config(problem("sddmm"), precision), side, 0)
    check("_bsr_pair_products_kernel", sm, pair_config(BsrProblem(
        "pairs", arch, torch.bfloat16, torch.bfloat16, (128, 128), (128, 128), 9, 9,
        other_block_shape=(128, 128)), "ieee"), 128, 2)
print(len(compiled), "compiled")
"""


def test_main_choices_are_compiled():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment_for_compiler(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "not compiled" not in done.stdout, done.stdout
    assert int(done.stdout.split()[0]) >= 50, done.stdout
