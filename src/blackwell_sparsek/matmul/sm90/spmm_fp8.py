# mypy: ignore-errors
"""BSR times dense in e4m3 on Hopper: the work tiles and the producer of `spmm`, fp8 products.

    out[t, f] = activation(sum over blocks b of descale[b] * sum over channels k of block b
                           x_descale[t, k / 128] * x[t, k] * A[f, k] + bias[f]) + residual[t, f]

A [M, K] is block-sparse with contiguous channels, and x [N, K] has contiguous channels too, because
WGMMA accepts fp8 operands in shared memory only if K is contiguous; out is [N, M]. What differs
from `spmm`:

- Tokens are the rows of accumulators, and features their columns: a block has one scale, so that a
  thread needs the scales of two tokens for 64 rows, and not one for each of its columns.
- Two-level sums. The tensor cores add fp8 products with fewer bits than fp32 has. The product of
  each step starts from zero, and is added to the fp32 sums, times its scales.
- The product of a step needs separate registers, so each consumer has two parts of 64 tokens by 128
  features, which it multiplies one after the other.

Called as impl "sm90" of `bsk::bsr_matmul_fp8`, by `fp8_launch.py`.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...calls.fp8 import SCALE_CHANNELS
from ...device.gluon.compat import async_store
from ...device.gluon.pipeline import barriers, halves, ring_memory, take, tiles, work_channel
from ...launch.descriptors import GROUP_ROWS
from .epilogue import Epilogue, finish_values
from .spmm import Lists, OperandRing, Output, Raster, ScaledTile, as_tiles, produce

_ROWS = gl.constexpr(GROUP_ROWS)
_SCALE_CHANNELS = gl.constexpr(SCALE_CHANNELS)
TILE_FIELDS = gl.constexpr(len(ScaledTile._fields))


class Scales(NamedTuple):
    """Scales in memory: of stored blocks, and of tokens by 128 channels; with their columns."""

    block_ptr: Any
    x_ptr: Any
    token_stride: Any
    group_stride: Any
    groups: Any  # of 128 channels that x has
    cols_ptr: Any  # int32 [nnzb], block column of each entry


class Entry(NamedTuple):
    """The stored block of a step: its block column and its scale."""

    col: Any
    scale: Any


# A warp issues its instructions in order, so one that needs a loaded value waits for it, and all
# that follow wait too. Each load is therefore made a step before the next one that needs it: the
# block of step i + 2 and the scales of the tokens of step i + 1, while step i is multiplied.


@gluon.jit
def _entry(scales, tile, step, CFG: gl.constexpr):
    """The block of a step of a work tile; past the last step any column, and a scale of 0."""
    live = step < tile.steps
    at = tile.begin + step // CFG.k_steps
    col = gl.load(scales.cols_ptr + at, mask=live, other=0)
    return Entry(col, gl.load(scales.block_ptr + at, mask=live, other=0.0))


@gluon.jit
def _token_scales(scales, block_col, step, col, n_cols, CFG: gl.constexpr):
    """The scales of each part of 64 tokens from `col` on for the channels of a step.

    0 for tokens and channels that do not exist: a block may reach beyond x.
    """
    parts: gl.constexpr = CFG.PARTS
    layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_M)
    group = (block_col * CFG.BLOCK_W + step % CFG.k_steps * CFG.TILE_K) // _SCALE_CHANNELS
    x_ptr = scales.x_ptr + group.to(gl.int64) * scales.group_stride
    found = ()
    for i in gl.static_range(parts):
        tokens = col + i * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, layout))
        at = x_ptr + tokens.to(gl.int64) * scales.token_stride
        of_x = gl.load(at, mask=(tokens < n_cols) & (group < scales.groups), other=0.0)
        found = found + (of_x,)  # noqa: RUF005
    return found


@gluon.jit
def _add_step(sums, a, x_smem, first, block_scale, token_scales, CFG: gl.constexpr):
    """The sums of each part plus its product with a tile of A, times the scales."""
    width: gl.constexpr = CFG.TILE_M
    layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_M)
    nothing = gl.zeros([_ROWS, width], gl.float32, layout)
    total = ()
    for i in gl.static_range(len(sums)):
        x = x_smem.index(first + i)
        part = warpgroup_mma(x, a.permute((1, 0)), nothing, use_acc=False, is_async=True)
        factors = token_scales[i] * block_scale
        done = warpgroup_mma_wait(0, deps=(part,))
        total = total + (sums[i] + done * factors[:, None],)  # noqa: RUF005
    return total


@gluon.jit
def _store_chunk(acc, row, col, slot, output, out_smem, epilogue, CFG: gl.constexpr):
    """Finish and store sums [64 tokens, out_chunk features]; partial sums go to their slot."""
    chunk: gl.constexpr = CFG.out_chunk
    layout: gl.constexpr = CFG.accumulator_layout(chunk)
    activation: gl.constexpr = CFG.ACTIVATION
    acc = gl.convert_layout(acc, layout)
    rows = row + gl.arange(0, chunk, gl.SliceLayout(0, layout))
    cols = col + gl.arange(0, _ROWS, gl.SliceLayout(1, layout))
    if output.partial_ptr is not None and slot >= 0:
        # a slot holds a whole block row
        partial_rows = (slot * CFG.BLOCK_H + rows % CFG.BLOCK_H).to(gl.int64)
        offsets = partial_rows[None, :] * epilogue.n_cols + cols[:, None]
        gl.store(output.partial_ptr + offsets, acc, mask=(cols < epilogue.n_cols)[:, None])
    else:
        acc = finish_values(acc, rows[None, :], cols[:, None], epilogue, activation)
        # the copy of the chunk before this one must have read the buffer
        tma.store_wait(0)
        out_smem.store(acc.to(out_smem.dtype))
        fence_async_shared()
        async_store(output.desc, [col, row], out_smem)


@gluon.jit
def _store_tile(sums, row, col, slot, output, out_smem, epilogue, CFG: gl.constexpr):
    """Store the sums of each 64 tokens in chunks of features through one buffer."""
    for i in gl.static_range(len(sums)):
        at = col + i * _ROWS
        if CFG.out_chunks == 1:
            _store_chunk(sums[i], row, at, slot, output, out_smem, epilogue, CFG)
        else:
            for half in gl.static_range(2):
                part = halves(sums[i])[half]
                first = row + half * CFG.out_chunk
                _store_chunk(part, first, at, slot, output, out_smem, epilogue, CFG)


@gluon.jit
def _consume(output, ring, work, epilogue, scales, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Multiply the ring's tiles into accumulators and store them, work tile by work tile."""
    parts: gl.constexpr = CFG.PARTS
    width: gl.constexpr = CFG.TILE_M
    layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_M)
    x_smem = as_tiles(ring.x, CFG.STAGES * (CFG.tile_n // _ROWS), CFG.x_tile())
    out_smem = output.smem.index(GROUP)
    n_cols = epilogue.n_cols
    step = 0
    ordinal = 0
    tile = ScaledTile(*take(work, ordinal))
    while tile.steps >= 0:
        col = tile.col + GROUP * (parts * _ROWS)
        sums = ()
        for _i in gl.static_range(parts):
            sums = sums + (gl.zeros([_ROWS, width], gl.float32, layout),)  # noqa: RUF005
        entry = _entry(scales, tile, 0, CFG)
        next_entry = _entry(scales, tile, 1, CFG)
        of_tokens = _token_scales(scales, entry.col, 0, col, n_cols, CFG)
        for i in range(tile.steps):
            entry_after = _entry(scales, tile, i + 2, CFG)
            next_of_tokens = _token_scales(scales, next_entry.col, i + 1, col, n_cols, CFG)
            stage = step % CFG.STAGES
            mbarrier.wait(ring.full.index(stage), (step // CFG.STAGES) & 1)
            first = stage * (CFG.tile_n // _ROWS) + GROUP * parts
            a = ring.a.index(stage)
            sums = _add_step(sums, a, x_smem, first, entry.scale, of_tokens, CFG)
            mbarrier.arrive(ring.empty.index(stage), count=1)
            entry = next_entry
            next_entry = entry_after
            of_tokens = next_of_tokens
            step += 1
        # rows of padding in the plan are negative, where TMA cannot store
        if tile.row >= 0:
            _store_tile(sums, tile.row, col, tile.slot, output, out_smem, epilogue, CFG)
        ordinal += 1
        tile = ScaledTile(*take(work, ordinal))
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "n_rows", "n_cols", "m_tiles", "n_tiles", "raster_group", "token_stride", "group_stride",
        "groups",
    ]
)  # fmt: skip
def _spmm_fp8_sm90_kernel(
    a_desc,
    x_desc,
    out_desc,
    partial_ptr,
    bias_ptr,
    residual_ptr,
    residual_strides,
    block_scale_ptr,
    x_scale_ptr,
    token_stride,
    group_stride,
    groups,
    items_ptr,
    cols_ptr,
    counter_ptr,
    n_rows,
    n_cols,
    m_tiles,
    n_tiles,
    raster_group,
    CFG: gl.constexpr,
):
    """Set up the ring and start the roles: two consumers and a producer."""
    raster = Raster(m_tiles, n_tiles, raster_group)
    lists = Lists(items_ptr, cols_ptr, None)
    epilogue = Epilogue(bias_ptr, residual_ptr, residual_strides, n_rows, n_cols)
    scales = Scales(block_scale_ptr, x_scale_ptr, token_stride, group_stride, groups, cols_ptr)
    a_smem = ring_memory(a_desc, CFG.STAGES)
    x_smem = ring_memory(x_desc, CFG.STAGES)
    out_smem = tiles(out_desc, 2, out_desc.block_type.shape[0])
    ring = OperandRing(a_smem, x_smem, barriers(CFG.STAGES, 1), barriers(CFG.STAGES, 2))
    work = work_channel(TILE_FIELDS, 2)
    fence_async_shared()
    output = Output(out_desc, out_smem, partial_ptr)
    gl.warp_specialize(
        [
            (_consume, (output, ring, work, epilogue, scales, 0, CFG)),
            (_consume, (output, ring, work, epilogue, scales, 1, CFG)),
            (produce, (a_desc, x_desc, lists, counter_ptr, ring, work, raster, CFG)),
        ],
        [4, 1],
        [CFG.CONSUMER_REGISTERS, CFG.PRODUCER_REGISTERS],
    )
