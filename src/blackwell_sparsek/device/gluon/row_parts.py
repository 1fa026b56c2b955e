# mypy: ignore-errors
"""Rows of WGMMA accumulators: maxima, sums with deferred exchanges, rescaling only where needed.

Four threads hold a row, each of them two of every eight columns. Sums stay per thread until the
last tile: `parts` [rows, 4]. Maxima are needed at once; they are taken of groups of 8 first and
then of those, to keep dependency chains short.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

HOLDERS = gl.constexpr(4)


@gluon.jit
def _by_thread(x):
    """`x` [rows, keys] with a separate axis for the threads that share a row."""
    return gl.reshape(x, [x.shape[0], x.shape[1] // 32, 4, HOLDERS, 2])


@gluon.jit
def row_parts(x):
    """Sums [rows, 4] over the elements that each thread holds of a row."""
    return gl.sum(gl.sum(gl.sum(_by_thread(x), 4), 2), 1)


@gluon.jit
def row_maxima(s, like):
    """Maximum of each row of `s`, by short dependency chains, in the layout of `like`."""
    top = gl.max(gl.max(gl.max(gl.max(_by_thread(s), 4), 2), 1), 1)
    return gl.convert_layout(top, like.type.layout, assert_trivial=True)


@gluon.jit
def add_parts(parts, rescale, p):
    """Rescale the per-thread sums and add the weights `p` of another tile."""
    rows: gl.constexpr = gl.SliceLayout(1, parts.type.layout)
    factor = gl.convert_layout(rescale, rows, assert_trivial=True)
    return parts * factor[:, None] + row_parts(p)


@gluon.constexpr_function
def _pinning(offset):
    return (
        "{ .reg .pred p; setp.nan.f32 p, $1, $1; "
        f"@p st.shared.f32 [$2+{offset}], $1; mov.b32 $0, 0; }}"
    )


@gluon.jit
def pin_above(x, base, SPARE: gl.constexpr):
    """Make the compiler compute `x` before the next wait, by a store that happens only for NaN.

    The store goes to SPARE bytes past `base`, an address that is never read.
    """
    asm: gl.constexpr = _pinning(SPARE)
    gl.inline_asm_elementwise(asm, "=r,f,r,~{memory}", [x, base], gl.int32, False, 1)


@gluon.jit
def computed_here(x):
    """`x` as it is, computed at this place of the program.

    LLVM moves what only the next turn of a loop reads to the end of the loop. Sums that are due
    when a product is complete would then keep the registers of all products until the last.
    """
    return gl.inline_asm_elementwise("", "=f,0", [x], gl.float32, False, 1)


# Whether the maximum of any row of a warp changed; a thread holds two rows.
RAISED = gl.constexpr(
    "{ .reg .pred p, q; setp.neu.f32 p, $2, $4; setp.neu.or.f32 p, $3, $5, p; "
    "vote.sync.any.pred q, p, -1; selp.b32 $0, 1, 0, q; mov.b32 $1, $0; }"
)


@gluon.jit
def any_raised(m_log2, m_new):
    """1 for the rows of warps in which the maximum of a row changed."""
    return gl.inline_asm_elementwise(RAISED, "=r,=r,f,f,f,f", [m_log2, m_new], gl.int32, False, 2)


@gluon.constexpr_function
def _scaling(count):
    # operands: results, the accumulators they start from, the factor of each, whether to scale
    scaled = " ".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    return f"{{ .reg .pred q; setp.ne.s32 q, ${3 * count}, 0; @!q bra.uni same; {scaled} same: }}"


@gluon.constexpr_function
def _scaling_operands(count):
    tied = [str(i) for i in range(count)]
    return ",".join(["=f"] * count + tied + ["f"] * count + ["r"] * count)


@gluon.jit
def scale_rows(acc, factor, raised):
    """WGMMA's `acc` [64, columns] times `factor` [64, 1], in warps that have `raised` [64, 1]."""
    count: gl.constexpr = acc.shape[1] // 2
    asm: gl.constexpr = _scaling(acc.shape[1] // 2)
    operands: gl.constexpr = _scaling_operands(acc.shape[1] // 2)
    _, factors = gl.broadcast(acc, factor)
    _, flags = gl.broadcast(acc, raised)
    return gl.inline_asm_elementwise(asm, operands, [acc, factors, flags], gl.float32, True, count)


# Columns are masked by one bit for each column that a thread holds of a row: 8 k and 8 k + 1 from
# its first one on. Bits become predicates eight at a time (R2P); a comparison and a position for
# each column would take 1.5 times as many instructions.

_FIRST_COLUMN = "mov.u32 lane, %laneid; and.b32 lane, lane, 3; shl.b32 lane, lane, 1; "
# The bits of the columns up to {last}.
_UP_TO = (
    "sub.s32 t, {last}, lane; shr.s32 n, t, 3; shl.b32 n, n, 1; and.b32 t, t, 7; min.u32 t, t, 1; "
    "add.s32 n, n, t; add.s32 n, n, 1; max.s32 n, n, 0; bmsk.clamp.b32 {bits}, 0, n; "
)
RANGE_BITS = gl.constexpr(
    "{ .reg .b32 lane, t, n, before, upto; "
    + _FIRST_COLUMN
    + _UP_TO.format(last="$2", bits="upto")
    + "sub.s32 t, $1, 1; "
    + _UP_TO.format(last="t", bits="before")
    + "not.b32 before, before; and.b32 $0, upto, before; }"
)
# The product brings two bits of each byte together in the highest byte, without a carry into it.
WORD_BITS = gl.constexpr(
    "{ .reg .b32 lane, t; "
    + _FIRST_COLUMN
    + "shr.u32 t, $1, lane; and.b32 t, t, 0x03030303; "
    + "mul.lo.u32 t, t, 0x01041040; shr.u32 $0, t, 24; }"
)


@gluon.jit
def range_bits(first, last):
    """Bits of the columns from `first` to `last` of each row, for `keep_bits`."""
    return gl.inline_asm_elementwise(RANGE_BITS, "=r,r,r", [first, last], gl.int32, True, 1)


@gluon.jit
def word_bits(words):
    """What a thread holds of 32 columns that have a bit each in `words`: 8 bits for `keep_bits`."""
    return gl.inline_asm_elementwise(WORD_BITS, "=r,r", [words], gl.int32, True, 1)


@gluon.constexpr_function
def _choosing(count, other):
    # operands: results, the values they start from, and the bits of the row of each; a thread holds
    # two rows, whose elements alternate in pairs
    lines = []
    for i in range(count):
        bits = f"${2 * count + i % 4 // 2 * 2}"
        lines.append(f"and.b32 t, {bits}, {1 << (2 * (i // 4) + i % 2)}; setp.eq.b32 p, t, 0;")
        lines.append(f"selp.f32 ${i}, {other}, ${i}, p;")
    return "{ .reg .pred p; .reg .b32 t; " + " ".join(lines) + " }"


@gluon.constexpr_function
def _choosing_operands(count):
    tied = [str(i) for i in range(count)]
    return ",".join(["=f"] * count + tied + ["r"] * count)


# As PTX writes them.
MINUS_INFINITY = gl.constexpr("0fFF800000")
ZERO = gl.constexpr("0f00000000")


@gluon.jit
def keep_bits(x, bits, OTHER: gl.constexpr = MINUS_INFINITY):
    """WGMMA's `x` [64, columns], with OTHER in columns that have no bit in `bits` [64]."""
    count: gl.constexpr = x.shape[1] // 2
    asm: gl.constexpr = _choosing(x.shape[1] // 2, OTHER)
    operands: gl.constexpr = _choosing_operands(x.shape[1] // 2)
    _, spread = gl.broadcast(x, bits[:, None])
    return gl.inline_asm_elementwise(asm, operands, [x, spread], gl.float32, True, count)
