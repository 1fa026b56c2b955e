# mypy: ignore-errors
"""Attention of a few new queries over a cache, portable: sm_80 and newer, and the interpreter.

    s[i, j] = scale * q[i] . k[j], softcapped          where query i sees key j
    out[i]  = sum_j exp(s[i, j] - lse[i]) v[j]
    lse[i]  = log(sum_j exp(s[i, j]) + exp(sink))

q, out [B, Hq, Sq, D | Dv], lse [B, Hq, Sq]; caches [B, Hkv, S, D | Dv], or pages of them, [pages,
page_size, Hkv, D | Dv]. Reading the caches takes most of the time, so every program reads the same
amount (split-KV). A *head tile* is a KV head and up to TILE_M of the rows that share it, rows being
the queries of all its query heads; each head tile of each sequence is one softmax. The KV tiles of
all softmaxes are numbered in order, and each of a fixed number of programs takes an equal range of
them. The part of one softmax in a range is a *split*; the splits of a softmax are combined by the
last of their programs, always in the same order. Lengths, tables and lists are read on the device.
Called as impl "triton" of `bsk::attn_decode`.

Limits: D and Dv up to 576, lengths below 2**30. Slots past the lengths and blocks that are not
listed are not read. A length, page or block out of range is not read either; it makes the outputs
of its sequence (and KV head) NaN.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from ..attention.operands import score_factors, token_strides
from ..device.fp8 import as_halves, halves, turned_back, turned_halves
from ..device.masks import kv_range, position, row_bounds, within_bounds
from ..device.paging import cache_tile, clamped_tile, listed_block, load_cache_rows, visited_tiles
from ..device.partials import (
    MERGED_ROWS,
    is_last,
    merge_parts,
    merged_places,
    part_slot,
    store_part,
)
from ..device.records import Alibi, CacheTables, CacheView, Strides
from ..device.schedule import owner_of, share_of
from ..device.scores import add_slopes, cap, fold_sign
from ..device.softmax import LOG2_E, add_sink, finalise, init_state, softmax_step, softmax_step_down
from ..launch.description import KernelLaunch, run
from .portable_tuning import DecodeConfig, attn_decode_config

if TYPE_CHECKING:
    import torch

    from ..calls.decode import DecodeCall

# Sequences whose lengths are read at a time: as many as a warp scans by itself.
SCAN = tl.constexpr(32)


class DecodeHeads(NamedTuple):
    """KV heads, and the query heads that share each of them."""

    kv: Any
    group: Any


class DecodeResults(NamedTuple):
    """Where results go."""

    out: Any
    lse: Any


class DecodeInputs(NamedTuple):
    """Queries and caches."""

    q: Any
    k: Any
    v: Any


class DecodeTables(NamedTuple):
    """Lengths, and where keys lie; None where there is no table."""

    seqlens: Any
    page_table: Any
    kv_blocks: Any


class DecodeScoring(NamedTuple):
    """Factors of scores (see `score_factors`), sinks, and the scales of an fp8 cache."""

    scale_log2: Any
    inverse_cap: Any
    sinks: Any
    k_scale: Any
    v_scale: Any


class DecodeWorkspace(NamedTuple):
    """Partial results of splits, and what it takes to combine them."""

    partials: Any
    counters: Any
    """Self-resetting: splits of a softmax that have arrived."""
    records: Any
    """Which splits a softmax has, for `combine.py`; None if the last program combines them."""


class ScaleStrides(NamedTuple):
    """Strides between heads of the scales of an fp8 cache; 0 if all heads share one."""

    k: Any
    v: Any


class DecodeLayout(NamedTuple):
    """Strides of all tensors, and the numbers of heads.

    Contains records only: next to plain numbers, their strides of 1 would not compile (see
    `testing.sizes_of_one`).
    """

    out: Strides
    q: Strides
    k: Strides
    v: Strides
    scales: ScaleStrides
    heads: DecodeHeads


class VisitedKeys(NamedTuple):
    """Lengths, bands and limits that decide which keys of each sequence are visited."""

    seqlens_ptr: Any
    batch: Any
    q_len: Any
    capacity: Any
    left: Any
    right: Any
    num_blocks: Any
    """Entries of a list of blocks."""


class TileRange(NamedTuple):
    """KV tiles `[begin, end)` of the `total` of all softmaxes, which one program takes.

    `begin` lies in `sequence`, whose first tile is `sequence_start`.
    """

    total: Any
    begin: Any
    end: Any
    sequence: Any
    sequence_start: Any


class ScoreFactors(NamedTuple):
    """Factors of the scores of one KV head; `k_scale` applies only inside a softcap."""

    scale_log2: Any
    inverse_cap: Any
    k_scale: Any


class HeadTile(NamedTuple):
    """The current softmax: its sequence, the sequence's length (-1: out of range), its KV head."""

    sequence: Any
    kv_len: Any
    kv_head: Any


