"""A Gluon kernel on scores and dp in memory: the device functions of the backward pass."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blackwell_sparsek.device import masks, visits
from blackwell_sparsek.device.backprop import probabilities, score_gradients, shift_of_rows
from blackwell_sparsek.device.records import MaskLists, Score
from blackwell_sparsek.testing.compile_cases import CompileCase, compile_cases


@gluon.jit
def _gradient_probe_kernel(
    p_ptr, ds_ptr, s_ptr, dp_ptr, lse_ptr, delta_ptr, lists, q_len, kv_len, left, right, score,
    BLOCK_Q: gl.constexpr,
):  # fmt: skip
    """Weights and score gradients of 64 keys (rows) over all queries that see them."""
    N: gl.constexpr = 64
    M: gl.constexpr = 64
    Q_BLOCK: gl.constexpr = M if BLOCK_Q is None else BLOCK_Q
    TILE: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, M, 16]
    )
    kv_start = gl.program_id(0) * N
    offs_n = kv_start + gl.arange(0, N, gl.SliceLayout(1, TILE))
    offs_m = gl.arange(0, M, gl.SliceLayout(0, TILE))
    q_lo, q_hi = masks.q_range(kv_start, kv_start + N, q_len, kv_len, left, right)
    all_lo, all_hi = masks.q_range_of_all(kv_start, kv_start + N, q_len, kv_len, left, right)
    if lists is None:
        plan = visits.plan_dense(q_lo, q_hi, all_lo, all_hi, M)
    else:
        scan = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
        row = gl.program_id(0)
        plan = visits.plan_blocks(lists, row, q_lo, q_hi, all_lo, all_hi, scan, M, BLOCK_Q)
    first, last = masks.column_bounds(offs_n, q_len, kv_len, left, right)
    count = visits.num_masked_blocks(plan)
    for t in range(visits.num_tiles(count, M, Q_BLOCK)):
        ordinal, q_in_block = visits.tile_ordinal(t, offs_m, M, Q_BLOCK)
        entry = visits.masked_block(plan, ordinal)
        q_index = visits.keys_of_tile(lists, entry, ordinal, count, q_in_block, q_len, M, Q_BLOCK)
        visible = masks.within_bounds(q_index[None, :], first[:, None], last[:, None])
        if lists is not None:
            kv_in_block = offs_n - kv_start
            words = visits.bits_of_query_tile(
                lists, entry, ordinal, count, kv_in_block, q_in_block, M, Q_BLOCK
            )
            visible = visible & masks.bit_visible(words, kv_in_block[:, None])
        lse = gl.load(lse_ptr + q_index, mask=masks.exists(q_index, q_len), other=-float("inf"))
        delta = gl.load(delta_ptr + q_index, mask=masks.exists(q_index, q_len), other=0.0)
        at = offs_n[:, None] * 4096 + q_index[None, :]
        s, dp = gl.load(s_ptr + at), gl.load(dp_ptr + at)
        p, capped = probabilities(s, visible, shift_of_rows(lse)[None, :], score)
        gl.store(p_ptr + at, p)
        gl.store(ds_ptr + at, score_gradients(p, capped, dp, delta[None, :], score))


@compile_cases
def _cases():
    scores = torch.float32
    for name, block_q, inverse_cap in (("dense", None, None), ("blocks16-capped", 16, 0.1)):
        args = {
            **{f"{name}_ptr": scores for name in ("p", "ds", "s", "dp", "lse", "delta")},
            "lists": None if block_q is None else MaskLists(*(torch.int32,) * 5, 64),
            "q_len": 100,
            "kv_len": 100,
            "left": 3,
            "right": 0,
            "score": Score(0.1, inverse_cap),
            "BLOCK_Q": block_q,
        }
        yield CompileCase(f"gluon_gradient_probe/{name}", _gradient_probe_kernel, args, archs=(90,))
