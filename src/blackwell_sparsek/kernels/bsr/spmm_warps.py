"""BSR times dense on Hopper for blocks of 16 rows: out = act(A @ X + bias) + residual.

A is block-sparse [M, K] in blocks of 16 x 16, given as fragments (`fragments.py`); X [K, N] has
contiguous rows; out is [M, N] or its transpose in memory.

WGMMA multiplies 64 rows at a time, so that most of what it multiplies in blocks this low is zeros.
Here each of 16 warps has a block row of its own, and multiplies only its blocks, one
`mma.sync.m16n8k16` for 8 columns. X passes densely through a ring of chunks that all warps read,
filled by a producer warp: what is fetched meets 256 rows. A warp walks its own list of blocks,
moves on to the next chunk when a block lies there, and waits for no other warp
(`device/gluon/warps.py`). One program per SM takes pieces of work, 256 rows by 128 columns, in
turns. Rows of about the same length work together, so that a piece is over for all of them at
about the same time. Groups of rows go in sections whose blocks stay in L2 while X passes by.

What holds it is reading X from shared memory: 4 KB for each block.

Called as part of impl "sm90" of `bsk::bsr_matmul`. Limits: fp16 and bf16, pointers and
strides that TMA takes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ...device.gluon.pipeline import thread_barrier
from ...device.gluon.warps import (
    arrive_at,
    from_lane,
    lane_number,
    shared_address,
    wait_at,
    warp_number,
)
from ...device.schedule import place_in_sections
from .config_warps import HALF_COLUMNS, WARP_ROWS
from .spmm_warps_store import store_half

ROWS = gl.constexpr(WARP_ROWS)
HALF = gl.constexpr(HALF_COLUMNS)
LANES = gl.constexpr(32)
# int32 words of a fragment in all threads of a warp
WORDS = gl.constexpr(128)


@gluon.jit
def _produce(x_desc, chunks_smem, bars, grid, CFG: gl.constexpr):
    """Fill the ring with the chunks of X that one piece of work after the other needs."""
    groups, panels, section, chunks = grid
    step = 0
    for piece in range(gl.program_id(0), groups * panels, gl.num_programs(0)):
        _, panel = place_in_sections(piece, groups, panels, section)
        col = panel * (2 * HALF)
        for chunk in range(chunks):
            stage = step % CFG.STAGES
            mbarrier.wait(bars.index(CFG.STAGES + stage), ((step // CFG.STAGES) & 1) ^ 1)
            full = bars.index(stage)
            mbarrier.expect(full, CFG.chunk_bytes)
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    x_desc,
                    [chunk * CFG.CHUNK, col + half * HALF],
                    full,
                    chunks_smem.index(stage * 2 + half),
                )
            step += 1


@gluon.jit
def _fragment(fragments_ptr, entry, CFG: gl.constexpr):
    """Ask for the words of a fragment, four to a thread: int32 [WARPS, LANES, 4]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [CFG.WARPS, 1, 1], [2, 1, 0])
    warps = gl.arange(0, CFG.WARPS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    lanes = gl.arange(0, LANES, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    words = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    # the same for all warps, were `entry` the same
    offsets = 0 * warps[:, None, None] + 4 * lanes[None, :, None] + words[None, None, :]
    return gl.load(fragments_ptr + entry.to(gl.int64) * WORDS + offsets)


@gluon.jit
def _operand(words, dtype: gl.constexpr, CFG: gl.constexpr):
    """The words of a fragment as left operand [WARPS * 16, 16]; moves nothing."""
    layout: gl.constexpr = gl.DotOperandLayout(0, CFG.accumulator_layout(), 2)
    low = (words & 0xFFFF).to(gl.int16).to(dtype, bitcast=True)
    high = (words >> 16).to(gl.int16).to(dtype, bitcast=True)
    # [warp, (g, t), (k half, row half), pair] -> [(warp, row half, g), (k half, t, pair)]
    parts = gl.join(low, high).reshape([CFG.WARPS, 8, 4, 2, 2, 2]).permute([0, 4, 1, 3, 2, 5])
    return gl.convert_layout(parts.reshape([CFG.tile_m, 16]), layout, assert_trivial=True)


@gluon.jit
def _advance(place, chunk, bars, CFG: gl.constexpr):
    """Move on to a chunk: leave those before it to the producer, wait for it."""
    here, stage, phase = place
    while here < chunk:
        arrive_at(bars + 8 * (CFG.STAGES + stage))
        here += 1
        stage, phase = _next_stage(stage, phase, CFG)
        wait_at(bars + 8 * stage, phase)
    return here, stage, phase


@gluon.jit
def _next_stage(stage, phase, CFG: gl.constexpr):
    """The ring stage after this one, and its phase."""
    last = stage == CFG.STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _replaced(items, place: gl.constexpr, item):
    """The tuple `items` with `item` in one place."""
    result = ()
    for i in gl.static_range(len(items)):
        result = result + (item if i == place else items[i],)  # noqa: RUF005
    return result


@gluon.jit
def _multiply_row(row, place, bars, fragments_ptr, cols_ptr, slabs, CFG: gl.constexpr):
    """Sums [tile_m, HALF] of both halves, for the block row of each warp, and the new place."""
    begin, end = row
    here, stage, phase = place
    layout: gl.constexpr = CFG.accumulator_layout()
    operand: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    ahead_count: gl.constexpr = CFG.AHEAD
    tile_m: gl.constexpr = CFG.tile_m
    left = gl.zeros([tile_m, HALF], gl.float32, layout)
    right = gl.zeros([tile_m, HALF], gl.float32, layout)
    lane = lane_number()
    # Thread i holds the column of block i of the next 32. What is loaded must not be touched
    # before it is needed: a warp that waits for it stands still for thousands of cycles.
    next_cols = gl.load(cols_ptr + begin + lane, mask=begin + lane < end, other=0)
    ahead = ()
    for u in gl.static_range(ahead_count):
        ahead = ahead + (_fragment(fragments_ptr, begin + u, CFG),)  # noqa: RUF005
    wait_at(bars + 8 * stage, phase)
    for base in range(begin, end, LANES):
        cols = next_cols
        next_block = base + LANES + lane
        next_cols = gl.load(cols_ptr + next_block, mask=next_block < end, other=0)
        for j in range(0, gl.minimum(end - base, LANES), ahead_count):
            for u in gl.static_range(ahead_count):
                if base + j + u < end:
                    col = from_lane(cols, j + u)
                    here, stage, phase = _advance((here, stage, phase), col // CFG.slabs, bars, CFG)
                    slab = stage * (2 * CFG.slabs) + col % CFG.slabs
                    a = _operand(ahead[u], slabs.dtype, CFG)
                    left = mma_v2(a, slabs.index(slab).load(operand), left)
                    right = mma_v2(a, slabs.index(slab + CFG.slabs).load(operand), right)
                    # past the last block: read, never multiplied
                    fresh = _fragment(fragments_ptr, base + j + u + ahead_count, CFG)
                    ahead = _replaced(ahead, u, fresh)
    return left, right, (here, stage, phase)


@gluon.jit
def _consume(out_ptr, extras, operands, grid, sizes, CFG: gl.constexpr):
    """Multiply and store the block row of each warp, piece by piece of work."""
    fragments_ptr, items_ptr, cols_ptr, slabs = operands
    groups, panels, section, chunks = grid
    n_items, n_rows, n_cols, per_block = sizes
    bars = shared_address(CFG.STAGES * CFG.chunk_bytes)
    stage = 0
    phase = 0
    for piece in range(gl.program_id(0), groups * panels, gl.num_programs(0)):
        group, panel = place_in_sections(piece, groups, panels, section)
        item = group * CFG.WARPS + warp_number()
        item_ptr = items_ptr + 4 * item
        block_row = gl.load(item_ptr, mask=item < n_items, other=-1)
        begin = gl.load(item_ptr + 1, mask=item < n_items, other=0) * per_block
        end = gl.load(item_ptr + 2, mask=item < n_items, other=0) * per_block
        left, right, place = _multiply_row(
            *((begin, end), (0, stage, phase), bars, fragments_ptr, cols_ptr, slabs, CFG)
        )
        _, stage, phase = _advance(place, chunks - 1, bars, CFG)
        arrive_at(bars + 8 * (CFG.STAGES + stage))
        stage, phase = _next_stage(stage, phase, CFG)

        row = block_row * ROWS
        col = panel * (2 * HALF)
        store_half(left, row, col, out_ptr, extras, n_rows, n_cols, CFG)
        store_half(right, row, col + HALF, out_ptr, extras, n_rows, n_cols, CFG)


@gluon.jit(
    do_not_specialize=[
        *("n_items", "n_rows", "n_cols", "per_block"),
        *("groups", "panels", "section", "chunks"),
    ]
)
def _spmm_warps_kernel(
    out_ptr,
    out_stride,
    bias_ptr,
    residual_ptr,
    residual_strides,
    fragments_ptr,
    x_desc,
    items_ptr,
    cols_ptr,
    n_items,
    n_rows,
    n_cols,
    per_block,  # fragments of a block
    groups,
    panels,
    section,  # groups of rows whose pieces run together
    chunks,
    CFG: gl.constexpr,
):
    """Set up the ring and both roles; `_produce` and `_consume` do the work."""
    count: gl.constexpr = CFG.STAGES * 2 * CFG.slabs
    stages: gl.constexpr = CFG.STAGES
    slab_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HALF], x_desc.dtype)
    # One allocation, since `shared_address` must know where the barriers are: behind the ring.
    slabs = gl.allocate_shared_memory(x_desc.dtype, [count + 1, ROWS, HALF], slab_layout)
    bars = slabs.index(count)._reinterpret(gl.int64, [256, 1], mbarrier.MBarrierLayout())
    chunks_smem = slabs._reinterpret(x_desc.dtype, [2 * stages, CFG.CHUNK, HALF], x_desc.layout)
    for i in gl.static_range(stages):
        mbarrier.init(bars.index(i), count=1)
        mbarrier.init(bars.index(stages + i), count=CFG.WARPS)
    fence_async_shared()
    # without it, the barrier behind the last `init` would lie in the loops of the warps
    thread_barrier()

    extras = (out_stride, bias_ptr, residual_ptr, residual_strides)
    grid = (groups, panels, section, chunks)
    sizes = (n_items, n_rows, n_cols, per_block)
    operands = (fragments_ptr, items_ptr, cols_ptr, slabs)
    gl.warp_specialize(
        [
            (_consume, (out_ptr, extras, operands, grid, sizes, CFG)),
            (_produce, (x_desc, chunks_smem, bars, grid, CFG)),
        ],
        [1],
        [CFG.PRODUCER_REGISTERS],
    )
