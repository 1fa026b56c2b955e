# mypy: ignore-errors
"""Sampled dense product on Hopper: out[e] = sum over a batch of a @ b at block e, TMA and WGMMA.

a [B, M, K], b [B, K, N], out [nnzb, BLOCK_H, BLOCK_W]; zeros where a block reaches beyond (M, N).
Each of `a` and `b` may lie transposed in memory ([B, K, M], [B, N, K]); the gradient of a weight
has both with contiguous rows of K.

The kernel is persistent: one program per SM claims work tiles until none is left. A work tile is a
block row times a run of its stored blocks, over one share of the sum. A producer warp keeps a ring
full with a tile of `a` and, for each of two consumer warp groups, the columns of `b` that belong to
its blocks. Both consumers multiply the same rows with different blocks, so what is fetched of `a`
is multiplied with every block of the tile. A consumer without blocks, at the end of a row, only
skips its stages; pieces of `b` that no block needs are fetched from outside the tensor, as zeros,
and their sums are not stored.

Block rows of 16 and 32 rows are grouped to 64 rows (`triton/pack.py`): a tile computes the union of
their columns, and stores the blocks that exist.

The device side of impl "sm90" of `bsk::bsr_sddmm`; `sddmm_launch.py` launches it.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...device.gluon.compat import async_load, async_store, reinterpret
from ...device.gluon.pipeline import (
    barriers,
    claim,
    halves,
    publish,
    ring_place,
    take,
    work_channel,
)
from ...device.schedule import share_of
from .sddmm_plan import TILE_FIELDS

_TILE_FIELDS = gl.constexpr(TILE_FIELDS)


class SddmmTile(NamedTuple):
    """A work tile, as the producer publishes it to the consumers."""

    steps: Any  # of the sum; -1: there is no more work
    begin: Any  # pieces begin ... end - 1 of the pattern
    end: Any
    first_row: Any  # in the block
    share: Any


SDDMM_TILE_FIELDS = gl.constexpr(len(SddmmTile._fields))


class StepPlace(NamedTuple):
    """Where a step of the sum begins: row of `a`, batch entry, step of K."""

    row: Any
    batch: Any
    k: Any


class SampledLists(NamedTuple):
    """Where the plan and the pattern lie in memory."""

    tiles_ptr: Any  # int32 [tiles, TILE_FIELDS]
    cols_ptr: Any  # int32 [entries], block column of each entry
    source_ptr: Any  # int32 [entries, grouped rows], stored block or -1; None where that is entry


class Sums(NamedTuple):
    """How the sums of all work tiles are cut into steps and shares."""

    tiles: Any
    k_steps: Any  # of one batch entry
    total_steps: Any  # of all batch entries
    shares: Any


class SampledRing(NamedTuple):
    """Tiles of A and B in shared memory and the barriers of their stages."""

    a: Any
    b: Any
    full: Any
    empty: Any


@gluon.jit
def _fetch(a_desc, b_desc, lists, ring, stage, tile, place, CFG: gl.constexpr):
    """Start the copies of one step of the sum into a ring stage."""
    bar = ring.full.index(stage)
    stage_bytes: gl.constexpr = CFG.stage_bytes
    pieces: gl.constexpr = CFG.tile_pieces
    row, batch, k = place
    mbarrier.expect(bar, stage_bytes)
    if CFG.A_TRANSPOSED:
        async_load(a_desc, [batch, k, row], bar, ring.a.index(stage))
    else:
        async_load(a_desc, [batch, row, k], bar, ring.a.index(stage))
    for p in gl.static_range(pieces):
        piece = tile.begin + p
        live = piece < tile.end
        block_col = gl.load(lists.cols_ptr + piece // CFG.block_pieces, mask=live, other=0)
        col = block_col * CFG.BLOCK_W + (piece % CFG.block_pieces) * CFG.PIECE
        # before the first column TMA reads zeros
        col = gl.where(live, col, -CFG.PIECE)
        memory = ring.b.index(stage * CFG.tile_pieces + p)
        if CFG.B_TRANSPOSED:
            async_load(b_desc, [batch, col, k], bar, memory)
        else:
            async_load(b_desc, [batch, k, col], bar, memory)


@gluon.jit
def _produce(a_desc, b_desc, lists, counter_ptr, ring, work, sums, CFG: gl.constexpr):
    """Claim work tiles and keep the ring full."""
    per_share = sums.tiles * CFG.row_tiles
    total = per_share * sums.shares
    step = 0
    ordinal = 0
    number = gl.program_id(0)
    while number < total:
        share = number // per_share
        in_share = number % per_share
        tile_ptr = lists.tiles_ptr + _TILE_FIELDS * (in_share // CFG.row_tiles)
        block_row = gl.load(tile_ptr)
        begin = gl.load(tile_ptr + 1)
        end = gl.load(tile_ptr + 2)
        first_row = (in_share % CFG.row_tiles) * CFG.TILE_M
        first, last = share_of(share, sums.total_steps, sums.shares)
        # padding of a plan has no pieces, and is skipped
        if begin < end:
            tile = SddmmTile(last - first, begin, end, first_row, share)
            publish(work, ordinal, tile)
            ordinal += 1
            row = block_row * CFG.tile_rows + first_row
            for i in range(first, last):
                place = ring_place(step, CFG.STAGES)
                mbarrier.wait(ring.empty.index(place.stage), place.phase ^ 1)
                batch = i // sums.k_steps
                k = (i % sums.k_steps) * CFG.TILE_K
                _fetch(
                    a_desc, b_desc, lists, ring, place.stage, tile, StepPlace(row, batch, k), CFG
                )
                step += 1
        # claim late, with the last copies of this tile in flight: slow programs claim fewer tiles
        number = claim(counter_ptr, gl.num_programs(0), total)
    publish(work, ordinal, SddmmTile(-1, 0, 0, 0, 0))


@gluon.jit
def _store_chunk(
    acc,
    tile,
    out_desc,
    out_smem,
    lists,
    blocks,
    CHUNK: gl.constexpr,
    GROUP: gl.constexpr,
    CFG: gl.constexpr,
):
    """Store sums [TILE_M, out_chunk] of columns CHUNK * out_chunk on, block by block."""
    width: gl.constexpr = CFG.out_chunk
    layout: gl.constexpr = CFG.accumulator_layout(width)
    slabs: gl.constexpr = CFG.out_chunk // CFG.store_columns
    parts: gl.constexpr = CFG.grouped_rows
    whole: gl.constexpr = CFG.out_layout()
    acc = gl.convert_layout(acc, layout)
    # the copies of the chunk before this one must have read the buffer
    tma.store_wait(0)
    memory = reinterpret(out_smem, out_smem.dtype, [2, CFG.TILE_M, width], whole)
    memory.index(GROUP).store(acc.to(out_smem.dtype))
    fence_async_shared()
    for s in gl.static_range(slabs):
        col = CHUNK * CFG.out_chunk + s * CFG.store_columns
        piece = tile.begin + GROUP * CFG.slots + col // CFG.PIECE
        entry = piece // CFG.block_pieces
        first_col = (piece % CFG.block_pieces) * CFG.PIECE + col % CFG.PIECE
        for g in gl.static_range(parts):
            if lists.source_ptr is None:
                block = gl.where(piece < tile.end, entry, -1)
            else:
                source_ptr = lists.source_ptr + entry * CFG.grouped_rows + g
                block = gl.load(source_ptr, mask=piece < tile.end, other=-1)
            # TMA loads may begin before the first row or column of a tensor, but stores may not
            if block >= 0:
                row = (tile.share * blocks + block) * CFG.BLOCK_H + tile.first_row
                copy = out_smem.index(GROUP * CFG.out_copies + s * CFG.grouped_rows + g)
                async_store(out_desc, [row, first_col], copy)


@gluon.jit
def _consume(out_desc, out_smem, lists, blocks, ring, work, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Sum up the products of the ring's tiles and store them, work tile by work tile."""
    stages: gl.constexpr = CFG.STAGES
    tile_m: gl.constexpr = CFG.TILE_M
    group_n: gl.constexpr = CFG.GROUP_N
    chunks: gl.constexpr = CFG.OUT_CHUNKS
    b_tile: gl.constexpr = CFG.b_tile()
    b_layout: gl.constexpr = CFG.b_layout()
    layout: gl.constexpr = CFG.accumulator_layout(CFG.GROUP_N)
    # two consumers: the tile of the other one is next to that of this one
    b_smem = reinterpret(ring.b, ring.b.dtype, [2 * stages, b_tile[0], b_tile[1]], b_layout)
    step = 0
    ordinal = 0
    tile = SddmmTile(*take(work, ordinal))
    while tile.steps >= 0:
        if tile.begin + GROUP * CFG.slots < tile.end:
            acc = gl.zeros([tile_m, group_n], gl.float32, layout)
            for i in range(tile.steps):
                place = ring_place(step, CFG.STAGES)
                mbarrier.wait(ring.full.index(place.stage), place.phase)
                a = ring.a.index(place.stage)
                b = b_smem.index(2 * place.stage + GROUP)
                if CFG.A_TRANSPOSED:
                    a = a.permute((1, 0))
                if CFG.B_TRANSPOSED:
                    b = b.permute((1, 0))
                pending = warpgroup_mma(a, b, acc, is_async=True)
                # One product stays in flight; the one before it is done, so its stage is free.
                acc = warpgroup_mma_wait(1, deps=(pending,))
                before = ring_place(step + stages - 1, CFG.STAGES)
                mbarrier.arrive(ring.empty.index(before.stage), count=1, pred=i > 0)
                step += 1
            acc = warpgroup_mma_wait(0, deps=(acc,))
            before = ring_place(step + stages - 1, CFG.STAGES)
            mbarrier.arrive(ring.empty.index(before.stage), count=1, pred=tile.steps > 0)
            gl.static_assert(chunks == 2 or chunks == 4)
            for half in gl.static_range(2):
                part = halves(acc)[half]
                if chunks == 2:
                    _store_chunk(part, tile, out_desc, out_smem, lists, blocks, half, GROUP, CFG)
                else:
                    for quarter in gl.static_range(2):
                        some = halves(part)[quarter]
                        _store_chunk(
                            *(some, tile, out_desc, out_smem, lists, blocks),
                            *(2 * half + quarter, GROUP, CFG),
                        )
        else:
            for _i in range(tile.steps):
                place = ring_place(step, CFG.STAGES)
                mbarrier.wait(ring.full.index(place.stage), place.phase)
                mbarrier.arrive(ring.empty.index(place.stage), count=1)
                step += 1
        ordinal += 1
        tile = SddmmTile(*take(work, ordinal))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "k_steps", "total_steps", "shares", "blocks"])
