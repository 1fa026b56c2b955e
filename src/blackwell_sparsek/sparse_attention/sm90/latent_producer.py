# mypy: ignore-errors
"""The producer of the Hopper forward over latent keys, and the records that all roles share.

Four warps go through the keys near a query and those that it chose, 64 at a time. They look up
where these lie, leave notes on them, and gather them by cp.async, 16 bytes for each thread and
copy, as TMA cannot gather rows on Hopper. Keys that do not count are not read: zeros take their
place, since NaN among values would pass through a weight of 0.

Memory order: a thread arrives at the barrier of a part when its copies are complete. cp.async
writes through the generic proxy and WGMMA reads through the async one, so each consumer fences
after its wait; a fence of the producer would first have to wait for the copies.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from ...device.gluon.compat import async_gather, thread_barrier
from ...device.gluon.pipeline import publish
from ...device.masks import kv_range, position, row_bounds
from ...device.records import Range
from ...device.schedule import token_span
from ..triton.forward import OPEN
from ..triton.walk import (
    key_rows,
    length_of,
    lists_of_rows,
    offsets_of,
    places_of_keys,
    seen_of_block,
)


class LatentWork(NamedTuple):
    """Heads of a query, as the producer publishes them; all fields are int32."""

    batch: Any
    """-1 after the last one."""
    first_head: Any
    token: Any
    """Counted through all packed sequences."""
    tiles: Any
    wrong: Any
    """1 if its length or its count of entries is out of range."""


WORK_FIELDS = gl.constexpr(len(LatentWork._fields))


class LatentNotes(NamedTuple):
    """Notes on the keys in the stages, see `latent._noted`."""

    factors: Any
    flags: Any


class LatentShared(NamedTuple):
    """Shared by all roles."""

    ring: Any
    notes: Any
    work: Any
    cu_seqlens: Any
    heads: Any


class LatentProducer(NamedTuple):
    """Arguments of the producer alone."""

    k_ptr: Any
    lists: Any
    pages: Any
    k_strides: Any
    list_strides: Any
    sizes: Any
    """`producer.Sizes`."""
    batch: Any


class ListedQuery(NamedTuple):
    """A query: where its keys and its list are, and which keys it sees.

    Its keys are numbered: first those near it, up to `near_keys`, then those of its entries.
    """

    places: Any
    ids: Any
    gates: Any
    count: Any
    limits: Any
    near: Any
    near_range: Any
    near_keys: Any
    """A multiple of the keys of a tile."""


class FoundKeys(NamedTuple):
    """Keys of a tile: pointers, whether they are read, and notes for the consumers."""

    pointers: Any
    live: Any
    factors: Any
    flag: Any


@gluon.jit
def _listed_query(produce, shared, batch, first_head, token, q_first, q_len, CFG: gl.constexpr):
    """The `ListedQuery` of a token of a sequence, and what is published about it."""
    sizes, heads = produce.sizes, shared.heads
    kv_first, kv_len = token_span(shared.cu_seqlens.kv, batch, sizes.kv_len)
    kv_len, wrong_length = length_of(produce.pages, batch, kv_len)
    list_head = first_head // heads.per_list
    at = q_first + token
    lists, strides = produce.lists, produce.list_strides
    own = lists_of_rows(lists, strides, batch, list_head, at, token < q_len, sizes.most)
    # a record that is returned has no empty field: ids stand in for gates
    gates = own.ids
    if CFG.GATE:
        gates = lists.gate + offsets_of(batch, list_head, at, strides.gate)
    k_strides = produce.k_strides
    places = places_of_keys(
        produce.k_ptr, produce.k_ptr, k_strides, k_strides, batch, first_head // heads.group,
        kv_first, kv_len, produce.pages,
    )  # fmt: skip
    left, right = sizes.near_left, sizes.near_right
    q_pos = position(token, q_len, kv_len)
    lo, hi = kv_range(token, token + 1, q_len, kv_len, left, right)
    near_range = Range(lo, gl.where(left < 0, lo, gl.maximum(hi, lo)))
    near_tiles = (near_range.hi - lo + CFG.TILE_N - 1) // CFG.TILE_N
    query = ListedQuery(
        places, own.ids, gates, own.count, row_bounds(q_pos, kv_len, OPEN, sizes.limit_right),
        row_bounds(q_pos, kv_len, left, right), near_range, near_tiles * CFG.TILE_N,
    )  # fmt: skip
    tiles = near_tiles + (own.count * CFG.ENTRY_KEYS + CFG.TILE_N - 1) // CFG.TILE_N
    wrong = (own.wrong | wrong_length).to(gl.int32)
    return query, LatentWork(batch, first_head, at, tiles, wrong)


@gluon.jit
def _load_entries(query, key, CFG: gl.constexpr):
    """Numbers of the entries that the keys numbered `key` belong to; 0 where there is none."""
    entry = (key - query.near_keys) // CFG.ENTRY_KEYS
    listed = (key >= query.near_keys) & (entry < query.count)
    return gl.load(query.ids + entry, mask=listed, other=0)


@gluon.jit
def _find(produce, query, key, block, CFG: gl.constexpr):
    """The `FoundKeys` numbered `key`, whose entries `_load_entries` has loaded."""
    is_near = key < query.near_keys
    behind = key - query.near_keys
    entry = behind // CFG.ENTRY_KEYS
    listed = (is_near == 0) & (entry < query.count)
    inside = listed & (block >= 0) & (block < produce.sizes.num_blocks)
    kv_pos = gl.where(inside, block, 0) * CFG.ENTRY_KEYS + behind % CFG.ENTRY_KEYS
    chosen = inside & seen_of_block(kv_pos, query.limits, query.near)
    lo, hi = query.near_range
    kv_pos = gl.where(is_near, lo + key, kv_pos)
    visible = chosen | (is_near & (kv_pos < hi))
    factors = visible.to(gl.float32)
    if CFG.GATE:
        gate = gl.load(query.gates + entry, mask=chosen, other=0.0).to(gl.float32)
        factors = gl.where(chosen, gate, factors)
    keys = key_rows(query.places, produce.pages, kv_pos, visible)
    wrong = keys.wrong | (listed & (inside == 0))
    live = keys.live & (factors > 0.0)
    flag = gl.max(gl.where(wrong, 2, gl.where(live, 0, 1)), 0)
    # cp.async copies 16 bytes at a time, which `unsupported_latent` makes sure of
    pointers = gl.multiple_of(query.places.k + keys.k, [16])
    return FoundKeys(pointers, live, factors, flag)


@gluon.jit
def _copy(tile, found, FIRST: gl.constexpr, CFG: gl.constexpr):
    """Start copying the columns of keys from FIRST on, zeros in place of those not read."""
    columns = gl.arange(0, tile.shape[1], gl.SliceLayout(0, CFG.copy_layout()))
    async_gather(tile, found.pointers[:, None] + (FIRST + columns)[None, :], found.live[:, None])


@gluon.jit
def _send_part(shared, found, step, PART: gl.constexpr, CFG: gl.constexpr):
    """Start copying a part of a tile of keys when it is free; with the first, leave the notes."""
    ring, notes = shared.ring, shared.notes
    parts: gl.constexpr = CFG.parts
    half: gl.constexpr = CFG.half
    stage = step % CFG.STAGES
    phase = ((step // CFG.STAGES) & 1) ^ 1
    index = stage * parts + PART
    full = ring.full.index(index)
    mbarrier.wait(ring.empty.index(CFG.first_empty + index), phase)
    _copy(ring.v.index(stage).slice(PART * half, half, dim=1), found, PART * half, CFG)
    if parts == PART + 1:
        _copy(ring.k.index(stage), found, CFG.TILE_DV, CFG)
    async_copy.mbarrier_arrive(full, increment_count=False)
    if PART == 0:
        notes.factors.index(stage).store(found.factors)
        zero = gl.full([1], 0, gl.int32, CFG.words_layout())
        notes.flags.index(stage).store(zero + found.flag)
        # the one thread that arrives does not wait for the stores of the others
        thread_barrier()
        mbarrier.arrive(full, count=1)


@gluon.jit
def _send_pair(shared, even, odd, has_odd, step, CFG: gl.constexpr):
    """Send two tiles, whose parts are copied in the order in which consumers release them.

    The notes on an odd tile come with its last part: the consumer that reads them waits for both.
    They replace those of a tile whose first part was released, by a consumer that had its weights.
    """
    turns: gl.constexpr = 2 * CFG.parts
    for turn in gl.static_range(turns):
        if CFG.copied_tile(turn) == 0:
            _send_part(shared, even, step, CFG.copied_part(turn), CFG)
        else:
            if has_odd:
                _send_part(shared, odd, step + 1, CFG.copied_part(turn), CFG)


@gluon.jit
def _send_keys(produce, shared, query, work, step, CFG: gl.constexpr):
    """Send the keys of a query by pairs of tiles; return the next step."""
    tile_n: gl.constexpr = CFG.TILE_N
    key = gl.arange(0, tile_n, gl.SliceLayout(1, CFG.copy_layout()))
    even = _find(produce, query, key, _load_entries(query, key, CFG), CFG)
    odd = _find(produce, query, key + tile_n, _load_entries(query, key + tile_n, CFG), CFG)
    for first in range(0, work.tiles, 2):
        key += 2 * tile_n
        # entries arrive while the pair before them is sent
        even_block = _load_entries(query, key, CFG)
        odd_block = _load_entries(query, key + tile_n, CFG)
        _send_pair(shared, even, odd, first + 1 < work.tiles, step, CFG)
        even = _find(produce, query, key, even_block, CFG)
        odd = _find(produce, query, key + tile_n, odd_block, CFG)
        step += gl.minimum(work.tiles - first, 2)
    return step


@gluon.jit
def produce_keys(produce, shared, CFG: gl.constexpr):
    """Role of the producer: announce queries and their heads, and send their keys.

    Tiles of heads of one query run side by side on neighbouring programs, so that the L2 has the
    keys for all but the first of them.
    """
    sizes = produce.sizes
    units = shared.heads.q // CFG.PACK
    total = produce.batch * units * sizes.q_len
    step = 0
    slot = 0
    for number in range(gl.program_id(0), total, gl.num_programs(0)):
        first_head = number % units * CFG.PACK
        batch = number // units // sizes.q_len
        token = number // units % sizes.q_len
        q_first, q_len = token_span(shared.cu_seqlens.q, batch, sizes.q_len)
        if token < q_len:
            query, work = _listed_query(
                produce, shared, batch, first_head, token, q_first, q_len, CFG
            )
            publish(shared.work, slot, work, 4)
            step = _send_keys(produce, shared, query, work, step, CFG)
            slot += 1
    # no sequence: the end
    publish(shared.work, slot, LatentWork(-1, 0, 0, 0, 0), 4)
