"""BSR times few columns on Hopper: out = activation(A @ x + bias) + residual for N of at most 64.

A [M, K] block-sparse, x [K, N] with contiguous columns, out [M, N]: `dense @ A.T` of a layer, seen
from A. A program computes TILE_M rows of one block row, or one share of the blocks along K of it. A
producer warp keeps a ring of pieces of blocks, which lie contiguous in memory, and of x full
through TMA; one warp group multiplies. Where shares are more than one, each leaves its sums in
a workspace and the last to come adds them up in order.

Called as impl "sm90" of `bsk::bsr_matmul`. Limits: fp16 and bf16, blocks stored by rows, heights
that are multiples of 16, pointers and strides that TMA takes.
"""

import torch
import triton
import triton.language as tl
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

from ...core.launch import launch, on_device_of, resting_words, scratch
from ...device.gluon.pipeline import barriers, tiles
from ...device.partials import is_last
from ..sm90 import GROUP_ROWS, tensor_descriptor
from .config_narrow_sm90 import NarrowSm90Config
from .finish_sm90 import finish_values
from .row_table import HEADER, RowTable

_HEADER = gl.constexpr(HEADER)
_SUMS = gl.constexpr(GROUP_ROWS)
# Registers per thread: 32 sums and their addresses. Two programs of eight warps share an SM.
MAX_REGISTERS = 96
PRODUCER_REGISTERS = gl.constexpr(40)


@triton.constexpr_function
def _prefetch_asm(num_bytes):
    """PTX that brings `num_bytes` at $1 to the L2, asked for by one lane; $0 is for nothing."""
    return (
        "{ .reg .pred p; .reg .u32 l; mov.u32 l, %laneid; setp.eq.u32 p, l, 0; "
        f"@p cp.async.bulk.prefetch.L2.global [$1], {num_bytes}; mov.u32 $0, 0; }}"
    )


