"""(problem) -> how strips of blocks 16 columns wide are multiplied with few columns of x."""

from functools import lru_cache

import torch

from ..core.compat import warps_may_part
from ..kernels.bsr.config_strips import STRIP_BLOCK, STRIP_ROWS, StripsConfig
from .bsr import spmm_sizes
from .problem_bsr import BsrProblem

# Columns up to which strips are the faster kernel: blocks of 16 rows, and taller ones, of which TMA
# brings more at a time. us for 28672 x 4096 in 22 % of 16 x 16 blocks on an H200, strips and the
# best of the others: 1 column 18.3, 22.8; 16 columns 23.1, 38.1; 32 columns 35.6, 49.2; 64 columns
# 61.0, 69.9, but 12.9, 11.5 for 4096 x 4096. Of 128 x 16 with 16 columns 23.0, 24.0 and 6.1, 8.1.
MOST_COLUMNS, MOST_COLUMNS_TALL = 32, 16
# Warps of an SM: 1, 2, 4 and 8 for each of 13.6 strips take 23.1, 25.1, 25.3 and 41.6 us; of 3.9
# strips 69.5, 45.5, 40.1 and 43.5; of 1.9 strips of 197 blocks 33.3, 19.8, 16.2 and 13.7.
SM_WARPS, MOST_WARPS = 16, 8
# Rows of fewer blocks are over in a step or two: 4 warps with two units each take 6.2 us where 8
# with one take 6.9 (56 blocks, 1.9 strips an SM), 7.0 where 4 with one take 8.6 (2.9 strips).
SHORT_ROW, SHORT_ROW_WARPS = 128, 4


@lru_cache(maxsize=1024)
def strips_config(problem: BsrProblem) -> StripsConfig | None:
    """How strips multiply this product of one matrix; None where that is not for them."""
    sizes = spmm_sizes(problem)
    by_rows = problem.dense_left and problem.transposed and problem.row_major and problem.tma
    most = MOST_COLUMNS if sizes.block_h == STRIP_ROWS else MOST_COLUMNS_TALL
    fits = (
        problem.arch.sm == 90
        and problem.dtype in (torch.float16, torch.bfloat16)
        and sizes.block_w == STRIP_BLOCK
        and sizes.block_h % STRIP_ROWS == 0
        and problem.shape[0] % STRIP_BLOCK == 0
        and 1 <= sizes.n <= most
        and sizes.nnz_blocks > 0
    )
    if not (by_rows and fits and warps_may_part()):
        return None
    tile_n = next(tile for tile in (8, 16, 32) if sizes.n <= tile)
    strips = sizes.rows_b * (sizes.block_h // STRIP_ROWS)
    warps = max(1, min(SM_WARPS * problem.arch.num_sms // strips, MOST_WARPS))
    warps = 1 << (warps.bit_length() - 1)
    # wide tiles have no registers for two units, and less for one warp to wait for
    units = 2 if tile_n == 8 else 1
    if tile_n == MOST_COLUMNS:
        warps = max(warps, 2)
    elif warps >= SHORT_ROW_WARPS and sizes.nnz_blocks < SHORT_ROW * sizes.rows_b:
        warps, units = SHORT_ROW_WARPS, 2
    return StripsConfig(sizes.block_h, tile_n, warps, units, problem.activation)
