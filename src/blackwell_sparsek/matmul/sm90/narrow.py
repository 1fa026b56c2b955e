# mypy: ignore-errors
"""BSR times few columns on Hopper: out = activation(A @ x + bias) + residual for small N.

A is block-sparse [M, K], x [K, N] with contiguous columns, out [M, N]: `dense @ A.T` of a linear
layer, seen from A. A schedule (`row_schedule.py`) assigns work tiles to programs, each TILE_M rows
of one block row by TILE_N columns. A producer warp keeps a ring of blocks of A, which are
contiguous in memory, and of x full through TMA, without a break between tiles; one consumer warp
group multiplies. With SPLIT_K = 2 programs form clusters of two, and both may split the blocks of
one tile: they exchange halves of their sums through distributed shared memory, and each finishes
one half.

The kernel is bound by reading A once, a few microseconds. It is therefore launched with PDL: while
the previous kernel still runs, it reads its schedule, lets TMA fetch the descriptors and prefetches
its first blocks to L2.

Part of impl "sm90" of `bsk::bsr_matmul`. Limits: fp16 and bf16, blocks stored by rows, heights that
are multiples of 16, addresses and strides that TMA accepts.

SCALED, for `bsk::bsr_matmul_fp8`: operands are in e4m3 with scales. The product of each block
starts from zero and is added, times its scales, to the sums in fp32, because the tensor cores add
fp8 products with fewer bits.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...calls.fp8 import SCALE_CHANNELS
from ...core.compat import hopper_options
from ...device.gluon.cluster import cluster_barrier, cluster_rank, exchange_halves, init_exchange
from ...device.gluon.compat import async_load
from ...device.gluon.memory import bring_to_l2
from ...device.gluon.pipeline import barriers, tiles
from ...device.gluon.warps import shared_address
from ...launch.descriptors import GROUP_ROWS, tensor_descriptor
from ...launch.launcher import cdiv, launch, on_device_of
from .config import NarrowSm90Config
from .epilogue import Epilogue, finish_values
from .row_schedule import HEADER, OUTSIDE, RowSchedule, TileHeader

_HEADER = gl.constexpr(HEADER)
# Where the fields of a `TileHeader` are in a record.
_TILE_COUNT = gl.constexpr(TileHeader._fields.index("tile_count"))
_ROW_TILE = gl.constexpr(TileHeader._fields.index("row_tile"))
_BLOCKS = gl.constexpr(TileHeader._fields.index("blocks"))
_COL = gl.constexpr(TileHeader._fields.index("col"))
_SPLIT = gl.constexpr(TileHeader._fields.index("split"))
_SUMS = gl.constexpr(GROUP_ROWS)
_SCALE_CHANNELS = gl.constexpr(SCALE_CHANNELS)
PRODUCER_REGISTERS = gl.constexpr(40)
# Slots that a warp reads at once.
_LANES = gl.constexpr(32)
# A coordinate past the end of every tensor, where TMA reads zeros.
_OUTSIDE = gl.constexpr(OUTSIDE)


class Schedule(NamedTuple):
    """`RowSchedule` in memory: records of `HEADER + 2 * width` int32, `tiles` for each program."""

    records_ptr: Any
    tiles: Any
    width: Any


class Slots(NamedTuple):
    """32 slots of a record, one in each lane of a warp."""

    number: Any  # of the slot in its record
    a_row: Any  # row of its block in the values as a matrix [nnzb * BLOCK_H, BLOCK_W]
    x_row: Any  # row of x that its first column meets


class Operands(NamedTuple):
    """A and x in memory."""

    a_desc: Any
    values_ptr: Any  # A again, for prefetches
    prefetch: Any  # blocks of the first tile to prefetch to the L2
    x_desc: Any


class NarrowRing(NamedTuple):
    """Blocks of A and tiles of x in shared memory, and the barriers of their stages."""

    a: Any
    x: Any
    full: Any
    empty: Any
    primed: Any  # one barrier: TMA has fetched the descriptors


class NarrowScales(NamedTuple):
    """Scales of operands in fp8: one for each block, and for 128 channels of each column of x."""

    block_ptr: Any
    x_ptr: Any
    col_stride: Any
    group_stride: Any
    groups: Any  # of 128 channels that x has


class NarrowOutput(NamedTuple):
    """Where finished sums go."""

    ptr: Any
    strides: Any
    epilogue: Any


@gluon.jit
def _read_slots(slots_ptr, first, width, live):
    """32 slots from `first` on."""
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = first + gl.arange(0, _LANES, lane)
    mask = (slot < width) & live
    a_row = gl.load(slots_ptr + slot, mask=mask, other=_OUTSIDE)
    x_row = gl.load(slots_ptr + width + slot, mask=mask, other=_OUTSIDE)
    return Slots(slot, a_row, x_row)


@gluon.jit
def _prefetch_blocks(operands, slots, CFG: gl.constexpr):
    """Prefetch the first blocks of a tile to the L2, one by each lane of the warp."""
    block_ptr = operands.values_ptr + slots.a_row.to(gl.int64) * CFG.BLOCK_W
    present = (slots.number < operands.prefetch) & (slots.a_row < _OUTSIDE)
    nbytes = slots.number * 0 + CFG.TILE_M * CFG.BLOCK_W * CFG.ITEM_BYTES
    bring_to_l2(gl.where(present, block_ptr.to(gl.int64), 0), nbytes)


@gluon.jit
def _produce(operands, schedule, ring, CFG: gl.constexpr):
    """Keep the ring full."""
    a_desc = operands.a_desc
    x_desc = operands.x_desc
    width = schedule.width
    stage_blocks: gl.constexpr = CFG.STAGE_BLOCKS
    k_steps: gl.constexpr = CFG.k_steps
    nbytes: gl.constexpr = a_desc.block_type.nbytes + x_desc.block_type.nbytes
    # copies from outside the tensors make TMA fetch the descriptors and read nothing else, so they
    # need not wait for the previous kernel
    primed = ring.primed.index(0)
    mbarrier.expect(primed, nbytes)
    async_load(a_desc, [_OUTSIDE, 0], primed, ring.a.index(0))
    x = ring.x.index(0).slice(0, CFG.TILE_N, dim=0)
    async_load(x_desc, [0, _OUTSIDE], primed, x)
    size = _HEADER + 2 * width
    record_ptr = schedule.records_ptr + gl.program_id(0).to(gl.int64) * (schedule.tiles * size)
    tile_count = gl.load(record_ptr + _TILE_COUNT)
    blocks = gl.load(record_ptr + _BLOCKS)
    col = gl.load(record_ptr + _COL)
    slots = _read_slots(record_ptr + _HEADER, 0, width, True)
    _prefetch_blocks(operands, slots, CFG)
    if CFG.SPLIT_K > 1:
        cluster_barrier()
    # only the schedule may be read before the previous kernels have ended: it never changes
    gdc_wait()
    mbarrier.wait(primed, 0)
    begin = 0
    for tile in range(tile_count):
        slots_ptr = record_ptr + _HEADER
        record_ptr += size
        more = tile + 1 < tile_count
        next_blocks = gl.load(record_ptr + _BLOCKS, mask=more, other=0)
        next_col = gl.load(record_ptr + _COL, mask=more, other=0)
        next_slots = _read_slots(record_ptr + _HEADER, 0, width, more)
        # counted on from tile to tile: Triton 3.6 takes the bound of a loop from zero to `blocks`
        # out of the loop over tiles
        end = begin + gl.cdiv(blocks, CFG.STAGE_BLOCKS)
        for group in range(begin, end):
            first = (group - begin) * CFG.STAGE_BLOCKS
            if first % _LANES == 0 and first > 0:
                slots = _read_slots(slots_ptr, first, width, True)
            for i in gl.static_range(k_steps):
                step = group * CFG.k_steps + i
                stage = step % CFG.STAGES
                bar = ring.full.index(stage)
                mbarrier.wait(ring.empty.index(stage), ((step // CFG.STAGES) & 1) ^ 1)
                mbarrier.expect(bar, nbytes * stage_blocks)
                for b in gl.static_range(stage_blocks):
                    # past the last block both come from outside the tensors, as zeros
                    mine = slots.number == first + b
                    a_row = gl.sum(gl.where(mine, slots.a_row, 0), 0)
                    x_row = gl.sum(gl.where(mine, slots.x_row, 0), 0) + i * CFG.TILE_K
                    a = ring.a.index(stage * CFG.STAGE_BLOCKS + b)
                    x = ring.x.index(stage * CFG.STAGE_BLOCKS + b)
                    async_load(a_desc, [a_row, i * CFG.TILE_K], bar, a)
                    if CFG.x_rows > CFG.TILE_N:
                        # the padding of x is not fetched: its sums are not stored
                        x = x.slice(0, CFG.TILE_N, dim=0)
                    async_load(x_desc, [col, x_row], bar, x)
        begin = end
        blocks = next_blocks
        col = next_col
        slots = next_slots


@gluon.jit
def _indices(first_row, first_col, width: gl.constexpr, layout: gl.constexpr, CFG: gl.constexpr):
    """Rows and columns of the result for sums [64, width] in `layout`."""
    down = gl.arange(0, _SUMS, gl.SliceLayout(1, layout))[:, None]
    along = gl.arange(0, width, gl.SliceLayout(0, layout))[None, :]
    if CFG.swapped:
        return first_row + along, first_col + down
    else:
        return first_row + down, first_col + along


@gluon.jit
def _store(acc, first_row, first_col, output, CFG: gl.constexpr):
    """Finish and store the sums of a tile that begins at `first_row` and `first_col`."""
    epilogue = output.epilogue
    activation: gl.constexpr = CFG.ACTIVATION
    accumulators: gl.constexpr = acc.type.layout
    width: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = CFG.store_layout()
    rows, cols = _indices(first_row, first_col, width, accumulators, CFG)
    bias_only = Epilogue(epilogue.bias_ptr, None, None, epilogue.n_rows, epilogue.n_cols)
    acc = finish_values(acc, rows, cols, bias_only, activation)
    rows, cols = _indices(first_row, first_col, width, layout, CFG)
    inside = (rows < epilogue.n_rows) & (cols < epilogue.n_cols)
    if epilogue.residual_ptr is not None:
        # loaded in the layout of the store, 16 bytes at a time
        row_stride, col_stride = epilogue.residual_strides
        offsets = rows.to(gl.int64) * row_stride + cols.to(gl.int64) * col_stride
        residual = gl.load(epilogue.residual_ptr + offsets, mask=inside, other=0.0)
        acc += gl.convert_layout(residual, accumulators).to(gl.float32)
    row_stride, col_stride = output.strides
    offsets = rows.to(gl.int64) * row_stride + cols.to(gl.int64) * col_stride
    acc = gl.convert_layout(acc.to(output.ptr.dtype.element_ty), layout)
    gl.store(output.ptr + offsets, acc, mask=inside)


# Scales are loaded a step before they are needed, and what is needed to find them a step before
# that, as in `spmm_fp8.py`: the scales of step i + 1 and the blocks of step i + 2 while step i is
# multiplied.


@gluon.jit
def _step_blocks(slots_ptr, width, step, blocks, CFG: gl.constexpr):
    """Of each block of a step: its row in the values and the row of x that it meets.

    Past the last block, a row of x that does not exist.
    """
    stage_blocks: gl.constexpr = CFG.STAGE_BLOCKS
    first = step // CFG.k_steps * CFG.STAGE_BLOCKS
    found = ()
    for b in gl.static_range(stage_blocks):
        live = first + b < blocks
        a_row = gl.load(slots_ptr + first + b, mask=live, other=0)
        x_row = gl.load(slots_ptr + width + first + b, mask=live, other=_OUTSIDE)
        found = found + ((a_row, x_row),)  # noqa: RUF005
    return found


@gluon.jit
def _step_scales(scales, step_blocks, step, col, n_cols, CFG: gl.constexpr):
    """Of each block of a step: its scale, and those of TILE_N columns for its channels.

    0 for columns and channels that do not exist: a block may end beyond x.
    """
    sums: gl.constexpr = CFG.accumulator_layout()
    along: gl.constexpr = gl.SliceLayout(1 if CFG.swapped else 0, sums)
    columns: gl.constexpr = CFG.x_rows
    cols = col + gl.arange(0, columns, along)
    found = ()
    for b in gl.static_range(len(step_blocks)):
        a_row, x_row = step_blocks[b]
        group = (x_row + step % CFG.k_steps * CFG.TILE_K) // _SCALE_CHANNELS
        offsets = cols.to(gl.int64) * scales.col_stride + group.to(gl.int64) * scales.group_stride
        exists = group < scales.groups
        of_x = gl.load(scales.x_ptr + offsets, mask=(cols < n_cols) & exists, other=0.0)
        of_block = gl.load(scales.block_ptr + a_row // CFG.BLOCK_H, mask=exists, other=0.0)
        found = found + ((of_block, of_x),)  # noqa: RUF005
    return found


@gluon.jit
def _add_scaled(acc, ring, stage, step_scales, CFG: gl.constexpr):
    """acc + the products of the blocks of a stage, each times its scales."""
    layout: gl.constexpr = CFG.accumulator_layout()
    sums_width: gl.constexpr = CFG.sums_width
    nothing = gl.zeros([_SUMS, sums_width], gl.float32, layout)
    for b in gl.static_range(len(step_scales)):
        of_block, of_x = step_scales[b]
        a = ring.a.index(stage * CFG.STAGE_BLOCKS + b)
        x = ring.x.index(stage * CFG.STAGE_BLOCKS + b)
        if CFG.swapped:
            part = warpgroup_mma(x, a.permute((1, 0)), nothing, use_acc=False, is_async=True)
            factors = of_x * of_block
            acc += warpgroup_mma_wait(0, deps=(part,)) * factors[:, None]
        else:
            part = warpgroup_mma(a, x.permute((1, 0)), nothing, use_acc=False, is_async=True)
            factors = of_x * of_block
            acc += warpgroup_mma_wait(0, deps=(part,)) * factors[None, :]
    return acc


@gluon.jit
def _sum_scaled(
    acc, ring, scales, slots_ptr, width, begin, end, blocks, col, n_cols, CFG: gl.constexpr
):
    """The sums of a tile of operands in fp8."""
    step_blocks = _step_blocks(slots_ptr, width, 0, blocks, CFG)
    step_scales = _step_scales(scales, step_blocks, 0, col, n_cols, CFG)
    step_blocks = _step_blocks(slots_ptr, width, 1, blocks, CFG)
    for step in range(begin, end):
        ahead = step + 1 - begin
        blocks_after = _step_blocks(slots_ptr, width, ahead + 1, blocks, CFG)
        next_scales = _step_scales(scales, step_blocks, ahead, col, n_cols, CFG)
        stage = step % CFG.STAGES
        mbarrier.wait(ring.full.index(stage), (step // CFG.STAGES) & 1)
        acc = _add_scaled(acc, ring, stage, step_scales, CFG)
        mbarrier.arrive(ring.empty.index(stage), count=1)
        step_scales = next_scales
        step_blocks = blocks_after
    return acc


@gluon.jit
def _sum_products(acc, ring, begin, end, CFG: gl.constexpr):
    """The sums of a tile of operands in 16 bits."""
    stage_blocks: gl.constexpr = CFG.STAGE_BLOCKS
    for step in range(begin, end):
        stage = step % CFG.STAGES
        mbarrier.wait(ring.full.index(stage), (step // CFG.STAGES) & 1)
        for b in gl.static_range(stage_blocks):
            a = ring.a.index(stage * CFG.STAGE_BLOCKS + b)
            x = ring.x.index(stage * CFG.STAGE_BLOCKS + b)
            if CFG.swapped:
                acc = warpgroup_mma(x, a.permute((1, 0)), acc, is_async=True)
            else:
                acc = warpgroup_mma(a, x.permute((1, 0)), acc, is_async=True)
        # one stage stays in flight; the one before it is done and free
        acc = warpgroup_mma_wait(stage_blocks, deps=(acc,))
        before = (step + CFG.STAGES - 1) % CFG.STAGES
        mbarrier.arrive(ring.empty.index(before), count=1, pred=step > begin)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    last = (end + CFG.STAGES - 1) % CFG.STAGES
    mbarrier.arrive(ring.empty.index(last), count=1, pred=end > begin)
    return acc


@gluon.jit
def _consume(output, schedule, ring, scales, CFG: gl.constexpr):
    """Multiply the ring's tiles, and finish each work tile."""
    layout: gl.constexpr = CFG.accumulator_layout()
    sums_width: gl.constexpr = CFG.sums_width
    if CFG.SPLIT_K > 1:
        init_exchange(shared_address(CFG.exchange_offset + CFG.exchange_bytes), CFG.exchange_bytes)
        cluster_barrier()
    size = _HEADER + 2 * schedule.width
    record_ptr = schedule.records_ptr + gl.program_id(0).to(gl.int64) * (schedule.tiles * size)
    tile_count = gl.load(record_ptr + _TILE_COUNT)
    row_tile = gl.load(record_ptr + _ROW_TILE)
    blocks = gl.load(record_ptr + _BLOCKS)
    col = gl.load(record_ptr + _COL)
    split = gl.load(record_ptr + _SPLIT)
    # previous kernels may use bias, residual and output until they have ended
    gdc_wait()
    begin = 0
    for tile in range(tile_count):
        slots_ptr = record_ptr + _HEADER
        record_ptr += size
        more = tile + 1 < tile_count
        next_row_tile = gl.load(record_ptr + _ROW_TILE, mask=more, other=0)
        next_blocks = gl.load(record_ptr + _BLOCKS, mask=more, other=0)
        next_col = gl.load(record_ptr + _COL, mask=more, other=0)
        end = begin + gl.cdiv(blocks, CFG.STAGE_BLOCKS) * CFG.k_steps
        acc = gl.zeros([_SUMS, sums_width], gl.float32, layout)
        if CFG.SCALED:
            n_cols = output.epilogue.n_cols
            acc = _sum_scaled(
                *(acc, ring, scales, slots_ptr, schedule.width),
                *(begin, end, blocks, col, n_cols, CFG),
            )
        else:
            acc = _sum_products(acc, ring, begin, end, CFG)
        if CFG.SPLIT_K > 1 and split > 0:
            # the only tile of both programs
            buffer = shared_address(CFG.exchange_offset)
            half: gl.constexpr = CFG.half_layout()
            sums = exchange_halves(acc, buffer, buffer + CFG.exchange_bytes, half)
            first_col = col + cluster_rank() * (CFG.TILE_N // 2)
            _store(sums, row_tile * CFG.TILE_M, first_col, output, CFG)
        else:
            _store(acc, row_tile * CFG.TILE_M, col, output, CFG)
        begin = end
        row_tile = next_row_tile
        blocks = next_blocks
        col = next_col


# `n_rows` is specialised: where 16 divides it, rows are stored 16 bytes at a time
@gluon.jit(do_not_specialize=["n_cols", "tiles_each", "width", "prefetch"])
def _spmm_narrow_sm90_kernel(
    out_ptr,
    out_strides,
    a_desc,
    x_desc,
    values_ptr,
    bias_ptr,
    residual_ptr,
    residual_strides,
    scales,
    records_ptr,
    n_rows,
    n_cols,
    tiles_each,
    width,
    prefetch,
    CFG: gl.constexpr,
):
    """Set up the ring and start both roles, `_produce` and `_consume`."""
    # PDL: the next kernel may start as soon as there is room for it; it waits where it has to
    gdc_launch_dependents()
    stages: gl.constexpr = CFG.STAGES
    # The first and largest allocation, at offset 0: with SPLIT_K the partner's sums arrive after
    # the blocks, in the memory of further tiles.
    a_smem = tiles(a_desc, stages * CFG.STAGE_BLOCKS + CFG.exchange_tiles, CFG.TILE_M)
    x_smem = tiles(x_desc, stages * CFG.STAGE_BLOCKS, CFG.x_rows)
    ring = NarrowRing(a_smem, x_smem, barriers(stages, 1), barriers(stages, 1), barriers(1, 1))
    fence_async_shared()
    epilogue = Epilogue(bias_ptr, residual_ptr, residual_strides, n_rows, n_cols)
    output = NarrowOutput(out_ptr, out_strides, epilogue)
    operands = Operands(a_desc, values_ptr, prefetch, x_desc)
    schedule = Schedule(records_ptr, tiles_each, width)
    few: gl.constexpr = PRODUCER_REGISTERS
    if CFG.SPLIT_K > 1:
        # a cluster barrier waits for all threads of the cluster, those without work too
        gl.warp_specialize(
            [
                (_consume, (output, schedule, ring, scales, CFG)),
                (_produce, (operands, schedule, ring, CFG)),
                (cluster_barrier, ()),
                (cluster_barrier, ()),
            ],
            [1, 1, 2],
            [few, few, few],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (output, schedule, ring, scales, CFG)),
                (_produce, (operands, schedule, ring, CFG)),
            ],
            [1],
            [few],
        )


