# mypy: ignore-errors
"""The producer of the Hopper kernels that own queries, and the records that all roles share.

One warp announces the work tiles of its program and merges the lists of their rows. For each KV
tile of the keys near the queries, and of each entry that any row chose, it leaves a note in shared
memory and fetches keys and values by TMA, once a stage is free; `forward.py` and `dq.py` say what
consumers make of them.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...calls.sparse_attention import SparseAttentionCall
from ...device.gluon.compat import async_load, thread_barrier
from ...device.gluon.pipeline import publish, tile_at, tile_place
from ...device.masks import kv_range, not_after, not_before, position, row_bounds
from ...device.schedule import token_span
from ...launch.descriptors import GROUP_ROWS
from ..triton.forward import OPEN
from ..triton.walk import (
    NO_BLOCK,
    lists_of_rows,
    local_sides,
    next_block,
    offsets_of,
    rows_of_tile,
)

ROWS = gl.constexpr(GROUP_ROWS)
# What the note of a KV tile says, besides its first key: bits of one word. Bit FIRST_USER + i says
# that consumer i has rows with these keys.
MASKED = gl.constexpr(1)
NEAR = gl.constexpr(2)
LAST = gl.constexpr(4)
# Positions of keys matter, not only who chose them.
EDGE = gl.constexpr(8)
FIRST_USER = gl.constexpr(4)
# Words of a note.
NOTE_WORDS = gl.constexpr(2)


class WorkTile(NamedTuple):
    """A tile of queries, as the producer publishes it; all fields are int32."""

    batch: Any
    """-1 after the last one."""
    first_head: Any
    q_first: Any
    q_len: Any
    kv_len: Any
    q_start: Any


WORK_FIELDS = gl.constexpr(len(WorkTile._fields))


class Notes(NamedTuple):
    """Notes of the KV tiles in the stages: a weight for each row, and NOTE_WORDS words."""

    weights: Any
    words: Any
    cursors: Any
    """For each row, the place of the entry in its list, -1 if it is not there; None if unused."""


class Sizes(NamedTuple):
    """Lengths without `cu_seqlens`, sizes of lists, and bands."""

    q_len: Any
    kv_len: Any
    num_tiles: Any
    most: Any
    """The most entries of a list, and the blocks of a sequence; None for a kernel without lists."""
    num_blocks: Any
    limit_right: Any
    near_left: Any
    near_right: Any


def sizes_of(call: SparseAttentionCall, num_tiles: int) -> Sizes:
    """The `Sizes` of a call.

    Kernels take each of them as a parameter: Triton specialises the items of a record, and would
    compile for every length.
    """
    spec = call.spec
    return Sizes(
        *(spec.max_q, spec.max_k, num_tiles, spec.selection.most, spec.selection.num_blocks),
        *(spec.limit_right, *local_sides(call)),
    )


class SparseShared(NamedTuple):
    """Shared by all roles."""

    k_ring: Any
    v_ring: Any
    notes: Any
    """On the KV tiles in the stages: `Notes`, or `GatheredNotes` of single keys."""
    work: Any
    cu_seqlens: Any
    sizes: Any
    heads: Any


class SparseProducer(NamedTuple):
    """Arguments of the producer alone."""

    k_desc: Any
    v_desc: Any
    lists: Any
    list_strides: Any
    batch: Any


class Keys(NamedTuple):
    """Where TMA finds the keys of a work tile, and what every row sees of them."""

    place: Any
    every_last: Any
    """The last key that no query of the tile is too early for."""
    near_first: Any
    """The first key near the first query."""
    near_last: Any
    """The last key near the last query."""
    every_near_first: Any
    every_near_last: Any


@gluon.jit
def _send(produce, shared, keys, step, kv_start, weights, cursors, rows, flags, CFG: gl.constexpr):
    """Leave the note of a KV tile and start its copies, once a stage is free."""
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    zero = gl.full([1], 0, gl.int32, lane)
    consumers: gl.constexpr = CFG.CONSUMERS
    for group in gl.static_range(consumers):
        mine = weights != 0.0
        if shared.notes.cursors is not None:
            # an entry whose gate is 0 has a gradient
            mine = mine | (cursors >= 0)
        mine = mine & (rows // ROWS == group)
        flags = flags | (gl.max(mine.to(gl.int32), 0) << (FIRST_USER + group))
    stage = step % CFG.STAGES
    phase = ((step // CFG.STAGES) & 1) ^ 1
    k_full = shared.k_ring.full.index(stage)
    v_full = shared.v_ring.full.index(stage)
    mbarrier.wait(shared.k_ring.empty.index(stage), phase)
    shared.notes.weights.index(stage).store(weights)
    if shared.notes.cursors is not None:
        shared.notes.cursors.index(stage).store(cursors)
    shared.notes.words.index(stage * NOTE_WORDS).store(zero + kv_start)
    shared.notes.words.index(stage * NOTE_WORDS + 1).store(zero + flags)
    # the one thread that arrives does not wait for the stores of the others
    thread_barrier()
    d_slices: gl.constexpr = CFG.d_slices
    dv_slices: gl.constexpr = CFG.dv_slices
    mbarrier.expect(k_full, d_slices * produce.k_desc.block_type.nbytes)
    for i in gl.static_range(d_slices):
        tile = shared.k_ring.tiles.index(stage * d_slices + i)
        async_load(produce.k_desc, tile_at(keys.place, kv_start, i * CFG.SLICE_D), k_full, tile)
    mbarrier.wait(shared.v_ring.empty.index(stage), phase)
    mbarrier.expect(v_full, dv_slices * produce.v_desc.block_type.nbytes)
    for i in gl.static_range(dv_slices):
        tile = shared.v_ring.tiles.index(stage * dv_slices + i)
        async_load(produce.v_desc, tile_at(keys.place, kv_start, i * CFG.SLICE_DV), v_full, tile)
    return step + 1


@gluon.jit
def _send_entries(
    produce, shared, keys, own, block, member, gates, rows, real, step, CFG: gl.constexpr
):
    """Send the union of the entries of all rows, of which `block` is the first; return the next
    step."""
    sizes = shared.sizes
    tile_n: gl.constexpr = CFG.TILE_N
    parts: gl.constexpr = CFG.BLOCK_KV // CFG.TILE_N
    cursor = own.count - own.count
    while block != NO_BLOCK:
        inside = (block >= 0) & (block < sizes.num_blocks)
        if CFG.GATE:
            weights = gl.load(gates + cursor, mask=member, other=0.0).to(gl.float32)
            everyone = False
        else:
            weights = member.to(gl.float32)
            everyone = gl.min((member | (real == 0)).to(gl.int32), 0) != 0
        weights = gl.where(member & (inside == 0), float("nan"), weights)
        first_key = gl.where(inside, block, 0) * CFG.BLOCK_KV
        places = gl.where(member, cursor, -1)
        cursor += member.to(gl.int32)
        block, member = next_block(own, cursor)
        for part in gl.static_range(parts):
            kv_start = first_key + part * tile_n
            last_key = kv_start + (tile_n - 1)
            # near keys have been counted already
            far = not_after(kv_start, keys.near_last) == 0
            far = far | (not_before(last_key, keys.near_first) == 0)
            seen = far & not_after(last_key, keys.every_last)
            whole = everyone & inside & seen
            ends = (block == NO_BLOCK) & (part == parts - 1)
            flags = gl.where(whole, 0, MASKED) | gl.where(seen, 0, EDGE) | gl.where(ends, LAST, 0)
            step = _send(produce, shared, keys, step, kv_start, weights, places, rows, flags, CFG)
    return step


@gluon.jit
def _send_keys(produce, shared, tile, rows, step, CFG: gl.constexpr):
    """Send the KV tiles of a work tile; return the next step."""
    sizes, heads = shared.sizes, shared.heads
    tile_n: gl.constexpr = CFG.TILE_N
    tokens: gl.constexpr = CFG.tile_t
    own_rows = rows_of_tile(rows, tile.q_start, tile.q_len, tile.first_head, CFG.PACK, tokens)
    list_head = tile.first_head // heads.per_list
    token = tile.q_first + own_rows.token
    lists, strides = produce.lists, produce.list_strides
    own = lists_of_rows(lists, strides, tile.batch, list_head, token, own_rows.real, sizes.most)
    gates = None
    if CFG.GATE:
        gates = lists.gate + offsets_of(tile.batch, list_head, token, strides.gate)
    kv_first, _ = token_span(shared.cu_seqlens.kv, tile.batch, sizes.kv_len)
    kv_head = tile.first_head // heads.group
    place = tile_place(shared.cu_seqlens.kv, tile.batch, kv_head, kv_first, tile.kv_len)
    first_pos = position(tile.q_start, tile.q_len, tile.kv_len)
    last_token = gl.minimum(tile.q_start + tokens, tile.q_len) - 1
    last_pos = position(last_token, tile.q_len, tile.kv_len)
    _, every_last = row_bounds(first_pos, tile.kv_len, OPEN, sizes.limit_right)
    near = row_bounds(first_pos, tile.kv_len, sizes.near_left, sizes.near_right)
    last_near = row_bounds(last_pos, tile.kv_len, sizes.near_left, sizes.near_right)
    keys = Keys(place, every_last, near.first, last_near.last, last_near.first, near.last)

    lo, hi = kv_range(
        tile.q_start, tile.q_start + tokens, tile.q_len, tile.kv_len, sizes.near_left,
        sizes.near_right,
    )  # fmt: skip
    hi = gl.where(sizes.near_left < 0, 0, hi)
    begin = lo // tile_n * tile_n
    wrong = gl.max(own.wrong.to(gl.int32), 0)
    # looked up before the near keys, whose last tile must be marked if no entry follows
    block, member = next_block(own, own.count - own.count)
    without = block == NO_BLOCK
    # consumers wait for one KV tile at least
    marked = (wrong != 0) | (without & (begin >= hi))
    every_weight = own_rows.real.to(gl.float32)
    nowhere = rows - rows - 1
    for kv_start in range(begin, hi, tile_n):
        last_key = kv_start + (tile_n - 1)
        whole = not_before(kv_start, keys.every_near_first)
        whole = whole & not_after(last_key, keys.every_near_last)
        ends = (last_key + 1 >= hi) & without & (marked == 0)
        flags = gl.where(whole, 0, MASKED | NEAR | EDGE) | gl.where(ends, LAST, 0)
        step = _send(
            produce, shared, keys, step, kv_start, every_weight, nowhere, rows, flags, CFG
        )  # fmt: skip
    if marked:
        weights = gl.where(own.wrong, float("nan"), 0.0)
        flags = gl.where(without, LAST, 0) | MASKED
        step = _send(
            produce, shared, keys, step, begin - begin, weights, nowhere, rows, flags, CFG
        )  # fmt: skip
    return _send_entries(
        produce, shared, keys, own, block, member, gates, rows, own_rows.real, step, CFG
    )


@gluon.jit
def produce_tiles(produce, shared, CFG: gl.constexpr):
    """Role of the producer: announce this program's work tiles and send their keys."""
    sizes, heads = shared.sizes, shared.heads
    per_thread: gl.constexpr = CFG.tile_m // 32
    rows = gl.arange(0, CFG.tile_m, gl.BlockedLayout([per_thread], [32], [1], [0]))
    units = heads.q // CFG.PACK
    total = produce.batch * units * sizes.num_tiles
    step = 0
    slot = 0
    for number in range(gl.program_id(0), total, gl.num_programs(0)):
        batch = number // sizes.num_tiles // units
        first_head = number // sizes.num_tiles % units * CFG.PACK
        q_first, q_len = token_span(shared.cu_seqlens.q, batch, sizes.q_len)
        _, kv_len = token_span(shared.cu_seqlens.kv, batch, sizes.kv_len)
        q_start = number % sizes.num_tiles * CFG.tile_t
        if q_start < q_len:
            tile = WorkTile(batch, first_head, q_first, q_len, kv_len, q_start)
            publish(shared.work, slot, tile)
            step = _send_keys(produce, shared, tile, rows, step, CFG)
            slot += 1
    # no sequence: the end
    publish(shared.work, slot, WorkTile(-1, 0, 0, 0, 0, 0))