def _sddmm_sm90_kernel(
    a_desc,
    b_desc,
    out_desc,  # [shares * nnzb * BLOCK_H, BLOCK_W]
    tiles_ptr,
    cols_ptr,
    source_ptr,
    counter_ptr,
    tiles,
    k_steps,
    total_steps,
    shares,
    blocks,  # nnzb
    CFG: gl.constexpr,
):
    """Set up the ring and start the roles: two consumers and a producer."""
    stages: gl.constexpr = CFG.STAGES
    copies: gl.constexpr = CFG.out_copies
    a_tile: gl.constexpr = CFG.a_tile()
    b_piece: gl.constexpr = CFG.b_piece()
    out_block: gl.constexpr = CFG.out_block()
    # descriptors have a dimension for the batch, tiles do not
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(a_tile, a_desc.dtype)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(b_piece, b_desc.dtype)
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [stages, a_tile[0], a_tile[1]], a_layout)
    b_shape: gl.constexpr = [stages * CFG.tile_pieces, b_piece[0], b_piece[1]]
    b_smem = gl.allocate_shared_memory(b_desc.dtype, b_shape, b_layout)
    out_shape: gl.constexpr = [2 * copies, out_block[0], out_block[1]]
    out_smem = gl.allocate_shared_memory(out_desc.dtype, out_shape, out_desc.layout)
    ring = SampledRing(a_smem, b_smem, barriers(stages, 1), barriers(stages, 2))
    work = work_channel(SDDMM_TILE_FIELDS, 2)
    fence_async_shared()
    lists = SampledLists(tiles_ptr, cols_ptr, source_ptr)
    sums = Sums(tiles, k_steps, total_steps, shares)
    gl.warp_specialize(
        [
            (_consume, (out_desc, out_smem, lists, blocks, ring, work, 0, CFG)),
            (_consume, (out_desc, out_smem, lists, blocks, ring, work, 1, CFG)),
            (_produce, (a_desc, b_desc, lists, counter_ptr, ring, work, sums, CFG)),
        ],
        [4, 1],
        [CFG.CONSUMER_REGISTERS, CFG.PRODUCER_REGISTERS],
    )