def launch_spmm_narrow_sm90(
    out: torch.Tensor,
    values: torch.Tensor,
    schedule: RowSchedule,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    config: NarrowSm90Config,
    scales: NarrowScales | None = None,
) -> None:
    """Write activation(A @ x + bias) + residual to `out`.

    Parameters
    ----------
    out : [M, N], any strides
    values : [nnzb, bh, bw] contiguous, at least one block
    schedule : of the pattern, for N columns and `config`; complete on the device before this call
    x : [K, N] with contiguous columns
    bias : [M] contiguous, residual : [M, N], any strides; or None
    scales : of operands in fp8
    """
    m, n = out.shape
    # a dimension of size 1 may carry any stride, which TMA would refuse
    x_strides = (x.stride(1) if n > 1 else cdiv(x.shape[0], 16) * 16, 1)
    args = (
        out,
        out.stride(),
        tensor_descriptor(values.view(-1, config.BLOCK_W), config.a_block()),
        tensor_descriptor(x.mT, config.x_block(), x_strides),
        values,
        bias,
        residual,
        None if residual is None else residual.stride(),
        scales,
        schedule.records,
        m,
        n,
        schedule.records.shape[1],
        schedule.width,
        schedule.prefetch,
        config,
    )
    with on_device_of(out):
        launch(
            *(_spmm_narrow_sm90_kernel, schedule.records.shape[0] // config.SPLIT_K, args),
            cluster=config.SPLIT_K,
            num_warps=4,
            maxnreg=config.max_registers,
            launch_pdl=True,
            **hopper_options(),
        )
