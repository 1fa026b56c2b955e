# mypy: ignore-errors
"""The producer of the Hopper forward: one warp that finds work and keeps the rings full."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from ...device.gluon.pipeline import claim, publish, take, tile_at, tile_place
from ...device.masks import kv_range, kv_range_of_all
from ...device.records import VisitPlan
from ...device.schedule import (
    batch_and_heads,
    count_packed_tiles,
    place_in_sections,
    place_in_sequence,
    section_planes,
    sequence_of_tile,
    token_span,
)
from ...device.visits import (
    keys_of_tile,
    masked_unit,
    num_full_units,
    num_masked_units,
    num_tiles,
    plan_blocks,
    plan_dense,
    tile_ordinal,
)
from ...launch.descriptors import GROUP_ROWS

# What a program of the Hopper forward does next: its piece of work and that piece's KV tiles.

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
    sequence = sequence_of_tile(
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


ROWS = gl.constexpr(GROUP_ROWS)


@gluon.jit
def tile_starts(visit, kv_tile, CFG: gl.constexpr):
    """First keys of the copies that fill one KV tile of a plan."""
    lists, plan, num_masked, kv_len = visit
    tile_n: gl.constexpr = CFG.TILE_N
    unit_size: gl.constexpr = CFG.UNIT
    parts: gl.constexpr = CFG.parts
    part_rows: gl.constexpr = CFG.part_rows
    masked_tiles, _ = count_tiles(plan, CFG)
    starts = ()
    if lists is None:
        starts = (dense_tile(plan, kv_tile) * tile_n,)
    else:
        for part in gl.static_range(parts):
            in_kind = kv_tile if kv_tile < masked_tiles else kv_tile - masked_tiles
            ordinal, kv_in_unit = tile_ordinal(in_kind, part * part_rows, tile_n, unit_size)
            if kv_tile < masked_tiles:
                unit = masked_unit(plan, ordinal)
                units = num_masked
            else:
                unit = plan[3] + ordinal
                units = num_full_units(plan)
            # a tile with no unit left is read from past the keys, where TMA fills zeros
            kv = keys_of_tile(lists, unit, ordinal, units, kv_in_unit, kv_len, tile_n, unit_size)
            starts = starts + (kv,)  # noqa: RUF005
    return starts


@gluon.jit
def copy_tile(desc, ring, step, starts, place, CFG: gl.constexpr):
    """Start the copies of one KV tile into a ring, once its stage is free."""
    smem, full, empty = ring
    parts: gl.constexpr = CFG.parts
    part_rows: gl.constexpr = CFG.part_rows
    stage = step % CFG.STAGES
    bar = full.index(stage)
    tile = smem.index(stage)
    mbarrier.wait(empty.index(stage), ((step // CFG.STAGES) & 1) ^ 1)
    mbarrier.expect(bar, parts * desc.block_type.nbytes)
    for part in gl.static_range(parts):
        if parts == 1:
            tma.async_copy_global_to_shared(desc, tile_at(place, starts[part]), bar, tile)
        else:
            rows = tile.slice(part * part_rows, part_rows, dim=0)
            tma.async_copy_global_to_shared(desc, tile_at(place, starts[part]), bar, rows)


@gluon.jit
def _fetch_tile(desc, ring, step, visit, kv_tile, place, CFG: gl.constexpr):
    """Start the copies of one KV tile of a plan into a ring, once its stage is free."""
    # before the stage is waited for: reading the lists of a mask takes as long
    starts = tile_starts(visit, kv_tile, CFG)
    copy_tile(desc, ring, step, starts, place, CFG)


@gluon.jit
def copy_queries(desc, ring, turn, q_tile, place, CFG: gl.constexpr):
    """Start the copies of the queries of a piece of work, once there is room for them."""
    smem, full, empty = ring
    consumers: gl.constexpr = CFG.CONSUMERS
    stage = turn % CFG.Q_STAGES
    bar = full.index(stage)
    mbarrier.wait(empty.index(stage), ((turn // CFG.Q_STAGES) & 1) ^ 1)
    mbarrier.expect(bar, consumers * desc.block_type.nbytes)
    for g in gl.static_range(consumers):
        row = q_tile * CFG.tile_m + g * ROWS
        tma.async_copy_global_to_shared(
            desc, tile_at(place, row), bar, smem.index(stage * consumers + g)
        )


@gluon.jit
def _announce(produce, shared, plane, q_tile, q_span, kv_span, part, turn, CFG: gl.constexpr):
    """Publish a piece of work and fetch its queries; return its plan.

    `part` is None, or says which tiles of the piece are meant and which programs have the others.
    """
    q_desc, _, _, _, _ = produce
    mask, q_ring, _, _, work, _, heads, band, cu_seqlens = shared
    batch, q_head, _ = batch_and_heads(plane, heads[0], heads[1])
    plan = plan_piece(mask, plane, q_tile, (q_span[1], kv_span[1]), heads, band, CFG)
    fields = (plan[0], plan[1], plan[2], plan[3], plan[4], plan[5], plane, q_tile)
    if cu_seqlens[0] is not None:
        fields = fields + (q_span[0], q_span[1], kv_span[1])  # noqa: RUF005
    if part is not None:
        fields = fields + part
    publish(work, turn, fields)
    q_place = tile_place(cu_seqlens[0], batch, q_head, q_span[0], q_span[1])
    copy_queries(q_desc, q_ring, turn, q_tile, q_place, CFG)
    return plan


@gluon.jit
def _fetch_tiles(produce, shared, plane, plan, kv_span, begin, end, step, CFG: gl.constexpr):
    """Fetch the KV tiles `begin` to `end` of a plan; return the next step."""
    _, k_desc, v_desc, _, _ = produce
    mask, _, k_ring, v_ring, _, _, heads, _, cu_seqlens = shared
    batch, _, kv_head = batch_and_heads(plane, heads[0], heads[1])
    visit = (mask[0], plan, num_masked_units(plan), kv_span[1])
    kv_place = tile_place(cu_seqlens[1], batch, kv_head, kv_span[0], kv_span[1])
    for kv_tile in range(begin, end):
        _fetch_tile(k_desc, k_ring, step, visit, kv_tile, kv_place, CFG)
        _fetch_tile(v_desc, v_ring, step, visit, kv_tile, kv_place, CFG)
        step += 1
    return step


@gluon.jit
def _feed(produce, shared, plane, q_tile, q_span, kv_span, part, step, turn, CFG: gl.constexpr):
    """Publish a piece of work, fetch its queries and KV tiles; return the next step."""
    plan = _announce(produce, shared, plane, q_tile, q_span, kv_span, part, turn, CFG)
    begin = 0
    _, end = count_tiles(plan, CFG)
    if part is not None:
        begin = part[0]
        end = part[1]
    return _fetch_tiles(produce, shared, plane, plan, kv_span, begin, end, step, CFG)


@gluon.jit
def _announce_dense(produce, shared, piece, q_tiles, turn, CFG: gl.constexpr):
    """`_announce` a whole piece of a dense batch."""
    lengths = shared[5]
    plane, q_tile = place_piece(shared[0], produce[4], piece, q_tiles, CFG)
    spans = (0, lengths[0]), (0, lengths[1])
    _announce(produce, shared, plane, q_tile, *spans, None, turn, CFG)


@gluon.jit
def _feed_ahead(produce, shared, piece, next_piece, total, q_tiles, step, turn, CFG: gl.constexpr):
    """Fetch the KV tiles of an announced piece and announce the next one; return the next step."""
    mask, _, _, _, _, lengths, heads, band, _ = shared
    plane, q_tile = place_piece(mask, produce[4], piece, q_tiles, CFG)
    plan = plan_piece(mask, plane, q_tile, lengths, heads, band, CFG)
    _, end = count_tiles(plan, CFG)
    kv_span = (0, lengths[1])
    # with the ring full of this piece's tiles, the queries of the one before are done with
    full_ring = gl.minimum(end, CFG.STAGES)
    step = _fetch_tiles(produce, shared, plane, plan, kv_span, 0, full_ring, step, CFG)
    if next_piece < total:
        _announce_dense(produce, shared, next_piece, q_tiles, turn + 1, CFG)
    return _fetch_tiles(produce, shared, plane, plan, kv_span, full_ring, end, step, CFG)


@gluon.jit
def _feed_share(
    produce, shared, piece, whole, q_tiles, kv_tiles, tail_tiles, step, turn, CFG: gl.constexpr
):
    """Feed a whole piece, or a share of the tiles of those left over; return next step and turn."""
    mask, _, _, _, _, lengths, _, _, _ = shared
    schedule = produce[4]
    share = schedule[4]
    begin = 0
    end = kv_tiles
    if piece >= whole:
        begin = (piece - whole) * share
        end = gl.minimum(begin + share, tail_tiles)
    while begin < end:
        index = piece
        first_tile = begin
        end_tile = end
        begins = 0
        ends = 0
        if piece >= whole:
            in_tail = begin // kv_tiles
            index = whole + in_tail
            first_tile = begin - in_tail * kv_tiles
            end_tile = gl.minimum(first_tile + (end - begin), kv_tiles)
            begins = in_tail * kv_tiles // share
            ends = ((in_tail + 1) * kv_tiles - 1) // share
        plane, q_tile = place_piece(mask, schedule, index, q_tiles, CFG)
        spans = (0, lengths[0]), (0, lengths[1])
        part = (first_tile, end_tile, piece - whole, begins, ends)
        step = _feed(produce, shared, plane, q_tile, *spans, part, step, turn, CFG)
        turn += 1
        begin += end_tile - first_tile
    return step, turn


@gluon.jit
def claim_piece(counter_ptr, dynamic, piece, total):
    """The next piece of work of this program: every so many, or the first that nobody has."""
    next_piece = piece + gl.num_programs(0)
    if dynamic != 0:
        next_piece = claim(counter_ptr, gl.num_programs(0), total)
    return next_piece


@gluon.jit
def produce_tiles(produce, shared, CFG: gl.constexpr):
    """Take pieces of work, publish them and keep the rings full."""
    if CFG.OVERLAP:
        # everything read or written may belong to kernels in front until they have finished
        gdc_wait()
    _, _, _, counter_ptr, schedule = produce
    mask, _, _, _, work, lengths, heads, _, cu_seqlens = shared
    step = 0
    turn = 0
    sequence = 0
    if CFG.SHARED_TAIL:
        q_tiles = count_q_tiles(mask, schedule, lengths[0], CFG)
        kv_tiles = (lengths[1] + (CFG.TILE_N - 1)) // CFG.TILE_N
        # the pieces that are too few for all programs are one stretch of tiles, in equal shares
        left_over = schedule[1] * q_tiles % gl.num_programs(0)
        tail_tiles = gl.where(schedule[4] > 0, left_over * kv_tiles, 0)
        whole = schedule[1] * q_tiles - gl.where(schedule[4] > 0, left_over, 0)
        total = whole + gl.minimum(tail_tiles, gl.num_programs(0))
    elif cu_seqlens[0] is None:
        q_tiles = count_q_tiles(mask, schedule, lengths[0], CFG)
        total = schedule[1] * q_tiles
    else:
        num_sequences = schedule[1] // heads[0]
        total = count_packed_tiles(cu_seqlens[0], num_sequences, heads[0], CFG.tile_m)
    piece = gl.program_id(0)
    if CFG.AHEAD and piece < total:
        _announce_dense(produce, shared, piece, q_tiles, turn, CFG)
    while piece < total:
        if mask[0] is not None or CFG.AHEAD:
            # looking up a row of a mask takes long, and short rows come last
            next_piece = claim_piece(counter_ptr, schedule[3], piece, total)
        if CFG.SHARED_TAIL:
            step, turn = _feed_share(
                produce, shared, piece, whole, q_tiles, kv_tiles, tail_tiles, step, turn, CFG
            )
        elif CFG.AHEAD:
            step = _feed_ahead(produce, shared, piece, next_piece, total, q_tiles, step, turn, CFG)
            turn += 1
        elif cu_seqlens[0] is None:
            plane, q_tile = place_piece(mask, schedule, piece, q_tiles, CFG)
            spans = (0, lengths[0]), (0, lengths[1])
            step = _feed(produce, shared, plane, q_tile, *spans, None, step, turn, CFG)
            turn += 1
        else:
            sequence, plane, q_tile, q_span, kv_span = place_packed_piece(
                cu_seqlens, piece, sequence, num_sequences, schedule[2], lengths, heads, CFG
            )
            if q_tile * CFG.tile_m < q_span[1]:
                spans = (q_span, kv_span)
                step = _feed(produce, shared, plane, q_tile, *spans, None, step, turn, CFG)
                turn += 1
        if mask[0] is None and not CFG.AHEAD:
            # only now, with the last copies of this piece under way: who is late takes less
            next_piece = claim_piece(counter_ptr, schedule[3], piece, total)
        piece = next_piece
    # no plane: the end
    end = (0, 0, 0, 0, 0, 0, -1, 0)
    if cu_seqlens[0] is not None:
        end = end + (0, 0, 0)  # noqa: RUF005
    if CFG.SHARED_TAIL:
        end = end + (0, 0, 0, 0, 0)  # noqa: RUF005
    publish(work, turn, end)


# A scout for the Hopper forward: a warp that looks up pieces of work ahead of the producer.
#
# A row of a mask is claimed, found in the order of rows, then its list, then its bounds: four
# reads, each of which waits for the one before. That takes longer than the tiles that a producer
# is ahead.


@gluon.jit
def find_work(produce, shared, begun, CFG: gl.constexpr):
    """Publish pieces of work, each when the producer has `begun` with the one before."""
    _, _, _, counter_ptr, schedule = produce
    mask, _, _, _, work, lengths, heads, band, _ = shared
    q_tiles = count_q_tiles(mask, schedule, lengths[0], CFG)
    total = schedule[1] * q_tiles
    turn = 0
    piece = gl.program_id(0)
    while piece < total:
        plane, q_tile = place_piece(mask, schedule, piece, q_tiles, CFG)
        plan = plan_piece(mask, plane, q_tile, lengths, heads, band, CFG)
        fields = plan + (plane, q_tile)  # noqa: RUF005
        publish(work, turn, fields)
        mbarrier.wait(begun, turn & 1)
        piece = claim_piece(counter_ptr, schedule[3], piece, total)
        turn += 1
    # no plane: the end
    publish(work, turn, (0, 0, 0, 0, 0, 0, -1, 0))


@gluon.jit
def produce_found(produce, shared, begun, CFG: gl.constexpr):
    """Keep the rings full for the pieces of work that a scout publishes."""
    q_desc, k_desc, v_desc, _, _ = produce
    mask, q_ring, k_ring, v_ring, work, lengths, heads, _, cu_seqlens = shared
    step = 0
    turn = 0
    piece = take(work, turn, 1)
    while piece[6] >= 0:
        mbarrier.arrive(begun, count=1)
        plan = VisitPlan(piece[0], piece[1], piece[2], piece[3], piece[4], piece[5])
        batch, q_head, kv_head = batch_and_heads(piece[6], heads[0], heads[1])
        q_place = tile_place(cu_seqlens[0], batch, q_head, 0, lengths[0])
        kv_place = tile_place(cu_seqlens[1], batch, kv_head, 0, lengths[1])
        copy_queries(q_desc, q_ring, turn, piece[7], q_place, CFG)
        visit = (mask[0], plan, num_masked_units(plan), lengths[1])
        end_tile = count_tiles(plan, CFG)[1]
        if end_tile > 0:
            # consumers are done with the keys of a tile before they are with the values before it
            starts = tile_starts(visit, 0, CFG)
            copy_tile(k_desc, k_ring, step, starts, kv_place, CFG)
            for kv_tile in range(1, end_tile):
                after = tile_starts(visit, kv_tile, CFG)
                copy_tile(k_desc, k_ring, step + 1, after, kv_place, CFG)
                copy_tile(v_desc, v_ring, step, starts, kv_place, CFG)
                starts = after
                step += 1
            copy_tile(v_desc, v_ring, step, starts, kv_place, CFG)
            step += 1
        turn += 1
        piece = take(work, turn, 1)
