# mypy: ignore-errors
"""Sparse attention over latent keys on Hopper (MLA with absorbed weights, as DSA chooses them).

q [B, Hq, Sq, 576], one latent key of 576 columns for each token, whose first 512 are also the
values; out [B, Hq, Sq, 512]. Lists of neighbouring queries share too little to walk their union,
so a tile is up to 64 query heads of one query. Persistent programs take such tiles in turn; their
roles are

- a producer warp group (`latent_producer.py`), which gathers the keys near a query and those that
  it chose, 64 at a time;
- two consumers (`device/gluon/latent_pairs.py`), which share the scores of these tiles and have
  half of the columns of the values each.

Called as impl "sm90" of `bsk::sparse_attn_fwd`. Limits: fp16 and bf16, D 576 and Dv 512, values a
view of the first columns of the keys, strides and addresses in steps of 16 bytes.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...attention.operands import score_factors, token_strides
from ...calls.sparse_attention import SparseAttentionCall
from ...core.arch import arch_of
from ...core.compat import hopper_options
from ...decode.sm90_latent import LatentQueries
from ...decode.sm90_producer import KVRing
from ...device.gluon.latent_pairs import NotedScores, multiply_own_tiles_first, pair_exchange
from ...device.gluon.partials import columns_of, rows_of
from ...device.gluon.pipeline import take, tile_memory, work_channel
from ...device.records import CuSeqlens, Strides
from ...device.scores import cap, fold_sign
from ...device.softmax import add_sink, finalise
from ...launch.launcher import launch, on_device_of
from ..triton.walk import (
    head_counts,
    key_strides,
    list_arguments,
    local_sides,
    offsets_of,
    page_arguments,
)
from . import forward as walked
from . import gathered
from .forward_tiles import ForwardConsumer, RowPointers
from .gathered_tuning import is_gathered
from .latent_producer import (
    WORK_FIELDS,
    LatentNotes,
    LatentProducer,
    LatentShared,
    LatentWork,
    produce_keys,
)
from .latent_tuning import SparseLatentConfig, is_latent, sparse_latent_config
from .producer import Sizes


class GatheredKeys(NamedTuple):
    """The keys of a query, as consumers know them besides the notes."""

    factor: Any
    """Positive factor from scores to base-2 exponents."""


@gluon.constexpr_function
def _rows_layout(width):
    """Layout in which threads have 16 bytes of a row, and a warp as much of it as it can."""
    wide = min(width // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // wide, wide], [4, 1], [1, 0])


@gluon.jit
def _put_queries(consume, work, place, FIRST: gl.constexpr, CFG: gl.constexpr):
    """Copy columns of queries, from FIRST on, to shared memory; returns the factor of scores."""
    layout: gl.constexpr = _rows_layout(place.shape[1])
    row = gl.arange(0, CFG.ROWS, gl.SliceLayout(1, layout))
    columns = FIRST + gl.arange(0, place.shape[1], gl.SliceLayout(0, layout))
    # rows without a head read the last one, and are not written
    head = work.first_head + gl.minimum(row, CFG.PACK - 1)
    at = offsets_of(work.batch, head, work.token, consume.strides.q)
    q = gl.load(consume.pointers.q + at[:, None] + columns[None, :])
    q, factor = fold_sign(q, consume.score.factor)
    place.store(q)
    return factor


@gluon.jit
def _write(consume, shared, work, place, state, acc, GROUP: gl.constexpr, CFG: gl.constexpr):
    """End the softmax and store this consumer's columns of the outputs, and lse once.

    Outputs pass through `place`, where this consumer's columns of the queries were: no scores
    follow, and memory is then written in whole lines.
    """
    o_rows: gl.constexpr = gl.SliceLayout(1, CFG.accumulator_layout())
    m_log2 = gl.convert_layout(state.m_log2, o_rows)
    row_sum = gl.convert_layout(state.row_sum, o_rows)
    row_sum += gl.where(work.wrong != 0, float("nan"), 0.0)
    row = rows_of(acc)
    head = work.first_head + gl.minimum(row, CFG.PACK - 1)
    if consume.sinks is not None:
        m_log2, row_sum, rescale = add_sink(m_log2, row_sum, gl.load(consume.sinks + head))
        acc = acc * rescale[:, None]
    inverse, lse = finalise(m_log2, row_sum)
    place.store((acc * inverse[:, None]).to(place.dtype))
    if GROUP == 0:
        lse_row = head.to(gl.int64)
        if shared.cu_seqlens.q is None:
            lse_row += work.batch.to(gl.int64) * shared.heads.q
        lse_at = lse_row * consume.lse_head_stride + work.token
        gl.store(consume.pointers.lse + lse_at, lse, row < CFG.PACK)
    layout: gl.constexpr = _rows_layout(CFG.half)
    out = place.load(layout)
    row = rows_of(out)
    head = work.first_head + gl.minimum(row, CFG.PACK - 1)
    at = offsets_of(work.batch, head, work.token, consume.strides.out)
    columns = GROUP * CFG.half + columns_of(out)
    live = (row < CFG.PACK)[:, None]
    gl.store(consume.pointers.out + at[:, None] + columns[None, :], out, live)


@gluon.jit
def _noted(s, shared, step, tile, score, seen, CFG: gl.constexpr):
    """The `NotedScores` of a tile: capped, and -inf for keys that do not count.

    The notes of a tile are a factor for each key, 0 for keys that do not count, and a flag: 0 if
    all of them count, 2 if a number was out of range, which makes the sums NaN.
    """
    s = cap(s, score.inverse_cap)
    stage = step % CFG.STAGES
    group: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    flag = gl.max(shared.notes.flags.index(stage).load(group), 0)
    if flag != 0:
        factors = shared.notes.factors.index(stage)
        counted = factors.load(gl.SliceLayout(0, CFG.scores_layout())) > 0.0
        s = gl.where(counted[None, :], s, -float("inf"))
    return NotedScores(s, gl.where(flag == 2, float("nan"), 0.0))


@gluon.jit
def _consume(consume, shared, exchange, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Role of a consumer: attend with the heads of each query, for half of the columns."""
    half: gl.constexpr = CFG.half
    first_col: gl.constexpr = GROUP * CFG.half
    values_dim: gl.constexpr = CFG.TILE_DV
    q_smem = consume.q_tiles
    own = q_smem.front.index(0).slice(first_col, half, dim=1)
    step = 0
    pairs = 0
    slot = 0
    work = LatentWork(*take(shared.work, slot))
    while work.batch >= 0:
        # all scores of the query before are done: both consumers have had their weights
        factor = _put_queries(consume, work, own, first_col, CFG)
        if GROUP == 0:
            _put_queries(consume, work, q_smem.rest.index(0), values_dim, CFG)
        fence_async_shared()
        mbarrier.arrive(exchange.queries, count=1)
        mbarrier.wait(exchange.queries, slot & 1)
        seen = GatheredKeys(factor)
        step, pairs, acc, state = multiply_own_tiles_first(
            q_smem, exchange, shared, consume.score, seen, 0, work.tiles, step, pairs, slot, _noted,
            GROUP, CFG,
        )  # fmt: skip
        _write(consume, shared, work, own, state, acc, GROUP, CFG)
        slot += 1
        work = LatentWork(*take(shared.work, slot))


