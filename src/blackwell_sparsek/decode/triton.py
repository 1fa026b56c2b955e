# mypy: ignore-errors
"""Attention of a few new queries over a cache, portable: sm_80 and newer, and the interpreter.

    s[i, j] = scale * q[i] . k[j], softcapped          where query i sees key j
    out[i]  = sum_j exp(s[i, j] - lse[i]) v[j]
    lse[i]  = log(sum_j exp(s[i, j]) + exp(sink))

q, out [B, Hq, Sq, D | Dv], lse [B, Hq, Sq]; caches [B, Hkv, S, D | Dv], or pages of them,
[pages, page_size, Hkv, D | Dv]. The time goes into reading the caches, so every program reads the
same amount: the KV tiles of all sequences and heads lie in one row, of which each of a fixed number
of programs takes an equal stretch. Rows of a tile are the queries of all heads that share a KV
head. A softmax that a stretch cuts is put together by the last of its programs, always in the same
order. Lengths, tables and lists are read on the device. Called by `bsk::attn_decode`.

Limits: D and Dv up to 256, lengths below 2**30. Slots past the lengths and blocks that are not
listed are not read. A length, page or block out of range is not read either; it makes the outputs
of its sequence (and KV head) NaN.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..attention.operands import score_factors, token_strides
from ..calls.decode import DecodeSpec, capacity, kv_heads, page_size
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
from ..device.records import CacheTables, CacheView
from ..device.schedule import owner_of, share_of
from ..device.scores import cap, fold_sign
from ..device.softmax import add_sink, finalise, init_state, softmax_step, softmax_step_down
from ..launch.launcher import launch, on_device_of, resting_words, scratch
from .tuning import DecodeConfig

# Which keys a program of the decode kernel reads: its stretch of the tiles of all sequences.

# Sequences whose lengths are read at a time: as many as a warp scans without the others.
SCAN = tl.constexpr(32)


@triton.jit
def keys_seen(seqlens_ptr, sequence, exists, q_len, capacity, left, right):
    """Length, and the keys that some query sees; a length out of range counts as 0 keys, -1."""
    kv_len = tl.load(seqlens_ptr + sequence, mask=exists, other=0)
    return keys_of_length(kv_len, q_len, capacity, left, right)


@triton.jit
def keys_of_length(kv_len, q_len, capacity, left, right):
    """`keys_seen` of a length that is known."""
    kv_len = tl.where((kv_len >= 0) & (kv_len <= capacity), kv_len, -1)
    lo, hi = kv_range(0, q_len, q_len, tl.maximum(kv_len, 0), left, right)
    return kv_len, lo, hi


@triton.jit
def _tiles_of_sequences(
    seqlens_ptr, first, batch, q_len, capacity, num_blocks, left, right, planes,
    TILE_N: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Tiles of the next SCAN sequences: `planes` times those of their visited keys."""
    sequence = first + tl.arange(0, SCAN)
    exists = sequence < batch
    _, lo, hi = keys_seen(seqlens_ptr, sequence, exists, q_len, capacity, left, right)
    _, count = visited_tiles(lo, hi, num_blocks, TILE_N, BLOCK_KV)
    return tl.where(exists, count * planes, 0)


