"""Arithmetic on the sizes of arrays; needs no framework."""


def cdiv(a: int, b: int) -> int:
    """Ceiling division of non-negative integers."""
    return -(-a // b)
