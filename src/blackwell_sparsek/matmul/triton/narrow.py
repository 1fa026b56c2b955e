# mypy: ignore-errors
"""BSR times few columns: out[b] = activation(A @ x[b] + bias) + residual[b] for N of at most 64.

A [M, K] block-sparse in blocks [BLOCK_H, BLOCK_W], x [B, K, N], out and residual [B, M, N],
bias [M]; A and x 16 bits wide. dense @ BSR comes in as transposed views.

Every block is read once and meets few columns, so the time is that of reading. One program
computes TILE_M rows of one block row. It takes the blocks of the row for one long row of values,
whatever the width of a block, and always has two steps of TILE_K values under way. The warps share
out each step along K and add up their sums at the end, in a fixed order. Called by
`bsk::bsr_matmul`. Blocks must have sides that are multiples of 16, and zeros where they reach
beyond the shape of A.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...launch.launcher import launch, on_device_of
from ..plan import strides_of
from ..sm90.row_schedule import TABLE_HEADER, RowTable
from .spmm import addends_of, finish_tile
from .tuning import NarrowConfig

# Values that one thread loads at a time: 16 bytes. A block never ends in the middle of them.
CHUNK = tl.constexpr(8)
_HEADER = tl.constexpr(TABLE_HEADER)
# Without a limit of its own ptxas spills a few values to get below 128 or 168 registers.
MAX_REGISTERS = 240


@triton.jit
def _prefetch(ptrs, entry, ASM: tl.constexpr):
    """Bring what lies at each pointer to the L2 cache where there is an entry.

    Writes of other kernels meet in that cache, so nothing gets stale by coming early.
    """
    tl.inline_asm_elementwise(
        ASM, "=r,l,r", [ptrs.to(tl.int64), entry], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.constexpr_function
def _prefetch_asm(num_bytes):
    """PTX of a prefetch: pointer $1, not where $2 is negative. $0 must be written, for nothing."""
    return (
        "{ .reg .pred p; setp.ge.s32 p, $2, 0; "
        f"@p cp.async.bulk.prefetch.L2.global [$1], {num_bytes}; mov.u32 $0, 0; }}"
    )


@triton.jit
def _prefetch_row(
    values_ptr,
    slots_ptr,
    width,
    blocks,
    m_tile,
    block_stride,
    BLOCK_W: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):
    """Bring all that this program is going to read of its blocks to the L2 cache.

    Each thread asks for one piece of every step. Where blocks are stored by columns, the programs
    of a row ask for each other's values, and together for all.
    """
    NUM_PIECES: tl.constexpr = 32 * NUM_WARPS
    STEP: tl.constexpr = TILE_M * TILE_K
    PIECE: tl.constexpr = STEP // NUM_PIECES
    SHARE: tl.constexpr = TILE_M * BLOCK_W
    tl.static_assert(SHARE % PIECE == 0)
    ASM: tl.constexpr = _prefetch_asm(PIECE * values_ptr.dtype.element_ty.primitive_bitwidth // 8)
    values_ptr += m_tile * SHARE
    offset = tl.arange(0, NUM_PIECES) * PIECE
    entry = tl.load(slots_ptr + offset // SHARE, mask=offset // SHARE < width, other=-1)
    # the first step does not wait to hear how many blocks there are
    for _ in range(0, tl.maximum(blocks * SHARE, 1), STEP):
        ptrs = values_ptr + (entry.to(tl.int64) * block_stride + offset % SHARE)
        _prefetch(ptrs, entry, ASM)
        offset += STEP
        entry = tl.load(slots_ptr + offset // SHARE, mask=offset // SHARE < width, other=-1)


@triton.jit
def _load_slots(slots_ptr, width, k_first, BLOCK_W: tl.constexpr, TILE_K: tl.constexpr):
    """Where a step of the row finds its chunks: entries (or -1), k in the block, k in x."""
    k_row = k_first + tl.arange(0, TILE_K // CHUNK) * CHUNK  # [TILE_K / CHUNK]
    slot = k_row // BLOCK_W
    k_in_block = k_row % BLOCK_W
    mask = slot < width
    entry = tl.load(slots_ptr + slot, mask=mask, other=-1)
    col = tl.load(slots_ptr + width + slot, mask=mask, other=-1)
    return entry, k_in_block, col * BLOCK_W + k_in_block


@triton.jit
def _load_step(slots, a_ptrs, x_ptrs, mask_n, value_strides, x_strides, k_size):
    """Values [TILE_K / CHUNK, TILE_M, CHUNK] of a step, and of x [TILE_K / CHUNK, TILE_N, CHUNK].

    `a_ptrs` [1, TILE_M, 1] are the rows in the first block, `x_ptrs` [1, TILE_N, 1] the columns.
    Chunks come first because Triton then gives neighbouring ones to neighbouring threads.
    """
    entry, k_in_block, k_pos = slots
    offs = tl.arange(0, CHUNK)[None, None, :]
    a_offset = entry.to(tl.int64) * value_strides.batch
    a_offset += k_in_block.to(tl.int64) * value_strides.col
    a_ptrs = a_ptrs + (a_offset[:, None, None] + offs.to(tl.int64) * value_strides.col)
    mask_k = (entry >= 0)[:, None, None]
    a = tl.load(a_ptrs, mask=mask_k, other=0.0)
    mask_x = mask_k & mask_n
    if k_size is not None:
        mask_x = mask_x & (k_pos[:, None, None] + offs < k_size)
    x_offset = k_pos.to(tl.int64) * x_strides.row
    x_ptrs = x_ptrs + (x_offset[:, None, None] + offs.to(tl.int64) * x_strides.row)
    x = tl.load(x_ptrs, mask=mask_x, other=0.0)
    return a, x


@triton.jit
def _add_step(acc, a, x, NUM_WARPS: tl.constexpr):
    """Add the products of a step to the sums that `_total` adds up."""
    NUM_CHUNKS: tl.constexpr = a.shape[0]
    TILE_M: tl.constexpr = a.shape[1]
    TILE_N: tl.constexpr = x.shape[1]
    SHARE: tl.constexpr = NUM_CHUNKS // NUM_WARPS
    if TILE_N == 1:
        # no layout to change for one column: each thread multiplies what it loaded
        acc += tl.sum(a.to(tl.float32) * x.to(tl.float32), axis=2)  # [TILE_K / CHUNK, TILE_M]
    else:
        # rows as the second operand, which goes down to 8 of them
        a = tl.permute(tl.reshape(a, (NUM_WARPS, SHARE, TILE_M, CHUNK)), (0, 1, 3, 2))
        x = tl.permute(tl.reshape(x, (NUM_WARPS, SHARE, TILE_N, CHUNK)), (0, 2, 1, 3))
        a = tl.reshape(a, (NUM_WARPS, SHARE * CHUNK, TILE_M))
        x = tl.reshape(x, (NUM_WARPS, TILE_N, SHARE * CHUNK))
        acc = tl.dot(x, a, acc, input_precision="ieee")  # [NUM_WARPS, TILE_N, TILE_M]
    return acc


@triton.jit
def _no_sums(
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, NUM_WARPS: tl.constexpr
):
    """What `_add_step` starts from."""
    if TILE_N == 1:
        return tl.zeros((TILE_K // CHUNK, TILE_M), dtype=tl.float32)
    else:
        return tl.zeros((NUM_WARPS, TILE_N, TILE_M), dtype=tl.float32)


@triton.jit
def _total(acc, TILE_N: tl.constexpr):
    """The sums of all threads as a tile [TILE_M, TILE_N]."""
    if TILE_N == 1:
        return tl.sum(acc, axis=0)[:, None]
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
    OVERLAP: tl.constexpr,  # start before the kernel in front has finished
    PREFETCH: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):
    """Multiply TILE_M rows of one block row with all columns of one batch entry."""
    if OVERLAP:
        # the next kernel may start as soon as there is room for it; it waits where it has to
        gdc_launch_dependents()
    M_TILES: tl.constexpr = BLOCK_H // TILE_M
    pid = tl.program_id(0)
    m_tile = pid % M_TILES
    item = (pid // M_TILES) % n_rows
    batch = pid // M_TILES // n_rows
    record_ptr = records_ptr + item.to(tl.int64) * (_HEADER + 2 * width)
    slots_ptr = record_ptr + _HEADER
    row = tl.load(record_ptr)
    blocks = tl.load(record_ptr + 1)
    slots = _load_slots(slots_ptr, width, 0, BLOCK_W, TILE_K)
    next_slots = _load_slots(slots_ptr, width, TILE_K, BLOCK_W, TILE_K)

    # Only the table may be read ahead of other kernels: it never changes.
    if PREFETCH:
        _prefetch_row(
            *(values_ptr, slots_ptr, width, blocks, m_tile, value_strides.batch),
            *(BLOCK_W, TILE_M, TILE_K, NUM_WARPS),
        )
    if OVERLAP:
        gdc_wait()

    rows = m_tile * TILE_M + tl.arange(0, TILE_M)  # [TILE_M], in the block
    offs_n = tl.arange(0, TILE_N)
    mask_n = (offs_n < n_size)[None, :, None]
    a_ptrs = values_ptr + (rows.to(tl.int64) * value_strides.row)[None, :, None]
    x_ptrs = x_ptr + batch.to(tl.int64) * x_strides.batch
    x_ptrs += (offs_n.to(tl.int64) * x_strides.col)[None, :, None]
    operands = (a_ptrs, x_ptrs, mask_n, value_strides, x_strides, k_size)
    acc = _no_sums(TILE_M, TILE_N, TILE_K, NUM_WARPS)

    a, x = _load_step(slots, *operands)
    # two steps under way: the loads of the next one are out before this one is waited for
    for k_next in range(TILE_K, blocks * BLOCK_W, TILE_K):
        next_a, next_x = _load_step(next_slots, *operands)
        next_slots = _load_slots(slots_ptr, width, k_next + TILE_K, BLOCK_W, TILE_K)
        acc = _add_step(acc, a, x, NUM_WARPS)
        a, x = next_a, next_x
    acc = _add_step(acc, a, x, NUM_WARPS)

    epilogue = (out_ptr, out_strides, addends, batch, row * BLOCK_H + rows, m_size, n_size)
    finish_tile(_total(acc, TILE_N), 0, epilogue, ACTIVATION)


def launch_spmm_narrow(
    out: torch.Tensor,
    values: torch.Tensor,
    table: RowTable,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
    config: NarrowConfig,
) -> None:
    """Write activation(A @ x + bias) + residual to `out`.

    Parameters
    ----------
    out : [B, M, N], any strides, N at most `config.tile_n`
    values : [nnzb, bh, bw], any strides: a transposed view where the stored blocks are transposed
    table : of the pattern, complete on the device before this call
    x : [B, K, N], any strides
    bias : [M], residual : [B, M, N], any strides; or None
    """
    block_h, block_w = values.shape[1:]
    batches, m, n = out.shape
    config.check((block_h, block_w), n)
    if out.numel() == 0:
        return
    n_rows = table.records.shape[0]
    # a prefetch asks for aligned pieces of blocks that lie in one piece
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
        config.overlap,
        config.prefetch and whole and values.data_ptr() % 16 == 0,
        block_h,
        block_w,
        config.tile_m,
        config.tile_n,
        config.tile_k,
        config.num_warps,
    )
    # the interpreter does not know the option
    options = {"launch_pdl": True} if config.overlap else {}
    with on_device_of(out):
        grid = block_h // config.tile_m * n_rows * batches
        launch(
            *(_bsr_spmm_narrow_kernel, grid, args),
            num_warps=config.num_warps,
            num_stages=1,
            maxnreg=MAX_REGISTERS,
            **options,
        )
