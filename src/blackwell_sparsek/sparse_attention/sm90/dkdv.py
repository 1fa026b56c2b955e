# mypy: ignore-errors
"""Gradients of keys and values over chosen keys on Hopper.

    s^T = k q^T    dp^T = v dout^T    dv += p^T dout    dk += ds^T q

A program owns 64 keys of one KV head, which stay in shared memory with their values. It walks the
queries near them, then those that chose their entry, which `masks.key_selection.queries_of_blocks`
has listed. The roles of a program:

- a producer warp gathers tiles of 64 rows, PACK query heads of some queries, by TMA: the heads of
  one query are a box;
- another leaves the index of the query, lse in base 2 and delta of each row. Rows that there are
  not have an lse of +inf, and the logarithm of a gate is subtracted: p then has it as a factor;
- a consumer warp group multiplies as in `attention.sm90.backward_split`. Mask code runs where the
  producers say that positions matter.

Sums have one order, so that every run gives the same bits, and nothing is accumulated in memory.
Two programs share an SM: one computes exponentials while the other multiplies. Called as part of
impl "sm90" of `bsk::sparse_attn_bwd`, where at least eight query heads share a KV head and a list.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...attention.operands import gradient_factors
from ...attention.sm90.backward import start_products, zero_of
from ...attention.sm90.forward_plan import tma_strides
from ...calls.sparse_attention import SparseBackwardCall
from ...core.compat import hopper_options
from ...device.backprop import probabilities, score_gradients, shift_of_rows
from ...device.gluon.compat import async_load, placed, reinterpret, thread_barrier
from ...device.gluon.partials import columns_of, rows_of
from ...device.gluon.pipeline import barriers, ring_place, tile_at, tile_place, tiles
from ...device.masks import (
    column_bounds,
    exists,
    not_after,
    not_before,
    position,
    q_range,
    row_bounds,
    within_bounds,
)
from ...device.records import CuSeqlens, Strides
from ...device.schedule import token_span
from ...launch.descriptors import tensor_descriptor
from ...launch.launcher import cdiv, launch, on_device_of
from ..triton.backward import KeyGradients, RowTerms, transposed
from ..triton.forward import OPEN
from ..triton.walk import (
    head_counts,
    key_strides,
    list_arguments,
    local_sides,
    offsets_of,
    row_offsets,
)
from .forward import key_descriptor
from .producer import EDGE, NEAR, ROWS, Sizes
from .tuning import COPY_COLUMNS, SparseDkdvSm90Config

COLUMNS = gl.constexpr(COPY_COLUMNS)


class KeyStrides(NamedTuple):
    """Strides of batch, head and token; those of k and v stand in for what is not written."""

    dk: Strides
    dv: Strides
    gate: Strides


class RowDescriptors(NamedTuple):
    """Tensors that the producer copies."""

    q: Any
    dout: Any
    k: Any
    v: Any


class RowRing(NamedTuple):
    """Tiles of rows in flight."""

    q: Any
    dout: Any
    shift: Any
    delta: Any
    index: Any
    """Of the query in its sequence."""
    flags: Any
    full: Any
    empty: Any


class DkdvShared(NamedTuple):
    """Shared by all roles."""

    k_smem: Any
    v_smem: Any
    kv_full: Any
    rows: RowRing
    queries: Any
    """Lists of the queries of each block, see `QueriesOfBlocks`."""
    first_blocks: Any
    cu_seqlens: Any
    sizes: Sizes
    num_tokens: Any
    """Queries of a list head, and list heads of a batch; 0 where all batches share them."""
    num_lists: Any
    heads: Any


class RowDescription(NamedTuple):
    """Arguments of the producer of terms alone."""

    gate: Any
    gate_strides: Any
    terms: Any
    lse_head_stride: Any


class KeyTile(NamedTuple):
    """The keys of a program, and the queries near them."""

    batch: Any
    kv_head: Any
    kv_start: Any
    q_first: Any
    q_len: Any
    kv_first: Any
    kv_len: Any
    near_lo: Any
    near_hi: Any


class BlockList(NamedTuple):
    """Where the queries of a block are listed."""

    places: Any
    begin: Any
    end: Any


@gluon.jit
def _key_tile(shared, CFG: gl.constexpr):
    """The `KeyTile` of this program."""
    sizes, heads = shared.sizes, shared.heads
    kv_heads = heads.q // heads.group
    program = gl.program_id(0)
    # The first entry of every head comes first: many queries choose it. The others go head by head,
    # so that programs which run together find each other's queries in the L2.
    heads_of_all = gl.num_programs(0) // sizes.num_tiles
    early = gl.minimum(CFG.BLOCK_KV // ROWS, sizes.num_tiles)
    others = gl.maximum(sizes.num_tiles - early, 1)
    later = program - heads_of_all * early
    is_early = later < 0
    number = gl.where(is_early, program // early, later // others)
    batch, kv_head = number // kv_heads, number % kv_heads
    kv_start = gl.where(is_early, program % early, early + later % others) * ROWS
    q_first, q_len = token_span(shared.cu_seqlens.q, batch, sizes.q_len)
    kv_first, kv_len = token_span(shared.cu_seqlens.kv, batch, sizes.kv_len)
    sides = (sizes.near_left, sizes.near_right)
    lo, hi = q_range(kv_start, kv_start + ROWS, q_len, kv_len, *sides)
    hi = gl.where(sizes.near_left < 0, lo, gl.maximum(hi, lo))
    return KeyTile(batch, kv_head, kv_start, q_first, q_len, kv_first, kv_len, lo, hi)


@gluon.jit
def _list_of(shared, tile, first_head, CFG: gl.constexpr):
    """The `BlockList` of a program's keys, for the list of some query heads."""
    sizes = shared.sizes
    block = tile.kv_start // CFG.BLOCK_KV
    if shared.first_blocks is not None:
        block += gl.load(shared.first_blocks + tile.batch)
    list_head = first_head // shared.heads.per_list
    row = (tile.batch * shared.num_lists + list_head).to(gl.int64)
    starts = shared.queries.starts + row * (sizes.num_blocks + 1) + block
    # of packed sequences, some end before this tile: its block is another's
    there = exists(tile.kv_start, tile.kv_len)
    begin = gl.load(starts, there, other=0)
    end = gl.load(starts + 1, there, other=0)
    return BlockList(shared.queries.places + row * shared.num_tokens * sizes.most, begin, end)


