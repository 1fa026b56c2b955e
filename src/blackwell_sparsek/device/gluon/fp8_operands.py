# mypy: ignore-errors
"""fp8 tiles in shared memory as first operands of WGMMA, converted to fp16 in registers.

Tiles are copied as words of four values, int32 [keys, words], swizzled over 128 bytes: threads read
words without bank conflicts, in the order in which `device.fp8` converts them to operands.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..fp8 import FOUR, turned_halves


@gluon.constexpr_function
def _linear(reg, lane, warp, shape):
    return gl.DistributedLinearLayout(reg, lane, warp, [], shape)


@gluon.constexpr_function
def _powers(begin, end):
    """Powers of two from `begin` up to, not including, `end`."""
    return [1 << bit for bit in range(begin.bit_length() - 1, end.bit_length() - 1)]


@gluon.constexpr_function
def _key_layout(keys, words):
    """A warp holds 16 rows; the four threads of a row hold one word each of every 16 columns."""
    reg = [[0, n] for n in _powers(4, words)] + [[8, 0]] + [[n, 0] for n in _powers(64, keys)]
    lane = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return _linear(reg, lane, [[16, 0], [32, 0]], [keys, words])


@gluon.constexpr_function
def _value_layout(keys, words):
    """A thread holds pairs of keys; eight threads of a warp span eight words."""
    reg = [[1, 0]] + [[n, 0] for n in _powers(8, keys)]
    lane = [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]]
    return _linear(reg, lane, [[0, 8], [0, 16]], [keys, words])


@gluon.jit
def key_operand(tile, accumulator: gl.constexpr):
    """fp16 [keys, columns] from words [keys, columns / 4]; `column_of_slot` gives column order."""
    N: gl.constexpr = tile.shape[0]
    W: gl.constexpr = tile.shape[1]
    words = tile.load(_key_layout(N, W))
    x0, x1, x2, x3 = gl.inline_asm_elementwise(
        FOUR, "=h,=h,=h,=h,r", [words], dtype=(gl.float16,) * 4, is_pure=True, pack=1
    )
    # [keys, 16 columns, thread, high, low]
    every = gl.reshape(gl.join(gl.join(x0, x2), gl.join(x1, x3)), (N, W // 4, 4, 2, 2))
    halves = gl.reshape(gl.permute(every, (0, 1, 3, 2, 4)), (N, 4 * W))
    return gl.convert_layout(halves, gl.DotOperandLayout(0, accumulator, 2), assert_trivial=True)


@gluon.jit
def column_of_slot(slot):
    """The column of the cache that `key_operand` puts at `slot`."""
    return slot - slot % 16 + slot // 2 % 4 * 4 + slot // 8 % 2 * 2 + slot % 2


@gluon.jit
def value_operand(tile, accumulator: gl.constexpr):
    """fp16 [128, keys] from words [keys, 32]; `fp8.turned_back` restores the order in products."""
    words = tile.load(_value_layout(tile.shape[0], tile.shape[1]))
    halves = turned_halves(words)
    return gl.convert_layout(halves, gl.DotOperandLayout(0, accumulator, 2), assert_trivial=True)


@gluon.jit
def half_range(q):
    """Queries in fp16, scaled into its range by a power of two, and the factor that undoes this.

    One factor serves all rows: fp16 has 40 binades, and rows that share keys differ by less.
    """
    top = gl.max(gl.max(gl.abs(q.to(gl.float32)), 1), 0)
    exponent = (top.to(gl.int32, bitcast=True) >> 23) - 127
    # the largest value becomes at least 2**14, which leaves one binade below the fp16 maximum
    shift = gl.minimum(gl.maximum(exponent, -100), 126) - 14
    down = ((127 - shift) << 23).to(gl.float32, bitcast=True)
    up = ((127 + shift) << 23).to(gl.float32, bitcast=True)
    return (q.to(gl.float32) * down).to(gl.float16), up
