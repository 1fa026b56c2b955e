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

from ...core.launch import launch, on_device_of, resting_words, scratch
from ...device.masks import kv_range, position, row_bounds, within_bounds
from ...device.paging import cache_tile, load_cache_rows, visited_tiles
from ...device.partials import (
    MERGED_ROWS,
    is_last,
    merge_parts,
    part_slot,
    store_part,
)
from ...device.scores import cap, fold_sign
from ...device.shares import owner_of, share_of
from ...device.softmax import add_sink, finalise, init_state, softmax_step
from ...formats.decode_spec import DecodeSpec, capacity, kv_heads, page_size
from .config_decode import DecodeConfig
from .operands import score_factors, token_strides

# Sequences whose lengths are read at a time: as many as a warp scans without the others.
SCAN = tl.constexpr(32)


class DecodeStrides(NamedTuple):
    """Strides (batch, head, token) of q and out, (batch or page, head, token) of the caches."""

    out: tuple[int, int, int]
    q: tuple[int, int, int]
    k: tuple[int, int, int]
    v: tuple[int, int, int]
    scales: tuple[int, int]
    """Of the heads of k_scale and v_scale; 0 where one number is for all."""


@triton.jit
def _keys_seen(seqlens_ptr, sequence, exists, q_len, capacity, left, right):
    """Length, and the keys that some query sees; a length out of range counts as 0 keys, -1."""
    kv_len = tl.load(seqlens_ptr + sequence, mask=exists, other=0)
    return _keys_of_length(kv_len, q_len, capacity, left, right)


@triton.jit
def _keys_of_length(kv_len, q_len, capacity, left, right):
    """`_keys_seen` of a length that is known."""
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
    _, lo, hi = _keys_seen(seqlens_ptr, sequence, exists, q_len, capacity, left, right)
    _, count = visited_tiles(lo, hi, num_blocks, TILE_N, BLOCK_KV)
    return tl.where(exists, count * planes, 0)