# Which KV tiles a program takes.


@triton.jit
def keys_seen(keys, sequence, exists):
    """Length, and the keys that some query sees; a length out of range counts as 0 keys, -1."""
    kv_len = tl.load(keys.seqlens_ptr + sequence, mask=exists, other=0)
    return keys_of_length(keys, kv_len)


@triton.jit
def keys_of_length(keys, kv_len):
    """`keys_seen` of a length that is known."""
    kv_len = tl.where((kv_len >= 0) & (kv_len <= keys.capacity), kv_len, -1)
    lo, hi = kv_range(0, keys.q_len, keys.q_len, tl.maximum(kv_len, 0), keys.left, keys.right)
    return kv_len, lo, hi


@triton.jit
def _tiles_of_sequences(keys, first, head_tiles, TILE_N: tl.constexpr, BLOCK_KV: tl.constexpr):
    """KV tiles of the next SCAN sequences, over their `head_tiles`."""
    sequence = first + tl.arange(0, SCAN)
    exists = sequence < keys.batch
    _, lo, hi = keys_seen(keys, sequence, exists)
    _, count = visited_tiles(lo, hi, keys.num_blocks, TILE_N, BLOCK_KV)
    return tl.where(exists, count * head_tiles, 0)


@triton.jit
def find_range(keys, head_tiles, TILE_N: tl.constexpr, BLOCK_KV: tl.constexpr):
    """The `TileRange` of this program.

    The first SCAN sequences are read once, and most batches have no more.
    """
    first_counts = _tiles_of_sequences(keys, 0, head_tiles, TILE_N, BLOCK_KV)
    until = tl.cumsum(first_counts, 0)
    total = tl.max(until, 0)
    before = total
    for first in range(SCAN, keys.batch, SCAN):
        counts = _tiles_of_sequences(keys, first, head_tiles, TILE_N, BLOCK_KV)
        total += tl.sum(counts, 0)
    begin, end = share_of(tl.program_id(0), total, tl.num_programs(0))

    sequence = tl.sum(((first_counts > 0) & (until <= begin)).to(tl.int32), 0)
    sequence_start = tl.max(tl.where(until <= begin, until, 0), 0)
    for first in range(SCAN, keys.batch, SCAN):
        counts = _tiles_of_sequences(keys, first, head_tiles, TILE_N, BLOCK_KV)
        until = before + tl.cumsum(counts, 0)
        sequence += tl.sum(((counts > 0) & (until <= begin)).to(tl.int32), 0)
        sequence_start = tl.maximum(sequence_start, tl.max(tl.where(until <= begin, until, 0), 0))
        before = tl.max(until, 0)
    return TileRange(total, begin, end, sequence, sequence_start)


# The loops over the keys of one KV head.


@triton.jit
def attend_cache(
    q, first, last, k_ptr, v_ptr, cache, tile_begin, tile_end, layout, score,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_KV: tl.constexpr, TILE_N: tl.constexpr, PRECISION: tl.constexpr, alibi=None,
):  # fmt: skip
    """Softmax state and accumulators over the tiles `[tile_begin, tile_end)` of one KV head.

    `alibi` is None, or positions of the rows and the slopes of their heads in base 2.
    """
    TILE_DV: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM_V, 16))
    FP8: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth == 8
    offs_n = tl.arange(0, TILE_N)
    offs_d = tl.arange(0, q.shape[1])
    offs_dv = tl.arange(0, TILE_DV)
    m_log2, row_sum = init_state(first)
    acc = tl.zeros([q.shape[0], TILE_DV], tl.float32)
    # the page of the next tile is looked up while the keys of this one are being loaded
    ahead = cache_tile(tile_begin, offs_n, cache, TILE_N, PAGE_SIZE, BLOCK_KV)
    for tile in tl.range(tile_begin, tile_end):
        keys = ahead
        ahead = cache_tile(tile + 1, offs_n, cache, TILE_N, PAGE_SIZE, BLOCK_KV)
        k = load_cache_rows(k_ptr, keys.slab, keys.row, layout.k, keys.live, offs_d, HEAD_DIM)
        if FP8:
            k = k.to(tl.float16)
        s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        if score.inverse_cap is not None:
            s = cap(s * score.k_scale, score.inverse_cap)
        visible = within_bounds(keys.position[None, :], first[:, None], last[:, None])
        visible = visible & keys.live[None, :]
        scale_log2 = score.scale_log2
        if alibi is not None:
            s = add_slopes(s * scale_log2, alibi, keys.position)
            scale_log2 = 1.0
        s = tl.where(keys.wrong[None, :], float("nan"), tl.where(visible, s, -float("inf")))
        m_log2, row_sum, p, rescale = softmax_step(m_log2, row_sum, s, scale_log2)
        v = load_cache_rows(v_ptr, keys.slab, keys.row, layout.v, keys.live, offs_dv, HEAD_DIM_V)
        if FP8:
            v = v.to(tl.float16)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return m_log2, row_sum, acc


