# mypy: ignore-errors
"""Shared by the roles of the Hopper backward: records, rings in shared memory, step descriptions.

Used by the kernel that computes all gradients (`backward`) and by the one of dk and dv alone
(`backward_split`): both keep keys and values in shared memory and walk over tiles of queries.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.gluon.pipeline import barriers, tile_place, tiles
from ...device.gluon.records import WorkChannel
from ...device.records import Band, CuSeqlens, Heads, Lengths, Mask
from ...device.schedule import token_span
from ...launch.descriptors import GROUP_ROWS
from .config import INFO_DEPTH, ROW_PADDING

ROWS = gl.constexpr(GROUP_ROWS)
DEPTH = gl.constexpr(INFO_DEPTH)
PADDING = gl.constexpr(ROW_PADDING)


class ResidentKeys(NamedTuple):
    """Keys and values of a work tile: tiles of 64 rows, or slices, and a barrier pair for all."""

    k_smem: Any
    v_smem: Any
    full: Any
    empty: Any


class QueryRing(NamedTuple):
    """Tiles of queries and output gradients in flight, with lse in base 2 and delta.

    `dout_full` and `dout_empty` are `full` and `empty` unless `CFG.SPLIT_RING`.
    """

    q_smem: Any
    dout_smem: Any
    lse_smem: Any
    delta_smem: Any
    full: Any
    empty: Any
    dout_full: Any
    dout_empty: Any


class Shared(NamedTuple):
    """Shared by producer and consumers."""

    mask: Mask
    keys: ResidentKeys
    queries: QueryRing
    steps: Any
    """Shared memory of step descriptions, see `StepInfo`."""
    work: WorkChannel
    """Channel from the producer: first a work tile, then the tiles of each visit."""
    lengths: Lengths
    """Of all sequences; in the producer, of the sequence of a work tile; see `lengths_of_step`."""
    heads: Heads
    band: Band
    cu_seqlens: CuSeqlens
    """None if sequences are not packed. In lse, delta and the sums of dq, each sequence begins at a
    multiple of `PADDING` rows; a head has `head_rows` rows in all."""


class Descriptors(NamedTuple):
    """Tensors that the producer copies, lse and delta one number for each query."""

    q: Any
    dout: Any
    lse: Any
    delta: Any
    k: Any
    v: Any


class WorkPointers(NamedTuple):
    """Counters and lists in memory, int32 each."""

    counter: Any
    """Of the work tiles that were claimed."""
    order: Any = None
    """KV tiles in the order in which programs take them; None for raster order. If `visits` are
    planned, it begins with the place of the first tile of each program, and of the end."""
    semaphore: Any = None
    """With `CFG.ORDERED`, how many KV tiles have added to each [64, 64] of dq:
    [batch * heads, rows / 64, 2]."""
    ranks: Any = None
    """With `CFG.ORDERED` and a mask, how many KV tiles add to dq of each listed block earlier."""
    visits: Any = None
    """Query blocks in the order in which each of `visit_heads` heads visits them, if planned."""


class WorkOrder(NamedTuple):
    """The lists by which the producer finds work tiles; see `WorkPointers`."""

    counter: Any
    order: Any
    ranks: Any
    visits: Any
    visit_heads: Any
    num_batch_heads: Any
    """(batch, KV head) pairs."""
    raster_group: Any
    """(batch, KV head) pairs that run together, so that their queries stay in L2."""
    head_splits: Any
    """Shares into which the query heads of a KV head are divided. `num_batch_heads` and the group
    size count each share as a KV head of its own."""


class StepInfo(NamedTuple):
    """The description of a step. Queries of a tile have two parts, of 64 queries or a mask block.

    (batch, head) of the queries, -1 for the end; then for each part the first query, the row of the
    bit pool or -1, and its rank: how many KV tiles add to its dq before this one. Of packed
    sequences also the row of their first query (see `Shared`) and their lengths, which consumers
    read from here because registers are scarce in their loops.
    """

    batch_head: Any
    q_row: Any
    second_q_row: Any
    bits_id: Any
    second_bits_id: Any
    rank: Any
    second_rank: Any
    first_row: Any = None
    q_len: Any = None
    kv_len: Any = None


class SumRow(NamedTuple):
    """A row among lse, delta and the sums of dq of a head, and how many of them a head has."""

    row: Any
    rows: Any


# The place of each field in a step; the second part of a field follows the first.
BATCH_HEAD = gl.constexpr(StepInfo._fields.index("batch_head"))
Q_ROW = gl.constexpr(StepInfo._fields.index("q_row"))
BITS_ID = gl.constexpr(StepInfo._fields.index("bits_id"))
RANK = gl.constexpr(StepInfo._fields.index("rank"))
FIRST_ROW = gl.constexpr(StepInfo._fields.index("first_row"))
Q_LEN = gl.constexpr(StepInfo._fields.index("q_len"))
KV_LEN = gl.constexpr(StepInfo._fields.index("kv_len"))
PACKED_FIELDS = gl.constexpr(len(StepInfo._fields))
# without the fields of packed sequences
DENSE_FIELDS = gl.constexpr(StepInfo._fields.index("first_row"))


@gluon.jit
def step_infos(FIELDS: gl.constexpr = DENSE_FIELDS):
    """Shared memory for the descriptions of the steps in flight, FIELDS numbers each."""
    return gl.allocate_shared_memory(
        gl.int32, [DEPTH * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )


@gluon.jit
def read_info(steps, step, field: gl.constexpr, WARPS: gl.constexpr):
    """One field of a step, read by WARPS warps."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    fields: gl.constexpr = steps.shape[0] // DEPTH
    return gl.max(steps.index(step % DEPTH * fields + field).load(lanes), 0)