@gluon.jit
def _gathered_ring(dtype: gl.constexpr, CFG: gl.constexpr):
    """The `KVRing`: barriers of full parts of all stages, then those of empty ones."""
    stages: gl.constexpr = CFG.STAGES
    tile_n: gl.constexpr = CFG.TILE_N
    values: gl.constexpr = CFG.TILE_DV
    rest: gl.constexpr = CFG.rest
    parts: gl.constexpr = CFG.parts
    empty: gl.constexpr = CFG.first_empty
    v_smem = tile_memory(dtype, stages, tile_n, values)
    k_smem = tile_memory(dtype, stages, tile_n, rest)
    bars = gl.allocate_shared_memory(gl.int64, [2 * empty, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(empty):
        mbarrier.init(bars.index(i), count=CFG.fills(i % parts))
        mbarrier.init(bars.index(empty + i), count=CFG.releases)
    return KVRing(k_smem, v_smem, bars, bars)


@gluon.jit(
    do_not_specialize=[
        "lse_head_stride", "batch", "q_len", "kv_len", "most", "num_blocks", "limit_right",
        "near_left", "near_right",
    ]
)  # fmt: skip
def _sparse_attn_latent_kernel(
    pointers,
    k_ptr,
    sinks_ptr,
    lists,
    pages,
    cu_seqlens,
    strides,
    list_strides,
    lse_head_stride,
    batch,
    q_len,
    kv_len,
    most,
    num_blocks,
    limit_right,
    near_left,
    near_right,
    heads,
    score,
    CFG: gl.constexpr,
):
    """Set up the ring and start the roles: two consumers and the producer."""
    num: gl.constexpr = CFG.ROWS
    tile_n: gl.constexpr = CFG.TILE_N
    stages: gl.constexpr = CFG.STAGES
    dtype: gl.constexpr = pointers.q.dtype.element_ty
    weights: gl.constexpr = gl.NVMMASharedLayout.get_default_for([num, tile_n], dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_smem = LatentQueries(
        tile_memory(dtype, 1, num, CFG.TILE_DV), tile_memory(dtype, 1, num, CFG.rest)
    )
    p_smem = gl.allocate_shared_memory(dtype, [num, tile_n], weights)
    notes = LatentNotes(
        gl.allocate_shared_memory(gl.float32, [stages, tile_n], plain),
        gl.allocate_shared_memory(gl.int32, [stages, 1], plain),
    )
    ring = _gathered_ring(dtype, CFG)
    exchange = pair_exchange(p_smem, CFG)
    work = work_channel(WORK_FIELDS, 2)
    fence_async_shared()
    sizes = Sizes(q_len, kv_len, 0, most, num_blocks, limit_right, near_left, near_right)
    shared = LatentShared(ring, notes, work, cu_seqlens, heads)
    produce = LatentProducer(k_ptr, lists, pages, strides.k, list_strides, sizes, batch)
    consume = ForwardConsumer(pointers, sinks_ptr, strides, lse_head_stride, score, q_smem)
    gl.warp_specialize(
        [
            (_consume, (consume, shared, exchange, 0, CFG)),
            (_consume, (consume, shared, exchange, 1, CFG)),
            (produce_keys, (produce, shared, CFG)),
        ],
        [4, 4],
        [CFG.CONSUMER_REGISTERS, CFG.PRODUCER_REGISTERS],
    )


class LatentStrides(NamedTuple):
    """Strides of batch, head and token of outputs, queries and keys."""

    out: Strides
    q: Strides
    k: Strides


def forward(call: SparseAttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of any call of impl "sm90", in the tensors of `call.empty_results`."""
    if not is_latent(call.problem):
        return (gathered if is_gathered(call.problem) else walked).forward(call)
    out, lse = call.empty_results()
    config = sparse_latent_config(call.problem)
    launch_sparse_attn_latent(call, out, lse, config, arch_of(call.q.device).num_sms)
    return out, lse


def launch_sparse_attn_latent(
    call: SparseAttentionCall,
    out: torch.Tensor,
    lse: torch.Tensor,
    config: SparseLatentConfig,
    programs: int,
) -> None:
    """Fill `out` [B, Hq, Sq, 512] or [Tq, Hq, 512] and `lse`.

    Parameters
    ----------
    call : values that are the first columns of the keys; addresses and strides of keys in steps of
        16 bytes; at least one key
    out : like q, with Dv; contiguous in the last dimension; all of it is written
    lse : fp32 [B, Hq, Sq] or [Hq, Tq], contiguous
    config : tiles and registers
    programs : the most programs to launch
    """
    q, spec = call.q, call.spec
    work = call.batch * (q.shape[1] // config.PACK) * spec.max_q
    if work == 0:
        return
    lists, list_strides = list_arguments(call)
    strides = LatentStrides(token_strides(out), token_strides(q), key_strides(call.k, call))
    with on_device_of(q):
        args = (
            *(RowPointers(out, lse, q), call.k),
            None if spec.sinks is None else spec.sinks.contiguous(),
            *(lists, page_arguments(call), CuSeqlens(spec.cu_seqlens_q, spec.cu_seqlens_k)),
            *(strides, list_strides, lse.stride(-2), call.batch, spec.max_q, spec.max_k),
            *(spec.selection.most, spec.selection.num_blocks, spec.limit_right),
            *(*local_sides(call), head_counts(call), score_factors(spec.scale, spec.softcap)),
            config,
        )
        options: dict[str, Any] = {"num_warps": 4, "maxnreg": config.MAX_REGISTERS}
        programs = min(programs, work)
        launch(_sparse_attn_latent_kernel, programs, args, **options, **hopper_options())
