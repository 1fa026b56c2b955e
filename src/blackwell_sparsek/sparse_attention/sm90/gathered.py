# mypy: ignore-errors
"""Sparse attention over small entries on Hopper: entries of 1 to 32 keys, ordinary heads.

Entries of neighbouring queries are merged first (`triton/unions.py`). Persistent programs then take
tiles of queries, QUERIES for each of two consumers, which have PACK query heads of each of them in
their 64 rows. The roles of a program:

- a producer warp group (`gathered_producer.py`), which gathers the keys near the queries and those
  of the union of their entries, 64 at a time, and leaves a word for each key: the queries that
  attend to it;
- consumer warp groups, which go through the KV tiles that one of their queries has, as those of the
  walked forward do (`forward.py`): the scores of a tile are computed together with the values of
  the tile before. Tiles of the other consumer are freed unread.

Consumers know neither lists nor bands, positions or pages: a row has one bit, and sees the keys
whose words have it. Called as impl "sm90" of `bsk::sparse_attn_fwd`. Limits: fp16 and bf16, D and
Dv equal and 64, 128 or 256, no gates, strides and addresses in steps of 16 bytes. NaN in a value
that only some queries of a tile see reaches all rows of these consumers.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...attention.operands import score_factors, token_strides
from ...attention.sm90.forward_stages import (
    EMPTY_K,
    EMPTY_V,
    FULL_K,
    FULL_V,
    KvStages,
    await_stage,
    free_stage,
    zero_outputs,
)
from ...calls.sparse_attention import SparseAttentionCall
from ...core.arch import arch_of
from ...core.compat import hopper_options
from ...device.gluon.partials import columns_of, rows_of
from ...device.gluon.pipeline import barriers, ring_place, take, tile_memory, work_channel
from ...device.gluon.records import Ring
from ...device.gluon.row_parts import row_parts
from ...device.gluon.warps import shared_address
from ...device.records import CuSeqlens, Score, Strides
from ...device.scores import positive_factor
from ...device.softmax import init_state
from ...launch.launcher import cdiv, launch, on_device_of
from ..triton.unions import BOTH, Unions, merge_lists, owner_of
from ..triton.walk import head_counts, key_strides, local_sides, offsets_of, page_arguments
from .forward_tiles import (
    ForwardConsumer,
    RowPointers,
    attend,
    attend_last_values,
    await_copies,
    await_scores,
    end_softmax,
    start_tile,
)
from .gathered_producer import (
    WORK_FIELDS,
    GatheredNotes,
    GatheredProducer,
    GatheredTile,
    gather_tiles,
)
from .gathered_tuning import SparseGatheredConfig, sparse_gathered_config
from .notes import own_rows, put_rows
from .producer import ROWS, Sizes, SparseShared


class GatheredRows(NamedTuple):
    """Of a consumer's rows: queries in shared memory, bits of their queries, factors of scores."""

    q: Any
    bit: Any
    score: Any


class GatheredState(NamedTuple):
    """Softmax state of rows, accumulators, and bits of queries that met a wrong page."""

    m_log2: Any
    row_sum: Any
    acc: Any
    wrong: Any


@gluon.jit
def _bit_of(row, GROUP: gl.constexpr, CFG: gl.constexpr):
    """The bit of a row's query in the words of keys; 0 for rows without a query."""
    query = row // CFG.PACK
    bit = gl.full(row.shape, 1, gl.int32, row.type.layout) << (GROUP * CFG.group_t + query)
    return gl.where(query < CFG.group_t, bit, 0)


@gluon.jit
def _attend(rows, shared, stages, step, held, state, p, CFG: gl.constexpr):
    """Take in the KV tile at `step`; return the state and its weights.

    `p` are the weights of the tile at step `held`, whose product with its values is computed
    meanwhile; None where there is none.
    """
    m_log2, row_sum, acc, wrong = state
    s_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_N)
    stage = await_copies(stages, step, FULL_K, CFG)
    started = start_tile(rows.q, stages, stage, held, acc, p, CFG)
    s = await_scores(started, p, rows.score, CFG)
    words = shared.notes.words.index(stage).load(gl.SliceLayout(0, s_layout))
    if CFG.PAGED:
        group: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        wrong = wrong | gl.max(shared.notes.wrong.index(stage).load(group), 0)
    s = gl.where((words[None, :] & rows.bit[:, None]) != 0, s, -float("inf"))
    free_stage(stages, stage, EMPTY_K, CFG)
    m_log2, row_sum, acc, p = attend(
        s, None, started, stages, held, (m_log2, row_sum), p, rows.score, CFG
    )
    return GatheredState(m_log2, row_sum, acc, wrong), p


@gluon.jit
def _has(number, tile, total, GROUP: gl.constexpr):
    """Whether there is a KV tile `number`, and this consumer has it."""
    owner = owner_of(number, tile.common, tile.first, tile.second)
    return (number < total) & ((owner == BOTH) | (owner == GROUP))


