# mypy: ignore-errors
"""BSR times dense on Hopper: out = activation(A @ X + bias) + residual, with TMA and WGMMA.

A is block-sparse [M, K], X dense [K, N], out [M, N]. X and out may each lie transposed in memory
([N, K], [N, M]), and A may be read through the metadata of its transpose.

The kernel is persistent: one program per SM claims work tiles until none is left. A work tile is
one item of the plan (a block row, or a slice of a long one) times TILE_M rows and one panel of
columns. A producer warp claims the tiles and keeps a ring of A and X tiles full; two consumer warp
groups multiply. The consumers split the rows of a 128-row tile or, where a block row has only 64
rows, the columns of a panel twice as wide: either way each element of X that is fetched is
multiplied with every row of its block. While the consumers store a tile, the ring already fills for
the next one.

With PAIRED, two programs form a cluster and share copies of X by TMA multicast. What limits the
product of 64-row blocks is the bandwidth from L2 to shared memory, and a multicast copy to two SMs
is read once. The two programs take the two rows of a pair with many columns in common
(`row_pairs.py`) and the same panel. Where both rows have a block, each program copies half of the
columns of X to both; after that each copies the blocks that only its own row has. Both go through
their rings in step: a stage is free once both have released it, and the stages that only the longer
row needs pass through the other program empty. A scheduler warp in the first program claims work
tiles and sends their numbers to both producers.

The device side of impl "sm90" of `bsk::bsr_matmul`; `spmm_launch.py` launches it. Limits: fp16 and
bf16, block heights that are multiples of 64 (`triton/pack.py` packs lower ones), addresses and
strides that TMA accepts.
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

from ...device.gluon.cluster import (
    arrive_at_all,
    arrive_at_rank,
    cluster_barrier,
    cluster_exit_barrier,
    cluster_rank,
    copy_tile,
    read_shared,
    write_to_all,
)
from ...device.gluon.compat import async_load, async_store, reinterpret
from ...device.gluon.pipeline import (
    barriers,
    claim,
    halves,
    publish,
    ring_memory,
    take,
    tiles,
    work_channel,
)
from ...device.gluon.warps import shared_address
from ...device.schedule import raster_place
from ...launch.descriptors import GROUP_ROWS
from .config import PAIR, SLAB_COLUMNS
from .epilogue import Epilogue, finish_values
from .row_pairs import PAIR_FIELDS, PairedRow

_ROWS = gl.constexpr(GROUP_ROWS)
_SLAB = gl.constexpr(SLAB_COLUMNS)
_PAIR = gl.constexpr(PAIR)
_BOTH = gl.constexpr((1 << PAIR) - 1)
_PAIR_FIELDS = gl.constexpr(PAIR_FIELDS)


class SpmmTile(NamedTuple):
    """A work tile, as the producer publishes it to the consumers."""

    steps: Any  # K steps; -1: there is no more work
    row: Any  # first row and column of the result; a negative row is not stored
    col: Any
    slot: Any  # where the partial sum goes, -1: none; PAIRED: K steps of the longer row


class ScaledTile(NamedTuple):
    """A work tile of operands in fp8: a `SpmmTile`, and the first of its entries."""

    steps: Any
    row: Any
    col: Any
    slot: Any
    begin: Any


SPMM_TILE_FIELDS = gl.constexpr(len(SpmmTile._fields))


class PlanItem(NamedTuple):
    """An item of `SpmmPlan`: blocks begin ... end - 1 of a block row."""

    block_row: Any
    begin: Any
    end: Any
    slot: Any  # of the partial sum; -1 where the item is the whole row


class Lists(NamedTuple):
    """Where the plan and the pattern lie in memory."""

    items_ptr: Any  # int32 [items, 4], or rows of pairs [2 * items, PAIR_FIELDS]
    cols_ptr: Any  # int32 [nnzb], block column of each entry
    perm_ptr: Any  # int32 [nnzb], stored block of each entry; None where that is its own number


class Raster(NamedTuple):
    """Work tiles of the launch, and how many panels of columns are visited together."""

    m_tiles: Any
    n_tiles: Any
    group: Any


class OperandRing(NamedTuple):
    """Tiles of A and X in shared memory and the barriers of their stages.

    PAIRED: `full` and `empty` are one array, full first, followed by two scheduler barriers.
    """

    a: Any
    x: Any
    full: Any
    empty: Any


class Output(NamedTuple):
    """Where sums go: through shared memory and TMA, or as partial sums straight to memory."""

    desc: Any
    smem: Any  # a buffer for each consumer
    partial_ptr: Any  # fp32 [slots, BLOCK_H, N]; None where no row is split


@gluon.jit
def _read_tile(items_ptr, number, raster, CFG: gl.constexpr):
    """M and N tile of a work tile, and its item of the plan.

    Panels go in raster groups whose part of X stays in L2, and within a group each item visits all
    panels before the next item: tiles that run together share blocks of A as well.
    """
    n_tile, place = raster_place(number, raster.n_tiles, raster.m_tiles, raster.group)
    # places of a raster group count down, items are sorted longest first
    m_tile = raster.m_tiles - 1 - place
    item_ptr = items_ptr + 4 * (m_tile // CFG.row_tiles)
    block_row = gl.load(item_ptr)
    begin = gl.load(item_ptr + 1)
    end = gl.load(item_ptr + 2)
    slot = gl.load(item_ptr + 3)
    return m_tile, n_tile, PlanItem(block_row, begin, end, slot)


@gluon.jit
def _fetch_step(a_desc, x_desc, ring, stage, a_row, a_col, k, col, CFG: gl.constexpr):
    """Start the copies of one K step into a ring stage."""
    bar = ring.full.index(stage)
    a_copies: gl.constexpr = CFG.a_copies
    x_copies: gl.constexpr = CFG.x_copies
    nbytes: gl.constexpr = (
        CFG.a_copies * a_desc.block_type.nbytes + CFG.x_copies * x_desc.block_type.nbytes
    )
    mbarrier.expect(bar, nbytes)
    for g in gl.static_range(a_copies):
        tile = ring.a.index(stage * CFG.a_copies + g)
        if CFG.A_TRANSPOSED:
            async_load(a_desc, [a_col, a_row + g * _ROWS], bar, tile)
        else:
            async_load(a_desc, [a_row, a_col], bar, tile)
    for g in gl.static_range(x_copies):
        tile = ring.x.index(stage * CFG.x_copies + g)
        if CFG.WIDE:
            async_load(x_desc, [col // _SLAB, k, 0], bar, tile)
        elif CFG.X_TRANSPOSED:
            async_load(x_desc, [col + g * CFG.GROUP_N, k], bar, tile)
        else:
            async_load(x_desc, [k, col + g * CFG.GROUP_N], bar, tile)


@gluon.jit
def _publish_tile(work, ordinal, tile, begin, CFG: gl.constexpr):
    """Hand a `SpmmTile` to the consumers, with its first entry where they look up scales."""
    if CFG.SCALED:
        publish(work, ordinal, ScaledTile(tile.steps, tile.row, tile.col, tile.slot, begin))
    else:
        publish(work, ordinal, tile)


@gluon.jit
def produce(a_desc, x_desc, lists, counter_ptr, ring, work, raster, CFG: gl.constexpr):
    """Claim work tiles and keep the ring full."""
    total = raster.m_tiles * raster.n_tiles
    k_steps: gl.constexpr = CFG.k_steps
    step = 0
    ordinal = 0
    number = gl.program_id(0)
    while number < total:
        m_tile, n_tile, item = _read_tile(lists.items_ptr, number, raster, CFG)
        sub_row = (m_tile % CFG.row_tiles) * CFG.tile_m
        col = n_tile * CFG.tile_n
        row = item.block_row * CFG.BLOCK_H + sub_row
        steps = (item.end - item.begin) * CFG.k_steps
        _publish_tile(work, ordinal, SpmmTile(steps, row, col, item.slot), item.begin, CFG)
        ordinal += 1
        block_col = gl.load(lists.cols_ptr + item.begin, mask=item.begin < item.end, other=0)
        for entry in range(item.begin, item.end):
            more = entry + 1 < item.end
            next_block_col = gl.load(lists.cols_ptr + entry + 1, mask=more, other=0)
            if CFG.A_TRANSPOSED:
                a_row = sub_row
                a_col = gl.load(lists.perm_ptr + entry) * CFG.BLOCK_W
            else:
                a_row = entry * CFG.BLOCK_H + sub_row
                a_col = 0
            for u in gl.static_range(k_steps):
                stage = step % CFG.STAGES
                mbarrier.wait(ring.empty.index(stage), ((step // CFG.STAGES) & 1) ^ 1)
                k = block_col * CFG.BLOCK_W + u * CFG.TILE_K
                _fetch_step(a_desc, x_desc, ring, stage, a_row, a_col + u * CFG.TILE_K, k, col, CFG)
                step += 1
            block_col = next_block_col
        # claim late, with the last copies of this tile in flight: slow programs claim fewer tiles
        number = claim(counter_ptr, gl.num_programs(0), total)
    _publish_tile(work, ordinal, SpmmTile(-1, 0, 0, -1), 0, CFG)


# PAIRED: two programs of a cluster, each with a row of a pair, share copies of X.


@gluon.jit
def _bar_address(index, CFG: gl.constexpr):
    """Address of a barrier of a paired program, the same in both of them."""
    return shared_address(CFG.bars_offset + 8 * index)


@gluon.jit
def _schedule_pairs(counter_ptr, bars, total, CFG: gl.constexpr):
    """The scheduler warp: claim work tiles as the producers need them, and send them the numbers.

    It works in the first program of the cluster. Producers know their first tile, and receive the
    number of another one after each that they finish.

    Memory order: a number comes with the transaction that completes the phase of the `sent` barrier
    of its program, so a warp that waits there sees it. There is room for one number. The scheduler
    sends the next when both producers have arrived at its `read` barrier, which they do after they
    have loaded the last.
    """
    cluster_barrier()
    sent: gl.constexpr = CFG.sent_bar
    if cluster_rank() == 0:
        number = gl.program_id(0) // _PAIR
        ordinal = 0
        while number < total:
            mbarrier.wait(bars.index(CFG.read_bar), (ordinal & 1) ^ 1)
            number = claim(counter_ptr, gl.num_programs(0) // _PAIR, total)
            place = shared_address(CFG.number_offset)
            write_to_all(number, place, _bar_address(sent, CFG), _PAIR)
            ordinal += 1
    cluster_exit_barrier()


@gluon.jit
def _idle_warps():
    """The role of unused warps: a cluster barrier waits for all threads of the cluster."""
    cluster_barrier()
    cluster_exit_barrier()


@gluon.jit
def _next_number(bars, ordinal, CFG: gl.constexpr):
    """Number of the next work tile, as the scheduler warp has sent it to both programs."""
    mbarrier.expect(bars.index(CFG.sent_bar), 4)
    mbarrier.wait(bars.index(CFG.sent_bar), ordinal & 1)
    number = read_shared(shared_address(CFG.number_offset))
    read: gl.constexpr = CFG.read_bar
    arrive_at_rank(_bar_address(read, CFG), 0)
    return number


@gluon.jit
def _copy_x(stage, k, col, g: gl.constexpr, programs, CFG: gl.constexpr):
    """Start the copies of X for consumers `g`, to this program alone (None) or to both."""
    parameter: gl.constexpr = CFG.x_parameter
    slabs: gl.constexpr = CFG.x_slabs
    first = col + g * CFG.GROUP_N
    bar = _bar_address(stage, CFG)
    address = CFG.x_offset + (stage * CFG.x_tiles + g) * CFG.x_tile_bytes
    if CFG.WIDE:
        coordinates = (first // _SLAB, k, 0 * k)
        copy_tile(parameter, coordinates, bar, shared_address(address), programs)
    elif CFG.X_TRANSPOSED:
        copy_tile(parameter, (first, k), bar, shared_address(address), programs)
    else:
        for i in gl.static_range(slabs):
            slab = shared_address(address + i * (CFG.x_tile_bytes // CFG.x_slabs))
            copy_tile(parameter, (k, first + i * _SLAB), bar, slab, programs)


@gluon.jit
def _copy_a(stage, entry, u: gl.constexpr, CFG: gl.constexpr):
    """Start the copy of A for K step `u` of a block."""
    parameter: gl.constexpr = CFG.a_parameter
    bar = _bar_address(stage, CFG)
    address = shared_address(CFG.a_offset + stage * CFG.a_tile_bytes)
    if CFG.A_TRANSPOSED:
        coordinates = (entry * CFG.BLOCK_W + u * CFG.TILE_K, 0 * entry)
        copy_tile(parameter, coordinates, bar, address, None)
    else:
        coordinates = (entry * CFG.BLOCK_H, u * CFG.TILE_K + 0 * entry)
        copy_tile(parameter, coordinates, bar, address, None)


@gluon.jit
def _free_stage(bars, step, CFG: gl.constexpr):
    """The stage of a step, once both programs have released it."""
    stage = step % CFG.STAGES
    mbarrier.wait(bars.index(CFG.STAGES + stage), ((step // CFG.STAGES) & 1) ^ 1)
    return stage


@gluon.jit
def _read_pair(items_ptr, number, raster, rank):
    """N tile of a work tile, and this program's row of its pair."""
    n_tile, place = raster_place(number, raster.n_tiles, raster.m_tiles, raster.group)
    # places of a raster group count down, pairs are sorted longest first
    item_ptr = items_ptr + _PAIR_FIELDS * (_PAIR * (raster.m_tiles - 1 - place) + rank)
    block_row = gl.load(item_ptr)
    begin = gl.load(item_ptr + 1)
    end = gl.load(item_ptr + 2)
    shared = gl.load(item_ptr + 3)
    longest = gl.load(item_ptr + 4)
    return n_tile, PairedRow(block_row, begin, end, shared, longest)


