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
fp8 products with fewer bits; a warp of its own loads the scales (`narrow_factors.py`).
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
from .narrow_factors import factor_memory, load_factors, sum_scaled
from .narrow_records import (
    BEYOND,
    BLOCKS,
    COL,
    ROW_TILE,
    SLOTS_AT,
    SPLIT,
    TILE_COUNT,
    NarrowRing,
    NarrowScales,
    Schedule,
    first_record,
    record_size,
)
from .row_schedule import RowSchedule

_SUMS = gl.constexpr(GROUP_ROWS)
# Slots that a warp reads at once.
_LANES = gl.constexpr(32)


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
    a_row = gl.load(slots_ptr + slot, mask=mask, other=BEYOND)
    x_row = gl.load(slots_ptr + width + slot, mask=mask, other=BEYOND)
    return Slots(slot, a_row, x_row)


@gluon.jit
def _prefetch_blocks(operands, slots, CFG: gl.constexpr):
    """Prefetch the first blocks of a tile to the L2, one by each lane of the warp."""
    block_ptr = operands.values_ptr + slots.a_row.to(gl.int64) * CFG.BLOCK_W
    present = (slots.number < operands.prefetch) & (slots.a_row < BEYOND)
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
    async_load(a_desc, [BEYOND, 0], primed, ring.a.index(0))
    x = ring.x.index(0).slice(0, CFG.TILE_N, dim=0)
    async_load(x_desc, [0, BEYOND], primed, x)
    record_ptr = first_record(schedule)
    tile_count = gl.load(record_ptr + TILE_COUNT)
    blocks = gl.load(record_ptr + BLOCKS)
    col = gl.load(record_ptr + COL)
    slots = _read_slots(record_ptr + SLOTS_AT, 0, width, True)
    _prefetch_blocks(operands, slots, CFG)
    if CFG.SPLIT_K > 1:
        cluster_barrier()
    # only the schedule may be read before the previous kernels have ended: it never changes
    gdc_wait()
    mbarrier.wait(primed, 0)
    begin = 0
    for tile in range(tile_count):
        slots_ptr = record_ptr + SLOTS_AT
        record_ptr += record_size(schedule)
        more = tile + 1 < tile_count
        next_blocks = gl.load(record_ptr + BLOCKS, mask=more, other=0)
        next_col = gl.load(record_ptr + COL, mask=more, other=0)
        next_slots = _read_slots(record_ptr + SLOTS_AT, 0, width, more)
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
def _consume(output, schedule, ring, factors, CFG: gl.constexpr):
    """Multiply the ring's tiles, and finish each work tile."""
    layout: gl.constexpr = CFG.accumulator_layout()
    sums_width: gl.constexpr = CFG.sums_width
    if CFG.SPLIT_K > 1:
        init_exchange(shared_address(CFG.exchange_offset + CFG.exchange_bytes), CFG.exchange_bytes)
        cluster_barrier()
    record_ptr = first_record(schedule)
    tile_count = gl.load(record_ptr + TILE_COUNT)
    row_tile = gl.load(record_ptr + ROW_TILE)
    blocks = gl.load(record_ptr + BLOCKS)
    col = gl.load(record_ptr + COL)
    split = gl.load(record_ptr + SPLIT)
    # previous kernels may use bias, residual and output until they have ended
    gdc_wait()
    begin = 0
    for tile in range(tile_count):
        record_ptr += record_size(schedule)
        more = tile + 1 < tile_count
        next_row_tile = gl.load(record_ptr + ROW_TILE, mask=more, other=0)
        next_blocks = gl.load(record_ptr + BLOCKS, mask=more, other=0)
        next_col = gl.load(record_ptr + COL, mask=more, other=0)
        end = begin + gl.cdiv(blocks, CFG.STAGE_BLOCKS) * CFG.k_steps
        acc = gl.zeros([_SUMS, sums_width], gl.float32, layout)
        if CFG.SCALED:
            acc = sum_scaled(acc, ring, factors, begin, end, CFG)
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
    # a stage is full when the operands have arrived, and the factors, if it has any
    full = barriers(stages, 2 if CFG.SCALED else 1)
    ring = NarrowRing(a_smem, x_smem, full, barriers(stages, 1), barriers(1, 1))
    # without scales a row that no role uses
    factors = factor_memory(CFG.factor_rows, CFG.x_rows)
    fence_async_shared()
    epilogue = Epilogue(bias_ptr, residual_ptr, residual_strides, n_rows, n_cols)
    output = NarrowOutput(out_ptr, out_strides, epilogue)
    operands = Operands(a_desc, values_ptr, prefetch, x_desc)
    schedule = Schedule(records_ptr, tiles_each, width)
    few: gl.constexpr = CFG.PRODUCER_REGISTERS
    if CFG.SPLIT_K > 1:
        # a cluster barrier waits for all threads of the cluster, those without work too
        gl.warp_specialize(
            [
                (_consume, (output, schedule, ring, factors, CFG)),
                (_produce, (operands, schedule, ring, CFG)),
                (load_factors, (scales, schedule, ring, factors, n_cols, CFG)),
                (cluster_barrier, ()),
            ],
            [1, 1, 2],
            [few, few, few],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (output, schedule, ring, factors, CFG)),
                (_produce, (operands, schedule, ring, CFG)),
                (load_factors, (scales, schedule, ring, factors, n_cols, CFG)),
            ],
            [1, 1],
            [few, few],
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
