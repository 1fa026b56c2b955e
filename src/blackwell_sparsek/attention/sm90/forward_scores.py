# mypy: ignore-errors
"""Scores of a KV tile in the Hopper forward: bias, ALiBi, gates of keys, and masks.

`Queries` is the state of a consumer for one work tile. Scores pass through `add_key_terms` and, in
tiles that need mask code, `mask_scores`; softmax weights pass through `gated`.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.gates import gate_row, gate_weights, load_gate_terms
from ...device.gluon.row_parts import keep_bits, range_bits, word_bits
from ...device.scores import bias_of_head
from ...device.visits import keys_of_tile, masked_block, tile_ordinal
from .forward_producer import dense_tile, tile_starts


class TileBounds(NamedTuple):
    """First and last key that each row of a consumer sees, and that every row sees."""

    first: Any
    last: Any
    every_first: Any
    every_last: Any


class Queries(NamedTuple):
    """The state of a consumer that stays the same for all KV tiles of a work tile."""

    q: Any
    """Slices, in shared memory or as operands in registers."""
    visit: Any
    masked_tiles: Any
    q_index: Any
    q_start: Any
    bounds: Any
    score: Any
    seen: Any
    """The keys `[lo, hi)` that some query sees if other values may hold anything, such as NaN; else
    None."""
    alibi: Any
    """`Alibi`, or None."""
    bias: Any
    """`RowBias`, or None."""
    gate: Any
    """`TileGate`, or None."""


class Alibi(NamedTuple):
    """Positions of queries in fp32, and the slope of their head in units of raw scores."""

    q_pos: Any
    slope: Any


class RowBias(NamedTuple):
    """A pointer to the bias of each query, its stride between keys, and a unit of raw scores."""

    rows: Any
    kv_step: Any
    unit: Any


class TileGate(NamedTuple):
    """Thresholds of a consumer's queries, and the gate scores of keys."""

    tau: Any
    highest_tau: Any
    u_tiles: Any
    """fp32 [stages, keys] in shared memory: the gate scores of KV tiles."""


# What biases, ALiBi and gates add to the scores of a KV tile.


@gluon.jit
def of_keys(firsts, columns, CFG: gl.constexpr):
    """Positions of the keys of a tile, from the first key of each copy that fills it."""
    part_rows: gl.constexpr = CFG.part_rows
    counted = firsts[0] + columns
    for part in gl.static_range(1, len(firsts)):
        column = columns - part * part_rows
        counted = gl.where(column >= 0, firsts[part] + column, counted)
    return counted


@gluon.jit
def tile_gate(gates, batch, q_head, q_index, q_len, u_tiles):
    """The `TileGate` of the queries `q_index`."""
    row = gate_row(gates, batch, q_head)
    # queries past the last one must not raise the highest threshold
    tau = load_gate_terms(row.tau, q_index, q_len, -float("inf"))
    highest = gl.max(gl.where(tau == tau, tau, float("inf")), 0)
    return TileGate(tau, highest, u_tiles)


@gluon.jit
def row_bias(bias, batch, q_head, q_index, q_len, unit):
    """The `RowBias` of the queries `q_index`; rows past the last query read its bias."""
    existing = gl.minimum(q_index, q_len - 1).to(gl.int64)
    rows = bias_of_head(bias, batch, q_head) + existing * bias.q_step
    return RowBias(rows, bias.kv_step, unit)


@gluon.jit
def load_bias(queries, kv_tile, CFG: gl.constexpr):
    """The bias of the keys of a tile; arbitrary for keys that do not exist."""
    rows, kv_step, _ = queries.bias
    tile_n: gl.constexpr = CFG.TILE_N
    columns = gl.arange(0, tile_n, gl.SliceLayout(0, CFG.accumulator_layout(CFG.TILE_N)))
    firsts = tile_starts(queries.visit, kv_tile, CFG)
    kv_pos = of_keys(firsts, columns, CFG)
    all_exist = True
    for part in gl.static_range(len(firsts)):
        all_exist &= firsts[part] + CFG.part_rows <= queries.visit.kv_len
    if all_exist:
        # two neighbouring keys at a time
        terms = gl.load(rows[:, None] + (kv_pos.to(gl.int64) * kv_step)[None, :])
    else:
        # masks of loads would take registers
        existing = gl.minimum(kv_pos, queries.visit.kv_len - 1)
        terms = gl.load(rows[:, None] + (existing.to(gl.int64) * kv_step)[None, :])
    return terms


@gluon.jit
def gate_tile(queries, step, CFG: gl.constexpr):
    """The gate scores of the tile at `step`, in shared memory."""
    return queries.gate.u_tiles.index(step % CFG.gate_stages)


@gluon.jit
def gate_margin(queries, step, CFG: gl.constexpr):
    """The lowest gate score of a tile less the highest threshold; None without gates.

    If it is 1 or more, all weights are 1; if it is above 0, no key is hidden. It is -inf or NaN if
    a score or a threshold is not finite.
    """
    margin = None
    if queries.gate is not None:
        # every warp loads all keys, so the minimum needs no barrier
        warps: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
        u = gate_tile(queries, step, CFG).load(gl.SliceLayout(0, warps))
        margin = gl.min(gl.where(u == u, u, -float("inf")), 0) - queries.gate.highest_tau
    return margin