@gluon.jit
def _tiles_between(begin, end, CFG: gl.constexpr):
    """How many tiles of rows these queries fill."""
    return (end - begin + CFG.tokens - 1) // CFG.tokens


# Producers. Both wait until a stage is free; consumers wait for the copies and the terms.


@gluon.jit
def _copy_rows(descs, shared, tile, first_head, tokens, step, CFG: gl.constexpr):
    """Start the copies of a tile of rows, the heads of the queries `tokens`, once a stage is free.

    Tokens are counted through all packed sequences.
    """
    ring = shared.rows
    stages: gl.constexpr = CFG.STAGES
    d_copies: gl.constexpr = CFG.TILE_D // COLUMNS
    dv_copies: gl.constexpr = CFG.TILE_DV // COLUMNS
    count: gl.constexpr = CFG.tokens
    copies: gl.constexpr = CFG.tokens * (CFG.TILE_D + CFG.TILE_DV) // COLUMNS
    box: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CFG.PACK, COLUMNS], descs.q.dtype)
    # columns of 64 lie one after the other in shared memory, and rows in each of them
    q_shape: gl.constexpr = [stages * d_copies * count, CFG.PACK, COLUMNS]
    dout_shape: gl.constexpr = [stages * dv_copies * count, CFG.PACK, COLUMNS]
    q_boxes = reinterpret(ring.q, ring.q.dtype, q_shape, box)
    dout_boxes = reinterpret(ring.dout, ring.dout.dtype, dout_shape, box)
    batch = tile.batch if shared.cu_seqlens.q is None else 0
    stage, phase = ring_place(step, CFG.STAGES)
    full = ring.full.index(stage)
    mbarrier.wait(ring.empty.index(stage), phase ^ 1)
    mbarrier.expect(full, copies * descs.q.block_type.nbytes)
    for t in gl.static_range(count):
        for i in gl.static_range(d_copies):
            place = (batch, tokens[t], first_head, i * COLUMNS)
            async_load(descs.q, place, full, q_boxes.index((stage * d_copies + i) * count + t))
        for i in gl.static_range(dv_copies):
            place = (batch, tokens[t], first_head, i * COLUMNS)
            to = dout_boxes.index((stage * dv_copies + i) * count + t)
            async_load(descs.dout, place, full, to)
    return step + 1


