"""What the producer warp of the Hopper decode kernel does: find its tiles and have them copied."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from ...device.gluon.pipeline import publish, thread_barrier
from ...device.paging import visited_tiles
from .decode_sm90_work import (
    LOOKED_UP,
    find_stretch,
    head_of_plane,
    keys_of_sequence,
    look_up,
    places_of,
    positions_of,
    read_blocks,
)


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
