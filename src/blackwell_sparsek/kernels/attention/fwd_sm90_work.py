"""What a program of the Hopper forward does next: its piece of work and that piece's KV tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.masks import kv_range, kv_range_of_all
from ...device.schedule import (
    place_in_sections,
    place_in_sequence,
    section_planes,
    sequence_of_piece,
)
from ...device.sequences import batch_and_heads, token_span
from ...device.visits import (
    num_full_units,
    num_masked_units,
    num_tiles,
    plan_blocks,
    plan_dense,
)

# Entries of a mask row, or sequences, read at a time, four by each thread of the producer.
SCAN = gl.constexpr(128)


@gluon.jit
def count_q_tiles(mask, schedule, q_len, CFG: gl.constexpr):
    """How many pieces of work a plane of a dense batch has."""
    if schedule[0] is None:
        q_tiles = (q_len + CFG.tile_m - 1) // CFG.tile_m
    else:
        # an order names whole rows of the mask; what they have past the queries is empty
        block_q = mask[0][5]
        q_tiles = (q_len + block_q - 1) // block_q * (block_q // CFG.tile_m)
    return q_tiles


@gluon.jit
def place_piece(mask, schedule, piece, q_tiles, CFG: gl.constexpr):
    """Plane and query tile of a piece of work: in sections, or as the order of the mask says."""
    order_ptr, num_planes, section, _, _ = schedule
    if order_ptr is None:
        plane, q_tile = place_in_sections(piece, num_planes, q_tiles, section)
    else:
        row_tiles = mask[0][5] // CFG.tile_m
        q_blocks = q_tiles // row_tiles
        entry = gl.load(order_ptr + piece // row_tiles)
        plane = entry // q_blocks
        q_tile = entry % q_blocks * row_tiles + piece % row_tiles
    return plane, q_tile


@gluon.jit
def place_packed_piece(
    cu_seqlens, piece, sequence, num_sequences, most_planes, lengths, heads, CFG: gl.constexpr
):
    """Sequence, plane, query tile and the token spans of queries and keys of a piece of work.

    `sequence` is that of an earlier piece, and `lengths` the longest ones. A section has
    `most_planes` heads at the most.
    """
    offs_scan = gl.arange(0, SCAN, gl.BlockedLayout([4], [32], [1], [0]))
    sequence = sequence_of_piece(
        cu_seqlens[0], piece, sequence, num_sequences, heads[0], offs_scan, CFG.tile_m
    )
    q_span = token_span(cu_seqlens[0], sequence, lengths[0])
    kv_span = token_span(cu_seqlens[1], sequence, lengths[1])
    kv_bytes: gl.constexpr = 2 * (CFG.TILE_D + CFG.TILE_DV)
    section = gl.minimum(section_planes(kv_span[1], heads[1], kv_bytes), most_planes)
    q_head, q_tile = place_in_sequence(
        cu_seqlens[0], piece, sequence, heads[0], section, CFG.tile_m
    )
    return sequence, sequence * heads[0] + q_head, q_tile, q_span, kv_span


@gluon.jit
def piece_lengths(piece, dense_lengths):
    """First query token, queries and keys of the sequence that a published piece belongs to."""
    if len(piece) != 11:
        span = (0, dense_lengths[0], dense_lengths[1])
    else:
        span = (piece[8], piece[9], piece[10])
    return span


@gluon.jit
def plan_piece(mask, plane, q_tile, lengths, heads, band, CFG: gl.constexpr):
    """Which KV tiles the queries of a piece visit."""
    lists, batch_step, head_step = mask
    tile_n: gl.constexpr = CFG.TILE_N
    unit_size: gl.constexpr = CFG.UNIT
    q_len, kv_len = lengths
    q_start = q_tile * CFG.tile_m
    q_end = q_start + CFG.tile_m
    kv_lo, kv_hi = kv_range(q_start, q_end, q_len, kv_len, band[0], band[1])
    all_lo, all_hi = kv_range_of_all(q_start, q_end, q_len, kv_len, band[0], band[1])
    if lists is None:
        plan = plan_dense(kv_lo, kv_hi, all_lo, all_hi, tile_n)
    else:
        batch, q_head, _ = batch_and_heads(plane, heads[0], heads[1])
        row = batch * batch_step + q_head * head_step + q_start // lists[5]
        offs_scan = gl.arange(0, SCAN, gl.BlockedLayout([4], [32], [1], [0]))
        plan = plan_blocks(lists, row, kv_lo, kv_hi, all_lo, all_hi, offs_scan, tile_n, unit_size)
    return plan


@gluon.jit
def count_tiles(plan, CFG: gl.constexpr):
    """How many KV tiles a piece visits with mask code, and in all."""
    tile_n: gl.constexpr = CFG.TILE_N
    unit_size: gl.constexpr = CFG.UNIT
    masked = num_tiles(num_masked_units(plan), tile_n, unit_size)
    return masked, masked + num_tiles(num_full_units(plan), tile_n, unit_size)


@gluon.jit
def dense_tile(plan, kv_tile):
    """The KV tile that a piece without a mask visits as its `kv_tile`-th.

    The right edge of its band comes first, from the right, and the left edge last, from the right
    too: queries that see little of an edge do without the very first or the very last tile.
    """
    num_right = plan[5] - plan[4]
    after = kv_tile - num_right
    left = plan[3] - 1 - (after - num_full_units(plan))
    inner = gl.where(after < num_full_units(plan), plan[3] + after, left)
    return gl.where(after < 0, plan[5] - 1 - kv_tile, inner)


@gluon.jit
def needs_mask(lists, plan, kv_tile, masked_tiles):
    """Whether a KV tile needs mask code, of `masked_tiles` that do."""
    needs = kv_tile < masked_tiles
    if lists is None:
        after = kv_tile - (plan[5] - plan[4])
        # one comparison: what is negative is large without its sign
        needs = after.to(gl.uint32) >= num_full_units(plan).to(gl.uint32)
    return needs