@gluon.jit
def _produce_rows(descs, shared, CFG: gl.constexpr):
    """Role of the first producer: fetch the keys, then tiles of the rows that see them."""
    heads, most = shared.heads, shared.sizes.most
    count: gl.constexpr = CFG.tokens
    tile = _key_tile(shared, CFG)
    place = tile_place(shared.cu_seqlens.kv, tile.batch, tile.kv_head, tile.kv_first, tile.kv_len)
    mbarrier.expect(shared.kv_full, descs.k.block_type.nbytes + descs.v.block_type.nbytes)
    async_load(descs.k, tile_at(place, tile.kv_start), shared.kv_full, shared.k_smem.index(0))
    async_load(descs.v, tile_at(place, tile.kv_start), shared.kv_full, shared.v_smem.index(0))
    step = 0
    first = tile.kv_head * heads.group
    # rows past the end of a list repeat its last query
    for first_head in range(first, first + heads.group, CFG.PACK):
        for start in range(tile.near_lo, tile.near_hi, count):
            tokens = ()
            for t in gl.static_range(count):
                one = tile.q_first + gl.minimum(start + t, tile.near_hi - 1)
                tokens = tokens + (one,)  # noqa: RUF005
            step = _copy_rows(descs, shared, tile, first_head, tokens, step, CFG)
        listed = _list_of(shared, tile, first_head, CFG)
        for start in range(listed.begin, listed.end, count):
            tokens = ()
            for t in gl.static_range(count):
                one = gl.load(listed.places + gl.minimum(start + t, listed.end - 1)) // most
                tokens = tokens + (one,)  # noqa: RUF005
            step = _copy_rows(descs, shared, tile, first_head, tokens, step, CFG)


@gluon.jit
def _flags(shared, tile, first, last, near: gl.constexpr):
    """What the note of a tile with queries `first` to `last` of the sequence says."""
    sizes = shared.sizes
    last_key = tile.kv_start + (ROWS - 1)
    first_pos = position(first, tile.q_len, tile.kv_len)
    last_pos = position(last, tile.q_len, tile.kv_len)
    of_first = row_bounds(first_pos, tile.kv_len, sizes.near_left, sizes.near_right)
    of_last = row_bounds(last_pos, tile.kv_len, sizes.near_left, sizes.near_right)
    if near:
        whole = not_before(tile.kv_start, of_last.first) & not_after(last_key, of_first.last)
        flags = gl.where(whole, 0, EDGE | NEAR)
    else:
        limit = row_bounds(first_pos, tile.kv_len, OPEN, sizes.limit_right)
        # near keys are counted already
        far = not_after(tile.kv_start, of_last.last) == 0
        far = far | (not_before(last_key, of_first.first) == 0)
        flags = gl.where(far & not_after(last_key, limit.last), 0, EDGE)
    return flags


@gluon.jit
def _describe_rows(
    describe, shared, tile, first_head, token, real, gate, step, NEAR_KEYS: gl.constexpr,
    CFG: gl.constexpr,
):  # fmt: skip
    """Leave the terms of a tile of rows, once a stage is free.

    `token`, `real` and `gate` are the query of each row within its sequence, whether there is such
    a row, and its gate or None.
    """
    ring = shared.rows
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    row = _row_numbers()
    at = row_offsets(
        first_head + row % CFG.PACK, tile.q_first + token, tile.batch, shared.heads.q,
        describe.lse_head_stride, shared.cu_seqlens.q,
    )  # fmt: skip
    lse = gl.load(describe.terms.lse + at, real, other=-float("inf"))
    delta = gl.load(describe.terms.delta + at, real, other=0.0)
    # queries ascend
    first = gl.min(gl.where(real, token, OPEN), 0)
    flags = _flags(shared, tile, first, gl.max(gl.where(real, token, 0), 0), NEAR_KEYS)
    shift = shift_of_rows(lse)
    if gate is not None:
        # p is exp2(s - shift) times the gate; a gate of 0 has a shift of +inf
        shift = gl.where(gate > 0.0, shift - gl.log2(gl.where(gate > 0.0, gate, 1.0)), float("inf"))
    stage, phase = ring_place(step, CFG.STAGES)
    mbarrier.wait(ring.empty.index(stage), phase ^ 1)
    ring.shift.index(stage).store(shift)
    ring.delta.index(stage).store(delta)
    ring.index.index(stage).store(token)
    ring.flags.index(stage).store(gl.full([1], 0, gl.int32, lane) + flags)
    # the one thread that arrives does not wait for the stores of the others
    thread_barrier()
    mbarrier.arrive(ring.full.index(stage), count=1)
    return step + 1


