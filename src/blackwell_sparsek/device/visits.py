# mypy: ignore-errors
"""Which KV tiles a query tile visits: a dense range, or the blocks of a mask row.

The other direction is the same with the roles exchanged: the query tiles that a KV tile visits come
from a range of queries and from the transposed lists, whose blocks hold queries.

Both are lists of *units*: KV tiles when dense, mask blocks otherwise. A plan is six bounds,

    partial_begin, partial_end, edge_begin, full_begin, full_end, edge_end

and says: the units `[full_begin, full_end)` are visible as a whole and need no mask code; the units
`[partial_begin, partial_end)`, `[edge_begin, full_begin)` and `[full_end, edge_end)` need it. When
dense there are no partial units, and unit u holds the keys from u * TILE_N. For a mask, u is an
entry of its lists, which holds the keys from indices[u] * BLOCK_KV.

Units smaller than a tile are packed several to a tile, so that tiles keep the size that tensor
cores want; larger ones are cut into tiles.
"""

import triton
import triton.language as tl


@triton.jit
def plan_dense(kv_lo, kv_hi, all_lo, all_hi, TILE_N: tl.constexpr):
    """Plan over the keys `[kv_lo, kv_hi)`, of which every row sees `[all_lo, all_hi)`."""
    edge_begin = kv_lo // TILE_N
    edge_end = tl.where(kv_lo < kv_hi, (kv_hi + TILE_N - 1) // TILE_N, edge_begin)
    full_begin = tl.minimum((all_lo + TILE_N - 1) // TILE_N, edge_end)
    full_begin = tl.maximum(full_begin, edge_begin)
    full_end = tl.maximum(tl.minimum(all_hi // TILE_N, edge_end), full_begin)
    return 0, 0, edge_begin, full_begin, full_end, edge_end


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
    """Plan over row `row` of block lists `(indptr, partial_end, indices, ...)`.

    `offs_scan` is any range 0..n: the row is read n entries at a time. Blocks ascend within the
    partial and within the full ones, so counting those before a bound finds where it falls.
    """
    PACK: tl.constexpr = TILE_N // BLOCK_KV if BLOCK_KV < TILE_N else 1
    begin = tl.load(lists[0] + row)
    end = tl.load(lists[0] + row + 1)
    split = tl.load(lists[1] + row)

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
        block = tl.load(lists[2] + entry, mask=live, other=0)
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
    # tiles without mask code are whole tiles; blocks left over join the edge
    full_end = full_begin + (full_end - full_begin) // PACK * PACK
    return (
        begin + tl.sum(partial_before, 0),
        begin + tl.sum(partial_until, 0),
        edge_begin,
        full_begin,
        full_end,
        edge_end,
    )


@triton.jit
def num_masked_units(plan):
    """How many units of a plan need mask code."""
    return (plan[1] - plan[0]) + (plan[3] - plan[2]) + (plan[5] - plan[4])


@triton.jit
def num_full_units(plan):
    """How many units of a plan need none."""
    return plan[4] - plan[3]


@triton.jit
def masked_unit(plan, ordinal):
    """The unit that is `ordinal`-th among those with mask code; scalar or vector."""
    num_partial = plan[1] - plan[0]
    num_left = plan[3] - plan[2]
    edge = ordinal - num_partial
    edge_unit = tl.where(edge < num_left, plan[2] + edge, plan[4] + edge - num_left)
    return tl.where(edge < 0, plan[0] + ordinal, edge_unit)


@triton.jit
def num_tiles(num_units, TILE_N: tl.constexpr, UNIT: tl.constexpr):
    """How many tiles of TILE_N keys hold `num_units` units of UNIT keys."""
    if UNIT >= TILE_N:
        count = num_units * (UNIT // TILE_N)
    else:
        count = (num_units + (TILE_N // UNIT - 1)) // (TILE_N // UNIT)
    return count


@triton.jit
def tile_ordinal(kv_tile, offs_n, TILE_N: tl.constexpr, UNIT: tl.constexpr):
    """Ordinal of the unit of each key of a tile, and the key's place in it.

    The ordinal is one scalar where a unit fills the tile, a vector like `offs_n` otherwise.
    """
    if UNIT >= TILE_N:
        ordinal = kv_tile // (UNIT // TILE_N)
        kv_in_unit = kv_tile % (UNIT // TILE_N) * TILE_N + offs_n
    else:
        ordinal = kv_tile * (TILE_N // UNIT) + offs_n // UNIT
        kv_in_unit = offs_n % UNIT
    return ordinal, kv_in_unit


@triton.jit
def keys_of_tile(
    lists, unit, ordinal, num_units, kv_in_unit, kv_len, TILE_N: tl.constexpr, UNIT: tl.constexpr
):
    """Positions of the keys of a tile; `kv_len`, which no row sees, where a tile has no unit left.

    `lists` is None for dense units. `unit` and `ordinal` are what `tile_ordinal` and a plan gave.
    """
    if lists is None:
        kv_pos = unit * UNIT + kv_in_unit
    elif UNIT >= TILE_N:
        kv_pos = tl.load(lists[2] + unit) * UNIT + kv_in_unit
    else:
        live = ordinal < num_units
        block = tl.load(lists[2] + unit, mask=live, other=0)
        kv_pos = tl.where(live, block * UNIT + kv_in_unit, kv_len)
    return kv_pos


@triton.jit
def bits_of_tile(
    lists,
    unit,
    ordinal,
    num_units,
    q_in_block,
    kv_in_unit,
    TILE_N: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Words [rows, keys] that hold the visibility bit of each element; all ones for full blocks.

    `lists[3]` are the rows of the bit pool `lists[4]`, `lists[5]` is the height of a block.
    """
    WORDS: tl.constexpr = (UNIT + 31) // 32
    if UNIT >= TILE_N:
        bits_id = tl.load(lists[3] + unit) + (kv_in_unit - kv_in_unit)
    else:
        bits_id = tl.load(lists[3] + unit, mask=ordinal < num_units, other=-1)
    block_words = lists[5] * WORDS
    column = tl.cast(bits_id, tl.int64) * block_words + kv_in_unit // 32
    has_bits = (q_in_block >= 0)[:, None] & (bits_id >= 0)[None, :]
    return tl.load(lists[4] + (q_in_block * WORDS)[:, None] + column[None, :], has_bits, other=-1)


@triton.jit
def bits_of_query_tile(
    lists,
    unit,
    ordinal,
    num_units,
    kv_in_block,
    q_in_unit,
    TILE_M: tl.constexpr,
    UNIT: tl.constexpr,
):
    """`bits_of_tile` for lists of query blocks: words [keys, queries] of UNIT queries a block.

    The pool is the one of the other direction; `lists[5]` is the width of a block.
    """
    words = (lists[5] + 31) // 32
    if UNIT >= TILE_M:
        bits_id = tl.load(lists[3] + unit) + (q_in_unit - q_in_unit)
    else:
        bits_id = tl.load(lists[3] + unit, mask=ordinal < num_units, other=-1)
    row = tl.cast(bits_id, tl.int64) * (UNIT * words) + q_in_unit * words
    has_bits = (kv_in_block >= 0)[:, None] & (bits_id >= 0)[None, :]
    return tl.load(lists[4] + (kv_in_block // 32)[:, None] + row[None, :], has_bits, other=-1)
