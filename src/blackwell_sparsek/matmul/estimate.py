"""Estimated time of a block-sparse product and of its dense counterpart: a roofline, no timing.

A product takes the longer of its arithmetic and its traffic, plus its launches. The constants of
sm_90 are fitted to single calls on an H200 in float16: 8192 x 8192 x 8192 at 10 to 100 % of the
blocks, and the layers of Llama 3. Other GPUs use their own dense rate and bandwidth, from data
sheets, and the same shares of them. On a CPU the overhead of calls is left out: it matters only if
both products take fractions of a millisecond, and then the stored blocks are the safer choice.
`choice` compares the estimates; they are good enough to choose, not to predict.
"""

from typing import NamedTuple

import torch

from ..calls.matmul import BsrProblem
from ..core.arch import Arch
from ..launch.launcher import cdiv
from .sm90.config import WARP_ROWS, NarrowSm90Config
from .sm90.row_pairs import pairs_saved
from .sm90.tuning import narrow_sm90_config, spmm_sm90_config, spmm_sm90_paired, strips_config
from .triton.tuning import NARROW, SpmmSizes, spmm_sizes

# Seconds to start and end a kernel.
LAUNCH_S = 4e-6
# The same for Hopper's kernel for few columns, which uses PDL.
NARROW_LAUNCH_S = 2.2e-6
# Share of the memory bandwidth at which products with few columns read blocks: 3.1 to 3.8 of
# 4.3 TB/s.
NARROW_READ_SHARE = 0.78
# Seconds in which a program of that kernel copies a tile of a block with its rows of x, however
# small, and seconds for each column: 16 x 16 blocks of Llama's layers take 5e-8 with 16 columns and
# 8.5e-8 with 64.
NARROW_COPY_S, NARROW_COPY_COLUMN_S = 3.8e-8, 7.3e-10
# Fixed seconds of a product by strips, and the bytes of blocks that it multiplies per second, by
# the columns of a tile: 16 x 16 blocks of Llama's layers.
STRIPS_S = 3e-6
STRIPS_BYTES_S = {8: 3.2e12, 16: 2.6e12, 32: 1.55e12}
# Bytes per second, read and written, of packing low blocks into tall ones.
PACK_BYTES_S = 3e12
# Share of the memory bandwidth that densifying a matrix reaches.
DENSIFY_SHARE = 0.8
# Bytes per second from L2 to shared memory through TMA, all SMs of an H200: the feed of the dense
# operand.
L2_BYTES_S = 9.2e12
# Rows of a packed block (`launch.descriptors.GROUP_ROWS`).
PACKED_ROWS = 64
# Rows and columns of the tile that 16 warps with a block row each multiply. Its seconds on an SM of
# an H200 for each row of the dense operand and for each block of 16 x 16; and for each row if
# blocks are so few that fetching the operand dominates.
WARP_ROWS_TILE = (256, 128)
WARP_ROWS_X_S = 1.04e-9
WARP_ROWS_BLOCK_S = 22.6e-9
WARP_ROWS_FETCH_S = 4.2e-9
# Factor if the result is transposed: 16 x 16 blocks of Llama's layers, 1024 to 4096 tokens.
WARP_ROWS_TRANSPOSED = 1.3
# Overhead of a work tile of Hopper's other product, in seconds: waiting for its first copies and
# storing its sums. It is larger for short steps, whose stages hold fewer bytes in flight.
WORK_TILE_S, WORK_TILE_STEP_S = 1e-6, 36e-6
# Rows in pairs: the time saved as a share of the X that a pair fetches only once, and the highest
# share of the dense rate that was measured; blocks of 64 and of 32 at densities of 10 to 90 %.
# Steps of 16 gain nothing: 16 x 16 blocks packed take 2.34 ms at 70 %.
PAIRED_SHARE, PAIRED_MOST = 0.72, 1.0
PAIRED_STEP = 32
# Columns of the narrowest tile; fewer columns cost the same.
TILE_COLUMNS = 16
# Rate of Triton's kernel relative to the one for Hopper on the same blocks; and with at most
# PORTABLE_FEW columns, where it takes 1.7 to 2.5 times as long (measured up to 128 columns).
PORTABLE_SHARE, PORTABLE_FEW_SHARE = 0.7, 0.37
PORTABLE_FEW = 512


