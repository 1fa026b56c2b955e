# mypy: ignore-errors
"""Decoding over a latent cache on Hopper (MLA with absorbed weights): values are part of the keys.

q [B, Hq, Sq, 576], one cache [B, 1, S, 576] or pages of it, whose first 512 columns are also the
values; out [B, Hq, Sq, 512]. The division of work, the combination of splits and the producer are
those of `sm90.py`; only the arithmetic differs. Tiles are 64 query rows by 64 keys:

    S = Q K^T [64 rows, 64 keys]      O = P V [64 rows, 512]

Accumulators of 512 columns are too many for one warp group: each of two consumers has half of them.
A tile of keys is in shared memory once, for both products. The consumers alternate: one computes
the scores of even tiles and the other those of odd tiles, and each passes its weights and row
states to both through shared memory. The scores of an odd tile overlap the softmax of the even tile
before it.

The columns of the two consumers are released and copied separately, so that half of a tile is being
copied while the other half is still in use. The producer copies to computed addresses, see
`sm90_producer.py`.

With PAIRED, two programs form a cluster: they take two head tiles of the same keys, and each copies
every other slice of a tile to both, so that a tile is read from the L2 once. Each consumer then
multiplies the weights of its own tile first, from registers, while those of the other travel
through shared memory. Of row states only maxima travel with every tile; row sums are added up at
the end of a split. `device/gluon/latent_pairs.py` has this order, `sm90_latent_tiles.py` the one of
programs that work alone.

`decode` is impl "sm90" of `bsk::attn_decode`: it leaves other caches to `sm90.py`. Limits: fp16 and
bf16, D 576 and Dv 512, values a view of the first columns of the keys, pages and listed blocks of a
multiple of 16 tokens.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from ..calls.decode import DecodeCall
from ..core.compat import hopper_options
from ..device.gluon.cluster import cluster_barrier, cluster_exit_barrier, cluster_rank
from ..device.gluon.latent_pairs import multiply_own_tiles_first, pair_exchange
from ..device.gluon.partials import store_part
from ..device.gluon.pipeline import barriers, take, tiles, work_channel
from ..device.masks import kv_range, kv_range_of_all
from ..device.partials import is_last, part_slot
from ..device.scores import fold_sign
from ..launch.launcher import cdiv, launch, on_device_of
from ..launch.workspace import scratch, self_resetting_counters
from . import sm90
from .combine import launch_attn_decode_combine
from .sm90 import (
    ConsumerState,
    combine_parts,
    descriptor,
    kernel_arguments,
    places_of_rows,
    records_of_softmaxes,
    write_record,
    write_rows,
)
from .sm90_latent_tiles import Handover, KeysOfSplit, masked_tile, multiply_in_turns
from .sm90_producer import (
    SPLIT_FIELDS,
    KVRing,
    ProducerState,
    SharedState,
    Split,
    StageNotes,
    kv_head_of,
    produce_tiles,
)
from .triton import DecodeResults, DecodeWorkspace, HeadTile, VisitedKeys
from .tuning import LATENT_DIMS, LatentConfig, latent_launch

MAX_REGISTERS = 168


class LatentQueries(NamedTuple):
    """Queries in shared memory: the columns that multiply value columns, and the rest."""

    front: Any
    rest: Any


@gluon.jit
def _put_queries(
    consume, shared, q_smem, sequence, head_tile, q_tiles, FIRST: gl.constexpr, CFG: gl.constexpr
):
    """Copy columns of queries, from FIRST on, to shared memory; returns the factor of scores."""
    rows: gl.constexpr = CFG.ROWS
    dim: gl.constexpr = q_smem.shape[1]
    wide: gl.constexpr = 32 if dim >= 256 else dim // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // wide, wide], [4, 1], [1, 0])
    heads = shared.heads
    q_len = shared.keys.q_len
    kv_head = kv_head_of(head_tile, q_tiles)
    num_rows = q_len * heads.group
    row = (head_tile - kv_head * q_tiles) * rows
    row = row + gl.arange(0, rows, gl.SliceLayout(1, layout))
    offs_d = FIRST + gl.arange(0, dim, gl.SliceLayout(0, layout))
    strides = consume.strides.q
    _, _, offset = places_of_rows(row, num_rows, kv_head, heads.group, q_len, strides)
    queries = consume.q_ptr + sequence.to(gl.int64) * strides.batch
    live = (row < num_rows)[:, None]
    q = gl.load(queries + offset[:, None] + offs_d[None, :], live, other=0.0)
    q, factor = fold_sign(q, consume.score.scale_log2)
    q_smem.store(q)
    return factor


@gluon.jit
def _consume(consume, shared, q_smem, handover, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Attend with the queries of each split, for half of the columns of the values."""
    keys = shared.keys
    heads = shared.heads
    num: gl.constexpr = CFG.ROWS
    half: gl.constexpr = CFG.half
    first_col: gl.constexpr = GROUP * CFG.half
    values_dim: gl.constexpr = CFG.TILE_DV
    out_rows: gl.constexpr = gl.SliceLayout(1, CFG.accumulator_layout())
    num_rows = keys.q_len * heads.group
    q_tiles = (num_rows + num - 1) // num
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    if CFG.PAIRED:
        cluster_barrier()
        # parts of the second head tiles of pairs are stored after those of the first ones
        program = program // 2 + cluster_rank() * (programs // 2)
    # each consumer combines its columns by itself
    partials = consume.workspace.partials + (2 * programs).to(gl.int64) * (
        GROUP * num * (CFG.half + 2)
    )
    states = partials + (2 * programs).to(gl.int64) * (num * half)
    counters = consume.workspace.counters + GROUP * programs
    own = ConsumerState(
        DecodeResults(consume.results.out + first_col, consume.results.lse),
        consume.q_ptr, consume.sinks_ptr, consume.score, consume.workspace, consume.strides,
        None, None, consume.num_splits,
    )  # fmt: skip
    step = 0
    pairs = 0
    number = 0
    split = Split(*take(shared.splits, number))
    while split.sequence >= 0:
        # all scores of the previous split are done: both consumers have received its weights
        part = q_smem.front.index(0).slice(first_col, half, dim=1)
        place = (split.sequence, split.head_tile, q_tiles)
        factor = _put_queries(consume, shared, part, *place, first_col, CFG)
        if GROUP == 0:
            _put_queries(consume, shared, q_smem.rest.index(0), *place, values_dim, CFG)
        fence_async_shared()
        mbarrier.arrive(handover.queries, count=1)
        begins = split.origin + split.softmax_start // split.range_tiles
        ends = split.origin + (split.softmax_start + split.count - 1) // split.range_tiles
        kv_head = kv_head_of(split.head_tile, q_tiles)
        first_row = (split.head_tile - kv_head * q_tiles) * num
        length = gl.maximum(split.kv_len, 0)
        lo, hi = kv_range(0, keys.q_len, keys.q_len, length, keys.left, keys.right)
        all_lo, all_hi = kv_range_of_all(0, keys.q_len, keys.q_len, length, keys.left, keys.right)
        seen = KeysOfSplit(first_row, length, lo, hi, all_lo, all_hi, factor)
        if CFG.COMBINED and GROUP == 0:
            write_record(consume, split, begins, ends, heads.kv * q_tiles, program)
        mbarrier.wait(handover.queries, number & 1)
        if CFG.PAIRED:
            step, pairs, acc, state = multiply_own_tiles_first(
                q_smem, handover, shared, consume.score, seen, split.kv_tile,
                split.kv_end - split.kv_tile, step, pairs, number, masked_tile, GROUP, CFG,
            )  # fmt: skip
        else:
            step, acc, state, wrong = multiply_in_turns(
                q_smem, handover, shared, consume.score, seen, split, step, GROUP, CFG
            )
        sum_out = gl.convert_layout(state.row_sum, out_rows)
        # PAIRED: sums are NaN already, by what `masked_tile` adds to them
        if CFG.scattered and not CFG.PAIRED:
            sum_out = gl.where(wrong != 0, float("nan"), sum_out)
        m_out = gl.convert_layout(state.m_log2, out_rows)
        work = HeadTile(split.sequence, split.kv_len, kv_head)
        if begins == ends:
            write_rows(own, shared, work, m_out, sum_out, acc, first_row, num_rows)
        else:
            tile_rows = gl.minimum(num_rows - first_row, num)
            slot = part_slot(program, begins)
            store_part(partials, states, slot, m_out, sum_out, acc, tile_rows)
            if not CFG.COMBINED:  # noqa: SIM102
                if is_last(counters + begins, ends - begins + 1):
                    combine_parts(
                        own, shared, work, partials, states, begins, ends, first_row, num_rows,
                        num, half,
                    )  # fmt: skip
        number += 1
        split = Split(*take(shared.splits, number))
    if CFG.PAIRED:
        cluster_exit_barrier()


