# mypy: ignore-errors
"""Gradients of queries and gates over chosen keys on Hopper.

    s = q k^T    dp = dout v^T    dq += ds k    dgate[e] = sum_{j in e} r (dp - delta)

Work tiles, producer and roles are those of `forward.py`: two consumers with 64 rows each walk the
union of their lists. A row that did not choose an entry has an lse of +inf there, so that its
probabilities are 0 without mask code; positions are compared only where the producer says that
they matter. As in the dense kernel (`attention.sm90.backward_split`), output gradients are an
operand from registers, and the product for dq of a tile is issued with the scores of the next one.
Called as part of impl "sm90" of `bsk::sparse_attn_bwd`.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...attention.operands import gradient_factors, token_strides
from ...attention.sm90.forward_stages import (
    EMPTY_K,
    EMPTY_V,
    FULL_V,
    KvStages,
    await_stage,
    free_stage,
)
from ...calls.sparse_attention import SparseBackwardCall
from ...core.compat import hopper_options
from ...device.backprop import probabilities, score_gradients, shift_of_rows
from ...device.gluon.partials import rows_of
from ...device.gluon.pipeline import ring, ring_place, take, tiles, work_channel
from ...device.gluon.warps import shared_address
from ...device.masks import position, row_bounds
from ...device.records import CuSeqlens, Strides
from ...launch.launcher import cdiv, launch, on_device_of
from ..triton.backward import QueryGradients, RowTerms
from ..triton.forward import OPEN
from ..triton.walk import head_counts, list_arguments, row_offsets, rows_of_tile
from .forward import key_descriptor
from .notes import goes_on, next_used, note_at, put_rows, row_weights, visible_keys, write_rows
from .producer import (
    EDGE,
    NOTE_WORDS,
    ROWS,
    WORK_FIELDS,
    Notes,
    Sizes,
    SparseProducer,
    SparseShared,
    WorkTile,
    produce_tiles,
    sizes_of,
)
from .tuning import SparseDqSm90Config


class DqStrides(NamedTuple):
    """Strides of batch, head and token."""

    dq: Strides
    q: Strides
    dout: Strides


class DqConsumer(NamedTuple):
    """Arguments of the consumers alone."""

    gradients: Any
    q_ptr: Any
    dout_ptr: Any
    terms: Any
    strides: Any
    lse_head_stride: Any
    num_tokens: Any
    score: Any
    q_tiles: Any
    dout_tiles: Any


class OwnRows(NamedTuple):
    """The 64 rows of a consumer, output gradients as an operand from registers."""

    q: Any
    dout: Any
    shift: Any
    """lse in base 2."""
    delta: Any
    limits: Any
    near: Any


@gluon.jit
def _own_rows(consume, shared, tile, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Load the `OwnRows` of a work tile."""
    s_rows: gl.constexpr = gl.SliceLayout(1, CFG.accumulator_layout(CFG.TILE_N))
    operand: gl.constexpr = gl.DotOperandLayout(0, CFG.accumulator_layout(CFG.TILE_N), 2)
    sizes, heads, packed = shared.sizes, shared.heads, shared.cu_seqlens.q
    row = GROUP * ROWS + gl.arange(0, ROWS, s_rows)
    own = rows_of_tile(row, tile.q_start, tile.q_len, tile.first_head, CFG.PACK, CFG.tile_t)
    token = tile.q_first + own.token
    at = row_offsets(own.head, token, tile.batch, heads.q, consume.lse_head_stride, packed)
    lse = gl.load(consume.terms.lse + at, own.real, other=-float("inf"))
    delta = gl.load(consume.terms.delta + at, own.real, other=0.0)
    q = put_rows(
        consume.q_ptr, consume.strides.q, consume.q_tiles, tile, None,
        CFG.HEAD_DIM, CFG.SLICE_D, 1, GROUP, CFG,
    )  # fmt: skip
    dout = put_rows(
        consume.dout_ptr, consume.strides.dout, consume.dout_tiles, tile, None,
        CFG.HEAD_DIM_V, CFG.SLICE_DV, 1, GROUP, CFG,
    )  # fmt: skip
    q_pos = position(own.token, tile.q_len, tile.kv_len)
    limits = row_bounds(q_pos, tile.kv_len, OPEN, sizes.limit_right)
    near = row_bounds(q_pos, tile.kv_len, sizes.near_left, sizes.near_right)
    return OwnRows(q[0], dout[0].load(operand), shift_of_rows(lse), delta, limits, near)


@gluon.jit
def _add_gates(
    r, dp, dgate, cursors, own, note, tile, consume, shared, GROUP: gl.constexpr, CFG: gl.constexpr
):
    """Add a KV tile to the gradients of an entry's gate; store them with its last tile."""
    change = gl.sum(r * (dp - own.delta[:, None]), 1)
    dgate = gl.where(note.start % CFG.BLOCK_KV == 0, change, dgate + change)
    if consume.gradients.dgate is not None:
        row = GROUP * ROWS + rows_of(r)
        rows = rows_of_tile(row, tile.q_start, tile.q_len, tile.first_head, CFG.PACK, CFG.tile_t)
        # [B, Hq, T, K], or packed [Hq, T, K]; found in each step, as registers are scarce
        at = row_offsets(
            rows.head, tile.q_first + rows.token, tile.batch, shared.heads.q, consume.num_tokens,
            shared.cu_seqlens.q,
        )  # fmt: skip
        place = consume.gradients.dgate + at * shared.sizes.most + cursors
        ends = (note.start + CFG.TILE_N) % CFG.BLOCK_KV == 0
        gl.store(place, dgate, ends & (cursors >= 0))
    return dgate


