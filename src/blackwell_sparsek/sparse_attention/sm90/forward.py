# mypy: ignore-errors
"""Sparse attention forward on Hopper: the arithmetic of `triton.forward` by TMA and WGMMA.

Persistent programs take tiles of CONSUMERS x 64 rows, which are PACK query heads of neighbouring
queries (see `triton.walk`). The roles of a program:

- a producer warp (`producer.py`) merges the lists of the rows. For each KV tile of the keys near
  the queries, and of each entry that any row chose, it leaves a note in shared memory, what weight
  each row gives these keys and whether that needs mask code, and fetches keys and values by TMA;
- consumer warp groups own 64 rows each. They go through the KV tiles that one of their rows has,
  as the consumers of the dense forward do: the scores of a tile are computed together with the
  values of the tile before. Tiles that all rows have, and see whole, run without mask code. Tiles
  that none of their rows has are freed unread.

A weight is the gate of the entry, or 1, or 0 for rows that do not have it; NaN marks rows that met
a number out of range. Called as impl "sm90" of `bsk::sparse_attn_fwd`. Limits: fp16 and bf16,
entries of 64 and 128 keys, D and Dv up to 256 in steps of 8, strides and addresses that TMA takes,
no pages. NaN in a value that only some rows of a tile see reaches all of them.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...attention.operands import score_factors, token_strides
from ...attention.sm90.forward_plan import tma_strides
from ...attention.sm90.forward_stages import EMPTY_K, KvStages, free_stage, zero_outputs
from ...calls.sparse_attention import SparseAttentionCall
from ...core.arch import arch_of
from ...core.compat import hopper_options
from ...device.gluon.partials import rows_of
from ...device.gluon.pipeline import ring, ring_place, take, tiles, work_channel
from ...device.gluon.row_parts import row_parts
from ...device.gluon.warps import shared_address
from ...device.masks import position, row_bounds
from ...device.records import CuSeqlens, Score, Strides
from ...device.scores import positive_factor
from ...device.softmax import init_state
from ...launch.descriptors import packed_descriptor, tensor_descriptor
from ...launch.launcher import cdiv, launch, on_device_of
from ..triton.forward import OPEN
from ..triton.walk import HeadCounts, head_counts, list_arguments, rows_of_tile
from .forward_tiles import (
    ForwardConsumer,
    RowPointers,
    attend,
    attend_last_values,
    await_scores,
    end_softmax,
    start_tile,
)
from .notes import (
    goes_on,
    next_used,
    note_at,
    own_rows,
    put_rows,
    row_weights,
    visible_keys,
    write_rows,
)
from .producer import (
    MASKED,
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
from .tuning import SparseAttnSm90Config, sparse_attn_sm90_config


class RowState(NamedTuple):
    """Of a consumer's rows: queries in shared memory, keys that they see, and factors of scores."""

    q: Any
    limits: Any
    near: Any
    score: Any


@gluon.jit
def _mask(s, row_sum, weights, note, rows, CFG: gl.constexpr):
    """Scores, -inf where a row does not see a key; sums of rows whose weight is NaN are NaN."""
    part_rows: gl.constexpr = gl.SliceLayout(1, row_sum.type.layout)
    visible = visible_keys(note, rows.limits, rows.near, CFG) & (weights > 0.0)[:, None]
    spoilt = gl.convert_layout(gl.where(weights == weights, 0.0, weights), part_rows)
    return gl.where(visible, s, -float("inf")), row_sum + spoilt[:, None]


@gluon.jit
def _attend(
    rows, shared, stages, note, held, state, acc, p, GROUP: gl.constexpr, CFG: gl.constexpr
):
    """Take in the KV tile of `note`; return state, accumulators and weights.

    `p` are the weights of the tile at step `held`, whose product with its values is computed
    meanwhile; None where there is none.
    """
    m_log2, row_sum = state
    s_rows: gl.constexpr = gl.SliceLayout(1, CFG.accumulator_layout(CFG.TILE_N))
    stage, _ = ring_place(note.step, CFG.STAGES)
    started = start_tile(rows.q, stages, stage, held, acc, p, CFG)
    weights = row_weights(shared, stage, s_rows, GROUP)
    s = await_scores(started, p, rows.score, CFG)
    free_stage(stages, stage, EMPTY_K, CFG)
    if (note.flags & MASKED) != 0:
        s, row_sum = _mask(s, row_sum, weights, note, rows, CFG)
    gates = None
    if CFG.GATE:
        gates = weights
    return attend(s, gates, started, stages, held, (m_log2, row_sum), p, rows.score, CFG)


