# mypy: ignore-errors
"""BSR times dense on Hopper for blocks 16 rows high: out = activation(A @ X + bias) + residual.

A is block-sparse [M, K] in blocks of 16 x 16, given as fragments (`layouts.py`); X [K, N] has
contiguous rows; out is [M, N] or lies transposed in memory.

WGMMA multiplies 64 rows at a time, so with blocks this low most of what it multiplies would be
zeros. Here the work is one block row per warp: each of 16 warps multiplies only its own blocks,
with one `mma.sync.m16n8k16` for 8 columns. X passes densely through a ring of chunks that all warps
read, filled by a producer warp: 256 rows use what is fetched. A warp walks its own list of
blocks, moves on to the next chunk when a block lies there, and waits for no other warp
(`device/gluon/warps.py`).

The kernel is persistent: one program per SM computes every num_programs-th work tile, 256 rows by
128 columns. Rows of about the same length are neighbours, so that all warps finish a tile at about
the same time. Tiles go in raster groups of rows whose blocks stay in L2 while X passes by. The
bottleneck is reading X from shared memory: 4 KB for each block.

Part of impl "sm90" of `bsk::bsr_matmul`. Limits: fp16 and bf16, addresses and strides that TMA
accepts.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...core.arch import arch_of
from ...core.compat import hopper_options
from ...device.gluon.compat import async_load, reinterpret, thread_barrier
from ...device.gluon.warps import (
    arrive_at,
    from_lane,
    lane_number,
    shared_address,
    wait_at,
    warp_number,
)
from ...device.schedule import raster_place
from ...launch.descriptors import tensor_descriptor
from ...launch.launcher import cdiv, launch, on_device_of
from ..plan import SpmmPlan
from .config import HALF_COLUMNS, WARP_ROWS, WarpRowsConfig
from .epilogue import Epilogue, finish_values

ROWS = gl.constexpr(WARP_ROWS)
HALF = gl.constexpr(HALF_COLUMNS)
LANES = gl.constexpr(32)
# int32 words of a fragment in all threads of a warp
WORDS = gl.constexpr(128)
# Registers per thread the kernel is compiled for; the producer gives most of its own to the others.
MAX_REGISTERS = 96
# Blocks of the rows of a raster group: they are read again for every panel of X, out of L2 (50 MB).
RASTER_GROUP_BYTES = 16 * 2**20


class RowsRaster(NamedTuple):
    """Work tiles of the launch."""

    m_tiles: Any  # groups of WARPS block rows
    n_tiles: Any  # panels of 128 columns
    group: Any  # M tiles that are visited together
    chunks: Any  # of X, along K


class RowLists(NamedTuple):
    """A in memory: fragments, and which of them each block row has."""

    fragments_ptr: Any  # int32 [fragments, WORDS]
    items_ptr: Any  # int32 [n_items, 4]: block row, begin, end, unused
    cols_ptr: Any  # int32, column of each fragment in steps of 16
    n_items: Any
    per_block: Any  # fragments of a block


class RowsOutput(NamedTuple):
    """Where finished sums go."""

    ptr: Any
    stride: Any  # between rows, or columns where OUT_TRANSPOSED
    epilogue: Any


class ChunkPlace(NamedTuple):
    """Where a warp is in the ring of chunks."""

    chunk: Any  # of the current work tile
    stage: Any
    phase: Any


# Storing without a barrier over all warps.
#
# A thread holds pairs of neighbouring columns: four threads have 8 columns of one row, 16 bytes, so
# each would store 4 bytes at a time. Instead the four threads exchange what they hold for 32
# columns, and each stores 16 bytes. Gluon's conversion of layouts would take shared memory and a
# barrier of the program for that.

_EIGHT = ",".join(["r"] * 8)
_EIGHT_OUT = ",".join(["=r"] * 8)
_EXCHANGE_OPERANDS = gl.constexpr(f"{_EIGHT_OUT},{_EIGHT}")
_STORE_OPERANDS = gl.constexpr(
    f"{_EIGHT_OUT},{_EIGHT},{_EIGHT.replace('r', 'l')},{_EIGHT},~{{memory}}"
)


def _exchange() -> str:
    """PTX: four threads transpose 4 x 4 words, for two rows.

    Word 2 * i + r belongs to columns 8 * i + 2 * t of row half r before, to columns 8 * t + 2 * i
    after, in the thread t of the four.
    """
    lines = ["{ .reg .pred p1, p2; .reg .b32 s, v<8>;"]
    for bit in (1, 2):
        lines.append(f"mov.u32 s, %laneid; and.b32 s, s, {bit}; setp.ne.u32 p{bit}, s, 0;")
    lines += [f"mov.b32 v{i}, ${8 + i};" for i in range(8)]
    for row in (0, 1):
        for bit, pairs in ((1, ((0, 2), (4, 6))), (2, ((0, 4), (2, 6)))):
            for i, j in pairs:
                mine, other = f"v{i + row}", f"v{j + row}"
                lines.append(f"selp.b32 s, {mine}, {other}, p{bit};")
                lines.append(f"shfl.sync.bfly.b32 s, s, {bit}, 31, -1;")
                lines.append(f"@p{bit} mov.b32 {mine}, s; @!p{bit} mov.b32 {other}, s;")
    lines += [f"mov.b32 ${i}, v{i};" for i in range(8)]
    return " ".join([*lines, "}"])


def _store() -> str:
    """PTX: store the four words of each row half as 16 bytes, at the address of the first."""
    lines = ["{ .reg .pred p;"]
    for row in (0, 1):
        words = ", ".join(f"${8 + row + 2 * i}" for i in range(4))
        lines.append(f"setp.ne.s32 p, ${24 + row}, 0;")
        lines.append(f"@p st.global.v4.b32 [${16 + row}], {{{words}}};")
    lines += [f"mov.b32 ${i}, 0;" for i in range(8)]
    return " ".join([*lines, "}"])


_EXCHANGE = gl.constexpr(_exchange())
_STORE = gl.constexpr(_store())


@gluon.jit
def _store_in_sixteens(acc, row, col, out_ptr, out_stride, n_rows, n_cols, CFG: gl.constexpr):
    """Store sums as fp16 or bf16 in rows; n_cols is a multiple of 8."""
    low, high = acc.reshape([CFG.tile_m, HALF // 2, 2]).split()
    if out_ptr.dtype.element_ty == gl.float16:
        words = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, True, 1
        )
    else:
        words = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, True, 1
        )
    words = gl.inline_asm_elementwise(_EXCHANGE, _EXCHANGE_OPERANDS, [words], gl.int32, False, 8)
    layout: gl.constexpr = words.type.layout
    rows = row + gl.arange(0, CFG.tile_m, gl.SliceLayout(1, layout)) % ROWS
    pairs = gl.arange(0, HALF // 2, gl.SliceLayout(0, layout))
    cols = col + (pairs // 16) * 32 + (pairs % 4) * 8
    inside = ((rows >= 0) & (rows < n_rows))[:, None] & (cols < n_cols)[None, :]
    ptrs = out_ptr + (rows.to(gl.int64) * out_stride)[:, None] + cols[None, :]
    operands = [words, ptrs.to(gl.int64, bitcast=True), inside.to(gl.int32)]
    gl.inline_asm_elementwise(_STORE, _STORE_OPERANDS, operands, gl.int32, False, 8)


@gluon.jit
def _store_half(acc, row, col, output, CFG: gl.constexpr):
    """Finish and store sums [tile_m, HALF]; `row` is each warp's first row, negative: none."""
    epilogue = output.epilogue
    n_rows = epilogue.n_rows
    n_cols = epilogue.n_cols
    out_ptr = output.ptr
    layout: gl.constexpr = CFG.accumulator_layout()
    activation: gl.constexpr = CFG.ACTIVATION
    rows = row + gl.arange(0, CFG.tile_m, gl.SliceLayout(1, layout)) % ROWS
    cols = col + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    acc = finish_values(acc, rows[:, None], cols[None, :], epilogue, activation)
    inside = ((rows >= 0) & (rows < n_rows))[:, None] & (cols < n_cols)[None, :]
    if CFG.OUT_TRANSPOSED:
        offsets = rows[:, None] + (cols.to(gl.int64) * output.stride)[None, :]
        gl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=inside)
    elif out_ptr.dtype.element_ty == gl.float32:
        offsets = (rows.to(gl.int64) * output.stride)[:, None] + cols[None, :]
        gl.store(out_ptr + offsets, acc, mask=inside)
    else:
        _store_in_sixteens(acc, row, col, out_ptr, output.stride, n_rows, n_cols, CFG)


