import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.kv_cache.selection import (
    page_summaries_op,
    summaries_dispatch,
    topk_dispatch,
    topk_pages_op,
)
from blackwell_sparsek.testing import inputs

FP8 = torch.float8_e4m3fn
LENGTHS = torch.tensor([20, 7], dtype=torch.int32)


def keys(dtype=torch.float32):
    return inputs.integers(2, 2, 20, 8, seed=0, dtype=torch.float16 if dtype == FP8 else dtype)


def paged(dtype=torch.float32):
    cache = bsk.PagedKVCache(12, 4, 2, 8, dtype=dtype)
    ids = cache.add_sequences(2)
    k = keys(dtype)
    cache.append(ids, k, k, counts=LENGTHS.tolist())
    return cache, {"cache_seqlens": cache.lengths(ids), "page_table": cache.page_table(ids)}


@pytest.mark.parametrize("kind", ["minmax", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, FP8], ids=str)
def test_pages_and_blocks_of_the_same_keys_are_listed_alike(kind, dtype):
    cache, where = paged(dtype)
    blocks = bsk.KVCache(2, 2, 20, 8, dtype=dtype)
    blocks.append(keys(dtype), keys(dtype))
    q = inputs.integers(2, 4, 1, 8, seed=1)
    of_pages = bsk.page_summaries(cache.k, **where, kind=kind)
    of_blocks = bsk.page_summaries(blocks.k, cache_seqlens=LENGTHS, kv_block_size=4, kind=kind)
    assert of_pages.kind == of_blocks.kind == kind and of_pages.paged and not of_blocks.paged
    lists = bsk.topk_pages(q, of_pages, 3, **where)
    assert torch.equal(lists, bsk.topk_pages(q, of_blocks, 3, cache_seqlens=LENGTHS))
    assert lists[1].tolist() == [[0, 1, -1]] * 2 and (lists[0, :, -1] == 4).all()


@pytest.mark.parametrize("given", [False, True], ids=["new", "out"])
@pytest.mark.parametrize("kind", ["minmax", "mean"])
def test_summaries_are_those_of_the_tokens_that_are_there(kind, given):
    """Counted by hand: tokens past a length do not enter, whether `out` is given or not."""
    k_cache = torch.tensor([[1.0, 7, 4, -2, 6, 99], [5, 99, 99, 99, 99, 99]]).view(2, 1, 6, 1)
    where = {"cache_seqlens": torch.tensor([5, 1], dtype=torch.int32), "kv_block_size": 2}
    out = bsk.page_summaries(torch.zeros_like(k_cache), **where, kind=kind) if given else None
    made = bsk.page_summaries(k_cache, **where, kind=kind, out=out)
    assert made is out or not given
    expected = {
        "minmax": ([[1.0, -2, 6], [5, 0, 0]], [[7.0, 4, 6], [5, 0, 0]]),
        "mean": ([[4.0, 1, 6], [5, 0, 0]],) * 2,
    }
    assert (made.low[..., 0, 0].tolist(), made.high[..., 0, 0].tolist()) == expected[kind]


@pytest.mark.parametrize("impl", ["eager", "triton"])
def test_entries_of_the_table_that_name_no_page_rank_last(impl):
    """They are columns of the sequence, so they are listed once nothing else is left."""
    if impl == "triton":
        pytest.importorskip("triton")
    k_cache = torch.tensor([-9.0, -9, -9, -8]).view(4, 1, 1, 1)
    lengths = torch.tensor([5], dtype=torch.int32)
    table = torch.tensor([[-1, 0, 4, 3, 2]], dtype=torch.int32)
    where = {"cache_seqlens": lengths, "page_table": table}
    summaries = bsk.page_summaries(k_cache, **where)
    q = torch.ones(1, 1, 1, 1)
    lists = [
        bsk.topk_pages(q, summaries, k, **where, keep_last=0, impl=impl).tolist()
        for k in (1, 2, 3, 4)
    ]
    assert lists == [[[[3]]], [[[1, 3]]], [[[1, 3, 4]]], [[[0, 1, 3, 4]]]]


