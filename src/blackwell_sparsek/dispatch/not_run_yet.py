"""The guard of kernels that no GPU has run; needs no framework."""

from typing import Any


def not_run_yet(problem: Any) -> str | None:
    """Why `auto` passes over kernels that were only compiled and interpreted so far.

    Once they have run on a GPU, register them with `interpreted_only` instead.
    """
    return "has not run on a GPU yet: only runs when asked for"
