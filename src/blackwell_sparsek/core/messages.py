"""The grammar of error messages, and the check of flags, for callers of any framework."""

from collections.abc import Callable

from .errors import InvalidType


def message(op: str, arg: str, problem: str, expected: object, got: object) -> str:
    """One error line in the grammar of this package."""
    return f"{op}: {arg} {problem}; expected {expected}, got {one_line(got)}"


def check_flag(op: str, arg: str, value: object) -> None:
    """`value` must be True or False."""
    if not isinstance(value, bool):
        raise InvalidType(message(op, arg, "is not a bool", "bool", type(value).__name__))


_LONGEST = 500


def quoted(got: object) -> str:
    """The `repr` of an argument as one short line, in which text differs from numbers."""
    return one_line(got, repr)


def one_line(got: object, written: Callable[[object], str] = str) -> str:
    """An argument as one short, printable line: it may come from an untrusted file."""
    try:
        text = written(got)
    except ValueError:  # an int with more digits than Python writes
        return f"a {type(got).__name__} too large to show"
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} ..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
