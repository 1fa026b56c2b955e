"""Columns of WGMMA accumulators that are left out, by one bit for each a thread has of a row.

Bits become predicates eight at a time (R2P), where a comparison and a position for each column take
half as many instructions again. What a band means stands in `device/masks.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# A thread has the columns 8 k and 8 k + 1 behind its first one: bits of those up to {last}.
_UP_TO = (
    "sub.s32 t, {last}, lane; shr.s32 n, t, 3; shl.b32 n, n, 1; and.b32 t, t, 7; min.u32 t, t, 1; "
    "add.s32 n, n, t; add.s32 n, n, 1; max.s32 n, n, 0; bmsk.clamp.b32 {bits}, 0, n; "
)
BITS = gl.constexpr(
    "{ .reg .b32 lane, t, n, before, upto; mov.u32 lane, %laneid; and.b32 lane, lane, 3; "
    "shl.b32 lane, lane, 1; "
    + _UP_TO.format(last="$2", bits="upto")
    + "sub.s32 t, $1, 1; "
    + _UP_TO.format(last="t", bits="before")
    + "not.b32 before, before; and.b32 $0, upto, before; }"
)


@gluon.constexpr_function
def _choosing(count):
    # operands: results, the scores they start from, and the bits of each one's row; a thread has
    # two rows, whose elements come in pairs
    lines = []
    for i in range(count):
        bits = f"${2 * count + i % 4 // 2 * 2}"
        lines.append(f"and.b32 t, {bits}, {1 << (2 * (i // 4) + i % 2)}; setp.eq.b32 p, t, 0;")
        lines.append(f"selp.f32 ${i}, 0fFF800000, ${i}, p;")
    return "{ .reg .pred p; .reg .b32 t; " + " ".join(lines) + " }"


@gluon.constexpr_function
def _choosing_operands(count):
    tied = [str(i) for i in range(count)]
    return ",".join(["=f"] * count + tied + ["r"] * count)


@gluon.jit
def keep_columns(s, first, last):
    """Scores `s` [64, columns] of WGMMA, -inf where a column is not from `first` to `last`."""
    bits = gl.inline_asm_elementwise(BITS, "=r,r,r", [first, last], gl.int32, True, 1)
    count: gl.constexpr = s.shape[1] // 2
    asm: gl.constexpr = _choosing(s.shape[1] // 2)
    operands: gl.constexpr = _choosing_operands(s.shape[1] // 2)
    _, spread = gl.broadcast(s, bits[:, None])
    return gl.inline_asm_elementwise(asm, operands, [s, spread], gl.float32, True, count)