@gluon.jit
def write_info(steps, step, info):
    """Describe a step; the description of the step `DEPTH` before is no longer read."""
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    zero = gl.full([1], 0, gl.int32, lane)
    fields: gl.constexpr = steps.shape[0] // DEPTH
    for i in gl.static_range(fields):
        steps.index(step % DEPTH * fields + i).store(zero + info[i])


@gluon.jit
def lengths_of_step(shared, step):
    """Lengths of the sequences that a step belongs to, for a consumer."""
    lengths = shared.lengths
    if shared.cu_seqlens is not None:
        q_len = read_info(shared.steps, step, Q_LEN, 4)
        lengths = Lengths(q_len, read_info(shared.steps, step, KV_LEN, 4))
    return lengths


@gluon.jit
def sum_row(steps, head_rows, q_len, step, PART: gl.constexpr, WARPS: gl.constexpr):
    """The `SumRow` of the first query of a part of a step.

    `head_rows` are those of packed sequences, or None; `q_len` is that of others.
    """
    row = read_info(steps, step, Q_ROW + PART, WARPS)
    rows = padded_queries(q_len)
    if head_rows is not None:
        # no part of a packed sequence is without queries: only masks make those
        row += read_info(steps, step, FIRST_ROW, WARPS)
        rows = head_rows
    return SumRow(row, rows)


@gluon.jit
def place_of_keys(shared, batch_head, kv_heads):
    """The place of the keys of a (batch, KV head) for `tile_at`, to store their gradients."""
    batch = batch_head // kv_heads
    head = batch_head % kv_heads
    if shared.cu_seqlens is not None:
        kv_ptr = shared.cu_seqlens.kv
        kv_span = token_span(kv_ptr, batch, 0)
        place = tile_place(kv_ptr, batch, head, kv_span.first, kv_span.length)
    else:
        place = tile_place(None, batch, head, 0, shared.lengths.kv)
    return place


@gluon.jit
def padded_queries(q_len):
    """Rows of lse, delta and dq sums of a (batch, head); a part without queries begins there."""
    return (q_len + PADDING - 1) // PADDING * PADDING


@gluon.jit
def resident_keys(descs, CFG: gl.constexpr):
    """Allocate memory and barriers for the keys and values of a work tile."""
    consumers: gl.constexpr = CFG.CONSUMERS
    row_tiles: gl.constexpr = CFG.tile_n // ROWS
    k_smem = tiles(descs.k, row_tiles * CFG.d_slices, ROWS)
    v_smem = tiles(descs.v, row_tiles * CFG.dv_slices, ROWS)
    return ResidentKeys(k_smem, v_smem, barriers(1, 1).index(0), barriers(1, consumers).index(0))


@gluon.jit
def query_ring(descs, CFG: gl.constexpr):
    """Allocate the ring of query tiles."""
    stages: gl.constexpr = CFG.STAGES
    dout_stages: gl.constexpr = CFG.DOUT_STAGES
    tile_m: gl.constexpr = CFG.TILE_M
    consumers: gl.constexpr = CFG.CONSUMERS
    vector: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    q_smem = tiles(descs.q, stages * CFG.d_slices, tile_m)
    dout_smem = tiles(descs.dout, dout_stages * CFG.dv_slices, tile_m)
    lse_smem = gl.allocate_shared_memory(gl.float32, [stages, tile_m], vector)
    delta_smem = gl.allocate_shared_memory(gl.float32, [dout_stages, tile_m], vector)
    full = barriers(stages, 1)
    empty = barriers(stages, consumers)
    dout_full = full
    dout_empty = empty
    if CFG.SPLIT_RING:
        dout_full = barriers(dout_stages, 1)
        dout_empty = barriers(dout_stages, consumers)
    return QueryRing(q_smem, dout_smem, lse_smem, delta_smem, full, empty, dout_full, dout_empty)
