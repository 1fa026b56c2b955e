# mypy: ignore-errors
"""Packed queries over a cache on Hopper: the arithmetic of `triton.py` by TMA and WGMMA.

Shapes and results are those of `triton.py`, and `plan.py` divides the work of both: programs take
equal ranges of the units of all softmaxes or, if the plan says so, whole softmaxes as they get free
(`order.py`). Queries of all heads that share a KV head are the rows of a query tile, CONSUMERS x 64
of them, so that a decoding step reads its keys once for the whole group. The roles of a program are
those of `attention.sm90.forward`:

- a producer warp finds the parts of softmaxes that it has, publishes each as a `QueryPart`, and
  keeps rings of K and V tiles full, by one TMA copy for each page of a tile;
- consumer warp groups own 64 rows each. They go through the KV tiles as the consumers of the
  forward do, and leave parts for each other as with its split tail.

The producer has the queries of the next part copied while consumers end the one before. Where TMA
cannot, or a sign has to go into them, consumers load them (`tuning.copies_queries`).

Called as impl "sm90" of `bsk::attn_ragged`; decoding steps alone go on to `steps.py`. Limits: fp16
and bf16, D and Dv up to 128 in steps of 8, pages of a multiple of 16 tokens, strides and addresses
of the cache that TMA takes; neither packed keys, listed blocks, fp8 caches nor slopes. Slots past
the lengths are copied and not looked at; a page out of range is not read, and makes the outputs
that depend on it NaN.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_wait

from ..attention.sm90.forward import (
    SplitTail,
    attend_first_tile,
    attend_last_values,
    attend_tile,
    combine,
    drop_unseen,
    skip_tiles,
)
from ..attention.sm90.forward_plan import tma_strides
from ..attention.sm90.forward_producer import TailPart, Visit, count_tiles, dense_tile
from ..attention.sm90.forward_scores import Queries, TileBounds
from ..attention.sm90.forward_stages import KvStages, zero_outputs
from ..calls.ragged import RaggedCall
from ..core.compat import hopper_options
from ..decode.sm90 import descriptor
from ..decode.sm90_producer import (
    NOWHERE,
    KeyTables,
    TileCopies,
    check_pages,
    copy_rows,
    lanes,
    pick,
    read_pages,
)
from ..decode.triton import DecodeHeads, DecodeLayout
from ..device.gluon.compat import async_load, reinterpret
from ..device.gluon.partials import columns_of, rows_of
from ..device.gluon.pipeline import (
    next_claimed,
    publish,
    ring,
    ring_memory,
    ring_place,
    take,
    tiles,
    work_channel,
)
from ..device.gluon.row_parts import row_parts
from ..device.gluon.warps import shared_address
from ..device.masks import bounds_in_chunk, row_bounds
from ..device.paging import visited_tiles
from ..device.records import Range, RowBounds, Score, SoftmaxState, VisitPlan
from ..device.scores import fold_sign, positive_factor
from ..device.softmax import init_state
from ..device.visits import num_masked_blocks, plan_dense
from ..launch.descriptors import GROUP_ROWS, tensor_descriptor
from ..launch.launcher import launch, on_device_of
from ..launch.workspace import scratch, self_resetting_counters
from .order import launch_order
from .outputs import end_rows, row_places, store_lse, store_outputs
from .plan import (
    RaggedSizes,
    RaggedWorkspace,
    SoftmaxPart,
    TileOfQueries,
    find_query_tile,
    kernel_records,
    launch_plan,
    part_of_softmax,
    query_tile,
    units_of_program,
    units_of_tile,
)
from .steps import attend_steps
from .tuning import RaggedSm90Config, query_tiles, ragged_sm90_config, takes_steps

ROWS = gl.constexpr(GROUP_ROWS)
# Query tiles that the producer looks at at a time, four by each of its threads.
SCAN = gl.constexpr(128)


class QueryPart(NamedTuple):
    """The part of one softmax that a program computes, as the producer publishes it; all int32."""

    kv_head: Any
    """-1 after the last part."""
    first_query: Any
    """From here to `kv_hi` the fields of a `TileOfQueries`."""
    num_rows: Any
    used_rows: Any
    first_row: Any
    shift: Any
    kv_len: Any
    kv_lo: Any
    kv_hi: Any
    edge_begin: Any
    """From here to `edge_end` the bounds of a `VisitPlan`."""
    full_begin: Any
    full_end: Any
    edge_end: Any
    first_program: Any
    last_program: Any


PART_FIELDS = gl.constexpr(len(QueryPart._fields))


class RaggedShared(NamedTuple):
    """Shared by all roles."""

    q_ring: Any
    """A tile for each consumer, as TMA fills it where the producer copies queries."""
    k_ring: Any
    v_ring: Any
    parts: Any
    """Channel of `QueryPart`s."""
    verdicts: Any
    """Channel of one number for each part, when its last copy is on its way: whether a page was
    out of range."""
    sizes: Any
    heads: Any


class RaggedProducer(NamedTuple):
    """Arguments of the producer alone."""

    q_desc: Any
    """None where consumers load queries."""
    k_desc: Any
    v_desc: Any
    tables: Any
    page_row_stride: Any
    workspace: Any
    num_tiles: Any


class RaggedConsumer(NamedTuple):
    """Arguments of the consumers alone."""

    results: Any
    q_ptr: Any
    scoring: Any
    tensors: Any
    tail: Any


@gluon.jit
def _bounds_at(q_pos, tile, sizes):
    """First and last key that positions of a query tile see."""
    bounds = row_bounds(q_pos, gl.maximum(tile.kv_len, 0), sizes.left, sizes.right)
    first, last = bounds_in_chunk(bounds, q_pos, sizes.chunk)
    return RowBounds(gl.maximum(first, tile.kv_lo), last)


@gluon.jit
def _group_of(heads, CFG: gl.constexpr):
    """Query heads that share a KV head: a constant if possible, since rows are divided by it."""
    group = heads.group
    if CFG.HEADS > 0:
        group = CFG.HEADS
    return group


@gluon.jit
def _position(row, tile, group):
    """Position of the query of a row; rows past the last count as the last."""
    return gl.minimum(row, tile.num_rows - 1) // group + tile.shift


# The producer.


@gluon.jit
def _plan_part(tile, part, first_tile, sizes, group, CFG: gl.constexpr):
    """The `VisitPlan` of the KV tiles that a part has of its query tile."""
    tile_n: gl.constexpr = CFG.TILE_N
    last_row = gl.minimum(tile.first_row + CFG.tile_m, tile.used_rows) - 1
    _, every_last = _bounds_at(_position(tile.first_row, tile, group), tile, sizes)
    every_first, _ = _bounds_at(_position(last_row, tile, group), tile, sizes)
    # rows that are not used see nothing
    kv_hi = gl.where(tile.first_row < tile.used_rows, tile.kv_hi, tile.kv_lo)
    kv_lo = gl.maximum(tile.kv_lo, (first_tile + part.first) * tile_n)
    kv_hi = gl.minimum(kv_hi, (first_tile + part.end) * tile_n)
    return plan_dense(kv_lo, kv_hi, every_first, every_last + 1, tile_n)


@gluon.jit
def _fill(desc, tiles_ring, step, copies, kv_head, CFG: gl.constexpr):
    """Start the copies of one tile into a ring, once its stage is free."""
    cache: gl.constexpr = CFG.cache
    stage = step % CFG.STAGES
    bar = tiles_ring.full.index(stage)
    mbarrier.wait(tiles_ring.empty.index(stage), ((step // CFG.STAGES) & 1) ^ 1)
    mbarrier.expect(bar, cache.copies * desc.block_type.nbytes)
    copy_rows(desc, tiles_ring.tiles.index(stage), bar, copies, kv_head, 0, cache)


@gluon.jit
def _read_pages(keys, kv_tile, CFG: gl.constexpr):
    """Entries of the page table for the copies of a tile, one in each thread of the producer.

    They are not looked at, so that nothing waits for them yet.
    """
    pages = lanes()
    if CFG.PAGE_SIZE is not None:
        cache: gl.constexpr = CFG.cache
        starts = kv_tile * CFG.TILE_N + lanes() * cache.copy_keys
        starts = gl.where(lanes() < cache.copies, starts, NOWHERE)
        pages = read_pages(starts, keys, cache)
    return pages


@gluon.jit
def _copies(pages, keys, kv_tile, CFG: gl.constexpr):
    """The `TileCopies` of a tile with these pages, and 1 in threads whose page is out of range."""
    start = kv_tile * CFG.TILE_N
    wrong = lanes() * 0
    slabs = ()
    rows = ()
    if CFG.PAGE_SIZE is None:
        slabs = (keys.slab,)
        rows = (start,)
    else:
        cache: gl.constexpr = CFG.cache
        count: gl.constexpr = cache.copies
        checked, wrong = check_pages(pages, keys)
        for copy in gl.static_range(count):
            row = 0
            if cache.copy_keys < CFG.PAGE_SIZE:
                row = (start + copy * cache.copy_keys) % CFG.PAGE_SIZE
            slabs = slabs + (pick(checked, copy),)  # noqa: RUF005
            rows = rows + (row,)  # noqa: RUF005
    return TileCopies(slabs, rows, (), True, 0), wrong


@gluon.jit
def _copy_queries(produce, shared, tile, kv_head, part, CFG: gl.constexpr):
    """Start the copies of queries for the `part`-th part with keys, once there is room."""
    consumers: gl.constexpr = CFG.CONSUMERS
    q_ring = shared.q_ring
    for group in gl.static_range(consumers):
        phase = ring_place(part, 1).phase
        bar = q_ring.full.index(group)
        mbarrier.wait(q_ring.empty.index(group), phase ^ 1)
        mbarrier.expect(bar, produce.q_desc.block_type.nbytes)
        # of [token, KV head, head of it, dim]
        query = tile.first_query + (tile.first_row + group * ROWS) // CFG.HEADS
        async_load(produce.q_desc, [query, kv_head, 0, 0], bar, q_ring.tiles.index(group))


@gluon.jit
def _feed(produce, shared, keys, plan, tile, kv_head, step, part, CFG: gl.constexpr):
    """Fetch the queries and KV tiles of a plan, the `part`-th with keys.

    Returns the next step, and whether a page was out of range.
    """
    _, kv_tiles = count_tiles(plan, CFG)
    wrong = lanes() * 0
    pages = _read_pages(keys, dense_tile(plan, 0), CFG)
    for kv_tile in range(0, kv_tiles):
        copies, wrong_pages = _copies(pages, keys, dense_tile(plan, kv_tile), CFG)
        wrong = wrong | wrong_pages
        # a tile ahead, before a stage is waited for
        following = gl.minimum(kv_tile + 1, kv_tiles - 1)
        pages = _read_pages(keys, dense_tile(plan, following), CFG)
        _fill(produce.k_desc, shared.k_ring, step, copies, kv_head, CFG)
        _fill(produce.v_desc, shared.v_ring, step, copies, kv_head, CFG)
        if CFG.HEADS > 0:  # noqa: SIM102
            # there is room for a tile before the last queries have been read
            if kv_tile == 0:
                _copy_queries(produce, shared, tile, kv_head, part, CFG)
        step += 1
    return step, gl.max(wrong, 0)


@gluon.jit
def _ask(counter_ptr):
    """The value of the claim counter before the first thread raised it by one.

    Only the first thread's is meant, so that nothing waits for it before `pick` does.
    """
    nothing = lanes() * 0
    return gl.atomic_add(counter_ptr + nothing, nothing + 1, mask=lanes() == 0, sem="relaxed")


@gluon.jit
def _produce(produce, shared, CFG: gl.constexpr):
    """Role of the producer: find the parts of this program and keep the rings full.

    They are those of its range `[at, end)` of units, or softmax `at` of `end` in the order.
    """
    sizes, heads = shared.sizes, shared.heads
    group = _group_of(heads, CFG)
    tables, workspace = produce.tables, produce.workspace
    if CFG.PDL:
        # for the plan; what other kernels wrote was there before the plan began
        gdc_wait()
    total, programs, at, end = units_of_program(workspace, produce.num_tiles, heads.kv)
    claims = False
    if CFG.DYNAMIC:
        listed = gl.load(workspace.order + produce.num_tiles)
        claims = listed >= 0
        at = gl.where(claims, gl.program_id(0), at)
        end = gl.where(claims, listed * heads.kv, end)
    offs_scan = gl.arange(0, SCAN, gl.BlockedLayout([4], [32], [1], [0]))
    q_tile = 0
    before = 0
    if not claims:
        q_tile, before = find_query_tile(workspace, at // heads.kv, produce.num_tiles, offs_scan)
    step = 0
    slot = 0
    with_keys = 0
    while at < end:
        asked = lanes()
        if CFG.DYNAMIC:  # noqa: SIM102
            if claims:
                q_tile = gl.load(workspace.order + at // heads.kv)
                before = 0
                asked = _ask(workspace.counters)
        tile_end = gl.load(workspace.ends + q_tile)
        count = tile_end - before
        if count == 0:
            q_tile += 1
        else:
            sequence = gl.load(workspace.owners + q_tile)
            tile = query_tile(tables, sizes, q_tile, sequence, group, CFG.tile_m, CFG.TOP_LEFT)
            first_tile, num_visited = visited_tiles(tile.kv_lo, tile.kv_hi, 0, CFG.TILE_N, None)
            units = units_of_tile(tile, ROWS)
            part, stop = part_of_softmax(
                at, end, before, count, units, heads.kv, total, programs, CFG.WHOLE
            )
            if CFG.DYNAMIC:
                part = SoftmaxPart(
                    part.mine | claims,
                    gl.where(claims, at % heads.kv, part.kv_head),
                    gl.where(claims, 0, part.first),
                    gl.where(claims, num_visited, part.end),
                    gl.where(claims, 0, part.first_program),
                    gl.where(claims, 0, part.last_program),
                )
            if part.mine:
                plan = _plan_part(tile, part, first_tile, sizes, group, CFG)
                published = QueryPart(
                    part.kv_head, tile.first_query, tile.num_rows, tile.used_rows, tile.first_row,
                    tile.shift, tile.kv_len, tile.kv_lo, tile.kv_hi, plan.edge_begin,
                    plan.full_begin, plan.full_end, plan.edge_end, part.first_program,
                    part.last_program,
                )  # fmt: skip
                publish(shared.parts, slot, published)
                pages = tables.page_table
                if CFG.PAGE_SIZE is not None:
                    pages += sequence.to(gl.int64) * produce.page_row_stride
                # keys that none of these queries sees, but that exist, need not be cleared
                keys = KeyTables(
                    None, pages, 0, sizes.num_slabs, tile.kv_lo, tile.kv_len, sizes.slots, tile.slab
                )
                next_step, wrong = _feed(
                    produce, shared, keys, plan, tile, part.kv_head, step, with_keys, CFG
                )
                publish(shared.verdicts, slot, (wrong,))
                slot += 1
                with_keys += gl.where(next_step > step, 1, 0)
                step = next_step
            at = stop
            if stop == tile_end * heads.kv:
                q_tile += 1
                before = tile_end
            if CFG.DYNAMIC:  # noqa: SIM102
                if claims:
                    at = next_claimed(workspace.counters, pick(asked, 0), gl.num_programs(0), end)
    # no KV head: the end
    publish(shared.parts, slot, QueryPart(-1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0))


# The consumers.


@gluon.jit
def _rows_in(copy, CFG: gl.constexpr):
    """A copy of [token, KV head, head of it, dim] in shared memory as a tile of 64 rows."""
    dim: gl.constexpr = CFG.TILE_D
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, dim], copy.dtype)
    return reinterpret(copy, copy.dtype, [ROWS, dim], layout)


@gluon.jit
def _load_queries(consume, own, tile, kv_head, group, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Load this consumer's rows into `own`, in shared memory."""
    dim: gl.constexpr = CFG.TILE_D
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // dim, dim // 8], [4, 1], [1, 0])
    row = tile.first_row + GROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    offs_d = gl.arange(0, dim, gl.SliceLayout(0, layout))
    _, _, offset = row_places(
        row, tile.num_rows, kv_head, group, tile.first_query, consume.tensors.q
    )
    live = (row < tile.num_rows)[:, None] & (offs_d < CFG.HEAD_DIM)[None, :]
    q = gl.load(consume.q_ptr + offset[:, None] + offs_d[None, :], live, other=0.0)
    scale_log2 = consume.scoring.scale_log2
    if scale_log2 <= 0.0:
        # rare, and 160 instructions
        q = fold_sign(q, scale_log2)[0]
    own.store(q)
    fence_async_shared()


