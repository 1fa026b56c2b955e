"""What a program of the Hopper decode kernel reads: its stretch of the KV tiles of all sequences.

The tiles lie in one row, sequence by sequence and in it plane by plane; a plane is a KV head and up
to ROWS of the queries that share it. Program p takes the p-th stretch of `each` tiles.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.paging import visited_tiles
from .decode import _keys_seen

# Sequences whose lengths are read at a time, four by each thread of the producer.
SCAN = gl.constexpr(128)


@gluon.jit
def _tiles_of_sequences(lengths, first, planes, CFG: gl.constexpr):
    """Tiles of the next SCAN sequences."""
    seqlens_ptr, batch, q_len, capacity, left, right = lengths
    sequence = first + gl.arange(0, SCAN, gl.BlockedLayout([4], [32], [1], [0]))
    exists = sequence < batch
    _, lo, hi = _keys_seen(seqlens_ptr, sequence, exists, q_len, capacity, left, right)
    _, count = visited_tiles(lo, hi, 0, CFG.TILE_N, None)
    return gl.where(exists, count * planes, 0)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def find_stretch(lengths, planes, min_tiles, CFG: gl.constexpr):
    """Tiles of a stretch, this program's stretch, its first sequence, and that one's first tile."""
    seqlens_ptr, batch, q_len, capacity, left, right = lengths
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    sequence = 0
    first_tile = 0
    if batch == 1:
        # planes are alike: none of them is cut in more parts than it must be
        _, lo, hi = _keys_seen(seqlens_ptr, 0, True, q_len, capacity, left, right)
        _, count = visited_tiles(lo, hi, 0, CFG.TILE_N, None)
        total = count * planes
        each = (total + programs - 1) // programs
        if planes <= programs:
            of_plane = programs // planes
            each = (count + of_plane - 1) // of_plane
        each = gl.maximum(each, min_tiles)
        begin = program * each
    else:
        counts = _tiles_of_sequences(lengths, 0, planes, CFG)
        total = gl.sum(counts, 0)
        for first in range(SCAN, batch, SCAN):
            total += gl.sum(_tiles_of_sequences(lengths, first, planes, CFG), 0)
        each = gl.maximum((total + programs - 1) // programs, min_tiles)
        begin = program * each
        before = 0
        for first in range(0, batch, SCAN):
            if first > 0:
                counts = _tiles_of_sequences(lengths, first, planes, CFG)
            until = before + gl.associative_scan(counts, 0, _add)
            passed = (counts > 0) & (until <= begin)
            sequence += gl.sum(passed.to(gl.int32), 0)
            first_tile = gl.maximum(first_tile, gl.max(gl.where(passed, until, 0), 0))
            before = gl.max(until, 0)
    return each, begin, gl.minimum(begin + each, total), sequence, first_tile


@gluon.jit
def look_up(page_table_ptr, table_row, tile, kv_lo, kv_hi, num_pages, CFG: gl.constexpr):
    """Slab and row of each part of a tile, flat, and 1 if a page that holds live keys is wrong."""
    parts: gl.constexpr = CFG.parts
    part_keys: gl.constexpr = CFG.part_keys
    page_size: gl.constexpr = CFG.PAGE_SIZE
    wrong = 0
    places = ()
    for part in gl.static_range(parts):
        start = tile * CFG.TILE_N + part * part_keys
        # pages past the last key, and before the first one seen, may be anything
        wanted = (start < kv_hi) & (start + part_keys > kv_lo)
        page = gl.load(page_table_ptr + table_row + start // page_size, mask=wanted, other=0)
        exists = (page >= 0) & (page < num_pages)
        wrong = wrong | gl.where(exists, 0, 1)
        places = places + (gl.where(exists, page, 0), start % page_size)  # noqa: RUF005
    return places, wrong
