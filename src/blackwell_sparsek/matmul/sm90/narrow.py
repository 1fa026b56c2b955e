# mypy: ignore-errors
"""BSR times few columns on Hopper: out = activation(A @ x + bias) + residual for small N.

A [M, K] block-sparse, x [K, N] with contiguous columns, out [M, N]: `dense @ A.T` of a layer, seen
from A. A program computes the tiles that a schedule gives it, each TILE_M rows of one block row by
TILE_N columns; two programs of a cluster may share one. A producer warp keeps a ring of pieces of
blocks, which lie contiguous in memory, and of x full through TMA, and does not stop between tiles;
one warp group multiplies.

Called as impl "sm90" of `bsk::bsr_matmul`. Limits: fp16 and bf16, blocks stored by rows, heights
that are multiples of 16, pointers and strides that TMA takes.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...device.gluon.cluster import cluster_barrier, cluster_rank, exchange_halves, open_mailbox
from ...device.gluon.memory import bring_to_l2
from ...device.gluon.pipeline import barriers, tiles
from ...device.gluon.warps import shared_address
from ...launch.descriptors import GROUP_ROWS, tensor_descriptor
from ...launch.launcher import cdiv, launch, on_device_of
from .config import NarrowSm90Config
from .row_schedule import HEADER, OUTSIDE, RowSchedule
from .spmm import finish_values

_HEADER = gl.constexpr(HEADER)
_SUMS = gl.constexpr(GROUP_ROWS)
PRODUCER_REGISTERS = gl.constexpr(40)
# Slots that a warp reads at once.
_LANES = gl.constexpr(32)
# A coordinate past the end of every tensor.
_OUTSIDE = gl.constexpr(OUTSIDE)


@gluon.jit
def _slots(slots_ptr, first, width, present):
    """Rows of values and of x for 32 slots, one for each lane of a warp."""
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = first + gl.arange(0, _LANES, lane)
    mask = (slot < width) & present
    a_rows = gl.load(slots_ptr + slot, mask=mask, other=_OUTSIDE)
    x_rows = gl.load(slots_ptr + width + slot, mask=mask, other=_OUTSIDE)
    return slot, a_rows, x_rows


@gluon.jit
def _bring_blocks(values_ptr, slots, a_rows, count, CFG: gl.constexpr):
    """Bring the first `count` blocks of a tile to the L2, one for each lane of a warp."""
    block_ptr = values_ptr + a_rows.to(gl.int64) * CFG.BLOCK_W
    present = (slots < count) & (a_rows < _OUTSIDE)
    nbytes = slots * 0 + CFG.TILE_M * CFG.BLOCK_W * 2
    bring_to_l2(gl.where(present, block_ptr.to(gl.int64), 0), nbytes)


@gluon.jit
def _produce(blocks_of_a, x_desc, records_ptr, items, width, ring, CFG: gl.constexpr):
    """Keep the ring full."""
    a_desc, values_ptr, early = blocks_of_a
    a_smem, x_smem, full, empty, known = ring
    units: gl.constexpr = CFG.UNITS
    k_steps: gl.constexpr = CFG.k_steps
    nbytes: gl.constexpr = a_desc.block_type.nbytes + x_desc.block_type.nbytes
    # a copy from outside of the tensors reads nothing but their descriptors, so it may come early
    mbarrier.expect(known.index(0), nbytes)
    tma.async_copy_global_to_shared(a_desc, [_OUTSIDE, 0], known.index(0), a_smem.index(0))
    x = x_smem.index(0).slice(0, CFG.TILE_N, dim=0)
    tma.async_copy_global_to_shared(x_desc, [0, _OUTSIDE], known.index(0), x)
    size = _HEADER + 2 * width
    record_ptr = records_ptr + gl.program_id(0).to(gl.int64) * (items * size)
    tiles_mine = gl.load(record_ptr)
    blocks = gl.load(record_ptr + 2)
    col = gl.load(record_ptr + 3)
    slots, a_rows, x_rows = _slots(record_ptr + _HEADER, 0, width, True)
    _bring_blocks(values_ptr, slots, a_rows, early, CFG)
    if CFG.PARTS > 1:
        cluster_barrier()
    # only the schedule may be read ahead of other kernels: it never changes
    gdc_wait()
    mbarrier.wait(known.index(0), 0)
    begin = 0
    for item in range(tiles_mine):
        slots_ptr = record_ptr + _HEADER
        record_ptr += size
        more = item + 1 < tiles_mine
        next_blocks = gl.load(record_ptr + 2, mask=more, other=0)
        next_col = gl.load(record_ptr + 3, mask=more, other=0)
        next_slots, next_a_rows, next_x_rows = _slots(record_ptr + _HEADER, 0, width, more)
        # counted on from tile to tile: Triton 3.6 takes the bound of a loop from zero to `blocks`
        # out of the loop over tiles
        end = begin + gl.cdiv(blocks, CFG.UNITS)
        for group in range(begin, end):
            first = (group - begin) * CFG.UNITS
            if first % _LANES == 0 and first > 0:
                slots, a_rows, x_rows = _slots(slots_ptr, first, width, True)
            for i in gl.static_range(k_steps):
                step = group * CFG.k_steps + i
                stage = step % CFG.STAGES
                bar = full.index(stage)
                mbarrier.wait(empty.index(stage), ((step // CFG.STAGES) & 1) ^ 1)
                mbarrier.expect(bar, nbytes * units)
                for u in gl.static_range(units):
                    # past the last block both come from outside of the tensors, as zeros
                    a_row = gl.sum(gl.where(slots == first + u, a_rows, 0), 0)
                    x_row = gl.sum(gl.where(slots == first + u, x_rows, 0), 0) + i * CFG.TILE_K
                    a = a_smem.index(stage * CFG.UNITS + u)
                    x = x_smem.index(stage * CFG.UNITS + u)
                    tma.async_copy_global_to_shared(a_desc, [a_row, i * CFG.TILE_K], bar, a)
                    if CFG.x_rows > CFG.TILE_N:
                        # rows of the tile that are not fetched meet sums that nobody looks at
                        x = x.slice(0, CFG.TILE_N, dim=0)
                    tma.async_copy_global_to_shared(x_desc, [col, x_row], bar, x)
        begin = end
        blocks = next_blocks
        col = next_col
        slots = next_slots
        a_rows = next_a_rows
        x_rows = next_x_rows


@gluon.jit
def _store(acc, out_ptr, out_strides, extras, sizes, corner, CFG: gl.constexpr):
    """Finish and store the sums of a tile whose first row and column are `corner`."""
    bias_ptr, residual_ptr, residual_strides = extras
    activation: gl.constexpr = CFG.ACTIVATION
    accumulators: gl.constexpr = acc.type.layout
    width: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = CFG.store_layout()
    rows, cols = _indices(corner, width, accumulators, CFG)
    acc = finish_values(acc, rows, cols, (bias_ptr, None, None), sizes, activation)
    rows, cols = _indices(corner, width, layout, CFG)
    inside = (rows < sizes[0]) & (cols < sizes[1])
    if residual_ptr is not None:
        offsets = rows.to(gl.int64) * residual_strides[0] + cols.to(gl.int64) * residual_strides[1]
        residual = gl.load(residual_ptr + offsets, mask=inside, other=0.0)
        acc += gl.convert_layout(residual, accumulators).to(gl.float32)
    offsets = rows.to(gl.int64) * out_strides[0] + cols.to(gl.int64) * out_strides[1]
    acc = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), layout)
    gl.store(out_ptr + offsets, acc, mask=inside)


@gluon.jit
def _indices(corner, width: gl.constexpr, layout: gl.constexpr, CFG: gl.constexpr):
    """Rows and columns of the result for sums [64, width] in `layout`."""
    first_row, first_col = corner
    down = gl.arange(0, _SUMS, gl.SliceLayout(1, layout))[:, None]
    along = gl.arange(0, width, gl.SliceLayout(0, layout))[None, :]
    if CFG.swapped:
        return first_row + along, first_col + down
    else:
        return first_row + down, first_col + along


@gluon.jit
def _consume(output, records_ptr, items, width, ring, CFG: gl.constexpr):
    """Multiply what comes through the ring, and finish each tile."""
    out_ptr, out_strides, extras, sizes = output
    a_smem, x_smem, full, empty, _ = ring
    layout: gl.constexpr = CFG.accumulator_layout()
    sums_width: gl.constexpr = CFG.sums_width
    units: gl.constexpr = CFG.UNITS
    if CFG.PARTS > 1:
        open_mailbox(shared_address(CFG.mail_offset + CFG.mail_bytes), CFG.mail_bytes)
        cluster_barrier()
    size = _HEADER + 2 * width
    record_ptr = records_ptr + gl.program_id(0).to(gl.int64) * (items * size)
    tiles_mine = gl.load(record_ptr)
    row_tile = gl.load(record_ptr + 1)
    blocks = gl.load(record_ptr + 2)
    col = gl.load(record_ptr + 3)
    parted = gl.load(record_ptr + 4)
    # bias, residual and output belong to kernels in front until they have finished
    gdc_wait()
    begin = 0
    for item in range(tiles_mine):
        record_ptr += size
        more = item + 1 < tiles_mine
        next_tile = gl.load(record_ptr + 1, mask=more, other=0)
        next_blocks = gl.load(record_ptr + 2, mask=more, other=0)
        next_col = gl.load(record_ptr + 3, mask=more, other=0)
        end = begin + gl.cdiv(blocks, CFG.UNITS) * CFG.k_steps
        acc = gl.zeros([_SUMS, sums_width], gl.float32, layout)
        for step in range(begin, end):
            stage = step % CFG.STAGES
            mbarrier.wait(full.index(stage), (step // CFG.STAGES) & 1)
            for u in gl.static_range(units):
                a = a_smem.index(stage * CFG.UNITS + u)
                x = x_smem.index(stage * CFG.UNITS + u)
                if CFG.swapped:
                    acc = warpgroup_mma(x, a.permute((1, 0)), acc, is_async=True)
                else:
                    acc = warpgroup_mma(a, x.permute((1, 0)), acc, is_async=True)
            # one stage stays in flight; the one before it is done and free
            acc = warpgroup_mma_wait(units, deps=(acc,))
            before = (step + CFG.STAGES - 1) % CFG.STAGES
            mbarrier.arrive(empty.index(before), count=1, pred=step > begin)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        last = (end + CFG.STAGES - 1) % CFG.STAGES
        mbarrier.arrive(empty.index(last), count=1, pred=end > begin)
        if CFG.PARTS > 1 and parted > 0:
            # the only tile of both programs
            box = shared_address(CFG.mail_offset)
            half: gl.constexpr = CFG.half_layout()
            sums = exchange_halves(acc, box, box + CFG.mail_bytes, half)
            corner = (row_tile * CFG.TILE_M, col + cluster_rank() * (CFG.TILE_N // 2))
            _store(sums, out_ptr, out_strides, extras, sizes, corner, CFG)
        else:
            corner = (row_tile * CFG.TILE_M, col)
            _store(acc, out_ptr, out_strides, extras, sizes, corner, CFG)
        begin = end
        row_tile = next_tile
        blocks = next_blocks
        col = next_col


@gluon.jit
def _blocks_memory(a_desc, CFG: gl.constexpr):
    """The ring's room for blocks, of a program with a partner in front of its mailbox."""
    if CFG.PARTS == 1:
        return tiles(a_desc, CFG.STAGES * CFG.UNITS, CFG.TILE_M)
    else:
        page: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, 64], a_desc.dtype)
        shape: gl.constexpr = [CFG.pages, 8, 64]
        memory = gl.allocate_shared_memory(a_desc.dtype, shape, page)
        ring: gl.constexpr = [CFG.STAGES * CFG.UNITS, CFG.TILE_M, CFG.TILE_K]
        return memory._reinterpret(a_desc.dtype, ring, a_desc.layout)