@gluon.jit
def _read_entry(lists, place, end):
    """Block column and stored block at a place of the lists."""
    live = place < end
    block_col = gl.load(lists.cols_ptr + place, mask=live, other=0)
    entry = gl.load(lists.perm_ptr + place, mask=live, other=0)
    return block_col, entry


@gluon.jit
def _produce_paired(lists, bars, work, raster, CFG: gl.constexpr):
    """Keep the ring full with what this program copies, and with what its partner copies to it."""
    cluster_barrier()
    total = raster.m_tiles * raster.n_tiles
    rank = cluster_rank()
    k_steps: gl.constexpr = CFG.k_steps
    step = 0
    ordinal = 0
    number = gl.program_id(0) // _PAIR
    while number < total:
        n_tile, row = _read_pair(lists.items_ptr, number, raster, rank)
        col = n_tile * CFG.tile_n
        steps = (row.end - row.begin) * CFG.k_steps
        longest = row.longest * CFG.k_steps
        publish(work, ordinal, SpmmTile(steps, row.block_row * CFG.BLOCK_H, col, longest))
        here = _read_entry(lists, row.begin, row.end)
        for place in range(row.begin, row.end):
            there = _read_entry(lists, place + 1, row.end)
            block_col, entry = here
            for u in gl.static_range(k_steps):
                stage = _free_stage(bars, step, CFG)
                mbarrier.expect(bars.index(stage), CFG.stage_bytes)
                k = block_col * CFG.BLOCK_W + u * CFG.TILE_K
                for g in gl.static_range(_PAIR):
                    if place - row.begin >= row.shared:
                        _copy_x(stage, k, col, g, None, CFG)
                    elif rank == g:
                        _copy_x(stage, k, col, g, _BOTH, CFG)
                _copy_a(stage, entry, u, CFG)
                step += 1
            here = there
        for _place in range(row.end - row.begin, row.longest):
            for _u in gl.static_range(k_steps):
                stage = _free_stage(bars, step, CFG)
                mbarrier.arrive(bars.index(stage), count=1)
                step += 1
        number = _next_number(bars, ordinal, CFG)
        ordinal += 1
    publish(work, ordinal, SpmmTile(-1, 0, 0, -1))
    # a program must not end while its partner may still arrive at its barriers
    cluster_exit_barrier()