class _Device(NamedTuple):
    flops_per_sm: float
    """Rate of a large dense product in 16 bits."""
    bytes_s: float


# Only sm_90 is measured: 760 TFLOP/s on 132 SMs, between single calls (880) and sustained (650),
# and 4.3 TB/s.
_DEVICES = {
    80: _Device(2.3e12, 1.7e12),
    86: _Device(1.3e12, 0.6e12),
    89: _Device(1.8e12, 0.8e12),
    90: _Device(5.76e12, 4.3e12),
    100: _Device(10e12, 6.8e12),
    120: _Device(1.2e12, 1.5e12),
}
_CPU = _Device(1e11, 1e10)
# Rate of float32 and float64 relative to 16 bits on tensor cores.
_SCALAR_SHARE = 1 / 14
# Shares of the dense rate that plain PyTorch reaches on a CPU, by the shorter side of a block.
_EAGER_SHARES = ((128, 0.65), (64, 0.55), (32, 0.4), (0, 0.3))


def sparse_seconds(problem: BsrProblem, impl: str) -> float:
    """Time of the product from stored blocks by `impl`: "sm90", "triton" or "eager"."""
    sizes = spmm_sizes(problem)
    if impl == "eager":
        return _eager_seconds(problem, sizes)
    if impl == "sm90" and (strips := strips_config(problem.merged)) is not None:
        stored_bytes = _stored(sizes) * problem.dtype.itemsize
        return STRIPS_S + stored_bytes / STRIPS_BYTES_S[strips.TILE_N]
    if impl == "sm90" and (config := narrow_sm90_config(problem.merged)) is not None:
        return _narrow_seconds(problem, sizes, config)
    if impl == "sm90" and sizes.block_h < PACKED_ROWS:
        packed_s = packed_seconds(problem)
        return packed_s if sizes.block_h != 16 else min(packed_s, warp_rows_seconds(problem))
    if impl == "sm90":
        return _work_tiles_seconds(problem, _stored(sizes))
    # an element of the dense operand that comes from L2 is multiplied with the rows of one block
    bytes_s = L2_BYTES_S * device_of(problem.arch).bytes_s / _DEVICES[90].bytes_s
    fed = bytes_s / problem.dtype.itemsize * 2 * sizes.block_h
    few = problem.arch.sm and _columns(sizes) <= PORTABLE_FEW
    share = PORTABLE_FEW_SHARE if few else PORTABLE_SHARE
    rate = share * min(_share(sizes) * dense_rate(problem), fed)
    return _product_seconds(problem, _stored(sizes), rate)


def packs_for_few_columns(problem: BsrProblem) -> bool:
    """Whether Hopper's kernels may lose to the portable one: lowest blocks and few columns."""
    sizes = spmm_sizes(problem)
    low = sizes.block_h < PACKED_ROWS // 2 and _columns(sizes) <= PORTABLE_FEW
    return low and strips_config(problem.merged) is None