@pytest.mark.parametrize("impl", ["eager", "triton"])
def test_page_tables_of_64_bits(impl):
    if impl == "triton":
        pytest.importorskip("triton")
    cache, where = paged()
    wide = where | {"page_table": where["page_table"].long()}
    q, found = torch.ones(2, 4, 1, 8), []
    for given in (where, wide):
        made = bsk.page_summaries(cache.k, **given, impl=impl)
        found.append((made.low, made.high, bsk.topk_pages(q, made, 2, **given, impl=impl)))
    assert all(x.equal(y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("impl", ["eager", "triton"])
def test_a_cache_without_pages(impl):
    if impl == "triton":
        pytest.importorskip("triton")
    where = {"cache_seqlens": torch.tensor([5]).int(), "page_table": torch.tensor([[0, 1]]).int()}
    made = bsk.page_summaries(torch.zeros(0, 4, 2, 8), **where, impl=impl)
    assert made.low.shape == made.high.shape == (0, 2, 8)
    lists = bsk.topk_pages(torch.ones(1, 4, 1, 8), made, 1, **where, impl=impl)
    assert lists.tolist() == [[[1], [1]]]


@pytest.mark.parametrize("impl", ["eager", "triton"])
def test_nothing_to_choose_from_lists_nothing(impl):
    if impl == "triton":
        pytest.importorskip("triton")
    cache, where = paged()
    summaries = bsk.page_summaries(cache.k, **where)
    q = torch.ones(2, 4, 1, 8)
    nothing = [[[-1] * 3] * 2] * 2
    assert bsk.topk_pages(q[:, :, :0], summaries, 3, **where, impl=impl).tolist() == nothing
    where["page_table"] = where["page_table"][:, :0]
    assert bsk.topk_pages(q, summaries, 3, **where, impl=impl).tolist() == nothing
    where = {name: x[:0] for name, x in where.items()}
    assert bsk.topk_pages(q[:0], summaries, 3, **where, impl=impl).shape == (0, 2, 3)


@pytest.mark.parametrize("impl", ["eager", "triton"])
def test_every_option_reaches_the_implementation(impl):
    """First and last pages differ in number, and the two ways to combine queries in the result."""
    if impl == "triton":
        pytest.importorskip("triton")
    k_cache = torch.zeros(1, 1, 16, 2)
    k_cache[0, 0, 4], k_cache[0, 0, 6] = torch.tensor([9.0, 0.0]), torch.tensor([6.0, 6.0])
    lengths = torch.tensor([15], dtype=torch.int32)
    summaries = bsk.page_summaries(k_cache, cache_seqlens=lengths, kv_block_size=2)
    q = torch.eye(2).view(1, 2, 1, 2)

    def listed(k, first, last, reduce):
        kept = {"keep_first": first, "keep_last": last, "reduce": reduce}
        return bsk.topk_pages(q, summaries, k, cache_seqlens=lengths, **kept, impl=impl).tolist()

    assert listed(4, 2, 1, "max") == [[[0, 1, 2, 7]]]
    assert listed(4, 2, 1, "sum") == [[[0, 1, 3, 7]]]
    assert listed(4, 1, 2, "max") == [[[0, 2, 6, 7]]]


def test_double_precision_tells_close_pages_apart():
    """In single precision the three would be equal, and the earliest be taken."""
    k_cache = torch.tensor([1.0, 1.0 + 1e-12, 1.0 - 1e-12], dtype=torch.float64).view(1, 1, 3, 1)
    where = {"cache_seqlens": torch.tensor([3], dtype=torch.int32)}
    summaries = bsk.page_summaries(k_cache, **where, kv_block_size=1)
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    for sign, best in ((1.0, 1), (-1.0, 2)):
        assert bsk.topk_pages(sign * q, summaries, 1, **where, keep_last=0).tolist() == [[[best]]]


def test_update_after_an_append():
    cache, where = paged()
    summaries = bsk.page_summaries(cache.k, **where)
    k = inputs.integers(2, 2, 3, 8, seed=2, bound=9)
    cache.append([0, 1], k, k)
    where = {"cache_seqlens": cache.lengths([0, 1]), "page_table": cache.page_table([0, 1])}
    again = bsk.page_summaries(cache.k, **where, out=summaries, new_tokens=3)
    fresh = bsk.page_summaries(cache.k, **where)
    assert again is summaries
    assert torch.equal(again.low, fresh.low) and torch.equal(again.high, fresh.high)


@pytest.mark.parametrize("impl", ["eager", "triton"])
@pytest.mark.parametrize("update", [False, True])
def test_sequences_that_hold_different_numbers_of_tokens_of_a_page(update, impl):
    """Which of its summaries stayed was a matter of chance."""
    if impl == "triton":
        pytest.importorskip("triton")
    k_cache = torch.arange(12.0).view(3, 4, 1, 1)
    table = torch.tensor([[2, 1], [2, 1]], dtype=torch.int32)

    def where(*lengths, rows=slice(None)):
        return {
            "cache_seqlens": torch.tensor(lengths, dtype=torch.int32),
            "page_table": table[rows],
            "impl": impl,
        }

    made = bsk.page_summaries(k_cache, **where(7, 7))
    assert made.high.flatten().tolist() == [0, 6, 11]
    given = {"out": made, "new_tokens": 1} if update else {}
    match = r"page_table\[1, 1\] shares page 1 .*; expected 3 tokens of that page, or a c.*, got 1"
    with pytest.raises(bsk.InvalidInput, match=match):
        bsk.page_summaries(k_cache, **where(7, 5), **given)
    # a sequence that ends before the page does not hold it, and whole pages are shared as they are
    alone = bsk.page_summaries(k_cache, **where(7, 4), **given)
    assert alone.high.flatten().tolist() == [0, 6, 11]
    # the longer one last, whose summary covers the keys of both
    bsk.page_summaries(k_cache, **where(5, rows=slice(1)), out=made)
    assert made.high.flatten().tolist() == [0, 4, 11]
    bsk.page_summaries(k_cache, **where(7, rows=slice(1)), out=made)
    assert made.high.flatten().tolist() == [0, 6, 11]


def test_pages_that_an_update_leaves_alone_may_differ():
    k_cache = torch.arange(12.0).view(3, 4, 1, 1)
    table = torch.tensor([[0, 1], [1, 2]], dtype=torch.int32)
    lengths = torch.tensor([6, 5], dtype=torch.int32)
    where = {"cache_seqlens": lengths, "page_table": table}
    with pytest.raises(bsk.InvalidInput, match=r"page_table\[0, 1\] shares page 1 .* 4 tokens"):
        bsk.page_summaries(k_cache, **where)
    out = bsk.page_summaries(k_cache, cache_seqlens=lengths[:1], page_table=table[:1])
    bsk.page_summaries(k_cache, **where, out=out, new_tokens=1)
    assert out.high.flatten().tolist() == [3, 5, 8]


def test_full_selection_is_dense_decoding():
    cache, where = paged()
    q = inputs.normal(2, 4, 1, 8, seed=1)
    lists = bsk.topk_pages(q, bsk.page_summaries(cache.k, **where), 5, **where)
    dense = bsk.attention_decode(q, cache.k, cache.v, **where)
    sparse = bsk.attention_decode(q, cache.k, cache.v, kv_blocks=lists, **where)
    torch.testing.assert_close(sparse, dense)


@pytest.mark.parametrize("kind", ["minmax", "mean"])
def test_opcheck(kind):
    cache, where = paged()
    made = bsk.page_summaries(cache.k, **where, kind=kind)
    high = None if kind == "mean" else made.high
    args = (cache.k, *where.values(), 4, None, "auto")
    torch.library.opcheck(page_summaries_op, (made.low, high, *args))
    q = inputs.normal(2, 4, 1, 8, seed=1)
    args = (*where.values(), 4, 3, 0, 1, "max", "auto")
    torch.library.opcheck(topk_pages_op, (q, made.low, made.high.clone(), *args))


def test_compiles_in_one_piece():
    cache, where = paged()
    q = inputs.integers(2, 4, 1, 8, seed=1)

    def lists(q, k_cache, cache_seqlens, page_table):
        where = {"cache_seqlens": cache_seqlens, "page_table": page_table}
        return bsk.topk_pages(q + 0, bsk.page_summaries(k_cache, **where), 2, **where)

    compiled = torch.compile(lists, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, cache.k, **where), lists(q, cache.k, **where))


def test_explains_its_choice():
    cache, where = paged()
    assert bsk.explain(bsk.page_summaries, cache.k, **where).chosen == "eager"
    summaries = bsk.page_summaries(cache.k, **where)
    q = inputs.normal(2, 4, 1, 8, seed=1)
    assert bsk.explain(bsk.topk_pages, q, summaries, 2, **where).op == "topk_pages"
    with pytest.raises(bsk.Unsupported, match="topk_pages has no sm90 implementation"):
        bsk.topk_pages(q, summaries, 2, **where, impl="sm90")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kind": "median"}, "page_summaries: kind is unknown"),
        ({"kv_block_size": 8}, "kv_block_size does not fit; expected None or the 4 tokens"),
        ({"page_table": None}, "kv_block_size is missing for a contiguous cache"),
        ({"new_tokens": 1}, "new_tokens needs `out`"),
        ({"cache_seqlens": LENGTHS.long()}, "cache_seqlens has an unsupported dtype"),
        ({"cache_seqlens": LENGTHS[:1]}, "page_table has a wrong shape"),
        ({"page_table": None, "kv_block_size": 4}, r"wrong shape; expected \[12\], got \[2\]"),
    ],
)
def test_wrong_summaries(change, text):
    cache, where = paged()
    with pytest.raises(bsk.InvalidInput, match=text):
        bsk.page_summaries(cache.k, **{**where, **change})


