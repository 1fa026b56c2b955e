"""`bsk::page_summaries` and `bsk::topk_pages`: which pages of a cache a query should read."""

from typing import Any

import torch

from ..eager import page_selection as eager
from ..formats.page_summaries import PageSummaries
from ..tuning.problem_cache import CacheProblem
from .dispatch import Dispatcher, interpreted_only
from .kv_cache import why_not_triton
from .registry import define_op


def _launch_summaries(*args: Any) -> None:
    from ..kernels.cache.summaries import launch_page_summaries

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
    from ..kernels.cache.topk_pages import launch_topk_pages

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