@triton.jit
def attend_across(
    q, first, last, k_ptr, v_ptr, cache, tile_begin, tile_end, layout, score,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_KV: tl.constexpr, TILE_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `attend_cache`, with keys as the rows of products and queries as the columns.

    WGMMA multiplies at least 64 rows and reads them from shared memory; there are that many keys,
    but not that many queries. Caches are fp8 as bytes, fp8 as words of four (int32), or like q.
    """
    TILE_M: tl.constexpr = q.shape[0]
    TILE_DV: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM_V, 16))
    FP8: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth == 8
    WORDS: tl.constexpr = k_ptr.dtype.element_ty == tl.int32
    PACKED: tl.constexpr = 4 if WORDS else 1
    SCALED: tl.constexpr = (FP8 or WORDS) and q.dtype != tl.float16
    offs_n = tl.arange(0, TILE_N)
    offs_d = tl.arange(0, q.shape[1] // PACKED)
    offs_dv = tl.arange(0, TILE_DV // PACKED)
    scale_log2 = tl.zeros([TILE_M], tl.float32) + score.scale_log2
    if SCALED:
        # fp8 converts to fp16 in one step, to bf16 in two
        q, up = half_rows(q)
        scale_log2 = scale_log2 * up if score.inverse_cap is None else scale_log2
    if WORDS:
        q = as_halves(q)
    q = tl.trans(q)
    m_log2, _ = init_state(first)
    # partial sums over each thread's keys, reduced after the loop
    sums = tl.zeros([TILE_N, TILE_M], tl.float32)
    acc = tl.zeros([TILE_DV, TILE_M], tl.float32)
    # a page is looked up one tile ahead of its keys, the block that names it two tiles ahead
    block = listed_block(tile_begin, offs_n, cache, TILE_N, BLOCK_KV)
    next_block = listed_block(tile_begin + 1, offs_n, cache, TILE_N, BLOCK_KV)
    ahead = clamped_tile(tile_begin, block, offs_n, cache, TILE_N, PAGE_SIZE, BLOCK_KV)
    for tile in tl.range(tile_begin, tile_end):
        keys = ahead
        ahead = clamped_tile(tile + 1, next_block, offs_n, cache, TILE_N, PAGE_SIZE, BLOCK_KV)
        next_block = listed_block(tile + 2, offs_n, cache, TILE_N, BLOCK_KV)
        k = load_cache_rows(
            k_ptr, keys.slab, keys.row, layout.k, keys.readable, offs_d, HEAD_DIM // PACKED
        )
        if WORDS:
            k = halves(k)
        s = tl.dot(k.to(q.dtype), q, input_precision=PRECISION)
        if score.inverse_cap is not None:
            s = s * up[None, :] if SCALED else s
            s = cap(s * score.k_scale, score.inverse_cap)
        visible = within_bounds(keys.position[:, None], first[None, :], last[None, :])
        if BLOCK_KV is not None:
            listed = keys.listed
            visible = visible & (listed[:, None] if len(listed.shape) == 1 else listed)
        s = tl.where(visible, s, -float("inf"))
        m_log2, sums, p, rescale = softmax_step_down(m_log2, sums, s, scale_log2)
        if PAGE_SIZE is not None or BLOCK_KV is not None:
            wrong = keys.wrong
            wrong = wrong[:, None] if len(wrong.shape) == 1 else wrong
            sums = tl.where(wrong, float("nan"), sums)
        v = load_cache_rows(
            v_ptr, keys.slab, keys.row, layout.v, keys.readable, offs_dv, HEAD_DIM_V // PACKED
        )
        v = turned_halves(v) if WORDS else tl.trans(v.to(tl.float16) if FP8 else v)
        acc = tl.dot(v, p.to(v.dtype), acc * rescale[None, :], input_precision=PRECISION)
    if WORDS:
        acc = turned_back(acc)
    return m_log2, tl.sum(sums, 0), tl.trans(acc)


@triton.jit
def half_rows(q):
    """Queries in fp16, each row scaled into range by a power of two, and the inverse factors."""
    top = tl.max(tl.abs(q.to(tl.float32)), 1)
    exponent = (top.to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.minimum(tl.maximum(exponent, -126), 126)
    down = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    up = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    return (q.to(tl.float32) * down[:, None]).to(tl.float16), up


# The kernel.


@triton.jit
def _row_places(rows, num_rows, kv_head, group, strides):
    """Query index, query head and offset of packed rows; rows past the last count as the last."""
    rows = tl.minimum(rows, num_rows - 1)
    token = rows // group
    head = kv_head * group + rows % group
    return token, head, tl.cast(head, tl.int64) * strides.head + token * strides.token


@triton.jit
def write_rows(
    results, scoring, layout, work, m_log2, row_sum, acc, rows, columns, end_row, q_len,
    HEAD_DIM_V: tl.constexpr,
):  # fmt: skip
    """Finalise packed rows [R] and store outputs and lse; acc and columns are [R, C].

    Rows from `end_row` on are not stored. A row may occur more than once, with other columns.
    """
    live = rows < end_row
    token, head, offset = _row_places(rows, end_row, work.kv_head, layout.heads.group, layout.out)
    if scoring.sinks is not None:
        m_log2, row_sum, rescale = add_sink(m_log2, row_sum, tl.load(scoring.sinks + head))
        acc *= rescale[:, None]
    row_sum = tl.where(work.kv_len < 0, float("nan"), row_sum)
    inverse, lse = finalise(m_log2, row_sum)
    if scoring.v_scale is not None:
        inverse *= tl.load(scoring.v_scale + work.kv_head * layout.scales.v)
    out_ptr = results.out + tl.cast(work.sequence, tl.int64) * layout.out.batch
    tl.store(
        out_ptr + offset[:, None] + columns,
        (acc * inverse[:, None]).to(out_ptr.dtype.element_ty),
        live[:, None] & (columns < HEAD_DIM_V),
    )
    lse_head = tl.cast(work.sequence, tl.int64) * layout.heads.kv * layout.heads.group + head
    tl.store(results.lse + lse_head * q_len + token, lse, live)


@triton.jit(
    do_not_specialize=[
        "page_row_stride", "list_batch_stride", "list_head_stride",
        "batch", "q_len", "capacity", "num_pages", "num_blocks", "left", "right", "slopes_step",
    ]
)  # fmt: skip
def _attn_decode_kernel(
    results,
    inputs,
    tables,
    scoring,
    workspace,
    layout,
    page_row_stride,
    list_batch_stride,
    list_head_stride,
    batch,
    q_len,
    capacity,
    num_pages,
    num_blocks,
    left,
    right,
    slopes_ptr,
    slopes_step,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    PRECISION: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """Attend over one range of the KV tiles of all softmaxes."""
    tl.static_assert((slopes_ptr is None) or not ACROSS)
    TILE_D: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM, 16))
    TILE_DV: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM_V, 16))
    num_rows = q_len * layout.heads.group
    q_tiles = (num_rows + TILE_M - 1) // TILE_M
    head_tiles = layout.heads.kv * q_tiles
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    keys = VisitedKeys(tables.seqlens, batch, q_len, capacity, left, right, num_blocks)
    mine = find_range(keys, head_tiles, TILE_N, BLOCK_KV)
    tile = mine.begin
    sequence = mine.sequence
    sequence_start = mine.sequence_start
    acc_partials = workspace.partials
    state_partials = acc_partials + tl.cast(2 * programs, tl.int64) * (TILE_M * TILE_DV)
    offs_d = tl.arange(0, TILE_D)
    offs_dv = tl.arange(0, TILE_DV)[None, :]
    while tile < mine.end:
        kv_len, kv_lo, kv_hi = keys_seen(keys, sequence, True)
        first_tile, count = visited_tiles(kv_lo, kv_hi, num_blocks, TILE_N, BLOCK_KV)
        head_tile = (tile - sequence_start) // count
        softmax_start = sequence_start + head_tile * count
        kv_head = head_tile // q_tiles
        first_row = head_tile % q_tiles * TILE_M
        stop = tl.minimum(mine.end, softmax_start + count)
        shift = first_tile - softmax_start
        k_head = inputs.k + tl.cast(kv_head, tl.int64) * layout.k.head
        v_head = inputs.v + tl.cast(kv_head, tl.int64) * layout.v.head
        page_row = tl.cast(sequence, tl.int64) * page_row_stride
        list_row = tl.cast(sequence, tl.int64) * list_batch_stride + kv_head * list_head_stride
        cache = CacheView(
            CacheTables(tables.page_table, tables.kv_blocks, page_row, list_row),
            sequence, num_pages, num_blocks, capacity, kv_lo, kv_hi,
        )  # fmt: skip
        rows = first_row + tl.arange(0, TILE_M)
        token, head, offset = _row_places(rows, num_rows, kv_head, layout.heads.group, layout.q)
        queries = inputs.q + tl.cast(sequence, tl.int64) * layout.q.batch
        live = (rows < num_rows)[:, None] & (offs_d < HEAD_DIM)[None, :]
        q = tl.load(queries + offset[:, None] + offs_d[None, :], live, other=0.0)
        k_scale = 1.0
        if scoring.k_scale is not None:
            k_scale = tl.load(scoring.k_scale + kv_head * layout.scales.k)
        # with a softcap the softmax factor is the cap, and the scale of keys applies inside it
        scale_log2 = scoring.scale_log2
        if scoring.inverse_cap is None:
            scale_log2 = scale_log2 * k_scale
        q, scale_log2 = fold_sign(q, scale_log2)
        score = ScoreFactors(scale_log2, scoring.inverse_cap, k_scale)
        q_pos = position(token, q_len, tl.maximum(kv_len, 0))
        first, last = row_bounds(q_pos, tl.maximum(kv_len, 0), left, right)
        alibi = None
        if slopes_ptr is not None:
            of_sequence = tl.cast(sequence, tl.int64) * slopes_step
            alibi = Alibi(q_pos, tl.load(slopes_ptr + of_sequence + head) * LOG2_E)
        if ACROSS:
            m_log2, row_sum, acc = attend_across(
                q, first, last, k_head, v_head, cache, tile + shift, stop + shift, layout, score,
                HEAD_DIM, HEAD_DIM_V, PAGE_SIZE, BLOCK_KV, TILE_N, PRECISION,
            )  # fmt: skip
        else:
            m_log2, row_sum, acc = attend_cache(
                q, first, last, k_head, v_head, cache, tile + shift, stop + shift, layout, score,
                HEAD_DIM, HEAD_DIM_V, PAGE_SIZE, BLOCK_KV, TILE_N, PRECISION, alibi,
            )  # fmt: skip
        begins = owner_of(softmax_start, mine.total, programs)
        ends = owner_of(softmax_start + count - 1, mine.total, programs)
        work = HeadTile(sequence, kv_len, kv_head)
        if begins == ends:
            write_rows(
                results, scoring, layout, work, m_log2, row_sum, acc, rows, offs_dv, num_rows,
                q_len, HEAD_DIM_V,
            )  # fmt: skip
        else:
            slot = part_slot(program, begins)
            store_part(
                acc_partials, state_partials, slot, m_log2, row_sum, acc, num_rows - first_row
            )
            if is_last(workspace.counters + begins, ends - begins + 1):
                tile_rows = tl.minimum(num_rows - first_row, TILE_M)
                for row in range(0, tile_rows, MERGED_ROWS):
                    m_log2_all, row_sum_all, acc_all = merge_parts(
                        acc_partials, state_partials, begins, ends - begins + 1, row, tile_rows,
                        TILE_M, TILE_DV,
                    )  # fmt: skip
                    merged_rows, columns = merged_places(first_row + row, TILE_DV)
                    write_rows(
                        results, scoring, layout, work, m_log2_all, row_sum_all, acc_all,
                        merged_rows, columns, first_row + tile_rows, q_len, HEAD_DIM_V,
                    )  # fmt: skip
        tile = stop
        finished = stop == sequence_start + head_tiles * count
        sequence += finished.to(tl.int32)
        sequence_start = tl.where(finished, stop, sequence_start)


def decode(call: "DecodeCall") -> "tuple[torch.Tensor, torch.Tensor]":
    """Output and lse, as `empty_results` lays them out."""
    from ..dispatch.machine import fp32_precision

    config = attn_decode_config(call.problem, fp32_precision(call.q.dtype))
    out, lse = call.empty_results()
    launch_attn_decode(out, lse, call, config)
    return out, lse


def launch_attn_decode(
    out: "torch.Tensor", lse: "torch.Tensor", call: "DecodeCall", config: DecodeConfig
) -> None:
    """Fill `out` and `lse`; see `plan_attn_decode`."""
    import torch

    from ..launch.workspace import scratch, self_resetting_counters

    if call.q.shape[:3].numel() == 0:
        return
    k_cache, v_cache = call.k_cache, call.v_cache
    if config.words and has_words(k_cache) and has_words(v_cache):
        k_cache, v_cache = k_cache.view(torch.int32), v_cache.view(torch.int32)
    partials = scratch(partials_shape(config, call.v_cache.shape[-1]), torch.float32, call.q.device)
    workspace = DecodeWorkspace(
        partials, self_resetting_counters(config.programs, call.q.device), None
    )
    run(plan_attn_decode(out, lse, call, (k_cache, v_cache), workspace, config), call.q)


def partials_shape(config: DecodeConfig, dim_v: int) -> tuple[int, int, int]:
    """Shape of the fp32 workspace for splits of softmaxes, whatever the lengths are."""
    return 2 * config.programs, config.tile_m, triton.next_power_of_2(max(dim_v, 16)) + 2


def plan_attn_decode(
    out: Any,
    lse: Any,
    call: Any,
    caches: tuple[Any, Any],
    workspace: DecodeWorkspace,
    config: DecodeConfig,
) -> KernelLaunch | None:
    """The launch that fills `out` and `lse`.

    Parameters
    ----------
    out : [B, Hq, Sq, Dv], contiguous in the last dimension; all of it is written
    lse : fp32 [B, Hq, Sq], contiguous
    call : validated
    caches : those of the call, as they are or as int32 words of fp8 values
    workspace : partials fp32 [*partials_shape(config, Dv)], and counters int32 [config.programs],
        zero before the launch and after it
    config : tiles and launch options
    """
    q, (k_cache, v_cache) = call.q, caches
    batch, heads_q, q_len, dim = q.shape
    if batch * heads_q * q_len == 0:
        return None
    table, blocks, slopes = call.page_table, call.kv_blocks, call.alibi_slopes
    args = (
        DecodeResults(out, lse),
        DecodeInputs(q, k_cache, v_cache),
        DecodeTables(call.cache_seqlens, table, blocks),
        DecodeScoring(
            *score_factors(call.scale, call.softcap),
            None if call.sinks is None else call.sinks.contiguous(),
            call.k_scale,
            call.v_scale,
        ),
        workspace,
        DecodeLayout(
            Strides(*token_strides(out)),
            Strides(*token_strides(q)),
            cache_strides(k_cache, call.page_size),
            cache_strides(v_cache, call.page_size),
            ScaleStrides(scale_stride(call.k_scale), scale_stride(call.v_scale)),
            DecodeHeads(call.kv_heads, heads_q // call.kv_heads),
        ),
        0 if table is None else table.stride(0),
        *((0, 0) if blocks is None else blocks.stride()[:2]),
        batch,
        q_len,
        call.capacity,
        k_cache.shape[0],
        0 if blocks is None else blocks.shape[2],
        *call.band.scalars(),
        slopes,
        0 if slopes is None or slopes.dim() == 1 else slopes.stride(0),
        dim,
        call.v_cache.shape[-1],
        call.page_size,
        None if blocks is None else call.kv_block_size,
        config.tile_m,
        config.tile_n,
        config.precision,
        config.across,
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.registers is not None:
        options["maxnreg"] = config.registers
    return KernelLaunch(_attn_decode_kernel, config.programs, args, options)


def has_words(cache: "torch.Tensor") -> bool:
    """Whether fp8 rows start and end at words of four, and are long enough to be reordered."""
    from .tuning import FP8

    lengths = (*cache.stride()[:-1], cache.storage_offset(), cache.shape[-1])
    return cache.dtype == FP8 and cache.shape[-1] > 32 and all(n % 4 == 0 for n in lengths)


def cache_strides(cache: Any, page_size: int | None) -> Strides:
    """Strides of a cache of either layout."""
    return Strides(*token_strides(cache if page_size is None else cache.transpose(1, 2)))


def scale_stride(scale: Any) -> int:
    """Stride between heads of a scale of an fp8 cache; 0 if all heads share one."""
    return 0 if scale is None or scale.numel() == 1 else 1
