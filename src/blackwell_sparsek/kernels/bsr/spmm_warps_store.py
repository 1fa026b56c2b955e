"""The end of the product of single warps: epilogue and stores, without a barrier of all warps.

A thread holds pairs of neighbouring columns: four threads have 8 columns of one row, 16 bytes.
Stored as they are, rows would be written in pieces of 16 bytes. So the four threads exchange what
they hold for 32 columns, and each stores 16 bytes. Gluon would take shared memory and a barrier of
the program for that.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .config_warps import HALF_COLUMNS, WARP_ROWS
from .finish_sm90 import finish_values

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