# The producer.


@gluon.jit
def _produce(x_desc, chunks_smem, bars, raster, CFG: gl.constexpr):
    """Fill the ring with the chunks of X that each work tile needs."""
    step = 0
    for number in range(gl.program_id(0), raster.m_tiles * raster.n_tiles, gl.num_programs(0)):
        _, n_tile = raster_place(number, raster.m_tiles, raster.n_tiles, raster.group)
        col = n_tile * (2 * HALF)
        for chunk in range(raster.chunks):
            stage = step % CFG.STAGES
            mbarrier.wait(bars.index(CFG.STAGES + stage), ((step // CFG.STAGES) & 1) ^ 1)
            full = bars.index(stage)
            mbarrier.expect(full, CFG.chunk_bytes)
            for half in gl.static_range(2):
                async_load(
                    x_desc,
                    [chunk * CFG.CHUNK, col + half * HALF],
                    full,
                    chunks_smem.index(stage * 2 + half),
                )
            step += 1


# The consumers, one block row per warp.


@gluon.jit
def _fragment(fragments_ptr, entry, CFG: gl.constexpr):
    """Load the words of each warp's fragment, four to a thread: int32 [WARPS, LANES, 4]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [CFG.WARPS, 1, 1], [2, 1, 0])
    warps = gl.arange(0, CFG.WARPS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    lanes = gl.arange(0, LANES, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    words = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    # the offsets are the same for all warps; `entry` is what differs
    offsets = 0 * warps[:, None, None] + 4 * lanes[None, :, None] + words[None, None, :]
    return gl.load(fragments_ptr + entry.to(gl.int64) * WORDS + offsets)


@gluon.jit
def _operand(words, dtype: gl.constexpr, CFG: gl.constexpr):
    """The words of a fragment as left operand [WARPS * 16, 16]; no data moves."""
    layout: gl.constexpr = gl.DotOperandLayout(0, CFG.accumulator_layout(), 2)
    low = (words & 0xFFFF).to(gl.int16).to(dtype, bitcast=True)
    high = (words >> 16).to(gl.int16).to(dtype, bitcast=True)
    # [warp, (g, t), (k half, row half), pair] -> [(warp, row half, g), (k half, t, pair)]
    parts = gl.join(low, high).reshape([CFG.WARPS, 8, 4, 2, 2, 2]).permute([0, 4, 1, 3, 2, 5])
    return gl.convert_layout(parts.reshape([CFG.tile_m, 16]), layout, assert_trivial=True)


@gluon.jit
def _next_stage(place, CFG: gl.constexpr):
    """One chunk further: the next ring stage and its phase."""
    last = place.stage == CFG.STAGES - 1
    stage = gl.where(last, 0, place.stage + 1)
    phase = gl.where(last, place.phase ^ 1, place.phase)
    return ChunkPlace(place.chunk + 1, stage, phase)


@gluon.jit
def _advance(place, chunk, bars, CFG: gl.constexpr):
    """Move on to a chunk: release those before it to the producer, wait for it."""
    while place.chunk < chunk:
        arrive_at(bars + 8 * (CFG.STAGES + place.stage))
        place = _next_stage(place, CFG)
        wait_at(bars + 8 * place.stage, place.phase)
    return place


@gluon.jit
def _replaced(items, place: gl.constexpr, item):
    """The tuple `items` with `item` at index `place`."""
    result = ()
    for i in gl.static_range(len(items)):
        result = result + (item if i == place else items[i],)  # noqa: RUF005
    return result


@gluon.jit
def _multiply_row(begin, end, place, bars, lists, x_tiles, CFG: gl.constexpr):
    """Sums [tile_m, HALF] of both halves, for the block row of each warp, and the new place."""
    cols_ptr = lists.cols_ptr
    layout: gl.constexpr = CFG.accumulator_layout()
    operand: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    ahead_count: gl.constexpr = CFG.AHEAD
    tile_m: gl.constexpr = CFG.tile_m
    left = gl.zeros([tile_m, HALF], gl.float32, layout)
    right = gl.zeros([tile_m, HALF], gl.float32, layout)
    lane = lane_number()
    # Thread i holds the column of block i of the next 32. Nothing may touch what is loaded before
    # it is needed: the warp would stall on the load for thousands of cycles.
    next_cols = gl.load(cols_ptr + begin + lane, mask=begin + lane < end, other=0)
    ahead = ()
    for u in gl.static_range(ahead_count):
        ahead = ahead + (_fragment(lists.fragments_ptr, begin + u, CFG),)  # noqa: RUF005
    wait_at(bars + 8 * place.stage, place.phase)
    for base in range(begin, end, LANES):
        cols = next_cols
        next_block = base + LANES + lane
        next_cols = gl.load(cols_ptr + next_block, mask=next_block < end, other=0)
        for j in range(0, gl.minimum(end - base, LANES), ahead_count):
            for u in gl.static_range(ahead_count):
                if base + j + u < end:
                    col = from_lane(cols, j + u)
                    place = _advance(place, col // CFG.chunk_tiles, bars, CFG)
                    x_tile = place.stage * (2 * CFG.chunk_tiles) + col % CFG.chunk_tiles
                    a = _operand(ahead[u], x_tiles.dtype, CFG)
                    left = mma_v2(a, x_tiles.index(x_tile).load(operand), left)
                    right = mma_v2(a, x_tiles.index(x_tile + CFG.chunk_tiles).load(operand), right)
                    # past the last block: read, never multiplied
                    fresh = _fragment(lists.fragments_ptr, base + j + u + ahead_count, CFG)
                    ahead = _replaced(ahead, u, fresh)
    return left, right, place


@gluon.jit
def _consume(output, lists, x_tiles, raster, CFG: gl.constexpr):
    """Multiply and store the block row of each warp, work tile by work tile."""
    bars = shared_address(CFG.STAGES * CFG.chunk_bytes)
    stage = 0
    phase = 0
    for number in range(gl.program_id(0), raster.m_tiles * raster.n_tiles, gl.num_programs(0)):
        m_tile, n_tile = raster_place(number, raster.m_tiles, raster.n_tiles, raster.group)
        item = m_tile * CFG.WARPS + warp_number()
        item_ptr = lists.items_ptr + 4 * item
        block_row = gl.load(item_ptr, mask=item < lists.n_items, other=-1)
        begin = gl.load(item_ptr + 1, mask=item < lists.n_items, other=0) * lists.per_block
        end = gl.load(item_ptr + 2, mask=item < lists.n_items, other=0) * lists.per_block
        place = ChunkPlace(0, stage, phase)
        left, right, place = _multiply_row(begin, end, place, bars, lists, x_tiles, CFG)
        place = _advance(place, raster.chunks - 1, bars, CFG)
        arrive_at(bars + 8 * (CFG.STAGES + place.stage))
        place = _next_stage(place, CFG)
        stage = place.stage
        phase = place.phase

        row = block_row * ROWS
        col = n_tile * (2 * HALF)
        _store_half(left, row, col, output, CFG)
        _store_half(right, row, col + HALF, output, CFG)


@gluon.jit(
    do_not_specialize=[
        *("n_items", "n_rows", "n_cols", "per_block"),
        *("m_tiles", "n_tiles", "raster_group", "chunks"),
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
    per_block,
    m_tiles,
    n_tiles,
    raster_group,
    chunks,
    CFG: gl.constexpr,
):
    """Set up the ring and start both roles, `_produce` and `_consume`."""
    count: gl.constexpr = CFG.STAGES * 2 * CFG.chunk_tiles
    room: gl.constexpr = count + CFG.chunk_tiles
    stages: gl.constexpr = CFG.STAGES
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HALF], x_desc.dtype)
    # One allocation, since `shared_address` must know where the barriers are: after the ring, in
    # the memory of another half of a chunk, because both views must be of the same size.
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [room, ROWS, HALF], tile_layout)
    bars = reinterpret(x_tiles.index(count), gl.int64, [256, 1], mbarrier.MBarrierLayout())
    halves: gl.constexpr = [2 * stages + 1, CFG.CHUNK, HALF]
    chunks_smem = reinterpret(x_tiles, x_desc.dtype, halves, x_desc.layout)
    for i in gl.static_range(stages):
        mbarrier.init(bars.index(i), count=1)
        mbarrier.init(bars.index(stages + i), count=CFG.WARPS)
    fence_async_shared()
    # without it, the compiler would put the barrier after the last `init` into the warps' loops
    thread_barrier()

    epilogue = Epilogue(bias_ptr, residual_ptr, residual_strides, n_rows, n_cols)
    output = RowsOutput(out_ptr, out_stride, epilogue)
    raster = RowsRaster(m_tiles, n_tiles, raster_group, chunks)
    lists = RowLists(fragments_ptr, items_ptr, cols_ptr, n_items, per_block)
    gl.warp_specialize(
        [
            (_consume, (output, lists, x_tiles, raster, CFG)),
            (_produce, (x_desc, chunks_smem, bars, raster, CFG)),
        ],
        [1],
        [CFG.PRODUCER_REGISTERS],
    )


def launch_spmm_warps(
    out: torch.Tensor,
    fragments: torch.Tensor,
    columns: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    plan: SpmmPlan,
    per_block: int,
    config: WarpRowsConfig,
) -> None:
    """Write activation(A @ x + bias) + residual to `out`.

    Parameters
    ----------
    out : [M, N]; rows contiguous, or columns where the configuration says transposed
    fragments : A as `in_fragments` gives it, with AHEAD spare ones; at least one other
    columns : int32, columns of the fragments in steps of 16
    x : [K, N], rows contiguous
    bias : [M] contiguous, residual : [M, N], any strides; or None
    plan : of the pattern, with no row split
    per_block : fragments of a block
    """
    m, n = out.shape
    m_tiles, n_tiles = cdiv(plan.n_items, config.WARPS), cdiv(n, config.tile_n)
    with on_device_of(out):
        args = (
            out,
            out.stride(1 if config.OUT_TRANSPOSED else 0),
            bias,
            residual,
            None if residual is None else residual.stride(),
            fragments,
            tensor_descriptor(x, config.x_block()),
            plan.items,
            columns,
            plan.n_items,
            m,
            n,
            per_block,
            m_tiles,
            n_tiles,
            max(1, min(m_tiles, RASTER_GROUP_BYTES * m_tiles // fragments.nbytes)),
            cdiv(x.shape[0], config.CHUNK),
            config,
        )
        programs = min(arch_of(out.device).num_sms, m_tiles * n_tiles)
        launch(
            *(_spmm_warps_kernel, programs, args),
            num_warps=config.WARPS,
            maxnreg=MAX_REGISTERS,
            **hopper_options(),
        )