@triton.jit
def _prefetch(ptr, ASM: tl.constexpr):
    """Bring a piece of a block to the L2 cache, where writes of other kernels meet as well."""
    tl.inline_asm_elementwise(
        ASM, "=r,l", [ptr.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _place(width, records_ptr, CFG: gl.constexpr):
    """Tile of rows and record of this program, and its blocks of the row: begin, end."""
    tile = gl.program_id(0) // CFG.SPLITS
    share = gl.program_id(0) % CFG.SPLITS
    record_ptr = records_ptr + (tile // CFG.row_tiles).to(gl.int64) * (_HEADER + 2 * width)
    blocks = gl.load(record_ptr + 1)
    begin = blocks * share // CFG.SPLITS
    end = blocks * (share + 1) // CFG.SPLITS
    return tile, record_ptr, begin, end


@gluon.jit
def _produce(a_desc, x_desc, values_ptr, records_ptr, width, ring, CFG: gl.constexpr):
    """Keep the ring full."""
    a_smem, x_smem, full, empty = ring
    k_steps: gl.constexpr = CFG.k_steps
    nbytes: gl.constexpr = a_desc.block_type.nbytes + x_desc.block_type.nbytes
    tile, record_ptr, begin, end = _place(width, records_ptr, CFG)
    slots_ptr = record_ptr + _HEADER
    sub_row = (tile % CFG.row_tiles) * CFG.TILE_M
    entry = gl.load(slots_ptr + begin, mask=begin < end, other=0)
    col = gl.load(slots_ptr + width + begin, mask=begin < end, other=0)
    # only the table may be read ahead of other kernels: it never changes
    if CFG.PREFETCH:
        asm: gl.constexpr = _prefetch_asm(a_desc.block_type.nbytes * CFG.k_steps)
        for slot in range(begin, end):
            row = gl.load(slots_ptr + slot).to(gl.int64) * CFG.BLOCK_H + sub_row
            _prefetch(values_ptr + row * CFG.BLOCK_W, asm)
    if CFG.OVERLAP:
        gdc_wait()
    step = 0
    for slot in range(begin, end):
        more = slot + 1 < end
        next_entry = gl.load(slots_ptr + slot + 1, mask=more, other=0)
        next_col = gl.load(slots_ptr + width + slot + 1, mask=more, other=0)
        for u in gl.static_range(k_steps):
            stage = step % CFG.STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((step // CFG.STAGES) & 1) ^ 1)
            mbarrier.expect(bar, nbytes)
            a_row = entry * CFG.BLOCK_H + sub_row
            k = col * CFG.BLOCK_W + u * CFG.TILE_K
            a = a_smem.index(stage)
            x = x_smem.index(stage)
            tma.async_copy_global_to_shared(a_desc, [a_row, u * CFG.TILE_K], bar, a)
            if CFG.x_rows > CFG.TILE_N:
                # rows of the tile that are not fetched only meet sums that nobody looks at
                x = x.slice(0, CFG.TILE_N, dim=0)
            tma.async_copy_global_to_shared(x_desc, [0, k], bar, x)
            step += 1
        entry = next_entry
        col = next_col


@gluon.jit
def _sum_shares(part_ptr, tile, CFG: gl.constexpr):
    """Add up what the programs of a tile left, in their order."""
    layout: gl.constexpr = CFG.store_layout()
    width: gl.constexpr = CFG.sums_shape[1]
    splits: gl.constexpr = CFG.SPLITS
    first = tile.to(gl.int64) * (CFG.SPLITS * _SUMS * width)
    offsets = _part_offsets(layout, width)
    acc = gl.zeros([_SUMS, width], gl.float32, layout)
    for share in gl.static_range(splits):
        # past the L1, which does not see what other SMs write
        ptrs = part_ptr + first + share * (_SUMS * width) + offsets
        acc += gl.load(ptrs, cache_modifier=".cg")
    return acc


@gluon.jit
def _part_offsets(layout: gl.constexpr, width: gl.constexpr):
    """Where the sums of one share lie, [64, width]."""
    offs_row = gl.arange(0, _SUMS, gl.SliceLayout(1, layout))
    offs_col = gl.arange(0, width, gl.SliceLayout(0, layout))
    return offs_row[:, None] * width + offs_col[None, :]


@gluon.jit
def _store(acc, out_ptr, out_strides, extras, sizes, first_row, CFG: gl.constexpr):
    """Finish and store the sums of a tile."""
    layout: gl.constexpr = CFG.store_layout()
    width: gl.constexpr = CFG.sums_shape[1]
    activation: gl.constexpr = CFG.ACTIVATION
    down = gl.arange(0, _SUMS, gl.SliceLayout(1, layout))[:, None]
    along = gl.arange(0, width, gl.SliceLayout(0, layout))[None, :]
    if CFG.swapped:
        rows = first_row + along
        cols = down
    else:
        rows = first_row + down
        cols = along
    acc = finish_values(acc, rows, cols, extras, sizes, activation)
    offsets = rows.to(gl.int64) * out_strides[0] + cols.to(gl.int64) * out_strides[1]
    inside = (rows < sizes[0]) & (cols < sizes[1])
    gl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _consume(work, output, width, ring, CFG: gl.constexpr):
    """Multiply what comes through the ring, and finish the tile."""
    records_ptr, counters_ptr, part_ptr = work
    out_ptr, out_strides, extras, sizes = output
    a_smem, x_smem, full, empty = ring
    layout: gl.constexpr = CFG.accumulator_layout()
    sums_width: gl.constexpr = CFG.sums_shape[1]
    store_layout: gl.constexpr = CFG.store_layout()
    tile, record_ptr, begin, end = _place(width, records_ptr, CFG)
    block_row = gl.load(record_ptr)
    steps = (end - begin) * CFG.k_steps
    acc = gl.zeros([_SUMS, sums_width], gl.float32, layout)
    for step in range(steps):
        stage = step % CFG.STAGES
        mbarrier.wait(full.index(stage), (step // CFG.STAGES) & 1)
        a = a_smem.index(stage)
        x = x_smem.index(stage)
        if CFG.swapped:
            pending = warpgroup_mma(x, a.permute((1, 0)), acc, is_async=True)
        else:
            pending = warpgroup_mma(a, x.permute((1, 0)), acc, is_async=True)
        # one product stays in flight; the one before it is done, so its stage is free
        acc = warpgroup_mma_wait(1, deps=(pending,))
        mbarrier.arrive(empty.index((step + CFG.STAGES - 1) % CFG.STAGES), count=1, pred=step > 0)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    if CFG.OVERLAP:
        # bias, residual and output belong to kernels in front until they have finished
        gdc_wait()
    acc = gl.convert_layout(acc, store_layout)
    first_row = block_row * CFG.BLOCK_H + (tile % CFG.row_tiles) * CFG.TILE_M
    if CFG.SPLITS == 1:
        _store(acc, out_ptr, out_strides, extras, sizes, first_row, CFG)
    else:
        part = gl.program_id(0).to(gl.int64) * (_SUMS * sums_width)
        gl.store(part_ptr + part + _part_offsets(store_layout, sums_width), acc)
        if is_last(counters_ptr + tile, CFG.SPLITS):
            acc = _sum_shares(part_ptr, tile, CFG)
            _store(acc, out_ptr, out_strides, extras, sizes, first_row, CFG)


@gluon.jit(do_not_specialize=["n_rows", "n_cols", "width"])
def _spmm_narrow_sm90_kernel(
    out_ptr,
    out_strides,
    part_ptr,  # fp32 [tiles, SPLITS, 64, sums], None without splits
    counters_ptr,  # int32 [tiles] that rest at zero, None without splits
    values_ptr,
    a_desc,
    x_desc,
    bias_ptr,
    residual_ptr,
    residual_strides,
    records_ptr,
    n_rows,
    n_cols,
    width,
    CFG: gl.constexpr,
):
    """Set up the ring and the two roles; `_produce` and `_consume` do the work."""
    if CFG.OVERLAP:
        # the next kernel may start as soon as there is room for it; it waits where it has to
        gdc_launch_dependents()
    stages: gl.constexpr = CFG.STAGES
    a_smem = tiles(a_desc, stages, CFG.TILE_M)
    x_smem = tiles(x_desc, stages, CFG.x_rows)
    ring = (a_smem, x_smem, barriers(stages, 1), barriers(stages, 1))
    fence_async_shared()
    extras = (bias_ptr, residual_ptr, residual_strides)
    output = (out_ptr, out_strides, extras, (n_rows, n_cols))
    work = (records_ptr, counters_ptr, part_ptr)
    gl.warp_specialize(
        [
            (_consume, (work, output, width, ring, CFG)),
            (_produce, (a_desc, x_desc, values_ptr, records_ptr, width, ring, CFG)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )


def launch_spmm_narrow_sm90(
    out: torch.Tensor,
    values: torch.Tensor,
    table: RowTable,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    config: NarrowSm90Config,
) -> None:
    """Write activation(A @ x + bias) + residual to `out`.

    Parameters
    ----------
    out : [M, N], any strides, N at most `config.TILE_N`
    values : [nnzb, bh, bw] contiguous, at least one block
    table : of the pattern, complete on the device before this call
    x : [K, N] with contiguous columns
    bias : [M] contiguous, residual : [M, N], any strides; or None
    """
    m, n = out.shape
    tiles_m = table.records.shape[0] * config.row_tiles
    part = counters = None
    if config.SPLITS > 1:
        shape = (tiles_m, config.SPLITS, *config.sums_shape)
        part = scratch(shape, torch.float32, out.device)
        counters = resting_words(tiles_m, out.device)
    args = (
        out,
        out.stride(),
        part,
        counters,
        values,
        tensor_descriptor(values.view(-1, config.BLOCK_W), config.a_block()),
        tensor_descriptor(x.mT, config.x_block()),
        bias,
        residual,
        None if residual is None else residual.stride(),
        table.records,
        m,
        n,
        table.width,
        config,
    )
    options = {"launch_pdl": True} if config.OVERLAP else {}
    with on_device_of(out):
        launch(
            *(_spmm_narrow_sm90_kernel, tiles_m * config.SPLITS, args),
            num_warps=4,
            maxnreg=MAX_REGISTERS,
            **options,
        )