@gluon.jit
def _row_numbers():
    """Rows of a tile, held by one warp."""
    per_thread: gl.constexpr = ROWS // 32
    return gl.arange(0, ROWS, gl.BlockedLayout([per_thread], [32], [1], [0]))


@gluon.jit
def _produce_terms(describe, shared, CFG: gl.constexpr):
    """Role of the second producer: lse, delta and index of each row, in the order of the first."""
    heads, most = shared.heads, shared.sizes.most
    count: gl.constexpr = CFG.tokens
    in_tile = _row_numbers() // CFG.PACK
    tile = _key_tile(shared, CFG)
    step = 0
    first = tile.kv_head * heads.group
    for first_head in range(first, first + heads.group, CFG.PACK):
        for start in range(tile.near_lo, tile.near_hi, count):
            real = exists(start + in_tile, tile.near_hi)
            token = gl.where(real, start + in_tile, 0)
            step = _describe_rows(
                describe, shared, tile, first_head, token, real, None, step, True, CFG
            )  # fmt: skip
        listed = _list_of(shared, tile, first_head, CFG)
        for start in range(listed.begin, listed.end, count):
            real = exists(start + in_tile, listed.end)
            place = gl.load(listed.places + start + in_tile, real, other=0)
            token = gl.where(real, place // most - tile.q_first, 0)
            gate = None
            if describe.gate is not None:
                list_head = first_head // heads.per_list
                of_token = tile.q_first + token
                at = offsets_of(tile.batch, list_head, of_token, describe.gate_strides)
                gate = gl.load(describe.gate + at + place % most, real, other=1.0).to(gl.float32)
            step = _describe_rows(
                describe, shared, tile, first_head, token, real, gate, step, False, CFG
            )  # fmt: skip


# Consumer


@gluon.jit
def _hide(p, shared, tile, stage, flags, CFG: gl.constexpr):
    """p^T without the keys that a query does not see."""
    sizes = shared.sizes
    layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_M)
    kv_pos = tile.kv_start + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    index = shared.rows.index.index(stage).load(gl.SliceLayout(0, layout))[None, :]
    # bounds of the keys take two registers, those of the queries would take two for each query
    limit = column_bounds(kv_pos, tile.q_len, tile.kv_len, OPEN, sizes.limit_right)
    near = column_bounds(kv_pos, tile.q_len, tile.kv_len, sizes.near_left, sizes.near_right)
    is_near = within_bounds(index, near.first[:, None], near.last[:, None])
    wanted = gl.where((flags & NEAR) != 0, 1, 0)
    visible = (is_near.to(gl.int32) == wanted) & exists(kv_pos, tile.kv_len)[:, None]
    visible = visible & within_bounds(index, limit.first[:, None], limit.last[:, None])
    return gl.where(visible, p, 0.0)


