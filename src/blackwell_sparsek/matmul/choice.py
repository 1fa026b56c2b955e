"""Which implementation of a block-sparse product `auto` chooses, in which order, and why.

Each implementation says whether it can run a problem (`why_not_*`, beside the tiles of its kernels)
and whether `auto` should pass it over (below). The measurements are beside the thresholds: in
`sm90.tuning` for the Hopper kernels against the portable ones, in `estimate` for each of them
against the dense product.
"""

from functools import lru_cache

from ..calls.matmul import BsrProblem
from ..dispatch.dispatcher import Dispatcher, every_problem, interpreted_only, only_asked
from ..reference import matmul as reference
from . import dense, eager
from .estimate import dense_seconds, packs_for_few_columns, sparse_seconds
from .estimate_sampled import dense_sddmm_seconds, sddmm_seconds
from .sm90.tuning import spmm_sm90_passed_over, why_not_sddmm_sm90, why_not_sm90
from .triton.tuning import why_not_triton

# Estimates are accurate to a tenth.
CLOSE = 1.1


def sm90_passed_over(problem: BsrProblem) -> str | None:
    """Leave problems that the portable kernels run faster to them; the rest competes with dense."""
    return (
        spmm_sm90_passed_over(problem)
        or _slower_than_triton(problem)
        or _slower_than_dense(problem, "sm90")
    )


def triton_passed_over(problem: BsrProblem) -> str | None:
    """Interpreted kernels are for tests; compiled ones compete with the dense product."""
    return interpreted_only(problem) or _slower_than_dense(problem, "triton")


def eager_passed_over(problem: BsrProblem) -> str | None:
    """Plain PyTorch on stored blocks competes with the dense product too."""
    return _slower_than_dense(problem, "eager")


def dense_passed_over(problem: BsrProblem) -> str | None:
    """Name the first implementation on stored blocks that is estimated to be faster."""
    dense_s = dense_seconds(problem)
    for impl in _sparse_impls(problem):
        sparse_s = sparse_seconds(problem, impl)
        if sparse_s <= dense_s:
            return _compared(dense_s, impl, sparse_s)
    return None


# Cached, because estimating takes longer than the rest of a dispatch.
@lru_cache(maxsize=4096)
def _slower_than_dense(problem: BsrProblem, impl: str) -> str | None:
    sparse_s, dense_s = sparse_seconds(problem, impl), dense_seconds(problem)
    return None if sparse_s <= dense_s else _compared(sparse_s, "dense", dense_s)


@lru_cache(maxsize=4096)
def _slower_than_triton(problem: BsrProblem) -> str | None:
    """Leave blocks that must be packed for WGMMA to the portable kernel if it is faster."""
    if not packs_for_few_columns(problem) or why_not_triton(problem) is not None:
        return None
    own_s, portable_s = (sparse_seconds(problem, impl) for impl in ("sm90", "triton"))
    return None if own_s <= CLOSE * portable_s else _compared(own_s, "triton", portable_s)


def _sparse_impls(problem: BsrProblem) -> list[str]:
    """Implementations on stored blocks that can run, in the order in which `auto` tries them."""
    passed = spmm_sm90_passed_over(problem) or _slower_than_triton(problem)
    impls = ["sm90"] if (why_not_sm90(problem) or passed) is None else []
    if (why_not_triton(problem) or interpreted_only(problem)) is None:
        impls.append("triton")
    return [*impls, "eager"]


# Sampled products. On a CPU plain PyTorch on stored blocks computes them all.


def sampled_sm90_passed_over(problem: BsrProblem) -> str | None:
    """The Hopper kernel competes with the dense product."""
    return _sampled_slower_than_dense(problem, "sm90")


def sampled_triton_passed_over(problem: BsrProblem) -> str | None:
    """Interpreted kernels are for tests; compiled ones compete with the dense product."""
    return interpreted_only(problem) or _sampled_slower_than_dense(problem, "triton")


def sampled_eager_passed_over(problem: BsrProblem) -> str | None:
    """On a GPU, plain PyTorch on stored blocks competes with the dense product."""
    return _sampled_slower_than_dense(problem, "eager") if problem.arch.sm else None


def sampled_dense_passed_over(problem: BsrProblem) -> str | None:
    """Name the first implementation on stored blocks that is estimated to be faster."""
    if not problem.arch.sm:
        return "on a CPU left to eager"
    dense_s = dense_sddmm_seconds(problem)
    impls = ["sm90"] if why_not_sddmm_sm90(problem) is None else []
    if why_not_triton(problem) is None:
        impls.append("triton")
    for impl in (*impls, "eager"):
        sparse_s = sddmm_seconds(problem, impl)
        if sparse_s <= dense_s:
            return _compared(dense_s, impl, sparse_s)
    return None


@lru_cache(maxsize=4096)
def _sampled_slower_than_dense(problem: BsrProblem, impl: str) -> str | None:
    sparse_s, dense_s = sddmm_seconds(problem, impl), dense_sddmm_seconds(problem)
    return None if sparse_s <= dense_s else _compared(sparse_s, "dense", dense_s)


def _compared(own_s: float, other: str, other_s: float) -> str:
    return f"estimated {own_s * 1e3:.3g} ms, {other} {other_s * 1e3:.3g} ms"


_PACKAGE = __name__.rpartition(".")[0]

matmul_dispatch: Dispatcher = Dispatcher("bsr_matmul")
matmul_dispatch.register(
    "sm90", why_not_sm90, f"{_PACKAGE}.sm90.spmm_launch:matmul", auto_passes=sm90_passed_over
)
matmul_dispatch.register(
    "triton", why_not_triton, f"{_PACKAGE}.triton.spmm:matmul", auto_passes=triton_passed_over
)
matmul_dispatch.register("eager", every_problem, eager.matmul, auto_passes=eager_passed_over)
# last: reached only if all others were passed over in its favour
matmul_dispatch.register("dense", every_problem, dense.matmul, auto_passes=dense_passed_over)
matmul_dispatch.register("reference", every_problem, reference.matmul, auto_passes=only_asked)

sddmm_dispatch: Dispatcher = Dispatcher("bsr_sddmm")
sddmm_dispatch.register(
    "sm90",
    why_not_sddmm_sm90,
    f"{_PACKAGE}.sm90.sddmm_launch:sddmm",
    auto_passes=sampled_sm90_passed_over,
)
sddmm_dispatch.register(
    "triton",
    why_not_triton,
    f"{_PACKAGE}.triton.sddmm:sddmm",
    auto_passes=sampled_triton_passed_over,
)
sddmm_dispatch.register("eager", every_problem, eager.sddmm, auto_passes=sampled_eager_passed_over)
# last: reached only if all others were passed over in its favour
sddmm_dispatch.register("dense", every_problem, dense.sddmm, auto_passes=sampled_dense_passed_over)
sddmm_dispatch.register("reference", every_problem, reference.sddmm, auto_passes=only_asked)

pairs_dispatch: Dispatcher = Dispatcher("bsr_pair_products")
pairs_dispatch.register(
    "triton",
    why_not_triton,
    f"{_PACKAGE}.triton.pair_products:pair_products",
    auto_passes=interpreted_only,
)
pairs_dispatch.register("eager", every_problem, eager.pair_products)
pairs_dispatch.register("reference", every_problem, reference.pair_products, auto_passes=only_asked)
