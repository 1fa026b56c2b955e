"""Whether Triton's interpreter computes with bfloat16, or takes it for 16-bit integers.

It does the latter, without a word; `testing.interpreter` mends it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

_mended = 0


@contextmanager
def bf16_mended() -> Iterator[None]:
    """Inside, whoever entered has seen to it that bfloat16 is right."""
    global _mended
    _mended += 1
    try:
        yield
    finally:
        _mended -= 1


def bf16_is_exact() -> bool:
    """Whether somebody has."""
    return _mended > 0
