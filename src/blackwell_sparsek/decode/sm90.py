# mypy: ignore-errors
"""Attention of a few new queries over a cache on Hopper: the arithmetic of `triton.py` by WGMMA.

Shapes, results and the division of work are as in `triton.py`: programs take equal ranges of the KV
tiles of all softmaxes, and a split is the part of one softmax that a program has. A producer warp
(`sm90_producer.py`) publishes the splits and keeps a ring of K and V tiles full by TMA. A consumer
warp group computes with keys as the rows of its products,

    s^T = K Q^T [TILE_N, ROWS]      o^T = V^T P^T [Dv, ROWS]

so that few queries cost few instructions; 64 queries fill the rows of a product themselves. K and V
are operands in shared memory, where TMA put them; fp8 ones are first converted to fp16 in
registers. Q and P are small, and the consumer writes them to shared memory; the P of 64 queries
stays in registers.

Called by `sm90_latent.decode`, impl "sm90" of `bsk::attn_decode`, for all but latent caches.
Limits: queries in fp16 or bf16, caches too or in fp8 (D and Dv 128, up to 16 rows that share a KV
head), D and Dv 64, 128 or 256, pages and listed blocks of a multiple of 16 tokens, strides and
addresses that TMA accepts, and those of `triton.py`. Slots past the lengths are copied but ignored;
a page out of range is not read.
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..attention.operands import score_factors, token_strides
from ..attention.sm90.forward_plan import tma_strides
from ..calls.decode import DecodeCall
from ..core.compat import hopper_options
from ..device.fp8 import turned_back
from ..device.gluon.fp8_operands import column_of_slot, half_range, key_operand, value_operand
from ..device.gluon.partials import columns_of, merge_parts, rows_of, store_part
from ..device.gluon.pipeline import (
    barriers,
    drop_dead_values,
    peek,
    take,
    tiles,
    work_channel,
)
from ..device.masks import kv_range, kv_range_of_all, position, row_bounds, within_bounds
from ..device.partials import MERGED_ROWS, is_last, part_slot
from ..device.records import Strides
from ..device.scores import cap, fold_sign
from ..device.softmax import add_sink, finalise, init_state, weigh
from ..launch.descriptors import tensor_descriptor
from ..launch.launcher import cdiv, launch, on_device_of
from ..launch.workspace import scratch, self_resetting_counters
from .combine import RECORD_FIELDS, SoftmaxRecord, launch_attn_decode_combine
from .sm90_producer import (
    HEAD_TILE,
    SEQUENCE,
    SPLIT_FIELDS,
    KVRing,
    ProducerState,
    SharedState,
    Split,
    StageNotes,
    kv_head_of,
    produce_tiles,
)
from .triton import (
    DecodeHeads,
    DecodeResults,
    DecodeWorkspace,
    HeadTile,
    VisitedKeys,
    scale_stride,
)
from .tuning import DecodeSm90Config, attn_decode_sm90_launch


class DecodeSm90Scoring(NamedTuple):
    """Factors of scores (see `score_factors`), the scales of an fp8 cache and their strides."""

    scale_log2: Any
    inverse_cap: Any
    k_scale: Any
    v_scale: Any
    k_scale_stride: Any
    v_scale_stride: Any


class DecodeSm90Strides(NamedTuple):
    """Strides of out and q."""

    out: Strides
    q: Strides


class ConsumerState(NamedTuple):
    """Arguments of the consumer alone: queries, results, and its shared memory."""

    results: Any
    q_ptr: Any
    sinks_ptr: Any
    score: Any
    workspace: Any
    strides: Any
    q_smem: Any
    p_smem: Any
    num_splits: Any


class QueryTile(NamedTuple):
    """Queries of a head tile, with its KV head, its first row and the scale of its keys."""

    kv_head: Any
    first_row: Any
    q: Any
    k_scale: Any


@gluon.jit
def places_of_rows(rows, num_rows, kv_head, group, q_len, strides):
    """`triton._row_places`, without divisions if there is one query."""
    rows = gl.minimum(rows, num_rows - 1)
    token = rows - rows
    in_group = rows
    if q_len > 1:
        token = rows // group
        in_group = rows - token * group
    head = kv_head * group + in_group
    return token, head, head.to(gl.int64) * strides.head + token * strides.token


@gluon.jit
def read_queries(consume, shared, sequence, head_tile, q_tiles, CFG: gl.constexpr):
    """The `QueryTile` of a head tile. Nothing is read if the sequence is -1."""
    q_len = shared.keys.q_len
    heads = shared.heads
    strides = consume.strides.q
    score = consume.score
    rows: gl.constexpr = CFG.ROWS
    dim: gl.constexpr = CFG.TILE_D
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // dim, dim // 8], [4, 1], [1, 0])
    kv_head = kv_head_of(head_tile, q_tiles)
    first_row = (head_tile - kv_head * q_tiles) * rows
    num_rows = q_len * heads.group
    row = first_row + gl.arange(0, rows, gl.SliceLayout(1, layout))
    offs_d = gl.arange(0, dim, gl.SliceLayout(0, layout))
    if CFG.WORDS:
        offs_d = column_of_slot(offs_d)
    _, _, offset = places_of_rows(row, num_rows, kv_head, heads.group, q_len, strides)
    queries = consume.q_ptr + sequence.to(gl.int64) * strides.batch
    live = (row < num_rows) & (sequence >= 0)
    q = gl.load(queries + offset[:, None] + offs_d[None, :], live[:, None], other=0.0)
    k_scale = 1.0
    if score.k_scale is not None:
        k_scale_ptr = score.k_scale + kv_head * score.k_scale_stride
        k_scale = gl.load(k_scale_ptr, sequence >= 0, other=1.0)
    return QueryTile(kv_head, first_row, q, k_scale)


@gluon.jit
def put_queries(q_smem, q, k_scale, score, CFG: gl.constexpr):
    """Store queries to shared memory; return their score factor, and the one inside a softcap."""
    # with a softcap the softmax factor is the cap, and the scale of keys applies inside it
    factor = score.scale_log2
    if score.inverse_cap is None:
        factor = factor * k_scale
    q, factor = fold_sign(q, factor)
    inside = k_scale
    if CFG.WORDS and q.dtype != gl.float16:
        q, up = half_range(q)
        factor = factor * up if score.inverse_cap is None else factor
        inside = inside * up
    q_smem.store(q)
    fence_async_shared()
    return factor, inside


@gluon.jit
def mask_scores(s, kv_pos, first_row, length, keys, group):
    """Scores [rows, keys], -inf where a query does not see a key."""
    row = first_row + rows_of(s)
    # rows past the last query are masked like some existing position; they are never stored
    token = row - row
    if keys.q_len > 1:
        token = row // group
    q_pos = position(token, keys.q_len, length)
    first, last = row_bounds(q_pos, length, keys.left, keys.right)
    visible = within_bounds(kv_pos[None, :], first[:, None], last[:, None])
    return gl.where(visible, s, -float("inf"))


@gluon.jit
def write_rows(consume, shared, work, m_log2, row_sum, acc, first_row, end_row):
    """Finalise packed rows and store outputs and lse, but not from `end_row` on."""
    heads = shared.heads
    strides = consume.strides.out
    score = consume.score
    q_len = shared.keys.q_len
    row = first_row + rows_of(acc)
    live = row < end_row
    token, head, offset = places_of_rows(row, end_row, work.kv_head, heads.group, q_len, strides)
    if consume.sinks_ptr is not None:
        m_log2, row_sum, rescale = add_sink(m_log2, row_sum, gl.load(consume.sinks_ptr + head))
        acc = acc * rescale[:, None]
    row_sum = gl.where(work.kv_len < 0, float("nan"), row_sum)
    inverse, lse = finalise(m_log2, row_sum)
    if score.v_scale is not None:
        inverse *= gl.load(score.v_scale + work.kv_head * score.v_scale_stride)
    if shared.places_ptr is not None:
        # neither a sink nor a block out of range is a result of a query without a sequence
        unused = gl.load(shared.places_ptr + work.sequence) < 0
        inverse = gl.where(unused, 0.0, inverse)
        lse = gl.where(unused, -float("inf"), lse)
    out_ptr = consume.results.out + work.sequence.to(gl.int64) * strides.batch
    gl.store(
        out_ptr + offset[:, None] + columns_of(acc)[None, :],
        (acc * inverse[:, None]).to(out_ptr.dtype.element_ty),
        live[:, None],
    )
    lse_row = (work.sequence.to(gl.int64) * heads.kv * heads.group + head) * q_len + token
    if shared.places_ptr is not None:
        lse_row = head.to(gl.int64) * shared.keys.batch + work.sequence
    gl.store(consume.results.lse + lse_row, lse, live)


@gluon.jit
def combine_parts(
    consume, shared, work, acc_partials, state_partials, begins, ends, first_row, num_rows,
    TILE_M: gl.constexpr, TILE_DV: gl.constexpr,
):  # fmt: skip
    """Combine and store the parts of a softmax, of programs `begins .. ends`."""
    tile_rows = gl.minimum(num_rows - first_row, TILE_M)
    end_row = first_row + tile_rows
    for row in range(0, tile_rows, MERGED_ROWS):
        m_log2, row_sum, acc = merge_parts(
            acc_partials, state_partials, begins, ends - begins + 1, row, tile_rows,
            TILE_M, TILE_DV,
        )  # fmt: skip
        write_rows(consume, shared, work, m_log2, row_sum, acc, first_row + row, end_row)


@gluon.jit
def write_record(consume, split, begins, ends, head_tiles, program):
    """Record which programs hold the parts of a softmax, if `program` begins it."""
    if program == begins:
        parts = ends - begins + 1
        softmax = split.sequence * head_tiles + split.head_tile
        record = consume.workspace.records + softmax * RECORD_FIELDS
        fields = SoftmaxRecord(begins, parts, split.sequence, split.head_tile, split.kv_len)
        for i in gl.static_range(len(fields)):
            gl.store(record + i, fields[i])


@gluon.jit
def _by_rows(product, CFG: gl.constexpr):
    """A product with the queries as its rows."""
    if CFG.swapped:
        product = gl.permute(product, (1, 0))
    return product


@gluon.jit
def _no_product(WIDTH: gl.constexpr, LAYOUT: gl.constexpr, CFG: gl.constexpr):
    """Zeros of the shape of a product with WIDTH keys or dims."""
    rows: gl.constexpr = WIDTH if CFG.swapped else CFG.ROWS
    columns: gl.constexpr = CFG.ROWS if CFG.swapped else WIDTH
    return gl.zeros([rows, columns], gl.float32, LAYOUT)


@gluon.jit
def _start_scores(k, q_smem, no_scores, CFG: gl.constexpr):
    """Start the product of keys and queries."""
    if CFG.swapped:
        q = q_smem.permute((1, 0))
        scores = warpgroup_mma(k, q, no_scores, use_acc=False, is_async=True)
    else:
        scores = warpgroup_mma(q_smem, k.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    return scores


@gluon.jit
def _rescaled(acc, rescale, CFG: gl.constexpr):
    """Accumulators times a factor for each query."""
    if CFG.swapped:
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(0, acc.type.layout))[None, :]
    else:
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc


@gluon.jit
def _put_weights(p, p_smem, CFG: gl.constexpr):
    """Weights [queries, keys] as an operand: in shared memory, or in registers if they are rows."""
    weights = p_smem
    if CFG.swapped:
        p_smem.store(p.to(p_smem.dtype))
    else:
        operand: gl.constexpr = gl.DotOperandLayout(0, CFG.accumulator_layout(), 2)
        weights = gl.convert_layout(p.to(p_smem.dtype), operand)
    return weights


@gluon.jit
def _add_values(acc, weights, values, CFG: gl.constexpr):
    """acc + the product of weights and values; `values` [dims, keys] if CFG.swapped."""
    if CFG.swapped:
        fence_async_shared()
        product = warpgroup_mma(values, weights.permute((1, 0)), acc, is_async=True)
    else:
        product = warpgroup_mma(weights, values, acc, is_async=True)
    return warpgroup_mma_wait(0, deps=(product,))


@gluon.jit
def _consume(consume, shared, CFG: gl.constexpr):
    """Attend with the queries of each split."""
    ring = shared.ring
    keys = shared.keys
    heads = shared.heads
    score = consume.score
    p_smem = consume.p_smem
    tile_n: gl.constexpr = CFG.TILE_N
    tile_dv: gl.constexpr = CFG.TILE_DV
    num: gl.constexpr = CFG.ROWS
    layout: gl.constexpr = CFG.accumulator_layout()
    group: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    no_scores = _no_product(tile_n, CFG.scores_layout(), CFG)
    no_sums = _by_rows(no_scores, CFG)
    rows = rows_of(no_sums)
    offs_n = columns_of(no_sums)
    num_rows = keys.q_len * heads.group
    q_tiles = (num_rows + num - 1) // num
    acc_partials = consume.workspace.partials
    state_partials = acc_partials + (2 * gl.num_programs(0)).to(gl.int64) * (num * tile_dv)
    program = gl.program_id(0)
    step = 0
    number = 0
    if CFG.SINGLE:
        gdc_wait()
        if consume.num_splits > 0:
            # the head is known before the length is
            head_tile = program // consume.num_splits
            sequence = gl.where(head_tile < heads.kv * q_tiles, 0, -1)
        else:
            sequence = peek(shared.splits, number, SEQUENCE)
            head_tile = peek(shared.splits, number, HEAD_TILE)
        queries = read_queries(consume, shared, sequence, head_tile, q_tiles, CFG)
    split = Split(*take(shared.splits, number))
    while split.sequence >= 0:
        if not CFG.SINGLE:
            queries = read_queries(consume, shared, split.sequence, split.head_tile, q_tiles, CFG)
        factor, inside = put_queries(consume.q_smem, queries.q, queries.k_scale, score, CFG)
        # divisions, while the keys are being copied
        begins = split.origin + split.softmax_start // split.range_tiles
        ends = split.origin + (split.softmax_start + split.count - 1) // split.range_tiles
        if CFG.COMBINED:
            write_record(consume, split, begins, ends, heads.kv * q_tiles, program)
        length = gl.maximum(split.kv_len, 0)
        kv_lo, kv_hi = kv_range(0, keys.q_len, keys.q_len, length, keys.left, keys.right)
        all_lo, all_hi = kv_range_of_all(0, keys.q_len, keys.q_len, length, keys.left, keys.right)
        m_log2, row_sum = init_state(rows)
        sums = no_sums
        wrong = 0
        acc = _no_product(tile_dv, layout, CFG)
        for tile in range(split.kv_tile, split.kv_end):
            stage = step % CFG.STAGES
            phase = (step // CFG.STAGES) & 1
            kv_start = tile * tile_n
            mbarrier.wait(ring.full.index(stage), phase)
            kv_pos = kv_start + offs_n
            positions = None
            cut = (kv_start < kv_lo) | (kv_start + tile_n > kv_hi)
            if CFG.scattered:
                note = gl.max(shared.notes.flags.index(stage).load(group), 0)
                wrong = note % 2
                cut = note >= 2
            if CFG.BLOCK_KV is not None:
                positions = shared.notes.positions.index(stage)
                kv_pos = positions.load(gl.SliceLayout(0, no_sums.type.layout))
            k = ring.k.index(stage)
            v = ring.v.index(stage)
            if CFG.WORDS:
                k = key_operand(k, layout)
            scores = _start_scores(k, consume.q_smem, no_scores, CFG)
            if CFG.WORDS:
                if cut:
                    drop_dead_values(v, kv_start, positions, kv_lo, kv_hi)
                # while the tensor cores multiply
                values = value_operand(v, layout)
            s = _by_rows(warpgroup_mma_wait(0, deps=(scores,)), CFG)
            if CFG.WORDS and score.inverse_cap is not None:
                s = s * inside
            s = cap(s, score.inverse_cap)
            if CFG.BLOCK_KV is not None or (kv_start < all_lo) | (kv_start + tile_n > all_hi):
                s = mask_scores(s, kv_pos, queries.first_row, length, keys, heads.group)
            m_log2, p, rescale = weigh(m_log2, s, factor)
            sums = sums * rescale[:, None] + p
            weights = _put_weights(p, p_smem, CFG)
            acc = _rescaled(acc, rescale, CFG)
            if not CFG.WORDS:
                if cut:
                    drop_dead_values(v, kv_start, positions, kv_lo, kv_hi)
                    fence_async_shared()
                values = v.permute((1, 0)) if CFG.swapped else v
            acc = _add_values(acc, weights, values, CFG)
            mbarrier.arrive(ring.empty.index(stage), count=1)
            step += 1

        if CFG.WORDS:
            acc = turned_back(acc)
        out = _by_rows(acc, CFG)
        out_rows: gl.constexpr = gl.SliceLayout(1, out.type.layout)
        row_sum = gl.convert_layout(gl.sum(sums, 1), out_rows)
        if CFG.scattered:
            row_sum = gl.where(wrong != 0, float("nan"), row_sum)
        m_out = gl.convert_layout(m_log2, out_rows)
        first_row = queries.first_row
        work = HeadTile(split.sequence, split.kv_len, queries.kv_head)
        if begins == ends:
            write_rows(consume, shared, work, m_out, row_sum, out, first_row, num_rows)
        else:
            tile_rows = gl.minimum(num_rows - first_row, num)
            slot = part_slot(program, begins)
            store_part(acc_partials, state_partials, slot, m_out, row_sum, out, tile_rows)
            if not CFG.COMBINED:  # noqa: SIM102
                if is_last(consume.workspace.counters + begins, ends - begins + 1):
                    combine_parts(
                        consume, shared, work, acc_partials, state_partials, begins, ends,
                        first_row, num_rows, num, tile_dv,
                    )  # fmt: skip
        number += 1
        split = Split(*take(shared.splits, number))
        if CFG.SINGLE:  # noqa: SIM102
            if split.sequence >= 0:
                queries = read_queries(
                    consume, shared, split.sequence, split.head_tile, q_tiles, CFG
                )


@gluon.jit(
    do_not_specialize=[
        "page_row_stride", "list_batch_stride", "list_head_stride", "batch", "q_len", "capacity",
        "num_pages", "num_blocks", "left", "right", "num_splits",
    ]
)  # fmt: skip
def _attn_decode_sm90_kernel(
    results,
    q_ptr,
    k_desc,
    v_desc,
    seqlens_ptr,
    page_table_ptr,
    list_ptr,
    places_ptr,
    sinks_ptr,
    score,
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
    num_splits,
    CFG: gl.constexpr,
):
    """Set up the ring and the roles; `produce_tiles` and `_consume` do the work.

    `num_splits` is the number of programs per softmax, 0 if there are more softmaxes than programs.
    """
    first_length = batch
    if CFG.SINGLE:
        # PDL: the next kernel may start as soon as there is room for it; it waits where it must
        gdc_launch_dependents()
    else:
        # everything depends on the lengths, so the first load is issued before all else
        first_length = gl.load(seqlens_ptr)
    stages: gl.constexpr = CFG.STAGES
    tile_n: gl.constexpr = CFG.TILE_N
    producer_registers: gl.constexpr = CFG.PRODUCER_REGISTERS
    num: gl.constexpr = CFG.ROWS
    tile_d: gl.constexpr = CFG.TILE_D
    dtype: gl.constexpr = gl.float16 if CFG.WORDS else k_desc.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([num, tile_d], dtype)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([num, tile_n], dtype)
    k_smem = tiles(k_desc, stages, tile_n)
    v_smem = tiles(v_desc, stages, tile_n)
    q_smem = gl.allocate_shared_memory(dtype, [num, tile_d], q_layout)
    p_smem = q_smem
    if CFG.swapped:
        p_smem = gl.allocate_shared_memory(dtype, [num, tile_n], p_layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    flags = gl.allocate_shared_memory(gl.int32, [stages, 1], plain)
    positions = gl.allocate_shared_memory(gl.int32, [stages, CFG.noted_keys], plain)
    # keys and values share a barrier, since each barrier costs a launch 60 cycles
    ring = KVRing(k_smem, v_smem, barriers(stages, 1), barriers(stages, 1))
    splits = work_channel(SPLIT_FIELDS, 1)
    fence_async_shared()

    keys = VisitedKeys(seqlens_ptr, batch, q_len, capacity, left, right, num_blocks)
    produce = ProducerState(
        k_desc, v_desc, page_table_ptr, list_ptr, num_pages, page_row_stride, list_batch_stride,
        list_head_stride, num_splits,
    )  # fmt: skip
    consume = ConsumerState(
        results, q_ptr, sinks_ptr, score, workspace, strides, q_smem, p_smem, num_splits
    )
    notes = StageNotes(positions, flags)
    shared = SharedState(ring, notes, splits, keys, first_length, heads, places_ptr)
    # the first role runs in the warps of the launch, the other in an additional warp
    gl.warp_specialize(
        [(_consume, (consume, shared, CFG)), (produce_tiles, (produce, shared, CFG))],
        [1],
        [producer_registers],
    )


def decode(call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse, as `empty_results` lays them out."""
    config, programs = attn_decode_sm90_launch(call.problem)
    out, lse = call.empty_results()
    launch_attn_decode_sm90(out, lse, call, config, programs)
    return out, lse


