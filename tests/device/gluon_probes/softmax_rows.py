"""A Gluon kernel on scores in memory: every device function that needs no dot product."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blackwell_sparsek.device import masks, visits
from blackwell_sparsek.device.records import CuSeqlens, Heads, MaskLists, Score
from blackwell_sparsek.device.schedule import (
    batch_and_heads,
    head_offset,
    lse_offset,
    raster_group_size,
    raster_place,
    token_span,
)
from blackwell_sparsek.device.scores import cap
from blackwell_sparsek.device.softmax import add_sink, finalise, init_state, softmax_step
from blackwell_sparsek.testing.compile_cases import CompileCase, compile_cases


@gluon.jit
def _probe_kernel(
    out_ptr, lse_ptr, s_ptr, sinks_ptr, cu_seqlens, lists, strides, q_len, kv_len, left, right,
    heads, score, BLOCK_KV: gl.constexpr,
):  # fmt: skip
    """Softmax over the visible scores of 64 rows."""
    M: gl.constexpr = 64
    N: gl.constexpr = 64
    KV_BLOCK: gl.constexpr = N if BLOCK_KV is None else BLOCK_KV
    TILE: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16]
    )
    SCAN: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    q_tiles = (q_len + M - 1) // M
    group = raster_group_size(kv_len, heads.group_size, 256)
    num_heads = gl.num_programs(0) // q_tiles
    batch_head, q_tile = raster_place(gl.program_id(0), num_heads, q_tiles, group)
    batch, q_head, kv_head = batch_and_heads(batch_head, heads.q, heads.group_size)
    q_first, q_len = token_span(cu_seqlens.q, batch, q_len)
    kv_first, kv_len = token_span(cu_seqlens.kv, batch, kv_len)
    q_start = q_tile * M
    s_ptr += head_offset(batch, kv_head, kv_first, strides)
    kv_lo, kv_hi = masks.kv_range(q_start, q_start + M, q_len, kv_len, left, right)
    all_lo, all_hi = masks.kv_range_of_all(q_start, q_start + M, q_len, kv_len, left, right)
    if lists is None:
        plan = visits.plan_dense(kv_lo, kv_hi, all_lo, all_hi, N)
    else:
        scan = gl.arange(0, 128, SCAN)
        plan = visits.plan_blocks(lists, q_tile, kv_lo, kv_hi, all_lo, all_hi, scan, N, BLOCK_KV)
    offs_m = q_start + gl.arange(0, M, gl.SliceLayout(1, TILE))
    offs_n = gl.arange(0, N, gl.SliceLayout(0, TILE))
    q_pos = masks.position(offs_m, q_len, kv_len)
    first, last = masks.row_bounds(q_pos, kv_len, left, right)
    m_log2, row_sum = init_state(q_pos)
    n = visits.num_masked_blocks(plan)
    total = row_sum
    for t in range(visits.num_tiles(n, N, KV_BLOCK)):
        ordinal, kv_in_block = visits.tile_ordinal(t, offs_n, N, KV_BLOCK)
        entry = visits.masked_block(plan, ordinal)
        kv_pos = visits.keys_of_tile(lists, entry, ordinal, n, kv_in_block, kv_len, N, KV_BLOCK)
        s = gl.load(s_ptr + offs_m[:, None] * 4096 + kv_pos[None, :])
        visible = masks.within_bounds(kv_pos[None, :], first[:, None], last[:, None])
        if lists is not None:
            q_in_block = offs_m - q_start
            words = visits.bits_of_tile(
                lists, entry, ordinal, n, q_in_block, kv_in_block, N, KV_BLOCK
            )
            visible = visible & masks.bit_visible(words, kv_in_block[None, :])
        s = cap(s, score.inverse_cap)
        s = gl.where(visible, s, -float("inf"))
        m_log2, row_sum, p, rescale = softmax_step(m_log2, row_sum, s, score.factor)
        total = total * rescale + gl.sum(p, 1)
    if sinks_ptr is not None:
        m_log2, row_sum, rescale = add_sink(m_log2, row_sum, gl.load(sinks_ptr + q_head))
        total = total * rescale
    inverse, lse = finalise(m_log2, row_sum)
    gl.store(out_ptr + offs_m, total * inverse)
    lse_ptr += lse_offset(batch, q_head, q_first, heads.q, q_len, cu_seqlens.q)
    gl.store(lse_ptr + offs_m, lse)


@compile_cases
def _cases():
    indices, scores = torch.int32, torch.float32
    lists = MaskLists(*(indices,) * 5, 64)
    for name, block_kv, packed, inverse_cap in (
        ("dense", None, False, None),
        ("blocks16", 16, True, 0.1),
        ("blocks64", 64, True, None),
    ):
        args = {
            "out_ptr": scores,
            "lse_ptr": scores,
            "s_ptr": scores,
            "sinks_ptr": scores,
            "cu_seqlens": CuSeqlens(*(indices if packed else None,) * 2),
            "lists": None if block_kv is None else lists,
            "strides": (64, 64, 64),
            "q_len": 100,
            "kv_len": 100,
            "left": 3,
            "right": 0,
            "heads": Heads(8, 2),
            "score": Score(0.1, inverse_cap),
            "BLOCK_KV": block_kv,
        }
        yield CompileCase(f"gluon_probe/{name}", _probe_kernel, args, archs=(90,))
