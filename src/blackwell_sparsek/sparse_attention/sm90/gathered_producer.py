# mypy: ignore-errors
"""The producer of the Hopper forward over small entries, and the records that all roles share.

Four warps go through the keys near the queries of a work tile and through the union of their
entries (`triton/unions.py`), 64 keys at a time. They look up where these lie, leave a word for each
key, whose bit t says that query t of the tile attends to it, and gather keys and values by
cp.async, 16 bytes for each thread and copy. Keys that no query of the tile attends to are not read:
zeros take their place, since NaN among values would pass through a weight of 0.

The KV tiles of a work tile: those near its queries, and of entries that both consumers have; then
those of one consumer each in turns, and what one of them has left (`unions.owner_of`).

Memory order: that of `latent_producer.py`. Copies arrive at the barrier of a stage when they are
complete, and the fence between the proxies is the consumers'.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from ...device.gluon.compat import async_gather, thread_barrier
from ...device.gluon.pipeline import publish
from ...device.masks import bits_from, kv_range, position
from ...device.schedule import token_span
from ..triton.unions import COUNTS, QueriesAt, entry_places, keys_of_tile, union_walk
from ..triton.walk import key_rows, length_of, places_of_keys


class GatheredTile(NamedTuple):
    """A tile of queries, as the producer publishes it; all fields are int32."""

    batch: Any
    """-1 after the last one."""
    first_head: Any
    q_first: Any
    q_len: Any
    q_start: Any
    common: Any
    """KV tiles of both consumers, of the first alone and of the second alone."""
    first: Any
    second: Any
    wrong: Any
    """Bits of the queries whose lists or lengths are out of range."""


WORK_FIELDS = gl.constexpr(len(GatheredTile._fields))


class GatheredNotes(NamedTuple):
    """Notes on the keys in the stages: a word for each key, and the bits of wrong pages."""

    words: Any
    wrong: Any
    """None without pages."""


class GatheredProducer(NamedTuple):
    """Arguments of the producer alone."""

    k_ptr: Any
    v_ptr: Any
    unions: Any
    pages: Any
    k_strides: Any
    v_strides: Any
    batch: Any


class QueriesOfTile(NamedTuple):
    """The queries of a work tile: where their keys lie, their union, and how it is walked."""

    places: Any
    at: Any
    """`QueriesAt`."""
    entries: Any
    walk: Any
    """`UnionWalk`."""


class FoundKeys(NamedTuple):
    """Keys of a KV tile: pointers, whether they are read, words, and bits of wrong pages."""

    k: Any
    v: Any
    live: Any
    words: Any
    wrong: Any


@gluon.jit
def _load_entries(query, number, key, CFG: gl.constexpr):
    """The entries of the keys of a KV tile, 0 where there is none."""
    places = entry_places(query.walk, number, key, CFG.TILE_N, CFG.BLOCK_KV)
    return gl.load(query.entries + places.at, mask=places.listed, other=0)


@gluon.jit
def _find(produce, query, number, key, entries, CFG: gl.constexpr):
    """The `FoundKeys` of a KV tile, whose entries `_load_entries` has loaded."""
    near_tiles = query.walk.near_tiles
    kv_pos, words = keys_of_tile(
        query.at, entries, near_tiles, number, key, CFG.TILE_N, CFG.BLOCK_KV, CFG.LOCAL
    )
    keys = key_rows(query.places, produce.pages, kv_pos, words != 0)
    wrong = 0
    if CFG.PAGED:
        wrong = gl.reduce(gl.where(keys.wrong, words, 0), 0, _either)
    # cp.async copies 16 bytes at a time, which `unsupported_gathered` makes sure of
    k = gl.multiple_of(query.places.k + keys.k, [16])
    v = gl.multiple_of(query.places.v + keys.v, [16])
    return FoundKeys(k, v, keys.live, words, wrong)


@gluon.jit
def _either(a, b):
    """The bits that are in either word."""
    return a | b


@gluon.jit
def _copy(tiles, stage, pointers, live, SLICES: gl.constexpr, CFG: gl.constexpr):
    """Start copying keys or values to a stage, zeros in place of those not read."""
    width: gl.constexpr = tiles.shape[2]
    columns = gl.arange(0, width, gl.SliceLayout(0, CFG.copy_layout()))
    for i in gl.static_range(SLICES):
        tile = tiles.index(stage * SLICES + i)
        async_gather(tile, pointers[:, None] + (i * width + columns)[None, :], live[:, None])


@gluon.jit
def _send(shared, found, step, CFG: gl.constexpr):
    """Leave the notes on a KV tile and start copying it, once its stage is free."""
    notes, k_ring, v_ring = shared.notes, shared.k_ring, shared.v_ring
    stage = step % CFG.STAGES
    phase = ((step // CFG.STAGES) & 1) ^ 1
    k_full = k_ring.full.index(stage)
    mbarrier.wait(k_ring.empty.index(stage), phase)
    _copy(k_ring.tiles, stage, found.k, found.live, CFG.d_slices, CFG)
    async_copy.mbarrier_arrive(k_full, increment_count=False)
    notes.words.index(stage).store(found.words)
    if CFG.PAGED:
        zero = gl.full([1], 0, gl.int32, CFG.words_layout())
        notes.wrong.index(stage).store(zero + found.wrong)
    # the one thread that arrives does not wait for the stores of the others
    thread_barrier()
    mbarrier.arrive(k_full, count=1)
    mbarrier.wait(v_ring.empty.index(stage), phase)
    _copy(v_ring.tiles, stage, found.v, found.live, CFG.dv_slices, CFG)
    async_copy.mbarrier_arrive(v_ring.full.index(stage), increment_count=False)


@gluon.jit
def _send_keys(produce, shared, query, tile, step, CFG: gl.constexpr):
    """Send the KV tiles of a work tile; return the next step."""
    key = gl.arange(0, CFG.TILE_N, gl.SliceLayout(1, CFG.copy_layout()))
    total = tile.common + tile.first + tile.second
    entries = _load_entries(query, step - step, key, CFG)
    for number in range(total):
        # entries come a KV tile earlier than they are needed
        after = _load_entries(query, number + 1, key, CFG)
        found = _find(produce, query, number, key, entries, CFG)
        _send(shared, found, step, CFG)
        entries = after
        step += 1
    return step


@gluon.jit
def _queries_of_tile(produce, shared, batch, first_head, q_first, q_len, place, CFG: gl.constexpr):
    """The `QueriesOfTile` of the tile `place` of a sequence, and what is published about it."""
    sizes, heads, unions = shared.sizes, shared.heads, produce.unions
    tokens: gl.constexpr = CFG.tile_t
    q_start = place * tokens
    kv_first, kv_len = token_span(shared.cu_seqlens.kv, batch, sizes.kv_len)
    kv_len, wrong_length = length_of(produce.pages, batch, kv_len)
    list_head = first_head // heads.per_list
    union = (batch * (heads.q // heads.per_list) + list_head) * sizes.num_tiles + place
    counts = unions.counts + union.to(gl.int64) * COUNTS
    wrong = gl.where(wrong_length, -1, gl.load(counts + 3))
    places = places_of_keys(
        produce.k_ptr, produce.v_ptr, produce.k_strides, produce.v_strides, batch,
        first_head // heads.group, kv_first, kv_len, produce.pages,
    )  # fmt: skip
    near_lo = q_start - q_start
    near_tiles = near_lo
    if CFG.LOCAL:
        near_lo, hi = kv_range(
            q_start, q_start + tokens, q_len, kv_len, sizes.near_left, sizes.near_right
        )
        near_tiles = (gl.maximum(hi - near_lo, 0) + CFG.TILE_N - 1) // CFG.TILE_N
    walk = union_walk(
        gl.load(counts), gl.load(counts + 1), gl.load(counts + 2), unions.capacity, near_tiles,
        CFG.TILE_N // CFG.BLOCK_KV,
    )  # fmt: skip
    at = QueriesAt(
        position(q_start, q_len, kv_len), ~bits_from(gl.minimum(q_len - q_start, tokens)), kv_len,
        sizes.limit_right, near_lo, sizes.near_left, sizes.near_right,
    )  # fmt: skip
    entries = unions.entries + union.to(gl.int64) * unions.capacity
    query = QueriesOfTile(places, at, entries, walk)
    tile = GatheredTile(
        batch, first_head, q_first, q_len, q_start,
        walk.common, walk.first_tiles, walk.second_tiles, wrong,
    )  # fmt: skip
    return query, tile


@gluon.jit
def gather_tiles(produce, shared, CFG: gl.constexpr):
    """Role of the producer: announce this program's work tiles and send their keys.

    Neighbouring programs have neighbouring queries of one head, whose keys the L2 then has.
    """
    sizes = shared.sizes
    units = shared.heads.q // CFG.PACK
    total = produce.batch * units * sizes.num_tiles
    step = 0
    slot = 0
    for number in range(gl.program_id(0), total, gl.num_programs(0)):
        batch = number // sizes.num_tiles // units
        first_head = number // sizes.num_tiles % units * CFG.PACK
        place = number % sizes.num_tiles
        q_first, q_len = token_span(shared.cu_seqlens.q, batch, sizes.q_len)
        if place * CFG.tile_t < q_len:
            query, tile = _queries_of_tile(
                produce, shared, batch, first_head, q_first, q_len, place, CFG
            )
            publish(shared.work, slot, tile, 4)
            step = _send_keys(produce, shared, query, tile, step, CFG)
            slot += 1
    # no sequence: the end
    publish(shared.work, slot, GatheredTile(-1, 0, 0, 0, 0, 0, 0, 0, 0), 4)