def launch_attn_decode_sm90(
    out: torch.Tensor,
    lse: torch.Tensor,
    call: DecodeCall,
    config: DecodeSm90Config,
    programs: int,
    places: torch.Tensor | None = None,
) -> None:
    """Fill `out` and `lse`.

    Takes `2 * programs * ROWS * (Dv + 2)` floats of memory, whatever the lengths are.

    Parameters
    ----------
    out : [B, Hq, Sq, Dv], contiguous in the last dimension; all of it is written
    lse : fp32 [B, Hq, Sq], contiguous
    call : validated; caches with strides and addresses that TMA accepts and at least one slot
    config : tiles; SINGLE for a batch of one
    programs : how many programs split the tiles of all sequences and heads
    places : int32 [B], for one query of each sequence: its row of the page table, the lists or a
        contiguous cache, -1 for a query without a sequence. Then `lse` is [Hq, B], and parts are
        not combined by a separate launch.
    """
    q, k_cache, v_cache = call.q, call.k_cache, call.v_cache
    batch, heads_q, q_len, _ = q.shape
    if batch * heads_q * q_len == 0:
        return
    assert batch == 1 or not config.SINGLE, f"{batch=} {config=}"
    assert places is None or not (config.COMBINED or q_len > 1), f"{q_len=} {config=}"
    if config.WORDS:
        k_cache, v_cache = k_cache.view(torch.int32), v_cache.view(torch.int32)
    with on_device_of(q):
        descriptors = (
            descriptor(k_cache, call.page_size, config.k_block()),
            descriptor(v_cache, call.page_size, config.v_block()),
        )
        workspace = DecodeWorkspace(
            scratch((2 * programs, config.ROWS, config.TILE_DV + 2), torch.float32, q.device),
            self_resetting_counters(programs, q.device),
            records_of_softmaxes(call, config),
        )
        args = kernel_arguments(out, lse, call, descriptors, workspace, config, programs, places)
        options = {"num_warps": 4, "maxnreg": config.MAX_REGISTERS, "launch_pdl": config.SINGLE}
        options |= hopper_options()
        launch(_attn_decode_sm90_kernel, programs, args, **options)
        if config.COMBINED:
            tile = (config.ROWS, config.TILE_DV)
            launch_attn_decode_combine(out, lse, call, workspace, tile, programs)


