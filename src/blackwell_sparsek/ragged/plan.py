# mypy: ignore-errors
"""How the softmaxes of packed queries are divided among programs, and what their kernels take.

TILE_M rows of one sequence are a *query tile*; with a KV head it is one softmax. The plan, a kernel
of its own, counts the KV tiles that each query tile sees. In the kernels that follow, the KV tiles
of all softmaxes lie in one line, each as long as it takes (`tuning.TILE_UNITS`), and each of a
fixed number of programs takes an equal range, so that one long prompt does not hold up the others.
A tile belongs to the range that it begins in. What a range has of one softmax is a part. WHOLE: a
softmax belongs to the program in whose range it begins, and is not split; its bits then depend on
its own sequence only.

Query tiles are numbered through: those of sequence b begin at `cu_seqlens_q[b] * group // TILE_M +
b`, which leaves each sequence at least as many numbers as it has tiles; the others have no rows.
The queries after the last sequence are one more, without keys, so that every row of the output is
written.

Lengths, offsets and tables are read on the device, so the launches depend on sizes alone.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ..attention.operands import score_factors, token_strides
from ..calls.ragged import RaggedCall
from ..decode.triton import (
    DecodeHeads,
    DecodeLayout,
    ScaleStrides,
    cache_strides,
    scale_stride,
)
from ..device.masks import kv_range_at, range_in_chunks
from ..device.paging import visited_tiles
from ..device.records import Strides
from ..device.schedule import owner_of, share_of
from ..launch.launcher import launch
from . import tuning
from .outputs import Results

# Slots that are counted, or searched, at a time.
SCAN = tl.constexpr(512)
SOFTMAX_COST = tl.constexpr(tuning.SOFTMAX_COST)
TILE_UNITS = tl.constexpr(tuning.TILE_UNITS)
LIGHT_UNITS = tl.constexpr(tuning.LIGHT_UNITS)


class RaggedTables(NamedTuple):
    """Lengths, and where keys lie; None where there is no such tensor."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqlens_k: Any
    seqused_q: Any
    first_key: Any
    slabs: Any
    page_table: Any
    kv_blocks: Any


class RaggedSizes(NamedTuple):
    """Sizes that the launch knows, and the limits of the mask; `chunk` is None without."""

    batch: Any
    tokens_q: Any
    tokens_k: Any
    num_slabs: Any
    """Pages, or rows of a contiguous cache."""
    slots: Any
    """Slots of a sequence."""
    capacity: Any
    """The most keys of a sequence."""
    num_blocks: Any
    left: Any
    right: Any
    chunk: Any


class RaggedScoring(NamedTuple):
    """Factors of scores (see `score_factors`), sinks, slopes, and the scales of an fp8 cache."""

    scale_log2: Any
    inverse_cap: Any
    sinks: Any
    slopes: Any
    k_scale: Any
    v_scale: Any


class RaggedWorkspace(NamedTuple):
    """Parts of softmaxes, self-resetting counters of those that have arrived, and the plan.

    `ends` holds the units of one KV head up to the end of each query tile, `owners` the sequence of
    each. `order` is that of `order.py`, or None.
    """

    partials: Any
    counters: Any
    ends: Any
    owners: Any
    order: Any = None


class TableStrides(NamedTuple):
    """From sequence to sequence of a page table, lists and slopes, and head to head of lists."""

    pages: Any
    lists: Any
    list_heads: Any
    slopes: Any


class RaggedLayout(NamedTuple):
    """Strides of all tensors, and the numbers of heads."""

    tensors: DecodeLayout
    tables: TableStrides


class TileOfQueries(NamedTuple):
    """A query tile: where its rows lie, and the keys `[kv_lo, kv_hi)` that some of them sees."""

    first_query: Any
    """The first query of the sequence, in q."""
    num_rows: Any
    """Rows of the sequence, queries that are not used included."""
    used_rows: Any
    first_row: Any
    """The first row of the tile, among those of the sequence."""
    shift: Any
    """Position of the first query of the sequence."""
    kv_len: Any
    """-1 if a length is out of range."""
    kv_lo: Any
    kv_hi: Any
    first_slot: Any
    """The first key of the sequence among packed keys, otherwise 0."""
    slab: Any
    """The row of a contiguous cache."""


