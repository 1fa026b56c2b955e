"""`bsk::kv_append`: write new keys and values into a cache, in place."""

from typing import Any

import torch

from ..core.arch import arch_of
from ..eager import kv_append as eager
from ..tuning.problem_cache import CacheProblem
from .dispatch import Dispatcher, interpreted_only
from .machine import why_not_portable
from .registry import define_op

_SM_THAT_CONVERTS_FP8 = 89


def why_not_triton(problem: CacheProblem) -> str | None:
    """Why the kernels of caches cannot run this problem, or None when they can."""
    return why_not_portable(problem.arch, problem.dtype)


def _launch(*args: Any) -> None:
    from ..kernels.cache.append import launch_kv_append

    launch_kv_append(*args, converts_fp8=arch_of(args[0].device).sm >= _SM_THAT_CONVERTS_FP8)


append_dispatch = Dispatcher("kv_append")
append_dispatch.register("triton", why_not_triton, _launch, auto_passes=interpreted_only)
append_dispatch.register("eager", lambda problem: None, eager.kv_append)


def _append(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache_seqlens: torch.Tensor,
    counts: torch.Tensor | None,
    page_table: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    impl: str,
) -> None:
    problem = CacheProblem.of(k, k_cache, page_table is not None)
    new = (k, v, cache_seqlens, counts, page_table, k_scale, v_scale)
    with torch.autocast(k.device.type, enabled=False), torch.no_grad():
        append_dispatch(impl, problem, k_cache, v_cache, *new)


def _append_fake(*args: object) -> None:
    return None


kv_append = define_op(
    "kv_append",
    "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor cache_seqlens, "
    "Tensor? counts, Tensor? page_table, Tensor? k_scale, Tensor? v_scale, str impl) -> ()",
    _append,
    _append_fake,
)