def records_of_softmaxes(call: DecodeCall, config: Any) -> torch.Tensor | None:
    """Room for the records that `combine.py` reads, if a separate launch combines parts."""
    if not config.COMBINED:
        return None
    batch, heads_q, q_len, _ = call.q.shape
    head_tiles = call.kv_heads * cdiv(heads_q // call.kv_heads * q_len, config.ROWS)
    return scratch((batch * head_tiles, RECORD_FIELDS.value), torch.int32, call.q.device)


def kernel_arguments(
    out: torch.Tensor,
    lse: torch.Tensor,
    call: DecodeCall,
    descriptors: tuple[Any, ...],
    workspace: DecodeWorkspace,
    config: Any,
    programs: int,
    places: torch.Tensor | None = None,
) -> tuple[Any, ...]:
    """The arguments of the Hopper decode kernels, in order; `descriptors` are of the cache."""
    q, table, blocks = call.q, call.page_table, call.kv_blocks
    batch, heads_q, q_len, _ = q.shape
    heads = DecodeHeads(call.kv_heads, heads_q // call.kv_heads)
    head_tiles = heads.kv * cdiv(heads.group * q_len, config.ROWS)
    return (
        DecodeResults(out, lse),
        q,
        *descriptors,
        call.cache_seqlens,
        table,
        blocks,
        places,
        None if call.sinks is None else call.sinks.contiguous(),
        DecodeSm90Scoring(
            *score_factors(call.scale, call.softcap),
            call.k_scale,
            call.v_scale,
            scale_stride(call.k_scale),
            scale_stride(call.v_scale),
        ),
        workspace,
        DecodeSm90Strides(Strides(*token_strides(out)), Strides(*token_strides(q))),
        0 if table is None else table.stride(0),
        *((0, 0) if blocks is None else blocks.stride()[:2]),
        batch,
        q_len,
        call.capacity,
        call.k_cache.shape[0],
        0 if blocks is None else blocks.shape[2],
        *call.band.scalars(),
        heads,
        programs // (batch * head_tiles),
        config,
    )


def descriptor(cache: torch.Tensor, page_size: int | None, block: tuple[int, int, int, int]) -> Any:
    """TMA descriptor of a cache as [batch or page, head, token, dim]."""
    cache = cache if page_size is None else cache.transpose(1, 2)
    return tensor_descriptor(cache, block, tma_strides(cache))