# the number of rows is specialised: where 16 divides it, rows are stored 16 bytes at a time
@gluon.jit(do_not_specialize=["n_cols", "items", "width", "early"])
def _spmm_narrow_sm90_kernel(
    out_ptr,
    out_strides,
    a_desc,
    x_desc,
    values_ptr,
    bias_ptr,
    residual_ptr,
    residual_strides,
    records_ptr,
    n_rows,
    n_cols,
    items,
    width,
    early,
    CFG: gl.constexpr,
):
    """Set up the ring and the two roles; `_produce` and `_consume` do the work."""
    # the next kernel may start as soon as there is room for it; it waits where it has to
    gdc_launch_dependents()
    stages: gl.constexpr = CFG.STAGES
    a_smem = _blocks_memory(a_desc, CFG)
    x_smem = tiles(x_desc, stages * CFG.UNITS, CFG.x_rows)
    ring = (a_smem, x_smem, barriers(stages, 1), barriers(stages, 1), barriers(1, 1))
    fence_async_shared()
    extras = (bias_ptr, residual_ptr, residual_strides)
    output = (out_ptr, out_strides, extras, (n_rows, n_cols))
    blocks_of_a = (a_desc, values_ptr, early)
    few: gl.constexpr = PRODUCER_REGISTERS
    if CFG.PARTS > 1:
        # a cluster waits for all of its threads, those without work too
        gl.warp_specialize(
            [
                (_consume, (output, records_ptr, items, width, ring, CFG)),
                (_produce, (blocks_of_a, x_desc, records_ptr, items, width, ring, CFG)),
                (cluster_barrier, ()),
                (cluster_barrier, ()),
            ],
            [1, 1, 2],
            [few, few, few],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (output, records_ptr, items, width, ring, CFG)),
                (_produce, (blocks_of_a, x_desc, records_ptr, items, width, ring, CFG)),
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
) -> None:
    """Write activation(A @ x + bias) + residual to `out`.

    Parameters
    ----------
    out : [M, N], any strides
    values : [nnzb, bh, bw] contiguous, at least one block
    schedule : of the pattern, N and tiles and parts of `config`, complete before this call
    x : [K, N] with contiguous columns
    bias : [M] contiguous, residual : [M, N], any strides; or None
    """
    m, n = out.shape
    # a dimension of size 1 may carry any stride, which TMA would refuse
    x_strides = (x.stride(1) if n > 1 else cdiv(x.shape[0], 8) * 8, 1)
    args = (
        out,
        out.stride(),
        tensor_descriptor(values.view(-1, config.BLOCK_W), config.a_block()),
        tensor_descriptor(x.mT, config.x_block(), x_strides),
        values,
        bias,
        residual,
        None if residual is None else residual.stride(),
        schedule.records,
        m,
        n,
        schedule.records.shape[1],
        schedule.width,
        schedule.early,
        config,
    )
    with on_device_of(out):
        launch(
            *(_spmm_narrow_sm90_kernel, schedule.records.shape[0] // config.PARTS, args),
            cluster=config.PARTS,
            num_warps=4,
            maxnreg=config.max_registers,
            launch_pdl=True,
        )
