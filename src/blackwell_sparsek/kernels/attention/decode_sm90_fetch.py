"""What the producer warp of the Hopper decode kernel does: find its tiles and have them copied."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ...device.gluon.pipeline import publish
from ...device.paging import visited_tiles
from .decode_sm90_work import (
    find_stretch,
    keys_of_sequence,
    places_of,
    positions_of,
    read_blocks,
    read_pages,
    starts_of,
)


@gluon.jit
def _fetch(desc, ring, step, places, kv_head, wanted, CFG: gl.constexpr):
    """Start the copies of one tile into a ring whose stage is free; none if it is not wanted."""
    smem, full, _ = ring
    parts: gl.constexpr = CFG.parts
    part_keys: gl.constexpr = CFG.part_keys
    bar = full.index(step % CFG.STAGES)
    tile = smem.index(step % CFG.STAGES)
    mbarrier.expect(bar, parts * desc.block_type.nbytes, pred=wanted)
    for part in gl.static_range(parts):
        rows = tile
        if parts > 1:
            rows = tile.slice(part * part_keys, part_keys, dim=0)
        place = [places[2 * part], kv_head, places[2 * part + 1], 0]
        tma.async_copy_global_to_shared(desc, place, bar, rows, pred=wanted)


@gluon.jit
def _wait_for_stage(ring, step, CFG: gl.constexpr):
    """Wait until the stage of a step is free."""
    mbarrier.wait(ring[2].index(step % CFG.STAGES), ((step // CFG.STAGES) & 1) ^ 1)


@gluon.jit
def _produce_in_a_row(descs, shared, step, sequence, kv_head, first, end, CFG: gl.constexpr):
    """Fetch tiles of a contiguous cache; returns the next step."""
    for tile in range(first, end):
        places = (sequence, tile * CFG.TILE_N)
        _wait_for_stage(shared[0], step, CFG)
        _fetch(descs[0], shared[0], step, places, kv_head, True, CFG)
        _wait_for_stage(shared[1], step, CFG)
        _fetch(descs[1], shared[1], step, places, kv_head, True, CFG)
        step += 1
    return step


@gluon.jit
def _produce_scattered(
    descs, shared, tables, bounds, step, sequence, kv_head, first, end, CFG: gl.constexpr
):
    """Fetch tiles that tables and lists tell the places of; returns the next step.

    Blocks are read two tiles ahead and pages one, so that nothing waits for them.
    """
    list_ptr, table_ptr, num_blocks, num_pages = tables
    kv_lo, kv_hi, capacity = bounds
    positions, flags = shared[2]
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    nothing = gl.full([1], 0, gl.int32, lane)
    blocks = read_blocks(list_ptr, first, num_blocks, CFG)
    starts, wrong = starts_of(blocks, first, capacity, CFG)
    pages = read_pages(table_ptr, sequence, starts, kv_lo, kv_hi, CFG)
    blocks = read_blocks(list_ptr, first + 1, num_blocks, CFG)
    for tile in range(first, end):
        next_starts, wrong_block = starts_of(blocks, tile + 1, capacity, CFG)
        next_pages = read_pages(table_ptr, sequence, next_starts, kv_lo, kv_hi, CFG)
        blocks = read_blocks(list_ptr, tile + 2, num_blocks, CFG)
        _wait_for_stage(shared[0], step, CFG)
        places, wanted, cut, wrong_page = places_of(pages, starts, kv_lo, kv_hi, num_pages, CFG)
        wrong = wrong | wrong_page
        stage = step % CFG.STAGES
        if CFG.BLOCK_KV is not None:
            # positions are looked at as long as values are
            _wait_for_stage(shared[1], step, CFG)
            positions.index(stage).store(positions_of(starts, CFG))
        flags.index(stage).store(nothing + (wrong + 2 * cut))
        # the one thread that arrives does not wait for the stores of the others
        gl.thread_barrier()
        _fetch(descs[0], shared[0], step, places, kv_head, wanted, CFG)
        mbarrier.arrive(shared[0][1].index(stage), count=1, pred=wanted == 0)
        _wait_for_stage(shared[1], step, CFG)
        _fetch(descs[1], shared[1], step, places, kv_head, wanted, CFG)
        mbarrier.arrive(shared[1][1].index(stage), count=1, pred=wanted == 0)
        # the block after the last one is not this piece's
        wrong = wrong | gl.where(tile + 1 < end, wrong_block, 0)
        starts = next_starts
        pages = next_pages
        step += 1
    return step


@gluon.jit
def produce_tiles(produce, shared, CFG: gl.constexpr):
    """Find this program's stretch, publish its pieces and keep the rings full."""
    descs, tables, table_strides, min_tiles = produce
    page_table_ptr, list_ptr, num_pages = tables
    work, lengths, heads = shared[3], shared[4], shared[5]
    q_len, capacity, num_blocks = lengths[3], lengths[4], lengths[7]
    q_tiles = (q_len * heads[1] + CFG.ROWS - 1) // CFG.ROWS
    planes = heads[0] * q_tiles
    each, tile, end, sequence, sequence_tile = find_stretch(lengths, planes, min_tiles, CFG)
    step = 0
    turn = 0
    while tile < end:
        kv_len, kv_lo, kv_hi = keys_of_sequence(lengths, sequence)
        first_tile, count = visited_tiles(kv_lo, kv_hi, num_blocks, CFG.TILE_N, CFG.BLOCK_KV)
        plane = (tile - sequence_tile) // count
        plane_tile = sequence_tile + plane * count
        stop = gl.minimum(end, plane_tile + count)
        shift = first_tile - plane_tile
        begins = plane_tile // each
        ends = (plane_tile + count - 1) // each
        fields = (sequence, plane, kv_len, tile + shift, stop + shift, begins, ends)
        publish(work, turn, fields)
        kv_head = plane // q_tiles
        if CFG.scattered:
            rows = (list_ptr, page_table_ptr, num_blocks, num_pages)
            if CFG.BLOCK_KV is not None:
                list_row = sequence.to(gl.int64) * table_strides[1] + kv_head * table_strides[2]
                rows = (list_ptr + list_row, rows[1], num_blocks, num_pages)
            if CFG.PAGE_SIZE is not None:
                table_row = sequence.to(gl.int64) * table_strides[0]
                rows = (rows[0], page_table_ptr + table_row, num_blocks, num_pages)
            step = _produce_scattered(
                descs, shared, rows, (kv_lo, kv_hi, capacity), step, sequence, kv_head,
                tile + shift, stop + shift, CFG,
            )  # fmt: skip
        else:
            step = _produce_in_a_row(
                descs, shared, step, sequence, kv_head, tile + shift, stop + shift, CFG
            )
        turn += 1
        tile = stop
        finished = stop == sequence_tile + planes * count
        sequence += finished.to(gl.int32)
        sequence_tile = gl.where(finished, stop, sequence_tile)
    # no sequence: the end
    publish(work, turn, (-1, 0, 0, 0, 0, 0, 0))
