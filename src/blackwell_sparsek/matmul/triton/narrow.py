# mypy: ignore-errors
"""BSR times few columns: out[b] = activation(A @ x[b] + bias) + residual[b] for N of at most 64.

A [M, K] block-sparse in blocks [BLOCK_H, BLOCK_W], x [B, K, N], out and residual [B, M, N],
bias [M]; A and x 16 bits wide. dense @ BSR comes in as transposed views.

Every block is read once and multiplies few columns, so reading is the bottleneck. One program
computes TILE_M rows of one block row. It treats the blocks of the row as one long row of values,
whatever the width of a block, and always has two steps of TILE_K values in flight. The warps split
each step along K and add up their sums at the end, in a fixed order. Blocks must have sides
that are multiples of 16, and zeros where they reach beyond the shape of A.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...core.compat import threads_along_first
from ...launch.launcher import launch, on_device_of
from ..rows import RowsProduct, Strides, Views, strides_of
from ..sm90.row_schedule import TABLE_HEADER, RowTable, row_table
from .finish import OutputRows, addends_of, finish_tile
from .tuning import NarrowConfig, narrow_config, narrow_is_even

# Values that one thread loads at a time: 16 bytes. A block never ends in the middle of them.
CHUNK = tl.constexpr(8)
_HEADER = tl.constexpr(TABLE_HEADER)
_THREADS_ALONG_FIRST = tl.constexpr(threads_along_first())
# Without an explicit limit ptxas spills a few values to get below 128 or 168 registers.
MAX_REGISTERS = 240


class _Row(NamedTuple):
    """A record of the table: entries of the blocks of a row, then their block columns.

    There is room for `width` of each; the row has `blocks`.
    """

    slots_ptr: Any
    width: Any
    blocks: Any


class _Slots(NamedTuple):
    """Where a step of a row finds its chunks: entries (or -1), k in the block, k in x."""

    entry: Any
    k_in_block: Any
    k_pos: Any


class _Operands(NamedTuple):
    """The operands of a program.

    `a_ptrs` [1, TILE_M, 1] are its rows in the first block, `x_ptrs` [1, TILE_N, 1] the columns.
    """

    a_ptrs: Any
    a_strides: Strides
    x_ptrs: Any
    x_strides: Strides
    mask_n: Any
    k_size: Any


@triton.jit
def _prefetch(ptrs, entry, ASM: tl.constexpr):
    """Prefetch from each pointer to L2 where there is an entry.

    Other kernels write through L2 too, so an early prefetch cannot become stale.
    """
    tl.inline_asm_elementwise(
        ASM, "=r,l,r", [ptrs.to(tl.int64), entry], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.constexpr_function
def _prefetch_asm(num_bytes):
    """PTX of a prefetch: pointer $1, not where $2 is negative. $0 is written but unused."""
    return (
        "{ .reg .pred p; setp.ge.s32 p, $2, 0; "
        f"@p cp.async.bulk.prefetch.L2.global [$1], {num_bytes}; mov.u32 $0, 0; }}"
    )


@triton.jit
def _prefetch_row(
    values_ptr,
    row,
    m_tile,
    block_stride,
    BLOCK_W: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):
    """Prefetch everything that this program is going to read of its blocks to L2.

    Each thread prefetches one chunk of every step. If blocks are stored by columns, the programs of
    a row prefetch each other's values, and together all of them.
    """
    NUM_CHUNKS: tl.constexpr = 32 * NUM_WARPS
    STEP: tl.constexpr = TILE_M * TILE_K
    PREFETCHED: tl.constexpr = STEP // NUM_CHUNKS
    SHARE: tl.constexpr = TILE_M * BLOCK_W
    tl.static_assert(SHARE % PREFETCHED == 0)
    BITS: tl.constexpr = values_ptr.dtype.element_ty.primitive_bitwidth
    ASM: tl.constexpr = _prefetch_asm(PREFETCHED * BITS // 8)
    values_ptr += m_tile * SHARE
    offset = tl.arange(0, NUM_CHUNKS) * PREFETCHED
    entry = tl.load(row.slots_ptr + offset // SHARE, mask=offset // SHARE < row.width, other=-1)
    # the first step does not wait for the number of blocks
    for _ in range(0, tl.maximum(row.blocks * SHARE, 1), STEP):
        ptrs = values_ptr + (entry.to(tl.int64) * block_stride + offset % SHARE)
        _prefetch(ptrs, entry, ASM)
        offset += STEP
        entry = tl.load(row.slots_ptr + offset // SHARE, mask=offset // SHARE < row.width, other=-1)


@triton.jit
def _load_slots(row, k_first, BLOCK_W: tl.constexpr, TILE_K: tl.constexpr):
    """The slots of the step of a row that begins with its value `k_first`."""
    k_row = k_first + tl.arange(0, TILE_K // CHUNK) * CHUNK  # [TILE_K / CHUNK]
    slot = k_row // BLOCK_W
    k_in_block = k_row % BLOCK_W
    mask = slot < row.width
    entry = tl.load(row.slots_ptr + slot, mask=mask, other=-1)
    col = tl.load(row.slots_ptr + row.width + slot, mask=mask, other=-1)
    return _Slots(entry, k_in_block, col * BLOCK_W + k_in_block)


@triton.jit
def _by_chunk(x, CHUNKS_FIRST: tl.constexpr):
    """A number for each chunk of a step, along the dimension of chunks."""
    if CHUNKS_FIRST:
        return x[:, None, None]
    else:
        return x[None, :, None]


@triton.jit
def _by_row(x, CHUNKS_FIRST: tl.constexpr):
    """A number for each row of values, or for each column of x, along that dimension."""
    if CHUNKS_FIRST:
        return x[None, :, None]
    else:
        return x[:, None, None]


@triton.jit
def _load_step(slots, operands, CHUNKS_FIRST: tl.constexpr):
    """Values [TILE_K / CHUNK, TILE_M, CHUNK] of a step, and of x [TILE_K / CHUNK, TILE_N, CHUNK].

    Chunks come first or second, where Triton gives neighbouring ones to neighbouring threads.
    """
    offs = tl.arange(0, CHUNK)[None, None, :]
    a_col = operands.a_strides.col
    a_offset = slots.entry.to(tl.int64) * operands.a_strides.batch
    a_offset += slots.k_in_block.to(tl.int64) * a_col
    a_ptrs = operands.a_ptrs + (_by_chunk(a_offset, CHUNKS_FIRST) + offs.to(tl.int64) * a_col)
    mask_k = _by_chunk(slots.entry >= 0, CHUNKS_FIRST)
    a = tl.load(a_ptrs, mask=mask_k, other=0.0)
    mask_x = mask_k & operands.mask_n
    if operands.k_size is not None:
        mask_x = mask_x & (_by_chunk(slots.k_pos, CHUNKS_FIRST) + offs < operands.k_size)
    x_row = operands.x_strides.row
    x_offset = slots.k_pos.to(tl.int64) * x_row
    x_ptrs = operands.x_ptrs + (_by_chunk(x_offset, CHUNKS_FIRST) + offs.to(tl.int64) * x_row)
    x = tl.load(x_ptrs, mask=mask_x, other=0.0)
    return a, x


@triton.jit
def _add_step(acc, a, x, TILE_N: tl.constexpr, NUM_WARPS: tl.constexpr):
    """Add the products of a step to the sums that `_total` adds up."""
    if TILE_N == 1:
        # no layout to change for one column: each thread multiplies what it loaded
        acc += tl.sum(a.to(tl.float32) * x.to(tl.float32), axis=2)
    else:
        NUM_CHUNKS: tl.constexpr = a.shape[0]
        TILE_M: tl.constexpr = a.shape[1]
        SHARE: tl.constexpr = NUM_CHUNKS // NUM_WARPS
        # rows as the second operand, which goes down to 8 of them
        a = tl.permute(tl.reshape(a, (NUM_WARPS, SHARE, TILE_M, CHUNK)), (0, 1, 3, 2))
        x = tl.permute(tl.reshape(x, (NUM_WARPS, SHARE, TILE_N, CHUNK)), (0, 2, 1, 3))
        a = tl.reshape(a, (NUM_WARPS, SHARE * CHUNK, TILE_M))
        x = tl.reshape(x, (NUM_WARPS, TILE_N, SHARE * CHUNK))
        acc = tl.dot(x, a, acc, input_precision="ieee")  # [NUM_WARPS, TILE_N, TILE_M]
    return acc


@triton.jit
def _no_sums(
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    CHUNKS_FIRST: tl.constexpr,
):
    """The initial sums of `_add_step`."""
    if TILE_N > 1:
        return tl.zeros((NUM_WARPS, TILE_N, TILE_M), dtype=tl.float32)
    elif CHUNKS_FIRST:
        return tl.zeros((TILE_K // CHUNK, TILE_M), dtype=tl.float32)
    else:
        return tl.zeros((TILE_M, TILE_K // CHUNK), dtype=tl.float32)


@triton.jit
def _total(acc, TILE_N: tl.constexpr, CHUNKS_FIRST: tl.constexpr):
    """The sums of all threads as a tile [TILE_M, TILE_N]."""
    if TILE_N == 1:
        return tl.sum(acc, axis=0 if CHUNKS_FIRST else 1)[:, None]
    else:
        return tl.trans(tl.sum(acc, axis=0))


@triton.jit(do_not_specialize=["n_rows", "width"])
def _bsr_spmm_narrow_kernel(
    out_ptr,
    values_ptr,
    x_ptr,
    records_ptr,
    out_strides,
    value_strides,
    x_strides,
    m_size,
    k_size,  # None when K is a multiple of BLOCK_W
    n_size,
    n_rows,
    width,
    addends,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,  # programmatic dependent launch: start before the previous kernel has ended
    PREFETCH: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):
    """Multiply TILE_M rows of one block row with all columns of one batch entry."""
    if PDL:
        # the next kernel may start as soon as there is room for it; it waits where it has to
        gdc_launch_dependents()
    M_TILES: tl.constexpr = BLOCK_H // TILE_M
    CHUNKS_FIRST: tl.constexpr = TILE_N > 1 or _THREADS_ALONG_FIRST
    pid = tl.program_id(0)
    m_tile = pid % M_TILES
    item = (pid // M_TILES) % n_rows
    batch = pid // M_TILES // n_rows
    record_ptr = records_ptr + item.to(tl.int64) * (_HEADER + 2 * width)
    block_row = tl.load(record_ptr)
    row = _Row(record_ptr + _HEADER, width, tl.load(record_ptr + 1))
    slots = _load_slots(row, 0, BLOCK_W, TILE_K)
    next_slots = _load_slots(row, TILE_K, BLOCK_W, TILE_K)

    # Only the table may be read before previous kernels have ended: it never changes.
    if PREFETCH:
        _prefetch_row(
            *(values_ptr, row, m_tile, value_strides.batch),
            *(BLOCK_W, TILE_M, TILE_K, NUM_WARPS),
        )
    if PDL:
        gdc_wait()

    rows = m_tile * TILE_M + tl.arange(0, TILE_M)  # [TILE_M], in the block
    offs_n = tl.arange(0, TILE_N)
    mask_n = _by_row(offs_n < n_size, CHUNKS_FIRST)
    a_ptrs = values_ptr + _by_row(rows.to(tl.int64) * value_strides.row, CHUNKS_FIRST)
    x_ptrs = x_ptr + batch.to(tl.int64) * x_strides.batch
    x_ptrs += _by_row(offs_n.to(tl.int64) * x_strides.col, CHUNKS_FIRST)
    operands = _Operands(a_ptrs, value_strides, x_ptrs, x_strides, mask_n, k_size)
    acc = _no_sums(TILE_M, TILE_N, TILE_K, NUM_WARPS, CHUNKS_FIRST)

    a, x = _load_step(slots, operands, CHUNKS_FIRST)
    # two steps in flight: the loads of the next one are issued before this one is waited for
    for k_next in range(TILE_K, row.blocks * BLOCK_W, TILE_K):
        next_a, next_x = _load_step(next_slots, operands, CHUNKS_FIRST)
        next_slots = _load_slots(row, k_next + TILE_K, BLOCK_W, TILE_K)
        acc = _add_step(acc, a, x, TILE_N, NUM_WARPS)
        a, x = next_a, next_x
    acc = _add_step(acc, a, x, TILE_N, NUM_WARPS)

    target = OutputRows(
        out_ptr, out_strides, addends, batch, block_row * BLOCK_H + rows, m_size, n_size
    )
    finish_tile(_total(acc, TILE_N, CHUNKS_FIRST), 0, target, ACTIVATION)


def multiplied(product: RowsProduct, bias: torch.Tensor | None, activation: str | None) -> bool:
    """Compute a product of few columns; False if it has more, or if its rows are too uneven."""
    rows = product.rows
    config = narrow_config(product.problem)
    if config is None or product.out.numel() == 0:
        return False
    table = row_table(rows.indptr, rows.indices, rows.perm)
    if table is None or not narrow_is_even(product.problem, config, table.width):
        return False
    for views in product.parts:
        launch_spmm_narrow(views, rows.blocks, table, bias, activation, config)
    return True


def launch_spmm_narrow(
    views: Views,
    values: torch.Tensor,
    table: RowTable,
    bias: torch.Tensor | None,
    activation: str | None,
    config: NarrowConfig,
) -> None:
    """Write activation(A @ x + bias) + residual to `out`.

    Parameters
    ----------
    views : out [B, M, N], x [B, K, N], residual [B, M, N] or None; any strides, N at most
        `config.tile_n`
    values : [nnzb, bh, bw], any strides: a transposed view where the stored blocks are transposed
    table : of the pattern, complete on the device before this call
    bias : [M], any stride, or None
    """
    out, x, residual = views
    block_h, block_w = values.shape[1:]
    batches, m, n = out.shape
    config.check((block_h, block_w), n)
    if out.numel() == 0:
        return
    n_rows = table.records.shape[0]
    # a prefetch asks for aligned chunks of blocks that are contiguous, either way round
    block_stride, *strides = values.stride()
    whole = strides in ([block_w, 1], [1, block_h]) and block_stride % 8 == 0
    args = (
        out,
        values,
        x,
        table.records,
        strides_of(out),
        strides_of(values),
        strides_of(x),
        m,
        x.shape[1] if x.shape[1] % block_w else None,
        n,
        n_rows,
        table.width,
        addends_of(bias, residual),
        activation,
        config.pdl,
        config.prefetch and whole and values.data_ptr() % 16 == 0,
        block_h,
        block_w,
        config.tile_m,
        config.tile_n,
        config.tile_k,
        config.num_warps,
    )
    # the interpreter does not know the option
    options = {"launch_pdl": True} if config.pdl else {}
    with on_device_of(out):
        grid = block_h // config.tile_m * n_rows * batches
        launch(
            *(_bsr_spmm_narrow_kernel, grid, args),
            num_warps=config.num_warps,
            num_stages=1,
            maxnreg=MAX_REGISTERS,
            **options,
        )