@gluon.jit
def _pass_over(stages, begin, number, tile, total, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Free the KV tiles of the other consumer from `number` on; return the next own one.

    Each of them is waited for: a barrier tells only whether the phase before is over.
    """
    while (number < total) & (_has(number, tile, total, GROUP) == 0):
        stage, phase = ring_place(begin + number, CFG.STAGES)
        await_stage(stages, stage, phase, FULL_K, CFG)
        free_stage(stages, stage, EMPTY_K, CFG)
        await_stage(stages, stage, phase, FULL_V, CFG)
        free_stage(stages, stage, EMPTY_V, CFG)
        number += 1
    return number


@gluon.jit
def _write(consume, shared, tile, state, slot, GROUP: gl.constexpr, CFG: gl.constexpr):
    """End the softmax of this consumer's rows and store outputs and lse.

    Outputs pass through the shared memory where the queries were, so that memory is written in
    whole lines.
    """
    # 0 again: else what `put_rows` found out about rows would be kept through the loops
    zero = slot >> 30
    o_rows: gl.constexpr = gl.SliceLayout(1, CFG.accumulator_layout(CFG.SLICE_DV))
    acc = state.acc
    m_log2 = gl.convert_layout(state.m_log2, o_rows)
    row_sum = gl.convert_layout(gl.sum(state.row_sum, 1), o_rows)
    own = own_rows(rows_of(acc[0]) + zero, tile, GROUP, CFG)
    spoilt = ((tile.wrong | state.wrong) >> (own.token - tile.q_start)) & 1
    row_sum += gl.where(spoilt != 0, float("nan"), 0.0)
    acc, factor = end_softmax(consume, shared, tile, own, m_log2, row_sum, acc)
    slices: gl.constexpr = CFG.dv_slices
    width: gl.constexpr = CFG.SLICE_DV
    for i in gl.static_range(slices):
        place = consume.q_tiles.index(GROUP * slices + i)
        place.store((acc[i] * factor).to(place.dtype))
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0])
    own = own_rows(gl.arange(0, ROWS, gl.SliceLayout(1, layout)) + zero, tile, GROUP, CFG)
    at = offsets_of(tile.batch, own.head, tile.q_first + own.token, consume.strides.out)
    for i in gl.static_range(slices):
        out = consume.q_tiles.index(GROUP * slices + i).load(layout)
        columns = i * width + columns_of(out)
        pointers = consume.pointers.out + at[:, None] + columns[None, :]
        gl.store(pointers, out, own.real[:, None])


@gluon.jit
def _consume(consume, shared, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Role of a consumer warp group: attend with its rows of each work tile."""
    tile_n: gl.constexpr = CFG.TILE_N
    s_layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_N)
    nothing = row_parts(gl.zeros([ROWS, tile_n], gl.float32, s_layout))
    row = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    bit = _bit_of(row, GROUP, CFG)
    factor = positive_factor(consume.score.factor)
    stages = KvStages(shared.k_ring.tiles, shared.v_ring.tiles, shared_address(CFG.tile_bytes))
    begin = 0
    slot = 0
    tile = GatheredTile(*take(shared.work, slot))
    while tile.batch >= 0:
        q = put_rows(
            consume.pointers.q, consume.strides.q, consume.q_tiles, tile, consume.score.factor,
            CFG.TILE_D, CFG.SLICE_D, CFG.d_slices, GROUP, CFG,
        )  # fmt: skip
        rows = GatheredRows(q, bit, Score(factor, consume.score.inverse_cap))
        m_log2, _ = init_state(row)
        state = GatheredState(m_log2, nothing, zero_outputs(CFG), begin - begin)
        total = tile.common + tile.first + tile.second
        number = _pass_over(stages, begin, begin - begin, tile, total, GROUP, CFG)
        # Runs of own KV tiles. A run ends with its last product: held back while others pass, its
        # values would keep a stage that the producer waits for.
        while number < total:
            step = begin + number
            state, p = _attend(rows, shared, stages, step, step, state, None, CFG)
            number += 1
            while _has(number, tile, total, GROUP):
                step = begin + number
                state, p = _attend(rows, shared, stages, step, step - 1, state, p, CFG)
                number += 1
            acc = attend_last_values(stages, begin + number - 1, state.acc, p, CFG)
            state = GatheredState(state.m_log2, state.row_sum, acc, state.wrong)
            number = _pass_over(stages, begin, number, tile, total, GROUP, CFG)
        begin += total
        _write(consume, shared, tile, state, slot, GROUP, CFG)
        slot += 1
        tile = GatheredTile(*take(shared.work, slot))


