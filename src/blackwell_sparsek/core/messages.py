"""The grammar of error messages, for callers of any framework."""

from collections.abc import Callable


def message(op: str, arg: str, problem: str, expected: object, got: object) -> str:
    """One error line in the grammar of this package."""
    return f"{op}: {arg} {problem}; expected {expected}, got {one_line(got)}"


_LONGEST = 500


def quoted(got: object) -> str:
    """What was given, as Python writes it, in one short line: text differs from numbers."""
    return one_line(got, repr)


def one_line(got: object, written: Callable[[object], str] = str) -> str:
    """What was given, as one short line: it may come from a file of a stranger."""
    try:
        text = written(got)
    except ValueError:  # an int with more digits than Python writes
        return f"a {type(got).__name__} too large to show"
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} ..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