@triton.jit
def _offset(tables, sizes, sequence, exists):
    """First query of a sequence; that of one past the last is the end of q."""
    token = tl.load(tables.cu_seqlens_q + tl.minimum(sequence, sizes.batch), mask=exists, other=0)
    token = tl.minimum(tl.maximum(token, 0), sizes.tokens_q)
    return tl.where(sequence > sizes.batch, sizes.tokens_q, token)


@triton.jit
def _first_tile(tables, sizes, sequence, exists, group, TILE_M: tl.constexpr):
    """Number of the first query tile of a sequence."""
    return _offset(tables, sizes, sequence, exists) * group // TILE_M + sequence


@triton.jit
def _keys_of(tables, sizes, sequence, exists):
    """Length, first slot, slab and first key of a sequence; a length out of range is -1."""
    first_slot = sequence - sequence
    slab = sequence
    most = first_slot + sizes.capacity
    fits = first_slot == 0
    if tables.cu_seqlens_k is not None:
        first_slot = tl.load(tables.cu_seqlens_k + sequence, mask=exists, other=0)
        end = tl.load(tables.cu_seqlens_k + sequence + 1, mask=exists, other=0)
        fits = (first_slot >= 0) & (end >= first_slot) & (end <= sizes.tokens_k)
        most = tl.minimum(end - first_slot, sizes.capacity)
        kv_len = end - first_slot
        slab = sequence - sequence
    if tables.seqlens_k is not None:
        kv_len = tl.load(tables.seqlens_k + sequence, mask=exists, other=0)
    if tables.slabs is not None:
        slab = tl.load(tables.slabs + sequence, mask=exists, other=0)
        fits = fits & (slab >= 0) & (slab < sizes.num_slabs)
    fits = fits & (kv_len >= 0) & (kv_len <= most)
    first_key = sequence - sequence
    if tables.first_key is not None:
        first_key = tl.load(tables.first_key + sequence, mask=exists, other=0)
        fits = fits & (first_key >= 0) & (first_key <= most)
    kv_len = tl.where(exists, tl.where(fits, kv_len, -1), 0)
    return kv_len, first_slot, slab, first_key


