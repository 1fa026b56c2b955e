# mypy: ignore-errors
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

from collections.abc import Iterator
from dataclasses import replace

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ...core.arch import arch_of
from ...core.compat import warps_may_part
from ...core.compile_cases import CompileCase, compile_cases
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
from ...launch.descriptors import descriptor_type, tensor_descriptor
from ...launch.launcher import cdiv, launch, on_device_of
from ..plan import SpmmPlan
from .config import HALF_COLUMNS, WARP_ROWS, WarpRowsConfig
from .spmm import finish_values

# The end of the product of single warps: epilogue and stores, without a barrier of all warps.
#
# A thread holds pairs of neighbouring columns: four threads have 8 columns of one row, 16 bytes.
# Stored as they are, rows would be written in pieces of 16 bytes. So the four threads exchange
# what they hold for 32 columns, and each stores 16 bytes. Gluon would take shared memory and a
# barrier of the program for that.

ROWS = gl.constexpr(WARP_ROWS)
HALF = gl.constexpr(HALF_COLUMNS)
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
def store_half(acc, row, col, out_ptr, extras, n_rows, n_cols, CFG: gl.constexpr):
    """Finish and store sums [tile_m, HALF]; `row` is the first row of each warp, negative: none."""
    out_stride, bias_ptr, residual_ptr, residual_strides = extras
    layout: gl.constexpr = CFG.accumulator_layout()
    activation: gl.constexpr = CFG.ACTIVATION
    rows = row + gl.arange(0, CFG.tile_m, gl.SliceLayout(1, layout)) % ROWS
    cols = col + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    addends = (bias_ptr, residual_ptr, residual_strides)
    acc = finish_values(acc, rows[:, None], cols[None, :], addends, (n_rows, n_cols), activation)
    inside = ((rows >= 0) & (rows < n_rows))[:, None] & (cols < n_cols)[None, :]
    if CFG.OUT_TRANSPOSED:
        offsets = rows[:, None] + (cols.to(gl.int64) * out_stride)[None, :]
        gl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=inside)
    elif out_ptr.dtype.element_ty == gl.float32:
        offsets = (rows.to(gl.int64) * out_stride)[:, None] + cols[None, :]
        gl.store(out_ptr + offsets, acc, mask=inside)
    else:
        _store_in_sixteens(acc, row, col, out_ptr, out_stride, n_rows, n_cols, CFG)


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


# Launching the product of single warps, and what is compiled of it without a GPU.

# Registers per thread the kernel is compiled for; the producer leaves most of its own to the rest.
MAX_REGISTERS = 96
# Blocks of the rows that run together: they are read again for every panel of X, out of L2 (50 MB).
SECTION_BYTES = 16 * 2**20


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
    columns : int32, columns of the fragments in units of 16
    x : [K, N], rows contiguous
    bias : [M] contiguous, residual : [M, N], any strides; or None
    plan : of the pattern, no row cut
    per_block : fragments of a block
    """
    m, n = out.shape
    groups, panels = cdiv(plan.n_items, config.WARPS), cdiv(n, config.tile_n)
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
            groups,
            panels,
            max(1, min(groups, SECTION_BYTES * groups // fragments.nbytes)),
            cdiv(x.shape[0], config.CHUNK),
            config,
        )
        programs = min(arch_of(out.device).num_sms, groups * panels)
        launch(
            *(_spmm_warps_kernel, programs, args),
            num_warps=config.WARPS,
            maxnreg=MAX_REGISTERS,
        )


def _case(
    name: str,
    config: WarpRowsConfig,
    dtype: torch.dtype = torch.float16,
    out_dtype: torch.dtype | None = None,
    extras: bool = False,
    max_spill_bytes: int = 0,
) -> CompileCase:
    return CompileCase(
        name=f"bsr_spmm_warps/{name}",
        kernel=_spmm_warps_kernel,
        args={
            "out_ptr": out_dtype or dtype,
            "out_stride": 4096,
            "bias_ptr": dtype if extras else None,
            "residual_ptr": dtype if extras else None,
            "residual_strides": (4096, 1) if extras else None,
            "fragments_ptr": torch.int32,
            "x_desc": descriptor_type(config.x_block(), dtype),
            "items_ptr": torch.int32,
            "cols_ptr": torch.int32,
            "n_items": 256,
            "n_rows": 4096,
            "n_cols": 4096,
            "per_block": 1,
            "groups": 16,
            "panels": 32,
            "section": 8,
            "chunks": 32,
            "CFG": config,
        },
        archs=(90,),
        num_warps=config.WARPS,
        options={"maxnreg": MAX_REGISTERS},
        expect={"sass:HMMA": 16, "sass:LDSM": 8},
        max_spill_bytes=max_spill_bytes,
    )


@compile_cases
def _cases() -> Iterator[CompileCase]:
    # with other releases of Triton nothing runs it, and not every one could build it
    if not warps_may_part():
        return
    plain = WarpRowsConfig()
    yield _case("16x16", plain)
    yield _case("16x16-bf16", plain, torch.bfloat16)
    yield _case("16x16-fp32-out", plain, out_dtype=torch.float32)
    linear = replace(plain, OUT_TRANSPOSED=True, ACTIVATION="silu")
    # addresses of the residual, once for each tile; the loop has no spills
    yield _case("16x16-linear-silu", linear, extras=True, max_spill_bytes=192)
    gelu = replace(plain, ACTIVATION="gelu")
    yield _case("16x16-gelu", gelu, extras=True, max_spill_bytes=208)
