"""Choosing pages at the sizes it is for, in a CUDA graph, and what decoding makes of the lists."""

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.testing import inputs
from blackwell_sparsek.testing.tolerance import assert_within_budget

pytestmark = pytest.mark.gpu


def paged(lengths, page_size, heads=8, dim=128, dtype=torch.bfloat16):
    """Whole-number keys in shuffled pages."""
    columns = -(-max(lengths) // page_size)
    pages = len(lengths) * columns + 3
    k_cache = inputs.integers(pages, page_size, heads, dim, seed=1, dtype=dtype, device="cuda")
    table = torch.randperm(pages)[: len(lengths) * columns].view(len(lengths), columns)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return k_cache, {"cache_seqlens": seqlens, "page_table": table.int().cuda()}


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("reduce", ["max", "sum"])
def test_equals_eager(page_size, reduce):
    k_cache, where = paged([9000, 1, 2345, 0], page_size)
    made = [bsk.page_summaries(k_cache, **where, impl=impl) for impl in ("triton", "eager")]
    q = inputs.integers(4, 32, 2, 128, seed=3, dtype=torch.bfloat16, device="cuda")
    pages = where["page_table"].shape[1]
    for k in (8, pages // 10, pages):
        lists = [
            bsk.topk_pages(q, x, k, **where, keep_first=1, reduce=reduce, impl=impl)
            for x, impl in zip(made, ("triton", "eager"), strict=True)
        ]
        assert torch.equal(*lists), k


def test_long_sequences_take_several_tiles():
    k_cache, where = paged([200_000], 16, heads=2, dim=64)
    summaries = bsk.page_summaries(k_cache, **where)
    q = inputs.integers(1, 4, 1, 64, seed=3, dtype=torch.bfloat16, device="cuda")
    assert where["page_table"].shape[1] > 8192
    for k in (100, 9000):
        lists = [bsk.topk_pages(q, summaries, k, **where, impl=i) for i in ("triton", "eager")]
        assert torch.equal(*lists)


def test_graph_updates_summaries_and_lists():
    k_cache, where = paged([3000, 700], 16)
    where["cache_seqlens"].fill_(600)
    summaries = bsk.page_summaries(k_cache, **where)
    q = torch.randn(2, 32, 1, 128, dtype=torch.bfloat16, device="cuda")
    bsk.topk_pages(q, summaries, 9, **where)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        where["cache_seqlens"].add_(1)
        bsk.page_summaries(k_cache, **where, out=summaries, new_tokens=1)
        lists = bsk.topk_pages(q, summaries, 9, **where)
    for _ in range(100):
        q.normal_()
        graph.replay()
    assert where["cache_seqlens"].tolist() == [700, 700]
    fresh = bsk.page_summaries(k_cache, **where)
    for b in range(2):
        at = where["page_table"][b, :44].long()
        assert torch.equal(summaries.low[at], fresh.low[at])
        assert torch.equal(summaries.high[at], fresh.high[at])
    assert torch.equal(lists, bsk.topk_pages(q, fresh, 9, **where))
    assert (lists[..., -1] == 43).all()


def test_nothing_waits():
    k_cache, where = paged([3000, 700], 16)
    q = torch.randn(2, 32, 1, 128, dtype=torch.bfloat16, device="cuda")
    bsk.topk_pages(q, bsk.page_summaries(k_cache, **where), 9, **where)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for impl in ("triton", "eager"):
            summaries = bsk.page_summaries(k_cache, **where, impl=impl)
            bsk.topk_pages(q, summaries, 9, **where, impl=impl)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_full_selection_is_dense_decoding():
    k_cache, where = paged([3000, 700, 0], 64)
    v_cache = torch.randn_like(k_cache)
    q = torch.randn(3, 32, 1, 128, dtype=torch.bfloat16, device="cuda")
    k_cache = k_cache * 0.1
    summaries = bsk.page_summaries(k_cache, **where)
    lists = bsk.topk_pages(q, summaries, where["page_table"].shape[1], **where)
    chosen = bsk.attention_decode(q, k_cache, v_cache, kv_blocks=lists, **where)
    exact = bsk.attention_decode(
        *(x.double() for x in (q, k_cache, v_cache)), **where, impl="eager"
    )
    plain = bsk.attention_decode(q, k_cache, v_cache, **where, impl="eager")
    assert_within_budget(chosen, exact, plain)