def test_summaries_of_other_numbers_are_refused():
    cache, where = paged()
    with pytest.raises(bsk.InvalidInput, match="page_summaries: k_cache has an unsupported dtype"):
        bsk.page_summaries(cache.k.int(), **where)


def test_wrong_out():
    cache, where = paged()
    made = bsk.page_summaries(cache.k, **where)
    with pytest.raises(bsk.InvalidInput, match="expected mean of 4 tokens, got minmax of 4"):
        bsk.page_summaries(cache.k, **where, out=made, kind="mean")
    with pytest.raises(bsk.InvalidInput, match=r"out\.low has a wrong shape"):
        bsk.page_summaries(cache.k[:-1], **where, out=made)
    with pytest.raises(bsk.InvalidType, match="out has a wrong type"):
        bsk.page_summaries(cache.k, **where, out=made.low)
    with pytest.raises(bsk.InvalidInput, match="are on different devices"):
        bsk.page_summaries(cache.k, **where, out=made._replace(low=made.low.to("meta")))


@pytest.mark.parametrize(("change", "text"), [
    (lambda x: x[:-1], "high has a wrong shape"), (lambda x: x.double(), "high has an unsupported"),
    (lambda x: x[..., :1].expand_as(x), "high has other strides; expected those of low"),
])  # fmt: skip
def test_summaries_that_do_not_go_together(change, text):
    cache, where = paged()
    made = bsk.page_summaries(cache.k, **where)
    wrong = made._replace(high=change(made.high))
    with pytest.raises(bsk.InvalidInput, match=f"topk_pages: summaries.{text}"):
        bsk.topk_pages(torch.zeros(2, 4, 1, 8), wrong, 3, **where)
    with pytest.raises(bsk.InvalidInput, match=f"page_summaries: out.{text}"):
        bsk.page_summaries(cache.k, **where, out=wrong)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"k": 0}, "topk_pages: k is too small"),
        ({"k": 2, "keep_first": 2}, r"k is too small; expected keep_first \+ keep_last"),
        ({"keep_last": -1}, "keep_last is too small"),
        ({"reduce": "mean"}, "reduce is unknown"),
        ({"impl": 3}, "topk_pages: impl is unknown"),
        ({"page_table": None}, "page_table does not fit"),
        ({"q": torch.zeros(2, 3, 1, 8)}, "q has a wrong number of heads; expected a multiple of"),
        ({"q": torch.zeros(2, 4, 1, 6)}, "q has a wrong shape"),
        ({"q": torch.zeros(1, 4, 1, 8)}, "q has a wrong shape"),
        ({"summaries": None}, "summaries have a wrong type"),
    ],
)
def test_wrong_choice(change, text):
    cache, where = paged()
    made = bsk.page_summaries(cache.k, **where)
    options = {"q": torch.zeros(2, 4, 1, 8), "summaries": made, "k": 3, **where}
    with pytest.raises(bsk.InvalidInput, match=text):
        bsk.topk_pages(**{**options, **change})


def test_summaries_of_other_sequences_are_refused():
    made = bsk.page_summaries(keys()[:1], cache_seqlens=LENGTHS[:1], kv_block_size=4)
    match = r"topk_pages: summaries have a wrong batch; expected 2, got \[1, 5, 2, 8\]"
    with pytest.raises(bsk.InvalidInput, match=match):
        bsk.topk_pages(torch.zeros(2, 4, 1, 8), made, 3, cache_seqlens=LENGTHS)


@pytest.mark.parametrize("dispatch", [summaries_dispatch, topk_dispatch], ids=lambda x: x.op)
def test_kernels_come_before_plain_torch(dispatch):
    assert list(dispatch.candidates) == ["triton", "eager"]