@gluon.jit
def _step(
    own, consume, shared, stages, tile, note, held, dq, ds, dgate,
    GROUP: gl.constexpr, CFG: gl.constexpr,
):  # fmt: skip
    """Take in the KV tile of `note`; return dq, ds of this tile, and sums of dgate.

    `ds` is that of the tile at step `held`, whose product with its keys is computed meanwhile; None
    where there is none.
    """
    s_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_N)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, CFG.accumulator_layout(CFG.TILE_D), 2)
    tile_n: gl.constexpr = CFG.TILE_N
    score = consume.score
    nothing = gl.zeros([ROWS, tile_n], gl.float32, s_layout)
    stage, phase = ring_place(note.step, CFG.STAGES)
    held_stage, _ = ring_place(held, CFG.STAGES)
    if ds is not None:
        dq_started = warpgroup_mma(ds, stages.k.index(held_stage), dq, is_async=True)
    k = stages.k.index(stage).permute((1, 0))
    s_started = warpgroup_mma(own.q, k, nothing, use_acc=False, is_async=True)
    await_stage(stages, stage, phase, FULL_V, CFG)
    v = stages.v.index(stage).permute((1, 0))
    dp_started = warpgroup_mma(own.dout, v, nothing, use_acc=False, is_async=True)
    weights = row_weights(shared, stage, s_rows, GROUP)
    here = weights > 0.0
    if CFG.GATE:
        cursors = shared.notes.cursors.index(stage).slice(GROUP * ROWS, ROWS, dim=0).load(s_rows)
        here = here | (cursors >= 0)
    shift = gl.where(here, own.shift, float("inf"))
    if ds is not None:
        s, dq = warpgroup_mma_wait(1, deps=(s_started, dq_started))
        free_stage(stages, held_stage, EMPTY_K, CFG)
    else:
        s = warpgroup_mma_wait(1, deps=(s_started,))
    p, capped = probabilities(s, None, shift[:, None], score)
    if (note.flags & EDGE) != 0:
        p = gl.where(visible_keys(note, own.limits, own.near, CFG), p, 0.0)
    dp = warpgroup_mma_wait(0, deps=(dp_started,))
    free_stage(stages, stage, EMPTY_V, CFG)
    if CFG.GATE:
        dgate = _add_gates(
            p, dp, dgate, cursors, own, note, tile, consume, shared, GROUP, CFG
        )  # fmt: skip
    ds = score_gradients(p, capped, dp, own.delta[:, None], score)
    if CFG.GATE:
        # p of an entry with gate 0 may be inf
        ds = gl.where((weights > 0.0)[:, None], ds * weights[:, None], 0.0)
    return dq, gl.convert_layout(ds.to(stages.k.dtype), ds_layout), dgate