# The consumers, with and without a partner.


@gluon.jit
def _store_chunk(acc, row, col, slot, output, out_smem, epilogue, CFG: gl.constexpr):
    """Finish and store sums [64, out_chunk]; a partial sum goes to its slot unfinished."""
    chunk: gl.constexpr = CFG.out_chunk
    layout: gl.constexpr = CFG.accumulator_layout(chunk)
    activation: gl.constexpr = CFG.ACTIVATION
    acc = gl.convert_layout(acc, layout)
    rows = row + gl.arange(0, _ROWS, gl.SliceLayout(1, layout))
    cols = col + gl.arange(0, chunk, gl.SliceLayout(0, layout))
    if output.partial_ptr is not None and slot >= 0:
        # a slot holds a whole block row
        partial_rows = (slot * CFG.BLOCK_H + rows % CFG.BLOCK_H).to(gl.int64)
        offsets = partial_rows[:, None] * epilogue.n_cols + cols[None, :]
        gl.store(output.partial_ptr + offsets, acc, mask=(cols < epilogue.n_cols)[None, :])
    else:
        acc = finish_values(acc, rows[:, None], cols[None, :], epilogue, activation)
        tile = acc.to(out_smem.dtype)
        # the copy of the chunk before this one must have read the buffer
        tma.store_wait(0)
        if CFG.OUT_TRANSPOSED:
            out_smem.permute((1, 0)).store(tile)
            fence_async_shared()
            async_store(output.desc, [col, row], out_smem)
        else:
            out_smem.store(tile)
            fence_async_shared()
            async_store(output.desc, [row, col], out_smem)


