# mypy: ignore-errors
"""Packed queries over a cache, portable: sm_80 and newer, and the interpreter.

    s[i, j] = scale * q[i] . k[j], softcapped, less slope * |p_i - j|     where query i sees key j
    out[i]  = sum_j exp(s[i, j] - lse[i]) v[j]
    lse[i]  = log(sum_j exp(s[i, j]) + exp(sink))

q, out [Tq, Hq, D | Dv], lse [Hq, Tq]; keys and values [B, Hkv, S, D | Dv], pages of them,
[pages, page_size, Hkv, D | Dv], or packed [Tk, Hkv, D | Dv]. Rows are the queries of all heads that
share a KV head.

`plan.py` divides the KV tiles of all softmaxes among a fixed number of programs. The last of those
that share a softmax combines their parts, always in the same order (`device.partials`). Called as
impl "triton" of `bsk::attn_ragged`.

Limits: D and Dv up to 256, lengths below 2**30. A length, page, block or row of the cache out of
range is not read; it makes the outputs of its sequence (and KV head) NaN.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..calls.ragged import RaggedCall
from ..decode.triton import ScoreFactors, attend_cache
from ..device.masks import bounds_in_chunk, row_bounds
from ..device.paging import visited_tiles
from ..device.partials import (
    MERGED_ROWS,
    is_last,
    merge_parts,
    merged_places,
    part_slot,
    store_part,
)
from ..device.records import Alibi, CacheTables, CacheView
from ..device.scores import fold_sign
from ..device.softmax import LOG2_E
from ..dispatch.machine import fp32_precision
from ..launch.launcher import launch, on_device_of
from ..launch.workspace import scratch, self_resetting_counters
from .outputs import row_places, write_rows
from .plan import (
    SCAN,
    TILE_UNITS,
    RaggedSizes,
    RaggedWorkspace,
    find_query_tile,
    kernel_records,
    launch_plan,
    part_of_softmax,
    query_tile,
    units_of_program,
)
from .tuning import RaggedConfig, query_tiles, ragged_config


class Inputs(NamedTuple):
    """Queries, keys and values."""

    q: Any
    k: Any
    v: Any


@triton.jit(
    do_not_specialize=[
        "batch", "tokens_q", "tokens_k", "num_slabs", "slots", "capacity", "num_blocks", "left",
        "right", "num_tiles",
    ]
)  # fmt: skip
def _attn_ragged_kernel(
    results,
    inputs,
    tables,
    scoring,
    workspace,
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
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    PRECISION: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Attend over one range of the KV tiles of all softmaxes."""
    TILE_D: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM, 16))
    TILE_DV: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM_V, 16))
    sizes = RaggedSizes(
        batch, tokens_q, tokens_k, num_slabs, slots, capacity, num_blocks, left, right, chunk
    )
    tensors = layout.tensors
    group = tensors.heads.group
    heads = tensors.heads.kv
    program = tl.program_id(0)
    total, programs, begin, end = units_of_program(workspace, num_tiles, heads)
    q_tile, before = find_query_tile(workspace, begin // heads, num_tiles, tl.arange(0, SCAN))
    acc_partials = workspace.partials
    slots_of_parts = tl.cast(2 * tl.num_programs(0), tl.int64)
    state_partials = acc_partials + slots_of_parts * (TILE_M * TILE_DV)
    offs_d = tl.arange(0, TILE_D)
    offs_dv = tl.arange(0, TILE_DV)[None, :]
    at = begin
    while at < end:
        tile_end = tl.load(workspace.ends + q_tile)
        count = tile_end - before
        if count == 0:
            q_tile += 1
        else:
            sequence = tl.load(workspace.owners + q_tile)
            tile = query_tile(tables, sizes, q_tile, sequence, group, TILE_M, TOP_LEFT)
            first_tile, _ = visited_tiles(tile.kv_lo, tile.kv_hi, num_blocks, TILE_N, BLOCK_KV)
            part, stop = part_of_softmax(
                *(at, end, before, count, TILE_UNITS, heads, total, programs), WHOLE
            )
            kv_head = part.kv_head
            if part.mine:
                unused = tile.first_row >= tile.used_rows
                # tiles of unused rows are counted as one, whatever is listed; padding has no list
                kv_hi = tl.where(unused, tile.kv_lo, tile.kv_hi)
                listed = tl.where(unused, 0, num_blocks)
                packed = tl.cast(tile.first_slot, tl.int64)
                k_head = inputs.k + tl.cast(kv_head, tl.int64) * tensors.k.head
                v_head = inputs.v + tl.cast(kv_head, tl.int64) * tensors.v.head
                k_head += packed * tensors.k.token
                v_head += packed * tensors.v.token
                page_row = tl.cast(sequence, tl.int64) * layout.tables.pages
                list_row = tl.cast(sequence, tl.int64) * layout.tables.lists
                list_row += kv_head * layout.tables.list_heads
                cache = CacheView(
                    CacheTables(tables.page_table, tables.kv_blocks, page_row, list_row),
                    tile.slab, num_slabs, listed, slots, tile.kv_lo, kv_hi,
                )  # fmt: skip
                rows = tile.first_row + tl.arange(0, TILE_M)
                query, head, offset = row_places(
                    rows, tile.num_rows, kv_head, group, tile.first_query, tensors.q
                )
                live = (rows < tile.num_rows)[:, None] & (offs_d < HEAD_DIM)[None, :]
                q = tl.load(inputs.q + offset[:, None] + offs_d[None, :], live, other=0.0)
                k_scale = 1.0
                if scoring.k_scale is not None:
                    k_scale = tl.load(scoring.k_scale + kv_head * tensors.scales.k)
                # under a softcap the factor of the softmax is the cap, that of keys is inside
                scale_log2 = scoring.scale_log2
                if scoring.inverse_cap is None:
                    scale_log2 = scale_log2 * k_scale
                q, scale_log2 = fold_sign(q, scale_log2)
                score = ScoreFactors(scale_log2, scoring.inverse_cap, k_scale)
                q_pos = query + tile.shift
                bounds = row_bounds(q_pos, tl.maximum(tile.kv_len, 0), left, right)
                first, last = bounds_in_chunk(bounds, q_pos, chunk)
                last = tl.where(rows < tile.used_rows, last, -1)
                alibi = None
                if scoring.slopes is not None:
                    of_sequence = tl.cast(sequence, tl.int64) * layout.tables.slopes
                    known = sequence < batch
                    slopes = tl.load(scoring.slopes + of_sequence + head, mask=known, other=0.0)
                    alibi = Alibi(q_pos, slopes * LOG2_E)
                m_log2, row_sum, acc = attend_cache(
                    q, first, last, k_head, v_head, cache, first_tile + part.first,
                    first_tile + part.end, tensors, score, HEAD_DIM, HEAD_DIM_V, PAGE_SIZE,
                    BLOCK_KV, TILE_N, PRECISION, alibi,
                )  # fmt: skip
                begins = part.first_program
                parts = part.last_program - begins + 1
                if parts == 1:
                    write_rows(
                        results, scoring, tensors, tile, kv_head, m_log2, row_sum, acc, rows,
                        offs_dv, tile.num_rows, tokens_q, HEAD_DIM_V,
                    )  # fmt: skip
                else:
                    tile_rows = tl.minimum(tile.num_rows - tile.first_row, TILE_M)
                    store_part(
                        acc_partials, state_partials, part_slot(program, begins), m_log2, row_sum,
                        acc, tile_rows,
                    )  # fmt: skip
                    if is_last(workspace.counters + begins, parts):
                        for row in range(0, tile_rows, MERGED_ROWS):
                            m_log2_all, row_sum_all, acc_all = merge_parts(
                                acc_partials, state_partials, begins, parts, row, tile_rows,
                                TILE_M, TILE_DV,
                            )  # fmt: skip
                            merged_rows, columns = merged_places(tile.first_row + row, TILE_DV)
                            write_rows(
                                results, scoring, tensors, tile, kv_head, m_log2_all, row_sum_all,
                                acc_all, merged_rows, columns, tile.first_row + tile_rows,
                                tokens_q, HEAD_DIM_V,
                            )  # fmt: skip
            at = stop
            if stop == tile_end * heads:
                q_tile += 1
                before = tile_end


def attention_ragged(call: RaggedCall) -> None:
    """Fill `out` and `lse` of a validated call."""
    launch_attn_ragged(call, ragged_config(call.problem, fp32_precision(call.q.dtype)))


def launch_attn_ragged(call: RaggedCall, config: RaggedConfig) -> None:
    """Fill `out` and `lse`, which is contiguous.

    Takes `2 * programs * tile_m * (Dv + 2)` floats of memory, Dv rounded up to a power of two, and
    two integers for each query tile.
    """
    q, k, v = call.q, call.k, call.v
    tokens, heads_q, dim = q.shape
    if tokens * heads_q == 0:
        return
    dim_v = v.shape[-1]
    tile_dv = triton.next_power_of_2(max(dim_v, 16))
    num_tiles = query_tiles(call.problem, config.tile_m)
    with on_device_of(q):
        records = kernel_records(call)
        parts = 0 if call.batch_invariant else 2 * config.programs
        workspace = RaggedWorkspace(
            scratch((parts, config.tile_m, tile_dv + 2), torch.float32, q.device),
            self_resetting_counters(config.programs, q.device),
            scratch((num_tiles,), torch.int32, q.device),
            scratch((num_tiles,), torch.int32, q.device),
        )
        launch_plan(call, records, workspace, config.tile_m, config.tile_n)
        args = (
            records.results,
            Inputs(q, k, v),
            records.tables,
            records.scoring,
            workspace,
            records.layout,
            *records.sizes,
            num_tiles,
            dim,
            dim_v,
            call.page_size,
            None if call.kv_blocks is None else call.kv_block_size,
            config.tile_m,
            config.tile_n,
            config.precision,
            call.top_left,
            call.batch_invariant,
        )
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        launch(_attn_ragged_kernel, config.programs, args, **options)