@gluon.jit
def _row_bounds_of(tile, rows, sizes, group, GROUP: gl.constexpr):
    """The `TileBounds` of this consumer's rows."""
    first_row = tile.first_row + GROUP * ROWS
    first, last = _bounds_at(_position(first_row + rows, tile, group), tile, sizes)
    _, every_last = _bounds_at(_position(first_row, tile, group), tile, sizes)
    every_first, _ = _bounds_at(_position(first_row + (ROWS - 1), tile, group), tile, sizes)
    return TileBounds(first, last, every_first, every_last)


@gluon.jit
def _write_rows(consume, tensors, tile, kv_head, state, acc, tokens_q, GROUP: gl.constexpr,
                CFG: gl.constexpr):  # fmt: skip
    """End the softmax of this consumer's rows and store outputs and lse."""
    rows = tile.first_row + GROUP * ROWS + rows_of(acc)
    query, head, offset = row_places(
        rows, tile.num_rows, kv_head, tensors.heads.group, tile.first_query, tensors.out
    )
    out, lse = end_rows(
        consume.scoring, tensors.scales, tile, kv_head, head, state.m_log2, state.row_sum, acc, rows
    )
    live = rows < tile.num_rows
    columns = columns_of(acc)[None, :]
    store_outputs(consume.results, out, offset, columns, live, CFG.HEAD_DIM_V)
    store_lse(consume.results, lse, tile, query, head, tokens_q, live)


