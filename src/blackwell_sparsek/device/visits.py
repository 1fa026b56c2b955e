# mypy: ignore-errors
"""Which KV tiles a query tile visits: a dense range, or the blocks of a mask row.

The other direction is the same with the roles exchanged: the query tiles that a KV tile visits come
from a range of queries, or from the transposed lists, whose blocks hold queries.

Both are sequences of *blocks*: KV tiles when dense, blocks of the mask otherwise. In a `VisitPlan`
the blocks `[full_begin, full_end)` are entirely visible and need no mask code; the blocks
`[partial_begin, partial_end)`, `[edge_begin, full_begin)` and `[full_end, edge_end)` need it. When
dense there are no partial blocks, and block b holds the keys from b * TILE_N on. For a mask, b is
an entry of its lists, which holds the keys from indices[b] * BLOCK_KV on.

Blocks smaller than a tile are packed several to a tile, so that tiles keep the size that tensor
cores want; larger ones are cut into tiles.
"""

import triton
import triton.language as tl

from .records import VisitPlan


@triton.jit
def plan_dense(kv_lo, kv_hi, all_lo, all_hi, TILE_N: tl.constexpr):
    """Plan over the keys `[kv_lo, kv_hi)`, of which every row sees `[all_lo, all_hi)`."""
    edge_begin = kv_lo // TILE_N
    edge_end = tl.where(kv_lo < kv_hi, (kv_hi + TILE_N - 1) // TILE_N, edge_begin)
    full_begin = tl.minimum((all_lo + TILE_N - 1) // TILE_N, edge_end)
    full_begin = tl.maximum(full_begin, edge_begin)
    full_end = tl.maximum(tl.minimum(all_hi // TILE_N, edge_end), full_begin)
    return VisitPlan(0, 0, edge_begin, full_begin, full_end, edge_end)


@triton.jit
def plan_blocks(
    lists,
    row,
    kv_lo,
    kv_hi,
    all_lo,
    all_hi,
    offs_scan,
    TILE_N: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Plan over row `row` of `MaskLists`.

    `offs_scan` is any range 0..n: the row is read n entries at a time. Blocks ascend within the
    partial and within the full ones, so counting the blocks before a bound locates it.
    """
    PACK: tl.constexpr = TILE_N // BLOCK_KV if BLOCK_KV < TILE_N else 1
    begin = tl.load(lists.indptr + row)
    end = tl.load(lists.indptr + row + 1)
    split = tl.load(lists.partial_end + row)

    seen_lo = kv_lo // BLOCK_KV
    seen_hi = tl.where(kv_lo < kv_hi, (kv_hi + BLOCK_KV - 1) // BLOCK_KV, seen_lo)
    whole_lo = (all_lo + BLOCK_KV - 1) // BLOCK_KV
    whole_hi = all_hi // BLOCK_KV

    # int32 vectors of partial counts, summed once after the scan
    zero = offs_scan - offs_scan
    partial_before, partial_until = zero, zero
    full_before, full_until, whole_before, whole_until = zero, zero, zero, zero
    for first in range(begin, end, offs_scan.shape[0]):
        entry = first + offs_scan
        live = entry < end
        block = tl.load(lists.indices + entry, mask=live, other=0)
        partial = live & (entry < split)
        full = live & (entry >= split)
        partial_before += (partial & (block < seen_lo)).to(tl.int32)
        partial_until += (partial & (block < seen_hi)).to(tl.int32)
        full_before += (full & (block < seen_lo)).to(tl.int32)
        full_until += (full & (block < seen_hi)).to(tl.int32)
        whole_before += (full & (block < whole_lo)).to(tl.int32)
        whole_until += (full & (block < whole_hi)).to(tl.int32)

    edge_begin = split + tl.sum(full_before, 0)
    edge_end = split + tl.sum(full_until, 0)
    full_begin = tl.minimum(tl.maximum(split + tl.sum(whole_before, 0), edge_begin), edge_end)
    full_end = tl.maximum(tl.minimum(split + tl.sum(whole_until, 0), edge_end), full_begin)
    # tiles without mask code must be whole; leftover blocks join the edge
    full_end = full_begin + (full_end - full_begin) // PACK * PACK
    return VisitPlan(
        begin + tl.sum(partial_before, 0),
        begin + tl.sum(partial_until, 0),
        edge_begin,
        full_begin,
        full_end,
        edge_end,
    )


@triton.jit
def num_masked_blocks(plan):
    """How many blocks of a plan need mask code."""
    return (
        (plan.partial_end - plan.partial_begin)
        + (plan.full_begin - plan.edge_begin)
        + (plan.edge_end - plan.full_end)
    )


@triton.jit
def num_full_blocks(plan):
    """How many blocks of a plan need no mask code."""
    return plan.full_end - plan.full_begin


@triton.jit
def masked_block(plan, ordinal):
    """The `ordinal`-th of the blocks that need mask code; scalar or vector."""
    num_partial = plan.partial_end - plan.partial_begin
    num_left = plan.full_begin - plan.edge_begin
    edge = ordinal - num_partial
    edge_block = tl.where(edge < num_left, plan.edge_begin + edge, plan.full_end + edge - num_left)
    return tl.where(edge < 0, plan.partial_begin + ordinal, edge_block)


@triton.jit
def num_tiles(num_blocks, TILE_N: tl.constexpr, BLOCK_KV: tl.constexpr):
    """How many tiles of TILE_N keys hold `num_blocks` blocks of BLOCK_KV keys."""
    if BLOCK_KV >= TILE_N:
        count = num_blocks * (BLOCK_KV // TILE_N)
    else:
        count = (num_blocks + (TILE_N // BLOCK_KV - 1)) // (TILE_N // BLOCK_KV)
    return count


@triton.jit
def tile_ordinal(kv_tile, offs_n, TILE_N: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Ordinal of the block of each key of a tile, and the key's place in it.

    The ordinal is a scalar if a block fills the tile, a vector like `offs_n` otherwise.
    """
    if BLOCK_KV >= TILE_N:
        ordinal = kv_tile // (BLOCK_KV // TILE_N)
        kv_in_block = kv_tile % (BLOCK_KV // TILE_N) * TILE_N + offs_n
    else:
        ordinal = kv_tile * (TILE_N // BLOCK_KV) + offs_n // BLOCK_KV
        kv_in_block = offs_n % BLOCK_KV
    return ordinal, kv_in_block


@triton.jit
def keys_of_tile(
    lists,
    entry,
    ordinal,
    num_blocks,
    kv_in_block,
    kv_len,
    TILE_N: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Positions of the keys of a tile; `kv_len`, which no row sees, past the last key.

    `lists` is None when dense. `entry` is the block of the plan at `ordinal`, which comes from
    `tile_ordinal`.
    """
    if lists is None:
        kv_pos = entry * BLOCK_KV + kv_in_block
    elif BLOCK_KV >= TILE_N:
        kv_pos = tl.load(lists.indices + entry) * BLOCK_KV + kv_in_block
    else:
        live = ordinal < num_blocks
        block = tl.load(lists.indices + entry, mask=live, other=0)
        kv_pos = tl.where(live, block * BLOCK_KV + kv_in_block, kv_len)
    return kv_pos


@triton.jit
def bits_of_tile(
    lists,
    entry,
    ordinal,
    num_blocks,
    q_in_block,
    kv_in_block,
    TILE_N: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Words [rows, keys] that hold the visibility bit of each element; all ones for full blocks.

    `q_in_block` counts from the first query of the row of blocks.
    """
    WORDS: tl.constexpr = (BLOCK_KV + 31) // 32
    if BLOCK_KV >= TILE_N:
        bits_id = tl.load(lists.bits_id + entry) + (kv_in_block - kv_in_block)
    else:
        bits_id = tl.load(lists.bits_id + entry, mask=ordinal < num_blocks, other=-1)
    block_words = lists.row_tokens * WORDS
    column = tl.cast(bits_id, tl.int64) * block_words + kv_in_block // 32
    has_bits = (q_in_block >= 0)[:, None] & (bits_id >= 0)[None, :]
    return tl.load(lists.bits + (q_in_block * WORDS)[:, None] + column[None, :], has_bits, other=-1)


@triton.jit
def bits_of_query_tile(
    lists,
    entry,
    ordinal,
    num_blocks,
    kv_in_block,
    q_in_block,
    TILE_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """`bits_of_tile` for lists of query blocks: words [keys, queries] of BLOCK_Q queries a block.

    The pool is that of the forward lists, and `lists.row_tokens` is the width of a block.
    """
    words = (lists.row_tokens + 31) // 32
    if BLOCK_Q >= TILE_M:
        bits_id = tl.load(lists.bits_id + entry) + (q_in_block - q_in_block)
    else:
        bits_id = tl.load(lists.bits_id + entry, mask=ordinal < num_blocks, other=-1)
    row = tl.cast(bits_id, tl.int64) * (BLOCK_Q * words) + q_in_block * words
    has_bits = (kv_in_block >= 0)[:, None] & (bits_id >= 0)[None, :]
    return tl.load(lists.bits + (kv_in_block // 32)[:, None] + row[None, :], has_bits, other=-1)