@gluon.jit(
    do_not_specialize=[
        "lse_head_stride", "batch", "q_len", "kv_len", "num_tiles", "limit_right", "near_left",
        "near_right",
    ]
)  # fmt: skip
def _sparse_attn_gathered_kernel(
    pointers,
    k_ptr,
    v_ptr,
    sinks_ptr,
    unions,
    pages,
    cu_seqlens,
    strides,
    lse_head_stride,
    batch,
    q_len,
    kv_len,
    num_tiles,
    limit_right,
    near_left,
    near_right,
    heads,
    score,
    CFG: gl.constexpr,
):
    """Allocate the rings, gather the arguments of the roles, and start them."""
    stages: gl.constexpr = CFG.STAGES
    tile_n: gl.constexpr = CFG.TILE_N
    room: gl.constexpr = CFG.barrier_room
    dtype: gl.constexpr = pointers.q.dtype.element_ty
    q_smem = tile_memory(dtype, CFG.CONSUMERS * CFG.d_slices, ROWS, CFG.SLICE_D)
    k_smem = tile_memory(dtype, stages * CFG.d_slices, tile_n, CFG.SLICE_D)
    v_smem = tile_memory(dtype, stages * CFG.dv_slices, tile_n, CFG.SLICE_DV)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = gl.allocate_shared_memory(gl.int32, [stages, tile_n], flat)
    k_full, k_empty = barriers(stages, CFG.fills(0), room), barriers(stages, CFG.arrivals, room)
    v_full, v_empty = barriers(stages, CFG.fills(1), room), barriers(stages, CFG.arrivals, room)
    wrong = None
    if CFG.PAGED:
        wrong = gl.allocate_shared_memory(gl.int32, [stages, 1], flat)
    work = work_channel(WORK_FIELDS, CFG.CONSUMERS)
    fence_async_shared()

    # the unions stand in for the lists
    sizes = Sizes(q_len, kv_len, num_tiles, None, None, limit_right, near_left, near_right)
    shared = SparseShared(
        Ring(k_smem, k_full, k_empty), Ring(v_smem, v_full, v_empty), GatheredNotes(words, wrong),
        work, cu_seqlens, sizes, heads,
    )  # fmt: skip
    produce = GatheredProducer(k_ptr, v_ptr, unions, pages, strides.k, strides.v, batch)
    consume = ForwardConsumer(pointers, sinks_ptr, strides, lse_head_stride, score, q_smem)
    gl.warp_specialize(
        [
            (_consume, (consume, shared, 0, CFG)),
            (_consume, (consume, shared, 1, CFG)),
            (gather_tiles, (produce, shared, CFG)),
        ],
        [4, 4],
        [CFG.CONSUMER_REGISTERS, CFG.PRODUCER_REGISTERS],
    )


class GatheredStrides(NamedTuple):
    """Strides of batch, head and token of outputs, queries, keys and values."""

    out: Strides
    q: Strides
    k: Strides
    v: Strides


def forward(call: SparseAttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse, in the tensors of `call.empty_results`."""
    out, lse = call.empty_results()
    config = sparse_gathered_config(call.problem)
    unions = merge_lists(call, config.tile_t)
    launch_sparse_attn_gathered(call, out, lse, unions, config, arch_of(call.q.device).num_sms)
    return out, lse


def launch_sparse_attn_gathered(
    call: SparseAttentionCall,
    out: torch.Tensor,
    lse: torch.Tensor,
    unions: Unions,
    config: SparseGatheredConfig,
    programs: int,
) -> None:
    """Fill `out` and `lse`.

    Parameters
    ----------
    call : k and v with addresses and strides in steps of 16 bytes; at least one key
    out : like q; contiguous in the last dimension; all of it is written
    lse : fp32 [B, Hq, Sq] or [Hq, Tq], contiguous
    unions : those of tiles of `config.tile_t` queries
    config : tiles and registers
    programs : the most programs to launch
    """
    q, spec = call.q, call.spec
    num_tiles = cdiv(spec.max_q, config.tile_t)
    work_tiles = call.batch * (q.shape[1] // config.PACK) * num_tiles
    if work_tiles == 0:
        return
    keys = (key_strides(x, call) for x in (call.k, call.v))
    strides = GatheredStrides(token_strides(out), token_strides(q), *keys)
    with on_device_of(q):
        args = (
            *(RowPointers(out, lse, q), call.k, call.v),
            None if spec.sinks is None else spec.sinks.contiguous(),
            *(unions, page_arguments(call), CuSeqlens(spec.cu_seqlens_q, spec.cu_seqlens_k)),
            *(strides, lse.stride(-2), call.batch, spec.max_q, spec.max_k, num_tiles),
            *(spec.limit_right, *local_sides(call), head_counts(call)),
            *(score_factors(spec.scale, spec.softcap), config),
        )
        options: dict[str, Any] = {"num_warps": 4, "maxnreg": config.MAX_REGISTERS}
        programs = min(programs, work_tiles)
        launch(_sparse_attn_gathered_kernel, programs, args, **options, **hopper_options())
