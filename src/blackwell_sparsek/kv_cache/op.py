"""`bsk::page_summaries` and `bsk::topk_pages`: which pages of a cache a query should read."""

from typing import Any

import torch

from ..calls.cache import CacheProblem
from ..core.arch import arch_of
from ..dispatch.dispatcher import Dispatcher, interpreted_only
from ..dispatch.machine import why_not_portable
from ..dispatch.operators import define_op
from . import eager as eager
from .layout import PageSummaries

# `bsk::kv_append`: write new keys and values into a cache, in place.

_SM_THAT_CONVERTS_FP8 = 89


def why_not_triton(problem: CacheProblem) -> str | None:
    """Why the kernels of caches cannot run this problem, or None when they can."""
    return why_not_portable(problem.arch, problem.dtype)


def _launch(*args: Any) -> None:
    from .append_kernel import launch_kv_append

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


def _launch_summaries(*args: Any) -> None:
    from .selection_kernels import launch_page_summaries

    launch_page_summaries(*args)


def _launch_topk(
    q: torch.Tensor,
    summaries: PageSummaries,
    k: int,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor | None,
    keep_first: int,
    keep_last: int,
    reduce: str,
) -> torch.Tensor:
    from .selection_kernels import launch_topk_pages

    low, high, page_size = summaries
    kv_blocks = _empty_lists(q, low, k)
    where = (cache_seqlens, page_table, page_size)
    launch_topk_pages(kv_blocks, q, low, high, *where, keep_first, keep_last, reduce)
    return kv_blocks


def _empty_lists(q: torch.Tensor, low: torch.Tensor, k: int) -> torch.Tensor:
    return q.new_empty((q.shape[0], low.shape[-2], k), dtype=torch.int32)


summaries_dispatch = Dispatcher("page_summaries")
summaries_dispatch.register(
    "triton", why_not_triton, _launch_summaries, auto_passes=interpreted_only
)
summaries_dispatch.register("eager", lambda problem: None, eager.page_summaries)
topk_dispatch = Dispatcher("topk_pages")
topk_dispatch.register("triton", why_not_triton, _launch_topk, auto_passes=interpreted_only)
topk_dispatch.register("eager", lambda problem: None, eager.topk_pages)


def _summaries(
    low: torch.Tensor,
    high: torch.Tensor | None,
    k_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor | None,
    page_size: int,
    new_tokens: int | None,
    impl: str,
) -> None:
    problem = CacheProblem.of(low, k_cache, page_table is not None)
    with torch.autocast(low.device.type, enabled=False), torch.no_grad():
        pages = (k_cache, cache_seqlens, page_table, page_size, new_tokens)
        summaries_dispatch(impl, problem, low, high, *pages)


def _topk(
    q: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor | None,
    page_size: int,
    k: int,
    keep_first: int,
    keep_last: int,
    reduce: str,
    impl: str,
) -> torch.Tensor:
    problem = CacheProblem.of(q, low, page_table is not None)
    summaries = PageSummaries(low, high, page_size)
    options = (cache_seqlens, page_table, keep_first, keep_last, reduce)
    with torch.autocast(q.device.type, enabled=False), torch.no_grad():
        return topk_dispatch(impl, problem, q, summaries, k, *options)


def _topk_fake(q: torch.Tensor, low: torch.Tensor, *options: Any) -> torch.Tensor:
    _, _, _, _, k, *_ = options
    return _empty_lists(q, low, k)


page_summaries = define_op(
    "page_summaries",
    "(Tensor(a!) low, Tensor(b!)? high, Tensor k_cache, Tensor cache_seqlens, "
    "Tensor? page_table, int page_size, int? new_tokens, str impl) -> ()",
    _summaries,
    lambda *args: None,
)
topk_pages = define_op(
    "topk_pages",
    "(Tensor q, Tensor low, Tensor high, Tensor cache_seqlens, Tensor? page_table, "
    "int page_size, int k, int keep_first, int keep_last, str reduce, str impl) -> Tensor",
    _topk,
    _topk_fake,
)
