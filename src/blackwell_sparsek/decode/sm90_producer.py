# mypy: ignore-errors
"""What a program of the Hopper decode kernel reads: its stretch of the KV tiles of all sequences.

The tiles lie in one row, sequence by sequence and in it plane by plane; a plane is a KV head and up
to ROWS of the queries that share it. Program p takes the p-th stretch of `each` tiles.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from ..device.gluon.pipeline import publish, thread_barrier
from ..device.paging import visited_tiles
from .triton import keys_of_length, keys_seen

# Sequences whose lengths are read at a time, four by each thread of the producer.
SCAN = gl.constexpr(128)
# Stretches may be longer by one part in so many if that leaves planes whole, which saves 1.8 of
# 129 us at 128 planes of 8k keys.
WORTH = gl.constexpr(32)
# Parts of tiles whose places are looked up at a time, one by each thread of the producer.
LOOKED_UP = gl.constexpr(32)
# Tiles that could be read while a program goes from one piece to another.
PIECE_COST = gl.constexpr(2)
# A position past all keys, and far enough from the end of int32 for sums.
NOWHERE = gl.constexpr(2**30)


@gluon.jit
def _tiles_of_sequences(lengths, first, CFG: gl.constexpr):
    """Tiles of a plane of each of the next SCAN sequences."""
    seqlens_ptr, _, batch, q_len, capacity, left, right, num_blocks = lengths
    sequence = first + gl.arange(0, SCAN, gl.BlockedLayout([4], [32], [1], [0]))
    exists = sequence < batch
    _, lo, hi = keys_seen(seqlens_ptr, sequence, exists, q_len, capacity, left, right)
    _, count = visited_tiles(lo, hi, num_blocks, CFG.TILE_N, CFG.BLOCK_KV)
    return gl.where(exists, count, 0)


@gluon.jit
def _add(a, b):
    """For scans."""
    return a + b


@gluon.jit
def keys_of_sequence(lengths, sequence):
    """Length of a sequence, and the keys that some query sees."""
    seqlens_ptr, first_length, batch, q_len, capacity, left, right, _ = lengths
    kv_len = first_length
    if batch > 1:
        kv_len = gl.load(seqlens_ptr + sequence)
    return keys_of_length(kv_len, q_len, capacity, left, right)


@gluon.jit
def head_of_plane(plane, q_tiles):
    """The KV head of a plane."""
    head = plane
    # seldom, and a division takes longer than all else that a piece begins with
    if q_tiles > 1:
        head = plane // q_tiles
    return head


@gluon.jit
def find_stretch(lengths, planes, of_plane, CFG: gl.constexpr):
    """This program's stretch: tiles `[tile, end)`, and where it begins: sequence and plane.

    Also the most tiles of a stretch, and what tells who else works on a plane: tile t of the plane
    whose first is `plane_tile` belongs to program `origin + (plane_tile + t) // each`. And the
    places between the tiles of a plane and those of the next, which stand for what a piece costs.
    """
    first_length, batch, q_len, capacity, left, right, num_blocks = lengths[1:]
    program = gl.program_id(0)
    sequence = 0
    plane_tile = 0
    origin = 0
    cost = 0
    if (batch == 1) & (of_plane > 0):
        # one sequence, whose planes are alike: no stretch goes from one to another
        plane = program // of_plane
        _, lo, hi = keys_of_length(first_length, q_len, capacity, left, right)
        _, count = visited_tiles(lo, hi, num_blocks, CFG.TILE_N, CFG.BLOCK_KV)
        each = (count + of_plane - 1) // of_plane
        origin = plane * of_plane
        tile = (program - origin) * each
        end = gl.where(plane < planes, gl.minimum(tile + each, count), 0)
    else:
        programs = gl.num_programs(0)
        counts = _tiles_of_sequences(lengths, 0, CFG)
        total = gl.sum(counts, 0)
        longest = gl.max(counts, 0)
        for first in range(SCAN, batch, SCAN):
            more = _tiles_of_sequences(lengths, first, CFG)
            total += gl.sum(more, 0)
            longest = gl.maximum(longest, gl.max(more, 0))
        # where all planes are equally long, no program has more pieces than others
        cost = gl.where(total == longest * batch, 0, PIECE_COST)
        total = (total + batch * cost) * planes
        each = (total + programs - 1) // programs
        # a plane that is not cut needs no merging, which is worth a few programs without work
        whole = (longest + cost + of_plane - 1) // gl.maximum(of_plane, 1)
        each = gl.where((of_plane > 0) & (whole - each <= each // WORTH), whole, each)
        tile = program * each
        end = gl.minimum(tile + each, total)
        before = 0
        sequence_tile = 0
        for first in range(0, batch, SCAN):
            if first > 0:
                counts = _tiles_of_sequences(lengths, first, CFG)
            places = gl.where(counts > 0, (counts + cost) * planes, 0)
            until = before + gl.associative_scan(places, 0, _add)
            passed = (counts > 0) & (until <= tile)
            sequence += gl.sum(passed.to(gl.int32), 0)
            sequence_tile = gl.maximum(sequence_tile, gl.max(gl.where(passed, until, 0), 0))
            before = gl.max(until, 0)
        # past the end, where a program without tiles begins, there is no sequence
        _, lo, hi = keys_of_sequence(lengths, gl.minimum(sequence, batch - 1))
        _, count = visited_tiles(lo, hi, num_blocks, CFG.TILE_N, CFG.BLOCK_KV)
        plane = (tile - sequence_tile) // (count + cost)
        plane_tile = sequence_tile + plane * (count + cost)
    return each, origin, tile, end, sequence, plane, plane_tile, cost


@gluon.jit
def _lanes():
    """Numbers of the threads of the producer."""
    return gl.arange(0, LOOKED_UP, gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def read_blocks(list_ptr, part, end, num_blocks, CFG: gl.constexpr):
    """The block of a list that each of LOOKED_UP parts from `part` on lies in.

    -1 past the end of the list, and from part `end` on.
    """
    part = part + _lanes()
    blocks = part
    if CFG.BLOCK_KV is not None:
        entry = part * CFG.part_keys // CFG.BLOCK_KV
        blocks = gl.load(list_ptr + entry, mask=(part < end) & (entry < num_blocks), other=-1)
    return blocks


@gluon.jit
def look_up(page_table_ptr, blocks, part, end, sequence, bounds, num_pages, CFG: gl.constexpr):
    """Position of the first key of each part, NOWHERE without one; its page, or the sequence of a
    contiguous cache; 1 if a block or a page is wrong."""
    kv_lo, kv_hi, capacity = bounds
    part = part + _lanes()
    starts = part * CFG.part_keys
    wrong = gl.zeros_like(part)
    if CFG.BLOCK_KV is not None:
        last_block = (capacity - 1) // CFG.BLOCK_KV
        inside = (blocks >= 0) & (blocks <= last_block)
        wrong = gl.where(inside | (blocks == -1), 0, 1)
        starts = gl.where(inside, blocks * CFG.BLOCK_KV + starts % CFG.BLOCK_KV, NOWHERE)
    starts = gl.where(part < end, starts, NOWHERE)
    pages = gl.zeros_like(part) + sequence
    if CFG.PAGE_SIZE is not None:
        # pages past the last key, and before the first one seen, may be anything
        wanted = _wanted(starts, kv_lo, kv_hi, CFG)
        pages = gl.load(page_table_ptr + starts // CFG.PAGE_SIZE, mask=wanted, other=0)
        exists = (pages >= 0) & (pages < num_pages)
        wrong = wrong | gl.where(exists, 0, 1)
        pages = gl.where(exists, pages, 0)
    return starts, pages, gl.max(wrong, 0)


@gluon.jit
def _pick(values, lane):
    """The value of one thread."""
    return gl.max(gl.where(_lanes() == lane, values, -(2**31)), 0)


@gluon.jit
def places_of(starts, pages, lane, kv_lo, kv_hi, CFG: gl.constexpr):
    """Slab and row of each part of the tile whose first part is a thread's, flat; the parts'
    positions; whether some part is wanted; 1 if not all keys are seen."""
    parts: gl.constexpr = CFG.parts
    wanted = False
    cut = 0
    places = ()
    own = ()
    for part in gl.static_range(parts):
        start = _pick(starts, lane + part)
        part_wanted = _wanted(start, kv_lo, kv_hi, CFG)
        row = gl.where(part_wanted, start, 0)
        if CFG.PAGE_SIZE is not None:
            row = row % CFG.PAGE_SIZE
        wanted = wanted | part_wanted
        whole = (start >= kv_lo) & (start + CFG.part_keys <= kv_hi)
        cut = cut | gl.where(whole, 0, 1)
        places = places + (_pick(pages, lane + part), row)  # noqa: RUF005
        own = own + (start,)  # noqa: RUF005
    return places, own, wanted, cut


@gluon.jit
def _wanted(start, kv_lo, kv_hi, CFG: gl.constexpr):
    """Whether a part holds keys that are seen."""
    return (start < kv_hi) & (start + CFG.part_keys > kv_lo)


@gluon.jit
def positions_of(starts, CFG: gl.constexpr):
    """Positions of all keys of a tile, in a warp."""
    parts: gl.constexpr = CFG.parts
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    offs_n = gl.arange(0, CFG.TILE_N, layout)
    kv_pos = starts[0] + offs_n
    for part in gl.static_range(1, parts):
        first = part * CFG.part_keys
        kv_pos = gl.where(offs_n < first, kv_pos, starts[part] + offs_n - first)
    return kv_pos


# What the producer warp of the Hopper decode kernel does: find its tiles and have them copied.


@gluon.jit
def _copy(desc, tile, bar, places, kv_head, wanted, CFG: gl.constexpr):
    """Start the copies of the keys or values of a tile."""
    parts: gl.constexpr = CFG.parts
    part_keys: gl.constexpr = CFG.part_keys
    for part in gl.static_range(parts):
        rows = tile
        if parts > 1:
            rows = tile.slice(part * part_keys, part_keys, dim=0)
        place = [places[2 * part], kv_head, places[2 * part + 1], 0]
        tma.async_copy_global_to_shared(desc, place, bar, rows, pred=wanted)


@gluon.jit
def _fetch(descs, ring, step, places, kv_head, wanted, CFG: gl.constexpr):
    """Start the copies of one tile into a stage that is free; none if it is not wanted."""
    k_smem, v_smem, full, _ = ring
    stage = step % CFG.STAGES
    bar = full.index(stage)
    tile_bytes: gl.constexpr = CFG.parts * (descs[0].block_type.nbytes + descs[1].block_type.nbytes)
    mbarrier.expect(bar, tile_bytes, pred=wanted)
    _copy(descs[0], k_smem.index(stage), bar, places, kv_head, wanted, CFG)
    _copy(descs[1], v_smem.index(stage), bar, places, kv_head, wanted, CFG)


@gluon.jit
def _wait_for_stage(ring, step, CFG: gl.constexpr):
    """Wait until the stage of a step is free."""
    mbarrier.wait(ring[3].index(step % CFG.STAGES), ((step // CFG.STAGES) & 1) ^ 1)


@gluon.jit
def _produce_in_a_row(descs, ring, piece, step, sequence, kv_head, first, end, CFG: gl.constexpr):
    """Publish a piece and fetch its tiles from a contiguous cache; returns the next step."""
    work, turn, fields = piece
    for tile in range(first, end):
        _wait_for_stage(ring, step, CFG)
        _fetch(descs, ring, step, (sequence, tile * CFG.TILE_N), kv_head, True, CFG)
        step += 1
        # the first keys take longer to come than the queries that the consumer loads
        if tile == first:
            publish(work, turn, fields)
    return step


@gluon.jit
def _produce_scattered(
    descs, ring, notes, tables, bounds, piece, step, sequence, kv_head, first, end,
    CFG: gl.constexpr,
):  # fmt: skip
    """Publish a piece and fetch its tiles, whose places tables tell; returns the next step.

    The places of 32 parts of tiles are looked up at a time, and their blocks 32 parts ahead.
    """
    list_ptr, table_ptr, num_blocks, num_pages = tables
    kv_lo, kv_hi, _ = bounds
    work, turn, fields = piece
    positions, flags = notes
    parts: gl.constexpr = CFG.parts
    lane_layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    nothing = gl.full([1], 0, gl.int32, lane_layout)
    last = end * parts
    blocks = read_blocks(list_ptr, first * parts, last, num_blocks, CFG)
    # what is published waits for the length; blocks are on their way by then
    publish(work, turn, fields)
    starts = blocks
    pages = blocks
    wrong = 0
    for tile in range(first, end):
        lane = (tile - first) * parts % LOOKED_UP
        if lane == 0:
            starts, pages, more_wrong = look_up(
                table_ptr, blocks, tile * parts, last, sequence, bounds, num_pages, CFG
            )
            wrong = wrong | more_wrong
            blocks = read_blocks(list_ptr, tile * parts + LOOKED_UP, last, num_blocks, CFG)
        places, own, wanted, cut = places_of(starts, pages, lane, kv_lo, kv_hi, CFG)
        stage = step % CFG.STAGES
        _wait_for_stage(ring, step, CFG)
        if CFG.BLOCK_KV is not None:
            positions.index(stage).store(positions_of(own, CFG))
        flags.index(stage).store(nothing + (wrong + 2 * cut))
        # the one thread that arrives does not wait for the stores of the others
        thread_barrier()
        _fetch(descs, ring, step, places, kv_head, wanted, CFG)
        mbarrier.arrive(ring[2].index(stage), count=1, pred=wanted == 0)
        step += 1
    return step


@gluon.jit
def produce_tiles(produce, shared, CFG: gl.constexpr):
    """Find this program's stretch, publish its pieces and keep the ring full."""
    descs, tables, table_strides, of_plane = produce
    page_table_ptr, list_ptr, num_pages = tables
    ring, notes, work, lengths, heads = shared
    if CFG.SINGLE:
        # nothing that other kernels may have written is read before this
        gdc_wait()
        lengths = lengths[:1] + (gl.load(lengths[0]),) + lengths[2:]  # noqa: RUF005
    q_len, capacity, num_blocks = lengths[3], lengths[4], lengths[7]
    q_tiles = (q_len * heads[1] + CFG.ROWS - 1) // CFG.ROWS
    planes = heads[0] * q_tiles
    each, origin, tile, end, sequence, plane, plane_tile, cost = find_stretch(
        lengths, planes, of_plane, CFG
    )
    step = 0
    turn = 0
    while tile < end:
        kv_len, kv_lo, kv_hi = keys_of_sequence(lengths, sequence)
        first_tile, count = visited_tiles(kv_lo, kv_hi, num_blocks, CFG.TILE_N, CFG.BLOCK_KV)
        stop = gl.minimum(end, plane_tile + count)
        if tile < stop:
            first = tile + first_tile - plane_tile
            until = stop + first_tile - plane_tile
            fields = (sequence, plane, kv_len, first, until, origin, plane_tile, count, each)
            kv_head = head_of_plane(plane, q_tiles)
            piece = (work, turn, fields)
            if CFG.scattered:
                rows = (list_ptr, page_table_ptr, num_blocks, num_pages)
                if CFG.BLOCK_KV is not None:
                    list_row = sequence.to(gl.int64) * table_strides[1] + kv_head * table_strides[2]
                    rows = (list_ptr + list_row, rows[1], num_blocks, num_pages)
                if CFG.PAGE_SIZE is not None:
                    table_row = sequence.to(gl.int64) * table_strides[0]
                    rows = (rows[0], page_table_ptr + table_row, num_blocks, num_pages)
                step = _produce_scattered(
                    descs, ring, notes, rows, (kv_lo, kv_hi, capacity), piece, step, sequence,
                    kv_head, first, until, CFG,
                )  # fmt: skip
            else:
                step = _produce_in_a_row(
                    descs, ring, piece, step, sequence, kv_head, first, until, CFG
                )
            turn += 1
        plane_tile += count + cost
        tile = plane_tile
        plane += 1
        if plane == planes:
            plane = 0
            sequence += 1
    # no sequence: the end
    publish(work, turn, (-1, 0, 0, 0, 0, 0, 0, 0, 1))