@gluon.jit
def _consume(consume, shared, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Role of a consumer warp group: dq of 64 rows of each work tile."""
    tile_d: gl.constexpr = CFG.TILE_D
    stages = KvStages(shared.k_ring.tiles, shared.v_ring.tiles, shared_address(CFG.tile_bytes))
    step = 0
    slot = 0
    tile = WorkTile(*take(shared.work, slot))
    while tile.batch >= 0:
        own = _own_rows(consume, shared, tile, GROUP, CFG)
        dq = gl.zeros([ROWS, tile_d], gl.float32, CFG.accumulator_layout(CFG.TILE_D))
        dgate = own.delta - own.delta
        note = note_at(shared, stages, step, 1, GROUP, CFG)
        note = next_used(shared, stages, note, GROUP, CFG)
        # Runs of KV tiles, as in the forward: a run ends with its last product, whose keys would
        # keep a stage while the tiles of others pass.
        while note.used != 0:
            dq, ds, dgate = _step(
                own, consume, shared, stages, tile, note, 0, dq, None, dgate, GROUP, CFG
            )
            held = note.step
            note = note_at(shared, stages, held + 1, goes_on(note), GROUP, CFG)
            while note.used != 0:
                dq, ds, dgate = _step(
                    own, consume, shared, stages, tile, note, held, dq, ds, dgate, GROUP, CFG
                )
                held = note.step
                note = note_at(shared, stages, held + 1, goes_on(note), GROUP, CFG)
            held_stage, _ = ring_place(held, CFG.STAGES)
            dq_started = warpgroup_mma(ds, stages.k.index(held_stage), dq, is_async=True)
            dq = warpgroup_mma_wait(0, deps=(dq_started,))
            free_stage(stages, held_stage, EMPTY_K, CFG)
            note = next_used(shared, stages, note, GROUP, CFG)
        step = note.step
        if consume.gradients.dq is not None:
            write_rows(
                consume.gradients.dq, consume.strides.dq, tile, (dq,), consume.score.scale,
                CFG.HEAD_DIM, CFG.SLICE_D, GROUP, CFG,
            )  # fmt: skip
        slot += 1
        tile = WorkTile(*take(shared.work, slot))


@gluon.jit(
    do_not_specialize=[
        "lse_head_stride", "num_tokens", "batch", "q_len", "kv_len", "num_tiles", "most",
        "num_blocks", "limit_right", "near_left", "near_right",
    ]
)  # fmt: skip
def _sparse_attn_dq_sm90_kernel(
    gradients,
    q_ptr,
    dout_ptr,
    k_desc,
    v_desc,
    terms,
    lists,
    cu_seqlens,
    strides,
    list_strides,
    lse_head_stride,
    num_tokens,
    batch,
    q_len,
    kv_len,
    num_tiles,
    most,
    num_blocks,
    limit_right,
    near_left,
    near_right,
    heads,
    score,
    CFG: gl.constexpr,
):
    """Allocate the rings, gather the arguments of the roles, and start them."""
    stages: gl.constexpr = CFG.STAGES
    consumers: gl.constexpr = CFG.CONSUMERS
    registers: gl.constexpr = CFG.CONSUMER_REGISTERS
    producer_registers: gl.constexpr = CFG.PRODUCER_REGISTERS
    tile_n: gl.constexpr = CFG.TILE_N
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_smem = tiles(k_desc, consumers, ROWS)
    dout_smem = tiles(v_desc, consumers, ROWS)
    k_smem = tiles(k_desc, stages, tile_n)
    v_smem = tiles(v_desc, stages, tile_n)
    weights = gl.allocate_shared_memory(gl.float32, [stages, CFG.tile_m], flat)
    words = gl.allocate_shared_memory(gl.int32, [stages * NOTE_WORDS, 1], flat)
    cursors = None
    if CFG.GATE:
        cursors = gl.allocate_shared_memory(gl.int32, [stages, CFG.tile_m], flat)
    k_ring = ring(k_smem, stages, CFG.arrivals, CFG.barrier_room)
    v_ring = ring(v_smem, stages, CFG.arrivals, CFG.barrier_room)
    work = work_channel(WORK_FIELDS, consumers)
    fence_async_shared()

    sizes = Sizes(q_len, kv_len, num_tiles, most, num_blocks, limit_right, near_left, near_right)
    notes = Notes(weights, words, cursors)
    shared = SparseShared(k_ring, v_ring, notes, work, cu_seqlens, sizes, heads)
    produce = SparseProducer(k_desc, v_desc, lists, list_strides, batch)
    consume = DqConsumer(
        gradients, q_ptr, dout_ptr, terms, strides, lse_head_stride, num_tokens, score, q_smem,
        dout_smem,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume, (consume, shared, 0, CFG)),
            (_consume, (consume, shared, 1, CFG)),
            (produce_tiles, (produce, shared, CFG)),
        ],
        [4, 1],
        [registers, producer_registers],
    )


def launch_sparse_attn_dq_sm90(
    call: SparseBackwardCall,
    delta: torch.Tensor,
    shares: torch.Tensor | None,
    config: SparseDqSm90Config,
    programs: int,
) -> None:
    """Fill dq, and `shares` with each query head's share of dgate, where these are wanted.

    Parameters
    ----------
    call : the backward call; k and v with strides and addresses that TMA takes
    delta : fp32, like lse, contiguous
    shares : fp32 [B, Hq, Tq, K] or packed [1, Hq, Tq, K], zeros, contiguous
    config : tiles
    programs : the most programs to launch
    """
    given, spec, dq = call.forward, call.forward.spec, call.gradients.dq
    q = given.q
    num_tiles = cdiv(spec.max_q, config.tile_t)
    work_tiles = given.batch * (q.shape[1] // config.PACK) * num_tiles
    if work_tiles == 0:
        return
    lists, list_strides = list_arguments(given)
    with on_device_of(q):
        args = (
            QueryGradients(dq, shares),
            q,
            call.dout,
            key_descriptor(given.k, config.k_block()),
            key_descriptor(given.v, config.v_block()),
            RowTerms(call.lse, delta),
            lists,
            CuSeqlens(spec.cu_seqlens_q, spec.cu_seqlens_k),
            DqStrides(*(token_strides(x) for x in (q if dq is None else dq, q, call.dout))),
            list_strides,
            call.lse.stride(-2),
            spec.selection.q_len,
            given.batch,
            *sizes_of(given, num_tiles),
            head_counts(given),
            gradient_factors(spec.scale, spec.softcap, q.dtype),
            config,
        )
        options: dict[str, Any] = {"num_warps": 4, "maxnreg": config.MAX_REGISTERS}
        programs = min(programs, work_tiles)
        launch(_sparse_attn_dq_sm90_kernel, programs, args, **options, **hopper_options())