@triton.jit
def _find_share(
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


@triton.jit
def _attend_cache(
    q, first, last, k_ptr, v_ptr, cache, tile_begin, tile_end, strides, score,
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
        k = load_cache_rows(k_ptr, slab, row, strides.k, live, offs_d, HEAD_DIM)
        if FP8:
            k = k.to(tl.float16)
        s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        if score[1] is not None:
            s = cap(s * score[2], score[1])
        visible = within_bounds(kv_pos[None, :], first[:, None], last[:, None]) & live[None, :]
        s = tl.where(wrong[None, :], float("nan"), tl.where(visible, s, -float("inf")))
        m_log2, row_sum, p, rescale = softmax_step(m_log2, row_sum, s, score[0])
        v = load_cache_rows(v_ptr, slab, row, strides.v, live, offs_dv, HEAD_DIM_V)
        if FP8:
            v = v.to(tl.float16)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return m_log2, row_sum, acc


@triton.jit
def _row_places(rows, num_rows, kv_head, group, q_len, strides):
    """Query index, query head and offset of packed rows; rows past the last count as the last."""
    rows = tl.minimum(rows, num_rows - 1)
    token = rows // group
    head = kv_head * group + rows % group
    return token, head, tl.cast(head, tl.int64) * strides[1] + token * strides[2]


@triton.jit
def _write(
    results, scoring, m_log2, row_sum, acc, rows, num_rows, batch, kv_head, kv_len, q_len, heads,
    strides, HEAD_DIM_V: tl.constexpr,
):  # fmt: skip
    """End the softmax of packed rows and store outputs and lse."""
    live = rows < num_rows
    token, head, offset = _row_places(rows, num_rows, kv_head, heads[1], q_len, strides.out)
    if scoring[2] is not None:
        m_log2, row_sum, rescale = add_sink(m_log2, row_sum, tl.load(scoring[2] + head))
        acc *= rescale[:, None]
    row_sum = tl.where(kv_len < 0, float("nan"), row_sum)
    inverse, lse = finalise(m_log2, row_sum)
    if scoring[4] is not None:
        inverse *= tl.load(scoring[4] + kv_head * strides.scales[1])
    offs_dv = tl.arange(0, acc.shape[1])
    out_ptr = results[0] + tl.cast(batch, tl.int64) * strides.out[0]
    tl.store(
        out_ptr + offset[:, None] + offs_dv[None, :],
        (acc * inverse[:, None]).to(out_ptr.dtype.element_ty),
        live[:, None] & (offs_dv < HEAD_DIM_V)[None, :],
    )
    lse_row = (tl.cast(batch, tl.int64) * heads[0] * heads[1] + head) * q_len + token
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
    strides,
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
    heads,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One stretch of the KV tiles of all sequences and heads.

    results (out, lse), inputs (q, k_cache, v_cache), tables (cache_seqlens, page_table,
    kv_blocks), scoring (scale_log2, inverse_cap, sinks, k_scale, v_scale), workspace (parts,
    counters), heads (KV heads, query heads of each).
    """
    TILE_D: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM, 16))
    TILE_DV: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM_V, 16))
    q_ptr, k_ptr, v_ptr = inputs
    num_rows = q_len * heads[1]
    q_tiles = (num_rows + TILE_M - 1) // TILE_M
    planes = heads[0] * q_tiles
    total, tile, end, sequence, sequence_tile = _find_share(
        tables[0], batch, q_len, capacity, num_blocks, left, right, planes, TILE_N, BLOCK_KV
    )
    program = tl.program_id(0)
    acc_parts = workspace[0]
    state_parts = acc_parts + tl.cast(2 * tl.num_programs(0), tl.int64) * (TILE_M * TILE_DV)
    offs_d = tl.arange(0, TILE_D)
    while tile < end:
        kv_len, kv_lo, kv_hi = _keys_seen(tables[0], sequence, True, q_len, capacity, left, right)
        first_tile, count = visited_tiles(kv_lo, kv_hi, num_blocks, TILE_N, BLOCK_KV)
        plane = (tile - sequence_tile) // count
        plane_tile = sequence_tile + plane * count
        kv_head = plane // q_tiles
        first_row = plane % q_tiles * TILE_M
        stop = tl.minimum(end, plane_tile + count)
        shift = first_tile - plane_tile
        k_head = k_ptr + tl.cast(kv_head, tl.int64) * strides.k[1]
        v_head = v_ptr + tl.cast(kv_head, tl.int64) * strides.v[1]
        page_row = tl.cast(sequence, tl.int64) * page_row_stride
        list_row = tl.cast(sequence, tl.int64) * list_batch_stride + kv_head * list_head_stride
        cache = (
            (tables[1], tables[2], page_row, list_row),
            sequence, num_pages, num_blocks, capacity, kv_lo, kv_hi,
        )  # fmt: skip
        rows = first_row + tl.arange(0, TILE_M)
        token, _, offset = _row_places(rows, num_rows, kv_head, heads[1], q_len, strides.q)
        q_plane = q_ptr + tl.cast(sequence, tl.int64) * strides.q[0]
        live = (rows < num_rows)[:, None] & (offs_d < HEAD_DIM)[None, :]
        q = tl.load(q_plane + offset[:, None] + offs_d[None, :], live, other=0.0)
        begins = owner_of(plane_tile, total, tl.num_programs(0))
        ends = owner_of(plane_tile + count - 1, total, tl.num_programs(0))
        k_scale = 1.0
        if scoring[3] is not None:
            k_scale = tl.load(scoring[3] + kv_head * strides.scales[0])
        # under a softcap the factor of the softmax is the cap, and that of keys belongs inside
        q, scale_log2 = fold_sign(q, scoring[0] * k_scale if scoring[1] is None else scoring[0])
        q_pos = position(token, q_len, tl.maximum(kv_len, 0))
        first, last = row_bounds(q_pos, tl.maximum(kv_len, 0), left, right)
        m_log2, row_sum, acc = _attend_cache(
            q, first, last,
            k_head, v_head, cache, tile + shift, stop + shift,
            strides, (scale_log2, scoring[1], k_scale),
            HEAD_DIM, HEAD_DIM_V, PAGE_SIZE, BLOCK_KV, TILE_N, PRECISION,
        )  # fmt: skip
        if begins == ends:
            _write(
                results, scoring, m_log2, row_sum, acc, rows, num_rows, sequence, kv_head, kv_len,
                q_len, heads, strides, HEAD_DIM_V,
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
                    _write(
                        results, scoring, m_log2_all, row_sum_all, acc_all,
                        first_row + row + tl.arange(0, MERGED_ROWS), first_row + tile_rows,
                        sequence, kv_head, kv_len, q_len, heads, strides, HEAD_DIM_V,
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
            DecodeStrides(
                token_strides(out),
                token_strides(q),
                _cache_strides(k_cache, pages),
                _cache_strides(v_cache, pages),
                (_scale_stride(spec.k_scale), _scale_stride(spec.v_scale)),
            ),
            *_table_strides(spec),
            batch,
            q_len,
            capacity(k_cache, spec),
            k_cache.shape[0],
            0 if blocks is None else blocks.shape[2],
            *spec.band.scalars(),
            (heads, heads_q // heads),
            dim,
            dim_v,
            pages,
            None if blocks is None else spec.kv_block_size,
            config.tile_m,
            config.tile_n,
            config.precision,
        )
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        launch(_attn_decode_kernel, config.programs, args, **options)


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