@gluon.jit
def _write(consume, shared, tile, m_log2, row_sum, acc, GROUP: gl.constexpr, CFG: gl.constexpr):
    """End the softmax of this consumer's rows and store outputs and lse."""
    o_rows: gl.constexpr = gl.SliceLayout(1, CFG.accumulator_layout(CFG.SLICE_DV))
    m_log2 = gl.convert_layout(m_log2, o_rows)
    row_sum = gl.convert_layout(row_sum, o_rows)
    own = own_rows(rows_of(acc[0]), tile, GROUP, CFG)
    acc, factor = end_softmax(consume, shared, tile, own, m_log2, row_sum, acc)
    write_rows(
        consume.pointers.out, consume.strides.out, tile, acc, factor,
        CFG.HEAD_DIM_V, CFG.SLICE_DV, GROUP, CFG,
    )  # fmt: skip


@gluon.jit
def _consume(consume, shared, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Role of a consumer warp group: attend with 64 rows of each work tile."""
    sizes = shared.sizes
    tile_n: gl.constexpr = CFG.TILE_N
    s_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_N)
    nothing = row_parts(gl.zeros([ROWS, tile_n], gl.float32, s_layout))
    offs = GROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    stages = KvStages(shared.k_ring.tiles, shared.v_ring.tiles, shared_address(CFG.tile_bytes))
    step = 0
    slot = 0
    tile = WorkTile(*take(shared.work, slot))
    while tile.batch >= 0:
        own = rows_of_tile(offs, tile.q_start, tile.q_len, tile.first_head, CFG.PACK, CFG.tile_t)
        q_pos = position(own.token, tile.q_len, tile.kv_len)
        limits = row_bounds(q_pos, tile.kv_len, OPEN, sizes.limit_right)
        near = row_bounds(q_pos, tile.kv_len, sizes.near_left, sizes.near_right)
        q = put_rows(
            consume.pointers.q, consume.strides.q, consume.q_tiles, tile, consume.score.factor,
            CFG.HEAD_DIM, CFG.SLICE_D, CFG.d_slices, GROUP, CFG,
        )  # fmt: skip
        factor = positive_factor(consume.score.factor)
        rows = RowState(q, limits, near, Score(factor, consume.score.inverse_cap))
        m_log2, _ = init_state(q_pos)
        row_sum = nothing
        acc = zero_outputs(CFG)
        note = note_at(shared, stages, step, 1, GROUP, CFG)
        note = next_used(shared, stages, note, GROUP, CFG)
        # Runs of KV tiles that this consumer needs. A run ends with its last product: held back
        # while others pass, its values would keep a stage that the producer waits for.
        while note.used != 0:
            m_log2, row_sum, acc, p = _attend(
                rows, shared, stages, note, 0, (m_log2, row_sum), acc, None, GROUP, CFG
            )
            held = note.step
            note = note_at(shared, stages, held + 1, goes_on(note), GROUP, CFG)
            while note.used != 0:
                m_log2, row_sum, acc, p = _attend(
                    rows, shared, stages, note, held, (m_log2, row_sum), acc, p, GROUP, CFG
                )
                held = note.step
                note = note_at(shared, stages, held + 1, goes_on(note), GROUP, CFG)
            acc = attend_last_values(stages, held, acc, p, CFG)
            note = next_used(shared, stages, note, GROUP, CFG)
        step = note.step
        row_sum = gl.convert_layout(gl.sum(row_sum, 1), m_log2.type.layout)
        _write(consume, shared, tile, m_log2, row_sum, acc, GROUP, CFG)
        slot += 1
        tile = WorkTile(*take(shared.work, slot))


@gluon.jit(
    do_not_specialize=[
        "lse_head_stride", "batch", "q_len", "kv_len", "num_tiles", "most", "num_blocks",
        "limit_right", "near_left", "near_right",
    ]
)  # fmt: skip
def _sparse_attn_fwd_sm90_kernel(
    pointers,
    k_desc,
    v_desc,
    sinks_ptr,
    lists,
    cu_seqlens,
    strides,
    list_strides,
    lse_head_stride,
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
    q_smem = tiles(k_desc, consumers * CFG.d_slices, ROWS)
    k_smem = tiles(k_desc, stages * CFG.d_slices, tile_n)
    v_smem = tiles(v_desc, stages * CFG.dv_slices, tile_n)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    weights = gl.allocate_shared_memory(gl.float32, [stages, CFG.tile_m], flat)
    words = gl.allocate_shared_memory(gl.int32, [stages * NOTE_WORDS, 1], flat)
    k_ring = ring(k_smem, stages, CFG.arrivals, CFG.barrier_room)
    v_ring = ring(v_smem, stages, CFG.arrivals, CFG.barrier_room)
    work = work_channel(WORK_FIELDS, consumers)
    fence_async_shared()

    sizes = Sizes(q_len, kv_len, num_tiles, most, num_blocks, limit_right, near_left, near_right)
    shared = SparseShared(
        k_ring, v_ring, Notes(weights, words, None), work, cu_seqlens, sizes, heads
    )
    produce = SparseProducer(k_desc, v_desc, lists, list_strides, batch)
    consume = ForwardConsumer(pointers, sinks_ptr, strides, lse_head_stride, score, q_smem)
    gl.warp_specialize(
        [
            (_consume, (consume, shared, 0, CFG)),
            (_consume, (consume, shared, 1, CFG)),
            (produce_tiles, (produce, shared, CFG)),
        ],
        [4, 1],
        [registers, producer_registers],
    )


class RowStrides(NamedTuple):
    """Strides of batch, head and token of outputs and queries."""

    out: Strides
    q: Strides


def forward(call: SparseAttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse, in the tensors of `call.empty_results`."""
    out, lse = call.empty_results()
    config = sparse_attn_sm90_config(call.problem)
    launch_sparse_attn_fwd_sm90(call, out, lse, config, arch_of(call.q.device).num_sms)
    return out, lse


def launch_sparse_attn_fwd_sm90(
    call: SparseAttentionCall,
    out: torch.Tensor,
    lse: torch.Tensor,
    config: SparseAttnSm90Config,
    programs: int,
) -> None:
    """Fill `out` and `lse`.

    Parameters
    ----------
    call : k and v with strides and addresses that TMA takes; at least one key
    out : like q, with Dv; contiguous in the last dimension; all of it is written
    lse : fp32 [B, Hq, Sq] or [Hq, Tq], contiguous
    config : tiles
    programs : the most programs to launch
    """
    q, spec = call.q, call.spec
    num_tiles = cdiv(spec.max_q, config.tile_t)
    work_tiles = call.batch * (q.shape[1] // config.PACK) * num_tiles
    if work_tiles == 0:
        return
    lists, list_strides = list_arguments(call)
    heads: HeadCounts = head_counts(call)
    with on_device_of(q):
        args = (
            RowPointers(out, lse, q),
            key_descriptor(call.k, config.k_block()),
            key_descriptor(call.v, config.v_block()),
            None if spec.sinks is None else spec.sinks.contiguous(),
            lists,
            CuSeqlens(spec.cu_seqlens_q, spec.cu_seqlens_k),
            RowStrides(token_strides(out), token_strides(q)),
            list_strides,
            lse.stride(-2),
            call.batch,
            *sizes_of(call, num_tiles),
            heads,
            score_factors(spec.scale, spec.softcap),
            config,
        )
        options: dict[str, Any] = {"num_warps": 4, "maxnreg": config.MAX_REGISTERS}
        programs = min(programs, work_tiles)
        launch(_sparse_attn_fwd_sm90_kernel, programs, args, **options, **hopper_options())


def key_descriptor(x: torch.Tensor, block: tuple[int, int, int, int]) -> Any:
    """TMA descriptor of keys or values, dense or packed."""
    if x.dim() == 3:
        return packed_descriptor(x, block)
    return tensor_descriptor(x, block, tma_strides(x))