@gluon.jit
def _store_tile(acc, row, col, slot, output, out_smem, epilogue, CFG: gl.constexpr):
    """Store an accumulator in OUT_CHUNKS column chunks through one buffer."""
    chunk: gl.constexpr = CFG.out_chunk
    gl.static_assert(CFG.OUT_CHUNKS == 2 or CFG.OUT_CHUNKS == 4)
    for half in gl.static_range(2):
        part = halves(acc)[half]
        if CFG.OUT_CHUNKS == 2:
            _store_chunk(part, row, col + half * chunk, slot, output, out_smem, epilogue, CFG)
        else:
            for quarter in gl.static_range(2):
                first = col + (2 * half + quarter) * chunk
                some = halves(part)[quarter]
                _store_chunk(some, row, first, slot, output, out_smem, epilogue, CFG)


@gluon.jit
def as_tiles(smem, count: gl.constexpr, shape: gl.constexpr):
    """The same shared memory as tiles that one consumer multiplies."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, smem.dtype)
    return reinterpret(smem, smem.dtype, [count, shape[0], shape[1]], layout)


@gluon.jit
def _release(empty, stage, live, CFG: gl.constexpr):
    """Release a stage to the producer; PAIRED: to both producers that copy to it."""
    if CFG.PAIRED:
        # each warp arrives on its own: a barrier of the warp group would only delay the arrivals
        arrive_at_all(_bar_address(CFG.STAGES + stage, CFG), live, _PAIR)
    else:
        mbarrier.arrive(empty.index(stage), count=1, pred=live)


@gluon.jit
def _consume(output, ring, work, epilogue, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Multiply the ring's tiles into an accumulator and store it, work tile by work tile."""
    if CFG.PAIRED:
        cluster_barrier()
    a_smem = as_tiles(ring.a, CFG.STAGES * CFG.a_tiles, CFG.a_tile())
    x_smem = as_tiles(ring.x, CFG.STAGES * CFG.x_tiles, CFG.x_tile())
    group_n: gl.constexpr = CFG.GROUP_N
    layout: gl.constexpr = CFG.accumulator_layout(CFG.GROUP_N)
    step = 0
    ordinal = 0
    tile = SpmmTile(*take(work, ordinal))
    while tile.steps >= 0:
        acc = gl.zeros([_ROWS, group_n], gl.float32, layout)
        for i in range(tile.steps):
            stage = step % CFG.STAGES
            mbarrier.wait(ring.full.index(stage), (step // CFG.STAGES) & 1)
            a = a_smem.index(stage * CFG.a_tiles + GROUP % CFG.a_tiles)
            x = x_smem.index(stage * CFG.x_tiles + GROUP % CFG.x_tiles)
            if CFG.A_TRANSPOSED:
                a = a.permute((1, 0))
            if CFG.X_TRANSPOSED:
                x = x.permute((1, 0))
            pending = warpgroup_mma(a, x, acc, is_async=True)
            # One product stays in flight; the one before it is done, so its stage is free.
            acc = warpgroup_mma_wait(1, deps=(pending,))
            _release(ring.empty, (step + CFG.STAGES - 1) % CFG.STAGES, i > 0, CFG)
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        _release(ring.empty, (step + CFG.STAGES - 1) % CFG.STAGES, tile.steps > 0, CFG)
        slot = tile.slot
        if CFG.PAIRED:
            # skip the stages that only the partner's row needs
            for _i in range(tile.steps, tile.slot):
                stage = step % CFG.STAGES
                mbarrier.wait(ring.full.index(stage), (step // CFG.STAGES) & 1)
                _release(ring.empty, stage, step >= 0, CFG)
                step += 1
            slot = -1

        row = tile.row + (GROUP % CFG.a_tiles) * _ROWS
        col = tile.col + (GROUP % CFG.x_tiles) * CFG.GROUP_N
        # with an odd number of rows the missing one is negative, where TMA cannot store
        if row >= 0:
            _store_tile(acc, row, col, slot, output, output.smem.index(GROUP), epilogue, CFG)
        ordinal += 1
        tile = SpmmTile(*take(work, ordinal))
    tma.store_wait(0)
    if CFG.PAIRED:
        cluster_exit_barrier()


@gluon.jit
def _paired_memory(a_desc, x_desc, out_desc, CFG: gl.constexpr):
    """Ring and output buffers of a program with a partner.

    Addresses in the partner are computed from offsets in shared memory: CFG knows where these
    allocations lie. The barriers are one array: STAGES full, STAGES empty, and two for the number
    of the next work tile, which follows them.
    """
    stages: gl.constexpr = CFG.STAGES
    room: gl.constexpr = CFG.bars_room
    a_smem = ring_memory(a_desc, CFG.STAGES * CFG.a_copies)
    x_smem = ring_memory(x_desc, CFG.STAGES * CFG.x_copies)
    out_smem = ring_memory(out_desc, 2)
    bars = gl.allocate_shared_memory(gl.int64, [room, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):
        mbarrier.init(bars.index(i), count=1)
        # each warp of the two consumers of each program
        mbarrier.init(bars.index(stages + i), count=8 * _PAIR)
    mbarrier.init(bars.index(CFG.sent_bar), count=1)
    mbarrier.init(bars.index(CFG.read_bar), count=_PAIR)
    return OperandRing(a_smem, x_smem, bars, bars), out_smem


@gluon.jit(do_not_specialize=["n_rows", "n_cols", "m_tiles", "n_tiles", "raster_group"])
def _spmm_sm90_kernel(
    a_desc,  # the first parameter, `x_desc` the next: inline assembly names them by position
    x_desc,
    out_desc,
    partial_ptr,
    bias_ptr,
    residual_ptr,
    residual_strides,
    items_ptr,
    cols_ptr,
    perm_ptr,
    counter_ptr,
    n_rows,
    n_cols,
    m_tiles,
    n_tiles,
    raster_group,
    CFG: gl.constexpr,
):
    """Set up the ring and start the roles: two consumers, a producer, PAIRED: a scheduler warp."""
    raster = Raster(m_tiles, n_tiles, raster_group)
    lists = Lists(items_ptr, cols_ptr, perm_ptr)
    epilogue = Epilogue(bias_ptr, residual_ptr, residual_strides, n_rows, n_cols)
    if CFG.PAIRED:
        ring, out_smem = _paired_memory(a_desc, x_desc, out_desc, CFG)
        work = work_channel(SPMM_TILE_FIELDS, 2)
        fence_async_shared()
        output = Output(out_desc, out_smem, partial_ptr)
        few: gl.constexpr = CFG.PRODUCER_REGISTERS
        gl.warp_specialize(
            [
                (_consume, (output, ring, work, epilogue, 0, CFG)),
                (_consume, (output, ring, work, epilogue, 1, CFG)),
                (_produce_paired, (lists, ring.full, work, raster, CFG)),
                (_schedule_pairs, (counter_ptr, ring.full, m_tiles * n_tiles, CFG)),
                (_idle_warps, ()),
            ],
            [4, 1, 1, 2],
            [CFG.CONSUMER_REGISTERS, few, few, few],
        )
    else:
        a_smem = ring_memory(a_desc, CFG.STAGES * CFG.a_copies)
        x_smem = ring_memory(x_desc, CFG.STAGES * CFG.x_copies)
        out_smem = tiles(out_desc, 2, out_desc.block_type.shape[0])
        ring = OperandRing(a_smem, x_smem, barriers(CFG.STAGES, 1), barriers(CFG.STAGES, 2))
        work = work_channel(SPMM_TILE_FIELDS, 2)
        fence_async_shared()
        output = Output(out_desc, out_smem, partial_ptr)
        gl.warp_specialize(
            [
                (_consume, (output, ring, work, epilogue, 0, CFG)),
                (_consume, (output, ring, work, epilogue, 1, CFG)),
                (produce, (a_desc, x_desc, lists, counter_ptr, ring, work, raster, CFG)),
            ],
            [4, 1],
            [CFG.CONSUMER_REGISTERS, CFG.PRODUCER_REGISTERS],
        )
