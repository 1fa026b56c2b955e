"""The PTX of `device/gluon/row_parts.py` that turns ranges and words into bits of columns.

Gluon has no interpreter, and PTX none in Triton's: the few instructions are evaluated here.
"""

import random
import re
from collections.abc import Container

import pytest

pytest.importorskip("triton.experimental.gluon", reason="Triton is not installed")

from blackwell_sparsek.device.gluon import row_parts

WORD = 2**32


def _signed(x: int) -> int:
    return (x + WORD // 2) % WORD - WORD // 2


_INSTRUCTIONS = {
    "mov.u32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "not.b32": lambda a: ~a,
    "shl.b32": lambda a, b: a << b,
    "shr.s32": lambda a, b: _signed(a) >> b,
    "shr.u32": lambda a, b: (a % WORD) >> b,
    "add.s32": lambda a, b: a + b,
    "sub.s32": lambda a, b: a - b,
    "min.u32": lambda a, b: min(a % WORD, b % WORD),
    "max.s32": lambda a, b: max(_signed(a), _signed(b)),
    "mul.lo.u32": lambda a, b: a * b,
    "bmsk.clamp.b32": lambda a, b: ((1 << min(b, 32)) - 1) << a,
}


def _evaluate(asm: str, lane: int, *inputs: int) -> int:
    """The result $0 of straight-line PTX whose inputs are $1, $2, ..."""
    values = {"%laneid": lane} | {f"${i + 1}": x % WORD for i, x in enumerate(inputs)}
    body = re.sub(r"\.reg[^;]*;", "", asm.strip("{} "))
    for line in filter(None, (part.strip() for part in body.split(";"))):
        name, operands = line.split(" ", 1)
        target, *sources = (x.strip() for x in operands.split(","))
        given = [values[x] if x in values else int(x, 0) for x in sources]
        values[target] = _INSTRUCTIONS[name](*given) % WORD
    return values["$0"]


def _columns(lane: int, width: int) -> list[int]:
    """The columns that a thread holds of a row, in the order of their bits."""
    return [8 * k + 2 * (lane % 4) + i for k in range(width // 8) for i in (0, 1)]


def _bits(lane: int, width: int, visible: Container[int]) -> int:
    return sum((c in visible) << i for i, c in enumerate(_columns(lane, width)))


@pytest.mark.parametrize("lane", [0, 1, 2, 3, 30])
def test_bits_of_a_range(lane):
    edges = [-(10**6), -129, -9, -1, 0, 1, 2, 6, 7, 8, 31, 63, 64, 120, 126, 127, 128, 300, 10**6]
    asm = row_parts.RANGE_BITS.value
    for first in edges:
        for last in edges:
            found = _evaluate(asm, lane, first, last)
            assert found == _bits(lane, 128, range(first, last + 1)), (first, last)


@pytest.mark.parametrize("lane", [0, 1, 2, 3, 30])
def test_bits_of_words(lane):
    draw = random.Random(lane)
    asm = row_parts.WORD_BITS.value
    for word in [
        0,
        WORD - 1,
        *(1 << i for i in range(32)),
        *(draw.getrandbits(32) for _ in range(99)),
    ]:
        assert _evaluate(asm, lane, word) == _bits(
            lane, 32, {c for c in range(32) if word >> c & 1}
        ), hex(word)


def test_columns_are_chosen_by_their_bits():
    # element i of a thread: pairs of neighbouring columns, of two rows in turns
    asm = row_parts._choosing.fn(64, row_parts.ZERO.value)
    lines = re.findall(
        r"and\.b32 t, \$(\d+), (\d+);[^;]*; selp\.f32 \$(\d+), (\w+), \$(\d+), p;", asm
    )
    assert len(lines) == 64
    for i, (bits, bit, target, other, source) in enumerate(lines):
        row, column = i % 4 // 2, 2 * (i // 4) + i % 2
        assert (int(target), int(source), other) == (i, i, "0f00000000")
        # operands follow the results and the values they start from; those of a row are alike
        assert int(bits) - 128 == 2 * row and int(bit) == 1 << column