@triton.jit
def find_share(
    seqlens_ptr, batch, q_len, capacity, num_blocks, left, right, planes,
    TILE_N: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """All tiles, this program's stretch of them, its first sequence, and that one's first tile.

    The first SCAN sequences are read once, which is all there is to most batches.
    """
    first_counts = _tiles_of_sequences(
        seqlens_ptr, 0, batch, q_len, capacity, num_blocks, left, right, planes, TILE_N, BLOCK_KV
    )
    until = tl.cumsum(first_counts, 0)
    total = tl.max(until, 0)
    before = total
    for first in range(SCAN, batch, SCAN):
        counts = _tiles_of_sequences(
            seqlens_ptr, first, batch, q_len, capacity, num_blocks, left, right, planes,
            TILE_N, BLOCK_KV,
        )  # fmt: skip
        total += tl.sum(counts, 0)
    begin, end = share_of(tl.program_id(0), total, tl.num_programs(0))

    sequence = tl.sum(((first_counts > 0) & (until <= begin)).to(tl.int32), 0)
    first_tile = tl.max(tl.where(until <= begin, until, 0), 0)
    for first in range(SCAN, batch, SCAN):
        counts = _tiles_of_sequences(
            seqlens_ptr, first, batch, q_len, capacity, num_blocks, left, right, planes,
            TILE_N, BLOCK_KV,
        )  # fmt: skip
        until = before + tl.cumsum(counts, 0)
        sequence += tl.sum(((counts > 0) & (until <= begin)).to(tl.int32), 0)
        first_tile = tl.maximum(first_tile, tl.max(tl.where(until <= begin, until, 0), 0))
        before = tl.max(until, 0)
    return total, begin, end, sequence, first_tile


# The loops of the decode kernel over the keys of one KV head.


@triton.jit
def attend_cache(
    q, first, last, k_ptr, v_ptr, cache, tile_begin, tile_end, layout, score,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_KV: tl.constexpr, TILE_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Softmax state and accumulators over the tiles `[tile_begin, tile_end)` of one KV head."""
    TILE_DV: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM_V, 16))
    FP8: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth == 8
    offs_n = tl.arange(0, TILE_N)
    offs_d = tl.arange(0, q.shape[1])
    offs_dv = tl.arange(0, TILE_DV)
    m_log2, row_sum = init_state(first)
    acc = tl.zeros([q.shape[0], TILE_DV], tl.float32)
    # a page is looked up while the keys of the tile before it are waited for
    ahead = cache_tile(tile_begin, offs_n, cache, TILE_N, PAGE_SIZE, BLOCK_KV)
    for tile in tl.range(tile_begin, tile_end):
        kv_pos, slab, row, live, wrong = ahead
        ahead = cache_tile(tile + 1, offs_n, cache, TILE_N, PAGE_SIZE, BLOCK_KV)
        k = load_cache_rows(k_ptr, slab, row, layout.k, live, offs_d, HEAD_DIM)
        if FP8:
            k = k.to(tl.float16)
        s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        if score[1] is not None:
            s = cap(s * score[2], score[1])
        visible = within_bounds(kv_pos[None, :], first[:, None], last[:, None]) & live[None, :]
        s = tl.where(wrong[None, :], float("nan"), tl.where(visible, s, -float("inf")))
        m_log2, row_sum, p, rescale = softmax_step(m_log2, row_sum, s, score[0])
        v = load_cache_rows(v_ptr, slab, row, layout.v, live, offs_dv, HEAD_DIM_V)
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
    """As `attend_cache`, with keys down and rows across.

    Tensor cores of Hopper want 64 rows and read them from shared memory; keys are that many, and
    queries are not. Caches are fp8 as bytes, fp8 as words of four (int32), or like q.
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
    scale_log2 = tl.zeros([TILE_M], tl.float32) + score[0]
    if SCALED:
        # keys become fp16 in one step, as bf16 they would need two
        q, up = half_rows(q)
        scale_log2 = scale_log2 * up if score[1] is None else scale_log2
    if WORDS:
        q = as_halves(q)
    q = tl.trans(q)
    m_log2, _ = init_state(first)
    # of each thread's keys, summed up at the end
    sums = tl.zeros([TILE_N, TILE_M], tl.float32)
    acc = tl.zeros([TILE_DV, TILE_M], tl.float32)
    # a page is looked up a tile before its keys are read, the block that tells which two before
    block = listed_block(tile_begin, offs_n, cache, TILE_N, BLOCK_KV)
    next_block = listed_block(tile_begin + 1, offs_n, cache, TILE_N, BLOCK_KV)
    ahead = clamped_tile(tile_begin, block, offs_n, cache, TILE_N, PAGE_SIZE, BLOCK_KV)
    for tile in tl.range(tile_begin, tile_end):
        kv_pos, slab, row, readable, listed, wrong = ahead
        ahead = clamped_tile(tile + 1, next_block, offs_n, cache, TILE_N, PAGE_SIZE, BLOCK_KV)
        next_block = listed_block(tile + 2, offs_n, cache, TILE_N, BLOCK_KV)
        k = load_cache_rows(k_ptr, slab, row, layout.k, readable, offs_d, HEAD_DIM // PACKED)
        if WORDS:
            k = halves(k)
        s = tl.dot(k.to(q.dtype), q, input_precision=PRECISION)
        if score[1] is not None:
            s = cap((s * up[None, :] if SCALED else s) * score[2], score[1])
        visible = within_bounds(kv_pos[:, None], first[None, :], last[None, :])
        if BLOCK_KV is not None:
            visible = visible & (listed[:, None] if len(listed.shape) == 1 else listed)
        s = tl.where(visible, s, -float("inf"))
        m_log2, sums, p, rescale = softmax_step_down(m_log2, sums, s, scale_log2)
        if PAGE_SIZE is not None or BLOCK_KV is not None:
            wrong = wrong[:, None] if len(wrong.shape) == 1 else wrong
            sums = tl.where(wrong, float("nan"), sums)
        v = load_cache_rows(v_ptr, slab, row, layout.v, readable, offs_dv, HEAD_DIM_V // PACKED)
        v = turned_halves(v) if WORDS else tl.trans(v.to(tl.float16) if FP8 else v)
        acc = tl.dot(v, p.to(v.dtype), acc * rescale[None, :], input_precision=PRECISION)
    if WORDS:
        acc = turned_back(acc)
    return m_log2, tl.sum(sums, 0), tl.trans(acc)


@triton.jit
def half_rows(q):
    """Queries in fp16, rows scaled by powers of two into its range, and the factors [rows] left."""
    top = tl.max(tl.abs(q.to(tl.float32)), 1)
    exponent = (top.to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.minimum(tl.maximum(exponent, -126), 126)
    down = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    up = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    return (q.to(tl.float32) * down[:, None]).to(tl.float16), up


FP8 = torch.float8_e4m3fn


class DecodeLayout(NamedTuple):
    """Strides (batch, head, token) of q and out, (batch or page, head, token) of the caches."""

    out: tuple[int, int, int]
    q: tuple[int, int, int]
    k: tuple[int, int, int]
    v: tuple[int, int, int]
    scales: tuple[int, int]
    """Of the heads of k_scale and v_scale; 0 where one number is for all."""
    heads: tuple[int, int]
    """KV heads, and query heads of each."""


@triton.jit
def _row_places(rows, num_rows, kv_head, group, q_len, strides):
    """Query index, query head and offset of packed rows; rows past the last count as the last."""
    rows = tl.minimum(rows, num_rows - 1)
    token = rows // group
    head = kv_head * group + rows % group
    return token, head, tl.cast(head, tl.int64) * strides[1] + token * strides[2]


@triton.jit
def _write(
    results, scoring, m_log2, row_sum, acc, rows, columns, num_rows, batch, kv_head, kv_len, q_len,
    layout, HEAD_DIM_V: tl.constexpr,
):  # fmt: skip
    """End the softmax of packed rows [R] and store outputs and lse; acc and columns are [R, C].

    A row may come more than once, with other columns.
    """
    live = rows < num_rows
    token, head, offset = _row_places(rows, num_rows, kv_head, layout.heads[1], q_len, layout.out)
    if scoring[2] is not None:
        m_log2, row_sum, rescale = add_sink(m_log2, row_sum, tl.load(scoring[2] + head))
        acc *= rescale[:, None]
    row_sum = tl.where(kv_len < 0, float("nan"), row_sum)
    inverse, lse = finalise(m_log2, row_sum)
    if scoring[4] is not None:
        inverse *= tl.load(scoring[4] + kv_head * layout.scales[1])
    out_ptr = results[0] + tl.cast(batch, tl.int64) * layout.out[0]
    tl.store(
        out_ptr + offset[:, None] + columns,
        (acc * inverse[:, None]).to(out_ptr.dtype.element_ty),
        live[:, None] & (columns < HEAD_DIM_V),
    )
    lse_row = (tl.cast(batch, tl.int64) * layout.heads[0] * layout.heads[1] + head) * q_len + token
    tl.store(results[1] + lse_row, lse, live)


@triton.jit(
    do_not_specialize=[
        "page_row_stride", "list_batch_stride", "list_head_stride",
        "batch", "q_len", "capacity", "num_pages", "num_blocks", "left", "right",
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
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    PRECISION: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """One stretch of the KV tiles of all sequences and heads.

    results (out, lse), inputs (q, k_cache, v_cache), tables (cache_seqlens, page_table,
    kv_blocks), scoring (scale_log2, inverse_cap, sinks, k_scale, v_scale), workspace (parts,
    counters).
    """
    TILE_D: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM, 16))
    TILE_DV: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM_V, 16))
    q_ptr, k_ptr, v_ptr = inputs
    num_rows = q_len * layout.heads[1]
    q_tiles = (num_rows + TILE_M - 1) // TILE_M
    planes = layout.heads[0] * q_tiles
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    total, tile, end, sequence, sequence_tile = find_share(
        tables[0], batch, q_len, capacity, num_blocks, left, right, planes, TILE_N, BLOCK_KV
    )
    acc_parts = workspace[0]
    state_parts = acc_parts + tl.cast(2 * programs, tl.int64) * (TILE_M * TILE_DV)
    offs_d = tl.arange(0, TILE_D)
    offs_dv = tl.arange(0, TILE_DV)[None, :]
    while tile < end:
        kv_len, kv_lo, kv_hi = keys_seen(tables[0], sequence, True, q_len, capacity, left, right)
        first_tile, count = visited_tiles(kv_lo, kv_hi, num_blocks, TILE_N, BLOCK_KV)
        plane = (tile - sequence_tile) // count
        plane_tile = sequence_tile + plane * count
        kv_head = plane // q_tiles
        first_row = plane % q_tiles * TILE_M
        stop = tl.minimum(end, plane_tile + count)
        shift = first_tile - plane_tile
        k_head = k_ptr + tl.cast(kv_head, tl.int64) * layout.k[1]
        v_head = v_ptr + tl.cast(kv_head, tl.int64) * layout.v[1]
        page_row = tl.cast(sequence, tl.int64) * page_row_stride
        list_row = tl.cast(sequence, tl.int64) * list_batch_stride + kv_head * list_head_stride
        cache = CacheView(
            CacheTables(tables[1], tables[2], page_row, list_row),
            sequence, num_pages, num_blocks, capacity, kv_lo, kv_hi,
        )  # fmt: skip
        rows = first_row + tl.arange(0, TILE_M)
        token, _, offset = _row_places(rows, num_rows, kv_head, layout.heads[1], q_len, layout.q)
        q_plane = q_ptr + tl.cast(sequence, tl.int64) * layout.q[0]
        live = (rows < num_rows)[:, None] & (offs_d < HEAD_DIM)[None, :]
        q = tl.load(q_plane + offset[:, None] + offs_d[None, :], live, other=0.0)
        k_scale = 1.0
        if scoring[3] is not None:
            k_scale = tl.load(scoring[3] + kv_head * layout.scales[0])
        # under a softcap the factor of the softmax is the cap, and that of keys belongs inside
        q, scale_log2 = fold_sign(q, scoring[0] * k_scale if scoring[1] is None else scoring[0])
        q_pos = position(token, q_len, tl.maximum(kv_len, 0))
        first, last = row_bounds(q_pos, tl.maximum(kv_len, 0), left, right)
        attend: tl.constexpr = attend_across if ACROSS else attend_cache
        m_log2, row_sum, acc = attend(
            q, first, last,
            k_head, v_head, cache, tile + shift, stop + shift,
            layout, (scale_log2, scoring[1], k_scale),
            HEAD_DIM, HEAD_DIM_V, PAGE_SIZE, BLOCK_KV, TILE_N, PRECISION,
        )  # fmt: skip
        begins = owner_of(plane_tile, total, programs)
        ends = owner_of(plane_tile + count - 1, total, programs)
        if begins == ends:
            _write(
                results, scoring, m_log2, row_sum, acc, rows, offs_dv, num_rows, sequence, kv_head,
                kv_len, q_len, layout, HEAD_DIM_V,
            )  # fmt: skip
        else:
            slot = part_slot(program, begins)
            store_part(acc_parts, state_parts, slot, m_log2, row_sum, acc, num_rows - first_row)
            if is_last(workspace[1] + begins, ends - begins + 1):
                tile_rows = tl.minimum(num_rows - first_row, TILE_M)
                for row in range(0, tile_rows, MERGED_ROWS):
                    m_log2_all, row_sum_all, acc_all = merge_parts(
                        acc_parts, state_parts, begins, ends - begins + 1, row, tile_rows,
                        TILE_M, TILE_DV,
                    )  # fmt: skip
                    merged_rows, columns = merged_places(first_row + row, TILE_DV)
                    _write(
                        results, scoring, m_log2_all, row_sum_all, acc_all, merged_rows, columns,
                        first_row + tile_rows, sequence, kv_head, kv_len, q_len, layout,
                        HEAD_DIM_V,
                    )  # fmt: skip
        tile = stop
        finished = stop == sequence_tile + planes * count
        sequence += finished.to(tl.int32)
        sequence_tile = tl.where(finished, stop, sequence_tile)


def launch_attn_decode(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    spec: DecodeSpec,
    config: DecodeConfig,
) -> None:
    """Fill `out` and `lse`.

    Takes `2 * programs * tile_m * (Dv + 2)` floats of memory, Dv rounded up to a power of two,
    whatever the lengths are.

    Parameters
    ----------
    out : [B, Hq, Sq, Dv], contiguous in the last dimension; all of it is written
    lse : fp32 [B, Hq, Sq], contiguous
    q : [B, Hq, Sq, D]
    k_cache, v_cache : [B, Hkv, S, D], or [pages, page_size, Hkv, D] with a page table
    spec : options of the call, validated
    config : tiles and launch options
    """
    batch, heads_q, q_len, dim = q.shape
    if batch * heads_q * q_len == 0:
        return
    heads, pages, dim_v = kv_heads(k_cache, spec), page_size(k_cache, spec), v_cache.shape[-1]
    tile_dv = triton.next_power_of_2(max(dim_v, 16))
    slots = 2 * config.programs
    if config.words and all(has_words(x) for x in (k_cache, v_cache)):
        k_cache, v_cache = k_cache.view(torch.int32), v_cache.view(torch.int32)
    blocks = spec.kv_blocks
    with on_device_of(q):
        args = (
            (out, lse),
            (q, k_cache, v_cache),
            (spec.cache_seqlens, spec.page_table, blocks),
            (
                *score_factors(spec.scale, spec.softcap),
                None if spec.sinks is None else spec.sinks.contiguous(),
                spec.k_scale,
                spec.v_scale,
            ),
            (
                scratch((slots, config.tile_m, tile_dv + 2), torch.float32, q.device),
                resting_words(config.programs, q.device),
            ),
            DecodeLayout(
                token_strides(out),
                token_strides(q),
                _cache_strides(k_cache, pages),
                _cache_strides(v_cache, pages),
                (_scale_stride(spec.k_scale), _scale_stride(spec.v_scale)),
                (heads, heads_q // heads),
            ),
            *_table_strides(spec),
            batch,
            q_len,
            capacity(k_cache, spec),
            k_cache.shape[0],
            0 if blocks is None else blocks.shape[2],
            *spec.band.scalars(),
            dim,
            dim_v,
            pages,
            None if blocks is None else spec.kv_block_size,
            config.tile_m,
            config.tile_n,
            config.precision,
            config.across,
        )
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        if config.registers is not None:
            options["maxnreg"] = config.registers
        launch(_attn_decode_kernel, config.programs, args, **options)


def has_words(cache: torch.Tensor) -> bool:
    """Whether fp8 rows begin and end between words of four, and are long enough to be reordered."""
    lengths = (*cache.stride()[:-1], cache.storage_offset(), cache.shape[-1])
    return cache.dtype == FP8 and cache.shape[-1] > 32 and all(n % 4 == 0 for n in lengths)


def _cache_strides(cache: torch.Tensor, pages: int | None) -> tuple[int, int, int]:
    """Strides of batch or page, of head, of token."""
    return token_strides(cache if pages is None else cache.transpose(1, 2))


def _table_strides(spec: DecodeSpec) -> tuple[int, int, int]:
    """Strides of the page table's rows, and of batch and head of the block lists."""
    table, blocks = spec.page_table, spec.kv_blocks
    of_table = 0 if table is None else table.stride(0)
    return (of_table, *((0, 0) if blocks is None else blocks.stride()[:2]))


def _scale_stride(scale: torch.Tensor | None) -> int:
    return 0 if scale is None or scale.numel() == 1 else 1
