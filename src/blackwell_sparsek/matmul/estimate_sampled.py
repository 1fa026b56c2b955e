"""Estimated time of a sampled product and of its dense counterpart; see `estimate`.

The shares of the Hopper kernel are what its copies from L2 allow; they await a measurement.
"""

from ..calls.matmul import BsrProblem
from ..launch.launcher import cdiv
from .estimate import (
    DENSIFY_SHARE,
    L2_BYTES_S,
    LAUNCH_S,
    dense_rate,
    density_of,
    device_of,
    packed_fill,
)
from .sm90.config import CONSUMERS
from .sm90.tuning import sddmm_sm90_config

# Share of the smaller of the dense rate and of what L2 feeds that work tiles reach.
SAMPLED_SHARE = 0.8
# Share of the dense rate that the portable kernel reaches with blocks of 64 and more, in proportion
# to the shorter side below: 8192 x 8192 in 22 % of blocks of 64 over 8192 tokens took 1.5 ms on an
# H200 (160 TFLOP/s), 8192 x 28672 in 20 % of blocks of 32 over 1024 tokens as long (65).
PORTABLE_SHARE, PORTABLE_SIDE = 0.2, 64
# The same for plain PyTorch on a GPU, which multiplies in float32.
EAGER_SHARE = 1 / 28


def sddmm_seconds(problem: BsrProblem, impl: str) -> float:
    """Time of the sampled product by `impl`: "sm90", "triton" or "eager"."""
    block_h, block_w = problem.block_shape
    stored = float(problem.nnz_blocks * block_h * block_w)
    rate = dense_rate(problem)
    written_s = stored * problem.out_dtype.itemsize / device_of(problem.arch).bytes_s
    if impl == "sm90":
        return _work_tiles_seconds(problem) + written_s + LAUNCH_S
    if impl == "triton":
        share = PORTABLE_SHARE * min(1.0, min(block_h, block_w) / PORTABLE_SIDE)
    else:
        share = EAGER_SHARE
    return _flops(problem, stored) / (share * rate) + written_s + LAUNCH_S


def dense_sddmm_seconds(problem: BsrProblem) -> float:
    """Time of the dense product and of cutting the blocks out of it."""
    elements = float(problem.shape[0] * problem.shape[1])
    block_h, block_w = problem.block_shape
    stored = problem.nnz_blocks * block_h * block_w
    bytes_s = device_of(problem.arch).bytes_s
    product_s = _flops(problem, elements) / dense_rate(problem)
    # read once, written once
    cut_s = 2 * stored * problem.out_dtype.itemsize / (bytes_s * DENSIFY_SHARE)
    written_s = elements * problem.out_dtype.itemsize / bytes_s
    operands_s = _operand_bytes(problem) / bytes_s
    return max(product_s, written_s + operands_s) + cut_s + 2 * LAUNCH_S


def _work_tiles_seconds(problem: BsrProblem) -> float:
    """Rounds of work tiles on all SMs, or reading the operands where sums are short."""
    config = sddmm_sm90_config(problem, True, False)
    rows_b = cdiv(problem.shape[0], config.tile_rows)
    group = config.grouped_rows
    entries = problem.nnz_blocks / (group * packed_fill(density_of(problem), group))
    # the last consumer of a row has half of its pieces on average
    pieces = entries * config.block_pieces + rows_b * config.slots / 2
    executed = config.tile_rows * pieces * config.PIECE
    tile = config.TILE_M * CONSUMERS * config.GROUP_N
    fed = L2_BYTES_S * 2.0 * tile * config.TILE_K / config.stage_bytes
    rate = SAMPLED_SHARE * min(dense_rate(problem), fed)
    # if there are fewer tiles than SMs, their sums are split, down to a point
    idle = max(1.0, problem.arch.num_sms * tile / max(executed * 4, 1.0))
    read_s = _operand_bytes(problem) / device_of(problem.arch).bytes_s
    return max(idle * _flops(problem, executed) / rate, read_s)


def _flops(problem: BsrProblem, elements: float) -> float:
    return 2.0 * elements * problem.n * problem.batch


def _operand_bytes(problem: BsrProblem) -> float:
    rows, cols = problem.shape
    return float((rows + cols) * problem.n * problem.batch * problem.dtype.itemsize)
