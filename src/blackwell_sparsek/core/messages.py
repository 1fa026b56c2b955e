"""The grammar of error messages, for callers of any framework."""


def message(op: str, arg: str, problem: str, expected: object, got: object) -> str:
    """One error line in the grammar of this package."""
    return f"{op}: {arg} {problem}; expected {expected}, got {got}"