@gluon.jit
def _consume(consume, shared, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Role of a consumer warp group: attend with 64 rows of each part."""
    sizes, q_ring = shared.sizes, shared.q_ring
    group = _group_of(shared.heads, CFG)
    given = consume.tensors
    heads = DecodeHeads(shared.heads.kv, group)
    tensors = DecodeLayout(given.out, given.q, given.k, given.v, given.scales, heads)
    tile_n: gl.constexpr = CFG.TILE_N
    s_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_N)
    o_rows: gl.constexpr = gl.SliceLayout(1, CFG.accumulator_layout(CFG.SLICE_DV))
    nothing = row_parts(gl.zeros([ROWS, tile_n], gl.float32, s_layout))
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    stages = KvStages(shared.k_ring.tiles, shared.v_ring.tiles, shared_address(CFG.tile_bytes))
    factor = positive_factor(consume.scoring.scale_log2)
    step = 0
    slot = 0
    with_keys = 0
    part = QueryPart(*take(shared.parts, slot))
    while part.kv_head >= 0:
        tile = TileOfQueries(
            part.first_query, part.num_rows, part.used_rows, part.first_row, part.shift,
            part.kv_len, part.kv_lo, part.kv_hi, 0, 0,
        )  # fmt: skip
        plan = VisitPlan(0, 0, part.edge_begin, part.full_begin, part.full_end, part.edge_end)
        masked_tiles, kv_tiles = count_tiles(plan, CFG)
        q_phase = ring_place(with_keys, 1).phase
        if part.first_row + GROUP * ROWS >= part.num_rows:
            # none of its rows exists
            if CFG.HEADS > 0:  # noqa: SIM102
                if kv_tiles > 0:
                    mbarrier.wait(q_ring.full.index(GROUP), q_phase)
                    mbarrier.arrive(q_ring.empty.index(GROUP), count=1)
            skip_tiles(stages, kv_tiles, step, GROUP, CFG)
            step += kv_tiles
            take(shared.verdicts, slot)
        else:
            q = q_ring.tiles.index(GROUP)
            if CFG.HEADS > 0:
                q = _rows_in(q, CFG)
            else:
                _load_queries(consume, q, tile, part.kv_head, group, GROUP, CFG)
            queries = Queries(
                (q,),
                Visit(None, plan, num_masked_blocks(plan), tile.kv_len),
                masked_tiles,
                rows,
                tile.first_row,
                _row_bounds_of(tile, rows, sizes, group, GROUP),
                Score(factor, consume.scoring.inverse_cap),
                Range(tile.kv_lo, tile.kv_len),
                *(None, None, None),
            )
            m_log2, _ = init_state(rows)
            sums = nothing
            acc = zero_outputs(CFG)
            if kv_tiles > 0:
                if CFG.HEADS > 0:
                    mbarrier.wait(q_ring.full.index(GROUP), q_phase)
                m_log2, sums, acc, p = attend_first_tile(
                    queries, stages, 0, step, (m_log2, sums), acc, GROUP, CFG
                )
                # only the first tile may end past the keys, and only the last begin before them
                drop_unseen(queries, stages, 0, ring_place(step, CFG.STAGES), CFG)
                for kv_tile in range(1, kv_tiles):
                    step, m_log2, sums, acc, p = attend_tile(
                        queries, stages, kv_tile, step, (m_log2, sums), acc, p, GROUP, CFG
                    )
                place = ring_place(step, CFG.STAGES)
                if CFG.HEADS > 0:
                    # every score of this part is taken: the next queries may come
                    mbarrier.arrive(q_ring.empty.index(GROUP), count=1)
                drop_unseen(queries, stages, kv_tiles - 1, place, CFG)
                acc = attend_last_values(stages, place, acc, p, CFG)
                step += 1
            row_sum = gl.convert_layout(gl.sum(sums, 1), m_log2.type.layout)
            wrong = take(shared.verdicts, slot)[0]
            row_sum = gl.where(wrong != 0, float("nan"), row_sum)
            complete = True
            if not CFG.WHOLE:  # noqa: SIM102
                if part.first_program < part.last_program:
                    shares = TailPart(
                        0, kv_tiles, gl.program_id(0), part.first_program, part.last_program
                    )
                    complete, m_log2, row_sum, acc = combine(
                        consume.tail, shares, SoftmaxState(m_log2, row_sum), acc, GROUP, CFG
                    )
            if complete:
                state = SoftmaxState(
                    gl.convert_layout(m_log2, o_rows), gl.convert_layout(row_sum, o_rows)
                )
                _write_rows(
                    consume, tensors, tile, part.kv_head, state, acc[0], sizes.tokens_q, GROUP, CFG
                )
        slot += 1
        with_keys += gl.where(kv_tiles > 0, 1, 0)
        part = QueryPart(*take(shared.parts, slot))


@gluon.jit(
    do_not_specialize=[
        "batch", "tokens_q", "tokens_k", "num_slabs", "slots", "capacity", "num_blocks", "left",
        "right", "num_tiles",
    ]
)  # fmt: skip
def _attn_ragged_sm90_kernel(
    results,
    q_ptr,
    q_desc,
    k_desc,
    v_desc,
    tables,
    scoring,
    workspace,
    tail,
    layout,
    batch,
    tokens_q,
    tokens_k,
    num_slabs,
    slots,
    capacity,
    num_blocks,
    left,
    right,
    chunk,
    num_tiles,
    CFG: gl.constexpr,
):
    """Allocate the rings, gather the arguments of the roles, and start them."""
    stages: gl.constexpr = CFG.STAGES
    registers: gl.constexpr = CFG.CONSUMER_REGISTERS
    producer_registers: gl.constexpr = CFG.PRODUCER_REGISTERS
    consumers: gl.constexpr = CFG.CONSUMERS
    if CFG.HEADS > 0:  # noqa: SIM108
        q_smem = ring_memory(q_desc, consumers)
    else:
        q_smem = tiles(k_desc, consumers, ROWS)
    k_smem = tiles(k_desc, stages, CFG.TILE_N)
    v_smem = tiles(v_desc, stages, CFG.TILE_N)
    k_ring = ring(k_smem, stages, CFG.arrivals, CFG.barrier_room)
    v_ring = ring(v_smem, stages, CFG.arrivals, CFG.barrier_room)
    q_ring = ring(q_smem, consumers, 1)
    parts = work_channel(PART_FIELDS, consumers)
    verdicts = work_channel(1, consumers)
    fence_async_shared()

    sizes = RaggedSizes(
        batch, tokens_q, tokens_k, num_slabs, slots, capacity, num_blocks, left, right, chunk
    )
    shared = RaggedShared(q_ring, k_ring, v_ring, parts, verdicts, sizes, layout.tensors.heads)
    produce = RaggedProducer(
        q_desc, k_desc, v_desc, tables, layout.tables.pages, workspace, num_tiles
    )
    consume = RaggedConsumer(results, q_ptr, scoring, layout.tensors, tail)
    gl.warp_specialize(
        [
            (_consume, (consume, shared, 0, CFG)),
            (_consume, (consume, shared, 1, CFG)),
            (_produce, (produce, shared, CFG)),
        ],
        [4, 1],
        [registers, producer_registers],
    )


def attention_ragged(call: RaggedCall) -> None:
    """Fill `out` and `lse` of a validated call."""
    problem = call.problem
    if takes_steps(problem):
        attend_steps(call)
        return
    launch_attn_ragged_sm90(call, ragged_sm90_config(problem, call.top_left), problem.arch.num_sms)


def _queries_descriptor(q: torch.Tensor, config: RaggedSm90Config) -> Any:
    """Of queries as [token, KV head, head of it, dim]."""
    q = q.unflatten(1, (-1, config.HEADS))
    return tensor_descriptor(q, config.q_block(), tma_strides(q))


def launch_attn_ragged_sm90(call: RaggedCall, config: RaggedSm90Config, programs: int) -> None:
    """Fill `out` and `lse`, which is contiguous.

    Takes `2 * programs * tile_m * (TILE_DV + 2)` floats of memory unless the call is
    batch-invariant, and three integers for each query tile.
    """
    q = call.q
    if q.shape[0] * q.shape[1] == 0:
        return
    num_tiles = query_tiles(call.problem, config.tile_m)
    with on_device_of(q):
        records = kernel_records(call)
        groups = 0 if config.WHOLE else 2 * programs * config.CONSUMERS
        parts = scratch((groups, GROUP_ROWS, config.TILE_DV + 2), torch.float32, q.device)
        counters = self_resetting_counters(1 + programs * config.CONSUMERS, q.device)
        lengths = (num_tiles, num_tiles) + ((num_tiles + 1,) if config.DYNAMIC else ())
        plan = (scratch((length,), torch.int32, q.device) for length in lengths)
        workspace = RaggedWorkspace(parts, counters, *plan)
        tile = (config.tile_m, config.TILE_N)
        if config.DYNAMIC:
            launch_order(call, records, workspace, programs, tile, GROUP_ROWS, config.PDL)
        else:
            launch_plan(call, records, workspace, *tile, GROUP_ROWS, config.PDL)
        args = (
            records.results,
            q,
            _queries_descriptor(q, config) if config.HEADS > 0 else None,
            descriptor(call.k, call.page_size, config.k_block()),
            descriptor(call.v, call.page_size, config.v_block()),
            records.tables,
            records.scoring,
            workspace,
            SplitTail(parts, counters),
            records.layout,
            *records.sizes,
            num_tiles,
            config,
        )
        options: dict[str, Any] = {"num_warps": 4, "maxnreg": config.MAX_REGISTERS}
        options["launch_pdl"] = config.PDL
        launch(_attn_ragged_sm90_kernel, programs, args, **options, **hopper_options())