@gluon.jit
def _step(dk, dv, step, tile, score, shared, CFG: gl.constexpr):
    """Add what one tile of rows gives to the gradients of 64 keys."""
    ring = shared.rows
    dtype: gl.constexpr = ring.q.dtype
    group: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    columns: gl.constexpr = gl.SliceLayout(0, CFG.accumulator_layout(CFG.TILE_M))
    p_layout: gl.constexpr = gl.DotOperandLayout(0, CFG.accumulator_layout(CFG.TILE_DV), 2)
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, CFG.accumulator_layout(CFG.TILE_D), 2)
    stage, phase = ring_place(step, CFG.STAGES)
    mbarrier.wait(ring.full.index(stage), phase)
    k, v = shared.k_smem.index(zero_of(step)), shared.v_smem.index(zero_of(step))
    s_started = start_products(k, ring.q, step, CFG.TILE_D, CFG)
    dp_started = start_products(v, ring.dout, step, CFG.TILE_DV, CFG)
    # capped scores leave no registers to load terms while the products are under way
    early: gl.constexpr = score.inverse_cap is None
    if early:
        shift = ring.shift.index(stage).load(columns)[None, :]
    s = warpgroup_mma_wait(1, deps=(s_started,))
    if not early:
        shift = ring.shift.index(stage).load(columns)[None, :]
    flags = gl.max(ring.flags.index(stage).load(group), 0)
    p, capped = probabilities(s, None, shift, score)
    if (flags & EDGE) != 0:
        p = _hide(p, shared, tile, stage, flags, CFG)
    if early:
        delta = ring.delta.index(stage).load(columns)[None, :]
    dp = warpgroup_mma_wait(0, deps=(dp_started,))
    if not early:
        delta = ring.delta.index(stage).load(columns)[None, :]
    ds = score_gradients(p, capped, dp, delta, score)
    p = gl.convert_layout(p.to(dtype), p_layout)
    ds = gl.convert_layout(ds.to(dtype), ds_layout)
    dv_started = warpgroup_mma(p, ring.dout.index(placed(stage)), dv, is_async=True)
    dk_started = warpgroup_mma(ds, ring.q.index(placed(stage)), dk, is_async=True)
    dv, dk = warpgroup_mma_wait(0, deps=(dv_started, dk_started))
    mbarrier.arrive(ring.empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def _store(ptr, strides, tile, acc, HEAD_DIM: gl.constexpr):
    """Store gradients of the keys that there are."""
    kv_pos = tile.kv_start + rows_of(acc)
    at = offsets_of(tile.batch, tile.kv_head, tile.kv_first + kv_pos, strides)
    columns = columns_of(acc)
    live = exists(kv_pos, tile.kv_len)[:, None] & (columns < HEAD_DIM)[None, :]
    gl.store(ptr + at[:, None] + columns[None, :], acc.to(ptr.dtype.element_ty), live)


@gluon.jit
def _consume(gradients, strides, score, shared, CFG: gl.constexpr):
    """Role of the consumer warp group: gradients of 64 keys."""
    heads = shared.heads
    tile_d: gl.constexpr = CFG.TILE_D
    tile_dv: gl.constexpr = CFG.TILE_DV
    tile = _key_tile(shared, CFG)
    steps = _tiles_between(tile.near_lo, tile.near_hi, CFG) * (heads.group // CFG.PACK)
    first = tile.kv_head * heads.group
    for first_head in range(first, first + heads.group, CFG.PACK):
        listed = _list_of(shared, tile, first_head, CFG)
        steps += _tiles_between(listed.begin, listed.end, CFG)
    dk = gl.zeros([ROWS, tile_d], gl.float32, CFG.accumulator_layout(CFG.TILE_D))
    dv = gl.zeros([ROWS, tile_dv], gl.float32, CFG.accumulator_layout(CFG.TILE_DV))
    mbarrier.wait(shared.kv_full, 0)
    for step in range(0, steps):
        dk, dv = _step(dk, dv, step, tile, score, shared, CFG)
    # found again, and not kept: registers are scarce in the loop
    tile = _key_tile(shared, CFG)
    if gradients.dv is not None:
        _store(gradients.dv, strides.dv, tile, dv, CFG.HEAD_DIM_V)
    if gradients.dk is not None:
        _store(gradients.dk, strides.dk, tile, dk * score.scale, CFG.HEAD_DIM)


@gluon.jit(
    do_not_specialize=[
        "lse_head_stride", "q_len", "kv_len", "num_tiles", "most", "num_blocks", "num_tokens",
        "num_lists", "limit_right", "near_left", "near_right",
    ]
)  # fmt: skip
def _sparse_attn_dkdv_sm90_kernel(
    gradients,
    q_desc,
    dout_desc,
    k_desc,
    v_desc,
    gate_ptr,
    terms,
    queries,
    first_blocks_ptr,
    cu_seqlens,
    strides,
    lse_head_stride,
    q_len,
    kv_len,
    num_tiles,
    most,
    num_blocks,
    num_tokens,
    num_lists,
    limit_right,
    near_left,
    near_right,
    heads,
    score,
    CFG: gl.constexpr,
):
    """Allocate the ring, gather the arguments of the roles, and start them."""
    stages: gl.constexpr = CFG.STAGES
    producer_registers: gl.constexpr = CFG.PRODUCER_REGISTERS
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_smem, v_smem = tiles(k_desc, 1, ROWS), tiles(v_desc, 1, ROWS)
    q_smem, dout_smem = tiles(k_desc, stages, ROWS), tiles(v_desc, stages, ROWS)
    shift = gl.allocate_shared_memory(gl.float32, [stages, ROWS], flat)
    delta = gl.allocate_shared_memory(gl.float32, [stages, ROWS], flat)
    index = gl.allocate_shared_memory(gl.int32, [stages, ROWS], flat)
    flags = gl.allocate_shared_memory(gl.int32, [stages, 1], flat)
    kv_full = barriers(1, 1).index(0)
    # one producer arrives with the bytes of its copies, the other behind the terms of rows
    full, empty = barriers(stages, 2), barriers(stages, 1)
    fence_async_shared()

    sizes = Sizes(q_len, kv_len, num_tiles, most, num_blocks, limit_right, near_left, near_right)
    rows = RowRing(q_smem, dout_smem, shift, delta, index, flags, full, empty)
    shared = DkdvShared(
        k_smem, v_smem, kv_full, rows, queries, first_blocks_ptr, cu_seqlens, sizes, num_tokens,
        num_lists, heads,
    )  # fmt: skip
    descs = RowDescriptors(q_desc, dout_desc, k_desc, v_desc)
    describe = RowDescription(gate_ptr, strides.gate, terms, lse_head_stride)
    # the first role runs in the warps of the launch, the others in warps of their own
    gl.warp_specialize(
        [
            (_consume, (gradients, strides, score, shared, CFG)),
            (_produce_rows, (descs, shared, CFG)),
            (_produce_terms, (describe, shared, CFG)),
        ],
        [1, 1],
        [producer_registers, producer_registers],
    )


def _row_descriptor(x: torch.Tensor, block: tuple[int, int, int, int]) -> Any:
    """TMA descriptor of the heads of a token: [B, S, H, D]; packed tokens are one batch."""
    x = x[None] if x.dim() == 3 else x.transpose(1, 2)
    return tensor_descriptor(x, block, tma_strides(x))


def launch_sparse_attn_dkdv_sm90(
    call: SparseBackwardCall, delta: torch.Tensor, config: SparseDkdvSm90Config
) -> None:
    """Fill dk and dv, whichever are needed.

    Parameters
    ----------
    call : the backward call; q, k, v and dout with strides and addresses that TMA takes
    delta : fp32, like lse, contiguous
    config : tiles
    """
    given, spec = call.forward, call.forward.spec
    q, k, v, chosen = given.q, given.k, given.v, given.spec.selection
    dk, dv = call.gradients.dk, call.gradients.dv
    num_tiles = cdiv(spec.max_k, config.TILE_M)
    programs = given.batch * given.kv_heads * num_tiles
    if programs == 0:
        return
    lists = transposed(given)
    written = (k if dk is None else dk, v if dv is None else dv)
    _, list_strides = list_arguments(given)
    with on_device_of(q):
        args = (
            KeyGradients(dk, dv),
            _row_descriptor(q, config.row_block()),
            _row_descriptor(call.dout, config.row_block()),
            key_descriptor(k, config.k_block()),
            key_descriptor(v, config.v_block()),
            spec.gate,
            RowTerms(call.lse, delta),
            lists.queries,
            lists.first_blocks,
            CuSeqlens(spec.cu_seqlens_q, spec.cu_seqlens_k),
            KeyStrides(*(key_strides(x, given) for x in written), list_strides.gate),
            call.lse.stride(-2),
            spec.max_q,
            spec.max_k,
            num_tiles,
            max(chosen.most, 1),
            lists.blocks,
            chosen.q_len,
            chosen.heads if chosen.batch > 1 else 0,
            spec.limit_right,
            *local_sides(given),
            head_counts(given),
            gradient_factors(spec.scale, spec.softcap, q.dtype),
            config,
        )
        options: dict[str, Any] = {"num_warps": 4, "maxnreg": config.MAX_REGISTERS}
        launch(_sparse_attn_dkdv_sm90_kernel, programs, args, **options, **hopper_options())