@triton.jit
def query_tile(
    tables, sizes, q_tile, sequence, group, TILE_M: tl.constexpr, TOP_LEFT: tl.constexpr
):
    """The `TileOfQueries` with number `q_tile`, which belongs to `sequence`. Scalars or vectors."""
    exists = sequence < sizes.batch
    first_query = _offset(tables, sizes, sequence, sequence <= sizes.batch)
    end_query = _offset(tables, sizes, sequence + 1, exists)
    q_len = tl.maximum(end_query - first_query, 0)
    kv_len, first_slot, slab, first_key = _keys_of(tables, sizes, sequence, exists)
    # padding uses none of its rows
    used = tl.where(exists, q_len, 0)
    if tables.seqused_q is not None:
        used = tl.load(tables.seqused_q + sequence, mask=exists, other=0)
        kv_len = tl.where((used >= 0) & (used <= q_len), kv_len, -1)
        used = tl.minimum(tl.maximum(used, 0), q_len)
    num_keys = tl.maximum(kv_len, 0)
    shift = num_keys - used
    if TOP_LEFT:
        shift = used - used
    first_row = (q_tile - _first_tile(tables, sizes, sequence, True, group, TILE_M)) * TILE_M
    begin = tl.minimum(first_row // group, used)
    end = tl.minimum((first_row + TILE_M - 1) // group + 1, used)
    keys = kv_range_at(begin + shift, end + shift, num_keys, sizes.left, sizes.right)
    keys = range_in_chunks(keys, begin + shift, end - 1 + shift, sizes.chunk)
    kv_lo = tl.maximum(keys.lo, first_key)
    return TileOfQueries(
        first_query, q_len * group, used * group, first_row, shift, kv_len, kv_lo, keys.hi,
        first_slot, slab,
    )  # fmt: skip


@triton.jit
def units_of_tile(tile, LIGHT_ROWS: tl.constexpr):
    """Units of a KV tile, fewer if the query tile has LIGHT_ROWS rows at the most."""
    return tl.where(tile.num_rows - tile.first_row <= LIGHT_ROWS, LIGHT_UNITS, TILE_UNITS)


class TileWork(NamedTuple):
    """The sequence of a query tile, the units of one of its softmaxes, 0 if it has no rows, and
    whether it is light."""

    sequence: Any
    units: Any
    light: Any


@triton.jit
def work_of_tiles(
    q_tile, tables, sizes, group, num_tiles, search_steps, BLOCK_KV: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TOP_LEFT: tl.constexpr, LIGHT_ROWS: tl.constexpr,
):  # fmt: skip
    """The `TileWork` of query tiles.

    Units of SOFTMAX_COST tiles stand for the time in which a softmax begins and ends.
    """
    # the last sequence, or the padding behind it, that begins by this tile
    sequence = q_tile - q_tile
    for step in range(0, search_steps):
        further = sequence + (1 << (search_steps - 1 - step))
        begins = _first_tile(tables, sizes, further, further <= sizes.batch, group, TILE_M)
        sequence = tl.where((further <= sizes.batch) & (begins <= q_tile), further, sequence)
    tile = query_tile(tables, sizes, q_tile, sequence, group, TILE_M, TOP_LEFT)
    _, count = visited_tiles(tile.kv_lo, tile.kv_hi, sizes.num_blocks, TILE_N, BLOCK_KV)
    count = tl.where(tile.first_row < tile.used_rows, count, 1)
    tile_units = units_of_tile(tile, LIGHT_ROWS)
    units = count * tile_units + SOFTMAX_COST * TILE_UNITS
    exists = (tile.first_row < tile.num_rows) & (q_tile < num_tiles)
    return TileWork(sequence, tl.where(exists, units, 0), tile_units < TILE_UNITS)


@triton.jit(
    do_not_specialize=[
        "batch", "tokens_q", "tokens_k", "num_slabs", "slots", "capacity", "num_blocks", "left",
        "right", "num_tiles", "search_steps",
    ]
)  # fmt: skip
def _plan_kernel(
    workspace,
    tables,
    heads,
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
    search_steps,
    BLOCK_KV: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    LIGHT_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add up the units of every query tile; one program.

    PDL: the next kernel may start at once; it waits where it reads the plan.
    """
    if PDL:
        gdc_launch_dependents()
    sizes = RaggedSizes(
        batch, tokens_q, tokens_k, num_slabs, slots, capacity, num_blocks, left, right, chunk
    )
    group = heads.group
    before = 0
    for start in range(0, num_tiles, SCAN):
        q_tile = start + tl.arange(0, SCAN)
        work = work_of_tiles(
            q_tile, tables, sizes, group, num_tiles, search_steps, BLOCK_KV, TILE_M, TILE_N,
            TOP_LEFT, LIGHT_ROWS,
        )  # fmt: skip
        before = store_ends(workspace, q_tile, work, before, num_tiles)


@triton.jit
def store_ends(workspace, q_tile, work, before, num_tiles):
    """Store `ends` and `owners` of neighbouring query tiles with `before` units before them.

    Returns the units up to their end.
    """
    ends = before + tl.cumsum(work.units, 0)
    tl.store(workspace.ends + q_tile, ends, q_tile < num_tiles)
    tl.store(workspace.owners + q_tile, work.sequence, q_tile < num_tiles)
    return tl.max(ends, 0)


class ProgramUnits(NamedTuple):
    """Units of all softmaxes, how many programs share them, and the range of this program."""

    total: Any
    programs: Any
    begin: Any
    end: Any


@triton.jit
def units_of_program(workspace, num_tiles, heads):
    """The `ProgramUnits` of this program."""
    total = tl.load(workspace.ends + num_tiles - 1) * heads
    # a tile begins in every range that is all inside a softmax: no part is missing
    programs = tl.minimum(tl.num_programs(0), tl.maximum(total // TILE_UNITS, 1))
    begin, end = share_of(tl.program_id(0), total, programs)
    return ProgramUnits(total, programs, begin, tl.where(tl.program_id(0) < programs, end, begin))


@triton.jit
def find_query_tile(workspace, unit, num_tiles, offs_scan):
    """The query tile that holds a unit of one head, and the units before it.

    `offs_scan` is any range 0..n: query tiles are looked at n at a time.
    """
    q_tile = 0
    before = 0
    for start in range(0, num_tiles, offs_scan.shape[0]):
        nth = start + offs_scan
        ends = tl.load(workspace.ends + nth, mask=nth < num_tiles, other=2**31 - 1)
        past = ends <= unit
        q_tile += tl.sum(past.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(past, ends, 0), 0))
    return q_tile, before


class SoftmaxPart(NamedTuple):
    """The part of one softmax that a program computes."""

    mine: Any
    """Whether it has anything."""
    kv_head: Any
    first: Any
    """The KV tiles `[first, end)` of those that the softmax visits."""
    end: Any
    first_program: Any
    """The programs that have parts of it, from the first to the last."""
    last_program: Any


@triton.jit
def part_of_softmax(
    at, end, before, count, tile_units, heads, total, programs, WHOLE: tl.constexpr
):
    """The `SoftmaxPart` of the range `[at, end)`, and where what follows it begins.

    `before` and `count` are the units of one head before its query tile, and in it, with those that
    `_plan_kernel` counts for the softmax itself, which come first; KV tiles have `tile_units`.
    """
    kv_head = (at - before * heads) // count
    start = before * heads + kv_head * count
    first_tile = start + SOFTMAX_COST * TILE_UNITS
    stop = tl.minimum(end, start + count)
    first_program = owner_of(first_tile, total, programs)
    last_program = owner_of(start + count - tile_units, total, programs)
    first = (tl.maximum(at - first_tile, 0) + tile_units - 1) // tile_units
    mine = first_tile + first * tile_units < stop
    if WHOLE:
        mine = at == start
        stop = start + count
        last_program = first_program
    end_tile = (stop - first_tile + tile_units - 1) // tile_units
    return SoftmaxPart(mine, kv_head, first, end_tile, first_program, last_program), stop


class KernelRecords(NamedTuple):
    """The arguments of a call that its kernels share."""

    results: Results
    tables: RaggedTables
    scoring: RaggedScoring
    layout: RaggedLayout
    sizes: RaggedSizes


def kernel_records(call: RaggedCall) -> KernelRecords:
    """The tensors and numbers of a call that kernels take."""
    q, k, v = call.q, call.k, call.v
    table, blocks, slopes = call.page_table, call.kv_blocks, call.alibi_slopes
    heads_q = q.shape[1]
    return KernelRecords(
        Results(call.out, call.lse),
        RaggedTables(
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            call.seqlens_k,
            call.seqused_q,
            call.first_key,
            call.slabs,
            table,
            blocks,
        ),
        RaggedScoring(
            *score_factors(call.scale, call.softcap),
            None if call.sinks is None else call.sinks.contiguous(),
            None if slopes is None else slopes.contiguous(),
            call.k_scale,
            call.v_scale,
        ),
        RaggedLayout(
            DecodeLayout(
                Strides(*token_strides(call.out)),
                Strides(*token_strides(q)),
                cache_strides(k, call.page_size),
                cache_strides(v, call.page_size),
                ScaleStrides(scale_stride(call.k_scale), scale_stride(call.v_scale)),
                DecodeHeads(call.kv_heads, heads_q // call.kv_heads),
            ),
            TableStrides(
                0 if table is None else table.stride(0),
                *((0, 0) if blocks is None else blocks.stride()[:2]),
                0 if slopes is None or slopes.dim() == 1 else heads_q,
            ),
        ),
        RaggedSizes(
            call.batch,
            q.shape[0],
            0 if call.cu_seqlens_k is None else k.shape[0],
            k.shape[0],
            call.slots,
            call.capacity,
            0 if blocks is None else blocks.shape[2],
            *call.band.scalars(),
            call.chunk or None,
        ),
    )


def launch_plan(
    call: RaggedCall,
    records: KernelRecords,
    workspace: RaggedWorkspace,
    tile_m: int,
    tile_n: int,
    light_rows: int = 0,
    pdl: bool = False,
) -> None:
    """Fill `ends` and `owners` of the workspace for query tiles of `tile_m` rows.

    Those with up to `light_rows` rows take less time.
    """
    heads = records.layout.tensors.heads
    block_kv = None if call.kv_blocks is None else call.kv_block_size
    num_tiles, steps = workspace.ends.numel(), call.batch.bit_length()
    plan = (workspace, records.tables, heads, *records.sizes, num_tiles, steps, block_kv)
    constants = (tile_m, tile_n, call.top_left, light_rows, pdl)
    launch(_plan_kernel, 1, (*plan, *constants), num_warps=4)
