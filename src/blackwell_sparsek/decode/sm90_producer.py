# mypy: ignore-errors
"""The producer warp of the Hopper decode kernel: it finds its KV tiles and copies them by TMA.

The KV tiles of all softmaxes are numbered in order, sequence by sequence and, in each, head tile by
head tile; a head tile is a KV head and up to ROWS of the rows that share it. Program p takes the
p-th range of `range_tiles` tiles. It publishes what it has of each softmax, a split, to the
consumer and keeps the ring of K and V tiles full across the ends of splits.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from ..device.gluon.cluster import (
    cluster_barrier,
    cluster_exit_barrier,
    cluster_rank,
    copy_tile,
)
from ..device.gluon.compat import async_load, thread_barrier
from ..device.gluon.pipeline import publish
from ..device.gluon.warps import shared_address
from ..device.paging import visited_tiles
from .triton import keys_of_length, keys_seen
from .tuning import SLICE

# Sequences whose lengths are read at a time, four by each thread of the producer.
SCAN = gl.constexpr(128)
# Ranges may grow by 1 / WORTH if that leaves softmaxes whole, which saves 1.8 of 129 us at 128
# softmaxes of 8k keys.
WORTH = gl.constexpr(32)
# Copies whose coordinates are looked up at a time, one by each thread of the producer.
LOOKED_UP = gl.constexpr(32)
# Tiles that could be read in the time that a program takes from one split to the next.
SPLIT_COST = gl.constexpr(2)
# A position past all keys, small enough that sums with it fit in int32.
NOWHERE = gl.constexpr(2**30)
# Columns of a copy to a computed address, its bytes in each row, and the programs of a pair.
_SLICE = gl.constexpr(SLICE)
_SLICE_ROW = gl.constexpr(2 * SLICE)
_BOTH = gl.constexpr(0b11)


class Split(NamedTuple):
    """The part of one softmax that a program computes, as the producer publishes it; all int32."""

    sequence: Any
    """-1 after the last split."""
    head_tile: Any
    kv_len: Any
    kv_tile: Any
    """First KV tile of the split, and the end of it."""
    kv_end: Any
    origin: Any
    """Tile t of the softmax belongs to program `origin + (softmax_start + t) // range_tiles`."""
    softmax_start: Any
    count: Any
    """KV tiles of the softmax."""
    range_tiles: Any


SPLIT_FIELDS = gl.constexpr(len(Split._fields))
SEQUENCE = gl.constexpr(Split._fields.index("sequence"))
HEAD_TILE = gl.constexpr(Split._fields.index("head_tile"))


class KVRing(NamedTuple):
    """Stages of K and V tiles, and barriers that tell when a stage is full and when it is empty."""

    k: Any
    v: Any
    full: Any
    empty: Any


class StageNotes(NamedTuple):
    """Information for the consumer about each stage of scattered keys."""

    positions: Any
    """Positions of all keys; only with block lists."""
    flags: Any
    """1 if a page or block was out of range, plus 2 if some keys are not seen."""


class SharedState(NamedTuple):
    """Shared by producer and consumer."""

    ring: Any
    notes: Any
    splits: Any
    """Channel of `Split`s."""
    keys: Any
    first_length: Any
    """Length of the first sequence; with SINGLE it is not read yet."""
    heads: Any
    places_ptr: Any
    """Where the keys of each sequence are found: its row of the page table, of the lists and of a
    contiguous cache, -1 for a query without a sequence; None if that is its number."""


class ProducerState(NamedTuple):
    """Arguments of the producer alone: where the keys are stored."""

    k_desc: Any
    v_desc: Any
    page_table_ptr: Any
    list_ptr: Any
    num_pages: Any
    page_row_stride: Any
    list_batch_stride: Any
    list_head_stride: Any
    num_splits: Any


class ProgramRange(NamedTuple):
    """Tiles `[tile, end)` of a program, and where they begin.

    `cost` is the gap in the numbering between the tiles of two softmaxes: what a split costs.
    """

    range_tiles: Any
    origin: Any
    tile: Any
    end: Any
    sequence: Any
    head_tile: Any
    softmax_start: Any
    cost: Any


class KeyTables(NamedTuple):
    """The list and the row of the page table of one sequence and head, the keys they see, and the
    row of a contiguous cache."""

    list_ptr: Any
    page_table_ptr: Any
    num_blocks: Any
    num_pages: Any
    kv_lo: Any
    kv_hi: Any
    capacity: Any
    slab: Any


class TileCopies(NamedTuple):
    """The copies that fill one tile: a value of the first three for each copy."""

    slabs: Any
    """Page, or the sequence of a contiguous cache."""
    rows: Any
    starts: Any
    """Position of the first key."""
    wanted: Any
    """Whether some key of the tile is seen."""
    cut: Any
    """1 if not all keys of the tile are seen."""


@gluon.jit
def _tiles_of_sequences(keys, first, CFG: gl.constexpr):
    """KV tiles of one head tile of each of the next SCAN sequences."""
    sequence = first + gl.arange(0, SCAN, gl.BlockedLayout([4], [32], [1], [0]))
    exists = sequence < keys.batch
    _, lo, hi = keys_seen(keys, sequence, exists)
    _, count = visited_tiles(lo, hi, keys.num_blocks, CFG.TILE_N, CFG.BLOCK_KV)
    return gl.where(exists, count, 0)


@gluon.jit
def _add(a, b):
    """Addition, for scans."""
    return a + b


@gluon.jit
def keys_of_sequence(keys, first_length, sequence):
    """Length of a sequence, and the keys that some query sees."""
    kv_len = first_length
    if keys.batch > 1:
        kv_len = gl.load(keys.seqlens_ptr + sequence)
    return keys_of_length(keys, kv_len)


@gluon.jit
def kv_head_of(head_tile, q_tiles):
    """The KV head of a head tile."""
    head = head_tile
    # rarely taken; the division would take longer than everything else at the start of a split
    if q_tiles > 1:
        head = head_tile // q_tiles
    return head


@gluon.jit
def find_range(keys, first_length, head_tiles, num_splits, CFG: gl.constexpr):
    """The `ProgramRange` of this program, or of the pair that it belongs to.

    A pair takes two head tiles at once, and counts as one program with one head tile here.
    """
    program = gl.program_id(0) // CFG.pair
    sequence = 0
    softmax_start = 0
    origin = 0
    cost = 0
    if (keys.batch == 1) & (num_splits > 0):
        # one sequence, whose softmaxes are equally long: no range crosses from one to another
        head_tile = program // num_splits
        _, lo, hi = keys_of_length(keys, first_length)
        _, count = visited_tiles(lo, hi, keys.num_blocks, CFG.TILE_N, CFG.BLOCK_KV)
        range_tiles = (count + num_splits - 1) // num_splits
        origin = head_tile * num_splits
        tile = (program - origin) * range_tiles
        end = gl.where(head_tile < head_tiles, gl.minimum(tile + range_tiles, count), 0)
    else:
        programs = gl.num_programs(0) // CFG.pair
        counts = _tiles_of_sequences(keys, 0, CFG)
        total = gl.sum(counts, 0)
        longest = gl.max(counts, 0)
        for first in range(SCAN, keys.batch, SCAN):
            more = _tiles_of_sequences(keys, first, CFG)
            total += gl.sum(more, 0)
            longest = gl.maximum(longest, gl.max(more, 0))
        # where all softmaxes are equally long, no program has more splits than others
        cost = gl.where(total == longest * keys.batch, 0, SPLIT_COST)
        total = (total + keys.batch * cost) * head_tiles
        range_tiles = (total + programs - 1) // programs
        # a softmax that is not split needs no combining, which is worth a few idle programs
        whole = (longest + cost + num_splits - 1) // gl.maximum(num_splits, 1)
        leaves_whole = (num_splits > 0) & (whole - range_tiles <= range_tiles // WORTH)
        range_tiles = gl.where(leaves_whole, whole, range_tiles)
        tile = program * range_tiles
        end = gl.minimum(tile + range_tiles, total)
        before = 0
        sequence_start = 0
        for first in range(0, keys.batch, SCAN):
            if first > 0:
                counts = _tiles_of_sequences(keys, first, CFG)
            places = gl.where(counts > 0, (counts + cost) * head_tiles, 0)
            until = before + gl.associative_scan(places, 0, _add)
            passed = (counts > 0) & (until <= tile)
            sequence += gl.sum(passed.to(gl.int32), 0)
            sequence_start = gl.maximum(sequence_start, gl.max(gl.where(passed, until, 0), 0))
            before = gl.max(until, 0)
        # a program without tiles begins past the end, where there is no sequence
        last_sequence = gl.minimum(sequence, keys.batch - 1)
        _, lo, hi = keys_of_sequence(keys, first_length, last_sequence)
        _, count = visited_tiles(lo, hi, keys.num_blocks, CFG.TILE_N, CFG.BLOCK_KV)
        head_tile = (tile - sequence_start) // (count + cost)
        softmax_start = sequence_start + head_tile * (count + cost)
    return ProgramRange(range_tiles, origin, tile, end, sequence, head_tile, softmax_start, cost)


@gluon.jit
def lanes():
    """Numbers of the threads of the producer."""
    return gl.arange(0, LOOKED_UP, gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def read_blocks(tables, copy, end, CFG: gl.constexpr):
    """The listed block that each of LOOKED_UP copies from `copy` on lies in.

    -1 past the end of the list, and from copy `end` on.
    """
    copy = copy + lanes()
    blocks = copy
    if CFG.BLOCK_KV is not None:
        entry = copy * CFG.copy_keys // CFG.BLOCK_KV
        listed = (copy < end) & (entry < tables.num_blocks)
        blocks = gl.load(tables.list_ptr + entry, mask=listed, other=-1)
    return blocks


@gluon.jit
def read_pages(starts, tables, CFG: gl.constexpr):
    """Entries of the page table for copies that begin at `starts`; 0 for unseen ones."""
    # entries past the last key, and before the first one seen, may hold anything
    wanted = _is_wanted(starts, tables, CFG)
    return gl.load(tables.page_table_ptr + starts // CFG.PAGE_SIZE, mask=wanted, other=0)


@gluon.jit
def check_pages(pages, tables):
    """Pages as int32, with 0 for those out of range; and 1 for each of these, else 0."""
    exists = (pages >= 0) & (pages < tables.num_pages)
    return gl.where(exists, pages, 0).to(gl.int32), gl.where(exists, 0, 1)


@gluon.jit
def look_up(tables, blocks, copy, end, CFG: gl.constexpr):
    """Position of the first key of each copy, NOWHERE without one; its page, or the sequence of a
    contiguous cache; 1 if a block or a page is out of range."""
    copy = copy + lanes()
    starts = copy * CFG.copy_keys
    wrong = gl.zeros_like(copy)
    if CFG.BLOCK_KV is not None:
        last_block = (tables.capacity - 1) // CFG.BLOCK_KV
        inside = (blocks >= 0) & (blocks <= last_block)
        wrong = gl.where(inside | (blocks == -1), 0, 1)
        starts = gl.where(inside, blocks * CFG.BLOCK_KV + starts % CFG.BLOCK_KV, NOWHERE)
    starts = gl.where(copy < end, starts, NOWHERE)
    slabs = gl.zeros_like(copy) + tables.slab
    if CFG.PAGE_SIZE is not None:
        slabs, wrong_pages = check_pages(read_pages(starts, tables, CFG), tables)
        wrong = wrong | wrong_pages
    return starts, slabs, gl.max(wrong, 0)


@gluon.jit
def pick(values, lane):
    """The value of one thread."""
    return gl.max(gl.where(lanes() == lane, values, -(2**31)), 0)


@gluon.jit
def copies_of_tile(starts, slabs, lane, tables, CFG: gl.constexpr):
    """The `TileCopies` of the tile whose first copy was looked up by thread `lane`."""
    copies: gl.constexpr = CFG.copies
    wanted = False
    cut = 0
    own_slabs = ()
    own_rows = ()
    own_starts = ()
    for copy in gl.static_range(copies):
        start = pick(starts, lane + copy)
        copy_wanted = _is_wanted(start, tables, CFG)
        row = gl.where(copy_wanted, start, 0)
        if CFG.PAGE_SIZE is not None:
            row = row % CFG.PAGE_SIZE
        wanted = wanted | copy_wanted
        whole = (start >= tables.kv_lo) & (start + CFG.copy_keys <= tables.kv_hi)
        cut = cut | gl.where(whole, 0, 1)
        own_slabs = own_slabs + (pick(slabs, lane + copy),)  # noqa: RUF005
        own_rows = own_rows + (row,)  # noqa: RUF005
        own_starts = own_starts + (start,)  # noqa: RUF005
    return TileCopies(own_slabs, own_rows, own_starts, wanted, cut)


@gluon.jit
def _is_wanted(start, tables, CFG: gl.constexpr):
    """Whether a copy holds keys that are seen."""
    return (start < tables.kv_hi) & (start + CFG.copy_keys > tables.kv_lo)


@gluon.jit
def positions_of(starts, CFG: gl.constexpr):
    """Positions of all keys of a tile, in a warp."""
    copies: gl.constexpr = CFG.copies
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    offs_n = gl.arange(0, CFG.TILE_N, layout)
    kv_pos = starts[0] + offs_n
    for copy in gl.static_range(1, copies):
        first = copy * CFG.copy_keys
        kv_pos = gl.where(offs_n < first, kv_pos, starts[copy] + offs_n - first)
    return kv_pos


@gluon.jit
def copy_rows(desc, tile, bar, copies, kv_head, COLUMN: gl.constexpr, CFG: gl.constexpr):
    """Start the copies of the keys or values of a tile, from COLUMN on."""
    count: gl.constexpr = CFG.copies
    copy_keys: gl.constexpr = CFG.copy_keys
    for copy in gl.static_range(count):
        rows = tile
        if count > 1:
            rows = tile.slice(copy * copy_keys, copy_keys, dim=0)
        place = [copies.slabs[copy], kv_head, copies.rows[copy], COLUMN]
        async_load(desc, place, bar, rows, pred=copies.wanted)


@gluon.jit
def _fetch(produce, ring, step, copies, kv_head, CFG: gl.constexpr):
    """Start the copies of one tile into a stage that is free; none if it is not wanted."""
    stage = step % CFG.STAGES
    bar = ring.full.index(stage)
    tile_bytes: gl.constexpr = CFG.copies * (
        produce.k_desc.block_type.nbytes + produce.v_desc.block_type.nbytes
    )
    mbarrier.expect(bar, tile_bytes, pred=copies.wanted)
    copy_rows(produce.k_desc, ring.k.index(stage), bar, copies, kv_head, CFG.k_column, CFG)
    copy_rows(produce.v_desc, ring.v.index(stage), bar, copies, kv_head, 0, CFG)


@gluon.jit
def _wait_for_stage(ring, step, CFG: gl.constexpr):
    """Wait until the stage of a step is free."""
    mbarrier.wait(ring.empty.index(step % CFG.STAGES), ((step // CFG.STAGES) & 1) ^ 1)


@gluon.jit
def _produce_contiguous(produce, shared, split, slab, number, step, kv_head, CFG: gl.constexpr):
    """Publish a split and fetch its tiles from a contiguous cache; returns the next step."""
    for tile in range(split.kv_tile, split.kv_end):
        _wait_for_stage(shared.ring, step, CFG)
        start = tile * CFG.TILE_N
        copies = TileCopies((slab,), (start,), (start,), True, 0)
        _fetch(produce, shared.ring, step, copies, kv_head, CFG)
        step += 1
        # the first keys take longer to arrive than the queries that the consumer loads
        if tile == split.kv_tile:
            publish(shared.splits, number, split)
    return step


@gluon.jit
def _produce_scattered(produce, shared, tables, split, number, step, kv_head, CFG: gl.constexpr):
    """Publish a split and fetch its tiles by page table or block list; returns the next step.

    The coordinates of 32 copies are looked up at a time, and their blocks 32 copies ahead.
    """
    ring = shared.ring
    copies_each: gl.constexpr = CFG.copies
    lane_layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    nothing = gl.full([1], 0, gl.int32, lane_layout)
    last = split.kv_end * copies_each
    blocks = read_blocks(tables, split.kv_tile * copies_each, last, CFG)
    # publishing waits for the length; the loads of the blocks are in flight by then
    publish(shared.splits, number, split)
    starts = blocks
    slabs = blocks
    wrong = 0
    for tile in range(split.kv_tile, split.kv_end):
        lane = (tile - split.kv_tile) * copies_each % LOOKED_UP
        if lane == 0:
            starts, slabs, more_wrong = look_up(tables, blocks, tile * copies_each, last, CFG)
            wrong = wrong | more_wrong
            blocks = read_blocks(tables, tile * copies_each + LOOKED_UP, last, CFG)
        copies = copies_of_tile(starts, slabs, lane, tables, CFG)
        stage = step % CFG.STAGES
        _wait_for_stage(ring, step, CFG)
        if CFG.BLOCK_KV is not None:
            shared.notes.positions.index(stage).store(positions_of(copies.starts, CFG))
        shared.notes.flags.index(stage).store(nothing + (wrong + 2 * copies.cut))
        # needed because the thread that arrives does not wait for the stores of the others
        thread_barrier()
        _fetch(produce, ring, step, copies, kv_head, CFG)
        mbarrier.arrive(ring.full.index(stage), count=1, pred=copies.wanted == 0)
        step += 1
    return step


# Copies to computed addresses: of parts of a tile, and to both programs of a pair.


@gluon.jit
def _copy_slice(copies, kv_head, bar, column, offset, CFG: gl.constexpr):
    """Start the copies of 64 columns of a tile; PAIRED: to both programs."""
    count: gl.constexpr = CFG.copies
    parameter: gl.constexpr = CFG.parameter
    for copy in gl.static_range(count):
        row = copies.rows[copy]
        place = (copies.slabs[copy], kv_head, row, column + 0 * row)
        address = shared_address(offset + copy * CFG.copy_keys * _SLICE_ROW)
        if CFG.PAIRED:
            copy_tile(parameter, place, bar, address, _BOTH)
        else:
            copy_tile(parameter, place, bar, address, None)


@gluon.jit
def _fill_part(ring, step, copies, kv_head, rank, PART: gl.constexpr, CFG: gl.constexpr):
    """Start the copies of a part of a tile into a stage where it is free; none if not wanted.

    PAIRED: only of the slices that this program copies, every other one. The partner's bytes may
    arrive before this program expects them; the phase still waits for this program's arrival.
    """
    stage = step % CFG.STAGES
    index = stage * CFG.parts + PART
    full = ring.full.index(index)
    slices: gl.constexpr = CFG.own_slices
    last: gl.constexpr = CFG.parts - 1 == PART
    tile_bytes: gl.constexpr = CFG.TILE_N * _SLICE_ROW
    mbarrier.expect(full, CFG.part_bytes(PART), pred=copies.wanted)
    mbarrier.arrive(full, count=1, pred=copies.wanted == 0)
    if copies.wanted:
        bar = shared_address(CFG.bars_offset + 8 * index)
        values = CFG.values_offset + stage * (CFG.TILE_N * CFG.TILE_DV * 2)
        for i in gl.static_range(slices):
            number = CFG.first_slice(PART, i) + rank
            _copy_slice(copies, kv_head, bar, number * _SLICE, values + number * tile_bytes, CFG)
        if last and rank == 0:
            rest = CFG.rest_offset + stage * tile_bytes
            _copy_slice(copies, kv_head, bar, CFG.k_column, rest, CFG)


@gluon.jit
def _copies_at(split, tables, starts, slabs, tile, CFG: gl.constexpr):
    """The `TileCopies` of a tile, from what was looked up or from a contiguous cache."""
    if CFG.scattered:
        lane = (tile - split.kv_tile) * CFG.copies % LOOKED_UP
        copies = copies_of_tile(starts, slabs, lane, tables, CFG)
    else:
        start = tile * CFG.TILE_N
        copies = TileCopies((tables.slab,), (start,), (start,), tile >= 0, 0)
    return copies


@gluon.jit
def _write_notes(notes, step, copies, wrong, CFG: gl.constexpr):
    """Write what consumers must know about the keys of a stage, which is empty."""
    stage = step % CFG.STAGES
    lane_layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    nothing = gl.full([1], 0, gl.int32, lane_layout)
    if CFG.BLOCK_KV is not None:
        notes.positions.index(stage).store(positions_of(copies.starts, CFG))
    notes.flags.index(stage).store(nothing + (wrong + 2 * copies.cut))
    # needed because the thread that arrives does not wait for the stores of the others
    thread_barrier()


@gluon.jit
def _take_turn(
    shared, tables, found, split, tile, step, kv_head, rank, TURN: gl.constexpr, CFG: gl.constexpr
):
    """Copy the part of a pair of tiles that is due at TURN, once its memory is free.

    Notes are written with the part that completes a tile, when both parts of its stage are known to
    be empty.
    """
    odd: gl.constexpr = CFG.copied_tile(TURN)
    part: gl.constexpr = CFG.copied_part(TURN)
    if tile + odd < split.kv_end:
        starts, slabs, wrong = found
        copies = _copies_at(split, tables, starts, slabs, tile + odd, CFG)
        now = step + odd
        index = CFG.first_empty + now % CFG.STAGES * CFG.parts + part
        mbarrier.wait(shared.ring.empty.index(index), ((now // CFG.STAGES) & 1) ^ 1)
        if CFG.scattered and CFG.completes(TURN):
            _write_notes(shared.notes, now, copies, wrong, CFG)
        _fill_part(shared.ring, now, copies, kv_head, rank, part, CFG)


@gluon.jit
def _produce_placed(shared, tables, split, number, step, kv_head, rank, CFG: gl.constexpr):
    """Publish a split and fetch its tiles in parts, pair by pair; returns the next step."""
    turns: gl.constexpr = 2 * CFG.parts
    copies_each: gl.constexpr = CFG.copies
    last = split.kv_end * copies_each
    blocks = read_blocks(tables, split.kv_tile * copies_each, last, CFG)
    publish(shared.splits, number, split)
    starts = blocks
    slabs = blocks
    wrong = 0
    for tile in range(split.kv_tile, split.kv_end, 2):
        if CFG.scattered:  # noqa: SIM102
            if (tile - split.kv_tile) * copies_each % LOOKED_UP == 0:
                starts, slabs, more_wrong = look_up(tables, blocks, tile * copies_each, last, CFG)
                wrong = wrong | more_wrong
                blocks = read_blocks(tables, tile * copies_each + LOOKED_UP, last, CFG)
        found = (starts, slabs, wrong)
        for turn in gl.static_range(turns):
            _take_turn(shared, tables, found, split, tile, step, kv_head, rank, turn, CFG)
        step += gl.minimum(split.kv_end - tile, 2)
    return step


@gluon.jit
def produce_tiles(produce, shared, CFG: gl.constexpr):
    """Find this program's range, publish its splits and keep the ring full."""
    keys = shared.keys
    first_length = shared.first_length
    rank = 0
    if CFG.pair > 1:
        cluster_barrier()
        rank = cluster_rank()
    if CFG.SINGLE:
        # nothing that an earlier kernel may have written is read before this
        gdc_wait()
        first_length = gl.load(keys.seqlens_ptr)
    q_tiles = (keys.q_len * shared.heads.group + CFG.ROWS - 1) // CFG.ROWS
    head_tiles = shared.heads.kv * q_tiles // CFG.pair
    mine = find_range(keys, first_length, head_tiles, produce.num_splits, CFG)
    # parts of the second head tiles of pairs are stored after those of the first ones
    origin = mine.origin + rank * (gl.num_programs(0) // CFG.pair)
    tile = mine.tile
    sequence = mine.sequence
    head_tile = mine.head_tile
    softmax_start = mine.softmax_start
    step = 0
    number = 0
    while tile < mine.end:
        kv_len, kv_lo, kv_hi = keys_of_sequence(keys, first_length, sequence)
        first_tile, count = visited_tiles(kv_lo, kv_hi, keys.num_blocks, CFG.TILE_N, CFG.BLOCK_KV)
        stop = gl.minimum(mine.end, softmax_start + count)
        if tile < stop:
            first = tile + first_tile - softmax_start
            until = stop + first_tile - softmax_start
            own_tile = head_tile * CFG.pair + rank
            split = Split(
                sequence, own_tile, kv_len, first, until, origin, softmax_start, count,
                mine.range_tiles,
            )  # fmt: skip
            kv_head = kv_head_of(own_tile, q_tiles)
            place = sequence
            if shared.places_ptr is not None:
                place = gl.maximum(gl.load(shared.places_ptr + sequence), 0)
            if CFG.scattered or CFG.placed:
                list_ptr = produce.list_ptr
                if CFG.BLOCK_KV is not None:
                    list_ptr += (
                        place.to(gl.int64) * produce.list_batch_stride
                        + kv_head * produce.list_head_stride
                    )
                page_table_ptr = produce.page_table_ptr
                if CFG.PAGE_SIZE is not None:
                    page_table_ptr += place.to(gl.int64) * produce.page_row_stride
                tables = KeyTables(
                    list_ptr, page_table_ptr, keys.num_blocks, produce.num_pages, kv_lo, kv_hi,
                    keys.capacity, place,
                )  # fmt: skip
                if CFG.placed:
                    step = _produce_placed(shared, tables, split, number, step, kv_head, rank, CFG)
                else:
                    step = _produce_scattered(
                        produce, shared, tables, split, number, step, kv_head, CFG
                    )
            else:
                step = _produce_contiguous(
                    produce, shared, split, place, number, step, kv_head, CFG
                )
            number += 1
        softmax_start += count + mine.cost
        tile = softmax_start
        head_tile += 1
        if head_tile == head_tiles:
            head_tile = 0
            sequence += 1
    # no sequence: the end
    publish(shared.splits, number, Split(-1, 0, 0, 0, 0, 0, 0, 0, 1))
    if CFG.pair > 1:
        # a program must not end while its partner may still arrive at its barriers
        cluster_exit_barrier()
