"""(problem) -> whether warps with a block row each multiply it (`kernels.bsr.spmm_warps`), how."""

from ..kernels.bsr.config_warps import WARP_ROWS, WarpRowsConfig
from .bsr import spmm_sizes
from .bsr_estimate import packed_seconds, warp_rows_seconds
from .problem_bsr import BsrProblem


def takes_warp_rows(problem: BsrProblem, x_transposed: bool) -> bool:
    """Whether such warps can and should multiply what `spmm_sm90_unsupported` accepts."""
    sizes = spmm_sizes(problem)
    if sizes.block_h != WARP_ROWS or sizes.nnz_blocks == 0 or x_transposed:
        return False
    return warp_rows_seconds(problem) < packed_seconds(problem)


def warp_rows_config(problem: BsrProblem) -> WarpRowsConfig:
    """How they do it."""
    return WarpRowsConfig(OUT_TRANSPOSED=problem.dense_left, ACTIVATION=problem.activation)