@gluon.jit
def gate_scores(queries, step, CFG: gl.constexpr):
    """The gate scores of the tile at `step`, [1, keys]."""
    keys: gl.constexpr = gl.SliceLayout(0, CFG.accumulator_layout(CFG.TILE_N))
    return gate_tile(queries, step, CFG).load(keys)[None, :]


@gluon.jit
def add_key_terms(s, margin, queries, kv_tile, step, CFG: gl.constexpr):
    """Scores with a bias, less slopes times distances, and -inf where a gate hides a key."""
    if queries.bias is not None:
        s = s + load_bias(queries, kv_tile, CFG).to(gl.float32) * queries.bias.unit
    if queries.alibi is not None:
        tile_n: gl.constexpr = CFG.TILE_N
        columns = gl.arange(0, tile_n, gl.SliceLayout(0, CFG.accumulator_layout(CFG.TILE_N)))
        kv_pos = of_keys(tile_starts(queries.visit, kv_tile, CFG), columns, CFG)
        distance = gl.abs(queries.alibi.q_pos[:, None] - kv_pos.to(gl.float32)[None, :])
        s = s - queries.alibi.slope * distance
    if queries.gate is not None:  # noqa: SIM102
        if not (margin > 0.0):
            hidden = gate_scores(queries, step, CFG) <= queries.gate.tau[:, None]
            s = gl.where(hidden, -float("inf"), s)
    return s


@gluon.jit
def gated(weights, margin, queries, step, CFG: gl.constexpr):
    """Softmax weights of a tile times the weights of the gate.

    Reads the gate scores again: kept in registers since `add_key_terms`, they would be spilled.
    """
    if queries.gate is not None:  # noqa: SIM102
        if not (margin >= 1.0):
            u, tau = gate_scores(queries, step, CFG), queries.gate.tau[:, None]
            if margin > -float("inf"):
                weights = weights * clipped_difference(u, tau)
            else:
                weights = weights * gate_weights(u, tau)
    return weights


@gluon.jit
def clipped_difference(u, tau):
    """`gate_weights` of finite values, in one instruction."""
    u, tau = gl.broadcast(u, tau)
    return gl.inline_asm_elementwise(
        "sub.sat.f32 $0, $1, $2;", "=f,f,f", [u, tau], gl.float32, True, 1
    )


# Masking the scores of a KV tile.


@gluon.jit
def mask_band(s, kv_start, bounds):
    """Scores of consecutive keys from `kv_start` on, -inf outside the band."""
    width: gl.constexpr = s.shape[1]
    # an edge that other consumers' queries need mask code for may not affect these
    if (kv_start + (width - 1) > bounds.every_last) | (kv_start < bounds.every_first):
        s = keep_bits(s, range_bits(bounds.first - kv_start, bounds.last - kv_start))
    return s


@gluon.jit
def visible_bits(visit, kv_tile, q_index, q_start, bounds, CFG: gl.constexpr):
    """Which keys of a tile of mask blocks each query sees, as `keep_bits` takes them.

    A word of a partial block holds the bits of 32 keys of a query. A thread loads the words of its
    two rows; one word per score would take as many registers as the scores.
    """
    lists = visit.lists
    tile_n: gl.constexpr = CFG.TILE_N
    block_kv: gl.constexpr = CFG.BLOCK_KV
    part: gl.constexpr = min(CFG.TILE_N, CFG.BLOCK_KV)
    word_keys: gl.constexpr = min(32, CFG.BLOCK_KV)
    block_words: gl.constexpr = (CFG.BLOCK_KV + 31) // 32
    q_in_block = q_index - q_start // lists.row_tokens * lists.row_tokens
    nothing = q_index - q_index
    visible = nothing
    for first in gl.static_range(0, tile_n, part):
        ordinal, kv_in_block = tile_ordinal(kv_tile, first, tile_n, block_kv)
        entry = masked_block(visit.plan, ordinal)
        kv_start = keys_of_tile(
            lists, entry, ordinal, visit.num_masked, kv_in_block, visit.kv_len, tile_n, block_kv
        )
        bits_id = gl.load(lists.bits_id + entry, mask=ordinal < visit.num_masked, other=-1)
        row = (bits_id.to(gl.int64) * lists.row_tokens + q_in_block) * block_words
        of_part = nothing
        for column in gl.static_range(0, part, word_keys):
            place = lists.bits + row + (kv_in_block + column) // 32
            words = gl.load(place, mask=bits_id >= 0, other=-1)
            of_part |= word_bits(words) << (column // 4)
        of_part &= range_bits(bounds.first - kv_start, bounds.last - kv_start)
        if part < tile_n:
            of_part &= (1 << (part // 4)) - 1
        visible |= of_part << (first // 4)
    return visible


@gluon.jit
def mask_scores(s, queries, kv_tile, CFG: gl.constexpr):
    """Scores of a masked tile, -inf where a query does not see the key."""
    visit, bounds = queries.visit, queries.bounds
    if visit.lists is None:
        s = mask_band(s, dense_tile(visit.plan, kv_tile) * CFG.TILE_N, bounds)
    else:
        visible = visible_bits(visit, kv_tile, queries.q_index, queries.q_start, bounds, CFG)
        s = keep_bits(s, visible)
    return s