@gluon.jit
def _idle_warps():
    """The role of unused warps: a cluster barrier waits for all threads of the cluster."""
    cluster_barrier()
    cluster_exit_barrier()


@gluon.jit
def _latent_ring(cache_desc, CFG: gl.constexpr):
    """The `KVRing`, with all barriers in one array, whose address CFG computes."""
    stages: gl.constexpr = CFG.STAGES
    tile_n: gl.constexpr = CFG.TILE_N
    values: gl.constexpr = CFG.TILE_DV
    dtype: gl.constexpr = cache_desc.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([tile_n, values], dtype)
    v_smem = gl.allocate_shared_memory(dtype, [stages, tile_n, values], layout)
    k_smem = tiles(cache_desc, stages, tile_n)
    room: gl.constexpr = CFG.bars_room
    each: gl.constexpr = CFG.first_empty
    bars = gl.allocate_shared_memory(gl.int64, [room, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(each):
        mbarrier.init(bars.index(i), count=1)
        mbarrier.init(bars.index(each + i), count=CFG.releases)
    return KVRing(k_smem, v_smem, bars, bars)


@gluon.jit(
    do_not_specialize=[
        "page_row_stride", "list_batch_stride", "list_head_stride", "batch", "q_len", "capacity",
        "num_pages", "num_blocks", "left", "right", "num_splits",
    ]
)  # fmt: skip
def _attn_decode_latent_kernel(
    results,
    q_ptr,
    cache_desc,  # in tiles of 64 columns
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
    """Set up the ring and start the roles: two consumers and the producer of `sm90.py`."""
    first_length = gl.load(seqlens_ptr)
    if CFG.COMBINED:
        # PDL: the combining kernel may start as soon as there is room for it, and waits for parts
        gdc_launch_dependents()
    stages: gl.constexpr = CFG.STAGES
    num: gl.constexpr = CFG.ROWS
    tile_n: gl.constexpr = CFG.TILE_N
    rest: gl.constexpr = CFG.rest
    values: gl.constexpr = CFG.TILE_DV
    dtype: gl.constexpr = cache_desc.dtype
    values_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([num, values], dtype)
    rest_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([num, rest], dtype)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([num, tile_n], dtype)
    q_smem = LatentQueries(
        gl.allocate_shared_memory(dtype, [1, num, values], values_layout),
        gl.allocate_shared_memory(dtype, [1, num, rest], rest_layout),
    )
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    p_smem = gl.allocate_shared_memory(dtype, [num, tile_n], p_layout)
    flags = gl.allocate_shared_memory(gl.int32, [stages, 1], plain)
    positions = gl.allocate_shared_memory(gl.int32, [stages, CFG.noted_keys], plain)
    ring = _latent_ring(cache_desc, CFG)
    if CFG.PAIRED:
        handover = pair_exchange(p_smem, CFG)
    else:
        states = gl.allocate_shared_memory(gl.float32, [3, num], plain)
        handover = Handover(
            *(p_smem, states, barriers(1, 1).index(0)),
            *(barriers(1, 2).index(0), barriers(1, 2).index(0)),
        )
    splits = work_channel(SPLIT_FIELDS, 2)
    fence_async_shared()
    keys = VisitedKeys(seqlens_ptr, batch, q_len, capacity, left, right, num_blocks)
    # copies to computed addresses refer to the descriptor by the name of the parameter
    produce = ProducerState(
        None, None, page_table_ptr, list_ptr, num_pages, page_row_stride, list_batch_stride,
        list_head_stride, num_splits,
    )  # fmt: skip
    consume = ConsumerState(
        results, q_ptr, sinks_ptr, score, workspace, strides, None, None, num_splits
    )
    notes = StageNotes(positions, flags)
    shared = SharedState(ring, notes, splits, keys, first_length, heads, places_ptr)
    few: gl.constexpr = CFG.PRODUCER_REGISTERS
    if CFG.PAIRED:
        gl.warp_specialize(
            [
                (_consume, (consume, shared, q_smem, handover, 0, CFG)),
                (_consume, (consume, shared, q_smem, handover, 1, CFG)),
                (produce_tiles, (produce, shared, CFG)),
                (_idle_warps, ()),
                (_idle_warps, ()),
            ],
            [4, 1, 1, 2],
            [CFG.CONSUMER_REGISTERS, few, few, few],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (consume, shared, q_smem, handover, 0, CFG)),
                (_consume, (consume, shared, q_smem, handover, 1, CFG)),
                (produce_tiles, (produce, shared, CFG)),
            ],
            [4, 1],
            [CFG.CONSUMER_REGISTERS, few],
        )


def decode(call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse, as `empty_results` lays them out, of any call of impl "sm90"."""
    if (call.problem.head_dim, call.problem.head_dim_v) != LATENT_DIMS:
        return sm90.decode(call)
    config, programs = latent_launch(call.problem)
    out, lse = call.empty_results()
    launch_attn_decode_latent(out, lse, call, config, programs)
    return out, lse


def launch_attn_decode_latent(
    out: torch.Tensor, lse: torch.Tensor, call: DecodeCall, config: LatentConfig, programs: int
) -> None:
    """Fill `out` [B, Hq, Sq, 512] and `lse`; as `sm90.launch_attn_decode_sm90`."""
    q, cache = call.q, call.k_cache
    if q.shape[0] * q.shape[1] * q.shape[2] == 0:
        return
    head_tiles = cdiv(call.problem.rows, config.ROWS)
    assert head_tiles % config.pair == programs % config.pair == 0, f"{head_tiles=} {programs=}"
    with on_device_of(q):
        workspace = DecodeWorkspace(
            # two consumers, each with two parts: sums of half the columns, maximum and sum of rows
            scratch((4 * programs, config.ROWS, config.half + 2), torch.float32, q.device),
            self_resetting_counters(2 * programs, q.device),
            records_of_softmaxes(call, config),
        )
        tiles_of_cache = descriptor(cache, call.page_size, config.block())
        args = kernel_arguments(out, lse, call, (tiles_of_cache,), workspace, config, programs)
        options = {"num_warps": 4, "maxnreg": MAX_REGISTERS, **hopper_options()}
        clusters = programs // config.pair
        launch(_attn_decode_latent_kernel, clusters, args, cluster=config.pair, **options)
        if config.COMBINED:
            tile = (config.ROWS, config.half)
            launch_attn_decode_combine(out, lse, call, workspace, tile, programs)
