"""Whether `auto` multiplies the stored blocks, or the matrix written out: `impl="dense"`."""

from collections.abc import Callable
from functools import lru_cache

from ..tuning.bsr_estimate import dense_seconds, sparse_seconds
from ..tuning.bsr_sm90 import spmm_sm90_passed_over
from ..tuning.problem_bsr import BsrProblem
from . import bsr_sm90, bsr_triton
from .dispatch import interpreted_only


def passed_for_dense(impl: str) -> Callable[[BsrProblem], str | None]:
    """Why `auto` passes over `impl`: because the dense product should be faster."""

    # the answer is kept, since estimating takes longer than the rest of a dispatch
    @lru_cache(maxsize=4096)
    def why(problem: BsrProblem) -> str | None:
        sparse_s, dense_s = sparse_seconds(problem, impl), dense_seconds(problem)
        return None if sparse_s <= dense_s else _compared(sparse_s, "dense", dense_s)

    return why


_sm90_for_dense, _triton_for_dense = passed_for_dense("sm90"), passed_for_dense("triton")


def sm90_passed_over(problem: BsrProblem) -> str | None:
    """What others do better is for them; the rest competes with the dense product."""
    return spmm_sm90_passed_over(problem) or _sm90_for_dense(problem)


def triton_passed_over(problem: BsrProblem) -> str | None:
    """Interpreted kernels are for tests; compiled ones compete with the dense product."""
    return interpreted_only(problem) or _triton_for_dense(problem)


def dense_passed_over(problem: BsrProblem) -> str | None:
    """Why `auto` passes over the dense product: the stored blocks should be faster."""
    dense_s = dense_seconds(problem)
    for impl in _sparse_impls(problem):
        sparse_s = sparse_seconds(problem, impl)
        if sparse_s <= dense_s:
            return _compared(dense_s, impl, sparse_s)
    return None


def _sparse_impls(problem: BsrProblem) -> list[str]:
    """Sparse implementations that can run, in the order in which `auto` asks."""
    sm90 = (bsr_sm90.why_not(problem) or spmm_sm90_passed_over(problem)) is None
    impls = ["sm90"] if sm90 else []
    if (bsr_triton.why_not(problem) or interpreted_only(problem)) is None:
        impls.append("triton")
    return [*impls, "eager"]


def _compared(own_s: float, other: str, other_s: float) -> str:
    return f"estimated {own_s * 1e3:.3g} ms, {other} {other_s * 1e3:.3g} ms"