def packed_seconds(problem: BsrProblem) -> float:
    """Time of the Hopper product of low blocks packed into blocks of 64 rows."""
    sizes = spmm_sizes(problem)
    stored = _stored(sizes)
    executed = stored / packed_fill(density_of(problem), PACKED_ROWS // sizes.block_h)
    packing_s = LAUNCH_S + (stored + executed) * problem.dtype.itemsize / PACK_BYTES_S
    return _work_tiles_seconds(problem, executed) + packing_s + _transposing_seconds(problem, sizes)


def warp_rows_seconds(problem: BsrProblem) -> float:
    """Time of the Hopper product in which each warp has a block row of 16 rows."""
    sizes = spmm_sizes(problem)
    stored = _stored(sizes)
    inner = problem.shape[0] if problem.dense_left else problem.shape[1]
    panels = cdiv(max(sizes.n, 1), WARP_ROWS_TILE[1]) * max(sizes.batch, 1)
    tiles = cdiv(sizes.rows_b * sizes.block_h, WARP_ROWS_TILE[0]) * panels
    rounds = cdiv(tiles, max(problem.arch.num_sms, 1))
    blocks = stored / 256 * panels / max(tiles, 1)
    busy_s = inner * WARP_ROWS_X_S + blocks * WARP_ROWS_BLOCK_S
    tile_s = max(busy_s, inner * WARP_ROWS_FETCH_S)
    if problem.dense_left:
        tile_s *= WARP_ROWS_TRANSPOSED
    packing_s = LAUNCH_S + 2 * stored * problem.dtype.itemsize / PACK_BYTES_S
    return rounds * tile_s + packing_s + LAUNCH_S + _transposing_seconds(problem, sizes)


def _transposing_seconds(problem: BsrProblem, sizes: SpmmSizes) -> float:
    """Time to transpose an x with contiguous columns, whose copies narrow blocks make short."""
    if problem.row_major != problem.dense_left or sizes.block_w % 32 == 0:
        return 0.0
    inner = problem.shape[0] if problem.dense_left else problem.shape[1]
    return LAUNCH_S + 2 * inner * _columns(sizes) * problem.dtype.itemsize / PACK_BYTES_S


def dense_seconds(problem: BsrProblem) -> float:
    """Time to densify the matrix and multiply it with torch, epilogue included."""
    sizes = spmm_sizes(problem)
    device = device_of(problem.arch)
    item = problem.dtype.itemsize
    elements = problem.shape[0] * problem.shape[1]
    share = DENSIFY_SHARE if problem.arch.sm else 1.0
    densify_s = (elements + _stored(sizes)) * item / (device.bytes_s * share)
    moved = elements * item + _operand_bytes(problem)
    product_s = max(_flops(elements, sizes) / dense_rate(problem), moved / device.bytes_s)
    passes = _epilogue_passes(problem)
    # each pass reads and writes the result in float32
    epilogue_s = passes * 8 * _columns(sizes) * _rows(problem) / device.bytes_s
    launches_s = (2 + passes) * LAUNCH_S if problem.arch.sm else 0.0
    return densify_s + product_s + epilogue_s + launches_s


def packed_fill(density: float, group: int) -> float:
    """Expected share of packed blocks that is stored: `group` random block rows packed into one.

    Examples
    --------
    >>> packed_fill(1.0, 4), round(packed_fill(0.22, 2), 3)
    (1.0, 0.562)
    """
    if density <= 0.0:
        return 1.0
    return density / (1.0 - (1.0 - min(density, 1.0)) ** group)


def _narrow_seconds(problem: BsrProblem, sizes: SpmmSizes, config: NarrowSm90Config) -> float:
    """Few columns: blocks are read from memory once, and each tile reads its rows of x from L2."""
    stored_bytes = _stored(sizes) * problem.dtype.itemsize
    bytes_s = device_of(problem.arch).bytes_s * NARROW_READ_SHARE
    read_s = (stored_bytes + _operand_bytes(problem)) / bytes_s
    panels = cdiv(_columns(sizes), config.TILE_N)
    fed_s = panels * stored_bytes * (1.0 + config.TILE_N / config.TILE_M) / L2_BYTES_S
    copies = panels * sizes.nnz_blocks * config.row_tiles * config.k_steps
    copy_s = NARROW_COPY_S + config.TILE_N * NARROW_COPY_COLUMN_S
    copied_s = copies / problem.arch.num_sms * copy_s
    return NARROW_LAUNCH_S + max(read_s, fed_s, copied_s)


def _eager_seconds(problem: BsrProblem, sizes: SpmmSizes) -> float:
    device = device_of(problem.arch)
    stored = _stored(sizes)
    wide = 8 if problem.dtype == torch.float64 else 4
    shorter = min(problem.block_shape)
    share = next(share for least, share in _EAGER_SHARES if shorter >= least)
    rate = share * dense_rate(problem)
    moved = 3 * stored * wide + _operand_bytes(problem)
    if problem.arch.sm:
        # eager multiplies in float32, and gathers rows of the dense operand through memory
        rate = _SCALAR_SHARE * device.flops_per_sm * problem.arch.num_sms
        moved += 2 * stored * _columns(sizes) / sizes.block_h * wide
    launches_s = 10 * LAUNCH_S if problem.arch.sm else 0.0
    return max(_flops(stored, sizes) / rate, moved / device.bytes_s) + launches_s


def _share(sizes: SpmmSizes) -> float:
    """Share of the dense rate: all of its 760 TFLOP/s, but 530 with 64 rows."""
    return 0.697 if sizes.block_h % 128 else 1.0


def _work_tiles_seconds(problem: BsrProblem, executed: float) -> float:
    """Time of Hopper's product with many columns: rounds of work tiles on all SMs."""
    sizes = spmm_sizes(problem)
    x_transposed = problem.row_major == problem.dense_left
    config = spmm_sm90_config(problem, x_transposed)
    panels = cdiv(max(sizes.n, 1), config.tile_n) * max(sizes.batch, 1)
    rows = cdiv(sizes.rows_b * sizes.block_h, config.tile_m)
    rounds = max(1.0, rows * panels / max(problem.arch.num_sms, 1))
    flops = 2.0 * executed * panels * config.tile_n
    # there may be fewer tiles than SMs
    idle = max(1.0, problem.arch.num_sms / max(rows * panels, 1))
    share = _share(sizes)
    if config.TILE_K >= PAIRED_STEP and spmm_sm90_paired(problem, config) is not None:
        inner = problem.shape[0] if problem.dense_left else problem.shape[1]
        density = min(1.0, executed / max(rows * config.tile_m * inner, 1))
        share = min(PAIRED_MOST, share / (1 - PAIRED_SHARE * pairs_saved(density)))
    arithmetic_s = idle * flops / (share * dense_rate(problem))
    moved = executed * problem.dtype.itemsize + _operand_bytes(problem)
    tile_s = WORK_TILE_S + WORK_TILE_STEP_S / config.TILE_K
    busy_s = max(arithmetic_s, moved / device_of(problem.arch).bytes_s)
    return busy_s + rounds * tile_s + LAUNCH_S


def _product_seconds(problem: BsrProblem, executed: float, rate: float) -> float:
    sizes = spmm_sizes(problem)
    moved = executed * problem.dtype.itemsize + _operand_bytes(problem)
    share = NARROW_READ_SHARE if sizes.n <= NARROW else 1.0
    moved_s = moved / (device_of(problem.arch).bytes_s * share)
    return max(_flops(executed, sizes) / rate, moved_s) + LAUNCH_S


def device_of(arch: Arch) -> _Device:
    """Rates of a device, or of the newest older one that is known."""
    if not arch.sm:
        return _CPU
    return _DEVICES[max((sm for sm in _DEVICES if sm <= arch.sm), default=80)]


def dense_rate(problem: BsrProblem) -> float:
    """Operations per second of a large dense product in the dtype of the problem."""
    device = device_of(problem.arch)
    scalar = problem.arch.sm and problem.dtype.itemsize > 2
    return device.flops_per_sm * problem.arch.num_sms * (_SCALAR_SHARE if scalar else 1.0)


def density_of(problem: BsrProblem) -> float:
    """Stored blocks over all blocks."""
    blocks = 1
    for size, block in zip(problem.shape, problem.block_shape, strict=True):
        blocks *= cdiv(size, block)
    return problem.nnz_blocks / max(blocks, 1)


def _stored(sizes: SpmmSizes) -> float:
    return float(sizes.nnz_blocks * sizes.block_h * sizes.block_w)


def _columns(sizes: SpmmSizes) -> int:
    return sizes.n * sizes.batch


def _flops(elements: float, sizes: SpmmSizes) -> float:
    return 2.0 * elements * cdiv(sizes.n, TILE_COLUMNS) * TILE_COLUMNS * sizes.batch


def _rows(problem: BsrProblem) -> int:
    return problem.shape[1] if problem.dense_left else problem.shape[0]


def _operand_bytes(problem: BsrProblem) -> int:
    """Bytes of the dense operand (read), the result (written) and a residual (read)."""
    columns = problem.n * problem.batch
    inner = problem.shape[0] if problem.dense_left else problem.shape[1]
    out = _rows(problem) * columns * problem.out_dtype.itemsize
    return inner * columns * problem.dtype.itemsize + out * (2 if problem.residual else 1)


def _epilogue_passes(problem: BsrProblem) -> int:
    extras = problem.bias + problem.residual + (problem.activation is not None)
    return extras + (extras > 0 or problem.out_dtype != problem.dtype)


def takes_warp_rows(problem: BsrProblem, x_transposed: bool) -> bool:
    """Whether warps with a block row each can run this, and are faster than packed tiles.

    For problems that `why_not_sm90` accepts; `x_transposed` is how the kernel would read x.
    """
    sizes = spmm_sizes(problem)
    if sizes.block_h != WARP_ROWS or sizes.nnz_blocks == 0 or x_transposed:
        return False
    return warp_rows_seconds(problem) < packed_seconds(problem)
