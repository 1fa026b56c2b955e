"""Summaries and the choice of pages: kernels and eager against loops over tokens."""

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.calls.cache import SummariesCall, TopkCall
from blackwell_sparsek.kv_cache import selection, selection_kernels
from blackwell_sparsek.kv_cache.selection import PageSummaries, empty_summaries
from blackwell_sparsek.testing import guard, inputs, layouts
from blackwell_sparsek.testing.kv_cases import assert_same_bits
from blackwell_sparsek.testing.poison import poison_
from blackwell_sparsek.testing.tolerance import assert_within_budget

FP8 = torch.float8_e4m3fn
KINDS = pytest.mark.parametrize("kind", ["minmax", "mean"])


def launch_page_summaries(*args):
    selection_kernels.summarise(SummariesCall(*args))


def eager_summaries(*args):
    selection.summaries_eager(SummariesCall(*args))


def topk_call(q, summaries, k, lengths, table, keep_first, keep_last, reduce):
    low, high, page_size = summaries
    return TopkCall(q, low, high, lengths, table, page_size, k, keep_first, keep_last, reduce)


def launch_topk(*args):
    call = topk_call(*args)
    kv_blocks = poison_(selection.empty_lists(call))
    selection_kernels.launch_topk_pages(kv_blocks, call)
    return kv_blocks


def eager_topk(*args):
    return selection.topk_eager(topk_call(*args))


SUMMARISE = pytest.mark.parametrize(
    "summarise", [launch_page_summaries, eager_summaries], ids=["triton", "eager"]
)
TOPK = pytest.mark.parametrize("topk", [launch_topk, eager_topk], ids=["triton", "eager"])


def cache_of(lengths, page_size, *, paged, heads=2, dim=16, dtype=torch.float32, device="cpu"):
    """Whole-number keys, NaN past the lengths and in unused pages; lengths; a shuffled table."""
    batch, columns = len(lengths), -(-max(max(lengths), 1) // page_size)
    keys = inputs.integers(batch, columns, page_size, heads, dim, seed=1, bound=6)
    slot = torch.arange(columns * page_size).view(1, columns, page_size, 1, 1)
    keys = keys.masked_fill(slot >= torch.tensor(lengths).view(-1, 1, 1, 1, 1), torch.nan)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    keys = keys.to(device=device, dtype=dtype)
    if not paged:
        return keys.flatten(1, 2).transpose(1, 2).contiguous(), seqlens, None
    pages = batch * columns + 2
    cache = poison_(torch.empty(pages, page_size, heads, dim, dtype=dtype, device=device))
    table = torch.randperm(pages)[: batch * columns].view(batch, columns)
    cache[table.flatten().to(device)] = keys.flatten(0, 1)
    return cache, seqlens, table.int().to(device)


def keys_of(cache, lengths, table, b, h, dtype=torch.float32):
    """[length, D] of one sequence and head."""
    length = int(lengths[b])
    if table is None:
        return cache[b, h, :length].to(dtype)
    return cache[table[b].long()].flatten(0, 1)[:length, h].to(dtype)


def expected_summaries(cache, lengths, table, page_size, kind, dtype=None):
    """The definition, page by page; `dtype` is that of the summaries unless given."""
    made = empty_summaries(cache, kind, page_size, paged=table is not None)
    if dtype is not None:
        made = PageSummaries(*(x.to(dtype) for x in (made.low, made.high)), page_size)
    for b in range(len(lengths)):
        for h in range(made.low.shape[-2]):
            pages = keys_of(cache, lengths, table, b, h, dtype or torch.float32).split(page_size)
            for j, keys in enumerate(pages if len(pages[0]) else ()):
                at = (int(table[b, j]), h) if table is not None else (b, j, h)
                made.low[at] = keys.mean(0) if kind == "mean" else keys.amin(0)
                if kind == "minmax":
                    made.high[at] = keys.amax(0)
    return made


def made_by(summarise, cache, lengths, table, page_size, kind, out=None, new_tokens=None):
    out = out or empty_summaries(cache, kind, page_size, paged=table is not None)
    high = None if kind == "mean" else out.high
    summarise(out.low, high, cache, lengths, table, page_size, new_tokens)
    return out


@SUMMARISE
@KINDS
@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("page_size", [1, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
def test_summaries(summarise, kind, paged, page_size, dtype, device):
    case = cache_of([33, 0, 16], page_size, paged=paged, dim=24, dtype=dtype, device=device)
    got = made_by(summarise, *case, page_size, kind)
    expected = expected_summaries(*case, page_size, kind)
    if kind == "mean":
        exact = expected_summaries(*case, page_size, kind, torch.float64)
        assert_within_budget(got.low, exact.low, expected.low, what="means")
    else:
        assert_same_bits(got.low, expected.low)
        assert_same_bits(got.high, expected.high)


@SUMMARISE
@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("new_tokens", [0, 1, 7, 8, 9, 100])
def test_only_changed_pages_are_made_again(summarise, paged, new_tokens, device):
    cache, lengths, table = cache_of([33, 0, 16, 5], 8, paged=paged, device=device)
    expected = expected_summaries(cache, lengths, table, 8, "minmax")
    out = empty_summaries(cache, "minmax", 8, paged=paged)
    made_by(summarise, cache, lengths, table, 8, "minmax", out, new_tokens)
    for b, length in enumerate(lengths.tolist()):
        for j in range(-(-length // 8)):
            at = int(table[b, j]) if paged else (b, j)
            fresh = (j + 1) * 8 > length - new_tokens
            assert torch.equal(out.low[at], expected.low[at] * fresh), (b, j)


@SUMMARISE
def test_wrong_pages_and_lengths_are_not_touched(summarise, device):
    cache, _, table = cache_of([33, 30, 16], 8, paged=True, device=device)
    table[0, 1], table[1, 0] = -1, cache.shape[0]
    lengths = torch.tensor([40, 24, -3], dtype=torch.int32, device=device)
    got = made_by(summarise, cache.nan_to_num(7), lengths, table, 8, "minmax")
    touched = (got.low != 0).flatten(1).any(1).nonzero().flatten().tolist()
    wanted = {*table[0].tolist(), *table[1, 1:3].tolist()} - {-1}
    assert set(touched) <= wanted


@SUMMARISE
def test_a_table_without_any_token_is_not_followed(summarise, device):
    cache, _, table = cache_of([33, 30], 8, paged=True, device=device)
    table[:] = cache.shape[0] + 5
    lengths = torch.zeros(2, dtype=torch.int32, device=device)
    got = made_by(summarise, cache.nan_to_num(7), lengths, table, 8, "minmax")
    assert not got.low.any() and not got.high.any()


@pytest.mark.parametrize("shape", [(0, 2, 16, 8), (3, 0, 16, 8), (3, 2, 0, 8)], ids=str)
@pytest.mark.parametrize("paged", [False, True])
def test_nothing_is_launched_without_pages(shape, paged, monkeypatch, device):
    """A GPU takes no launch of no programs."""
    monkeypatch.setattr(selection_kernels, "launch", lambda *args, **options: pytest.fail("launch"))
    batch, heads, slots, dim = shape
    lengths = torch.zeros(batch, dtype=torch.int32, device=device)
    table, cache = None, torch.zeros(shape, device=device)
    if paged:
        table = torch.zeros(batch, slots // 8, dtype=torch.int32, device=device)
        cache = torch.zeros(5, 8, heads, dim, device=device)
    out = empty_summaries(cache, "minmax", 8, paged=paged)
    launch_page_summaries(*out[:2], cache, lengths, table, 8, None)


def exact_lists(q, summaries, k, lengths, table, keep_first, keep_last, reduce):
    """The definition, page by page in fp64."""
    low, high, page_size = summaries.low.cpu(), summaries.high.cpu(), summaries.page_size
    heads = low.shape[-2]
    group = q.shape[1] // heads
    columns = low.shape[1] if table is None else table.shape[1]
    out = torch.full((q.shape[0], heads, k), -1, dtype=torch.int32)
    for b, length in enumerate(lengths.tolist()):
        count = min(-(-max(length, 0) // page_size), columns)
        for h in range(heads):
            rows = q[b, h * group : (h + 1) * group].flatten(0, 1).double()
            ranked = []
            for j in range(count):
                at = (b, j, h) if table is None else (int(table[b, j]), h)
                bounds = torch.maximum(rows * low[at].double(), rows * high[at].double()).sum(-1)
                score = bounds.sum() if reduce == "sum" else bounds.max()
                kept = j < keep_first or j >= count - keep_last
                ranked.append((not kept, -float(score), j))
            best = sorted(j for _, _, j in sorted(ranked)[:k])
            out[b, h, : len(best)] = torch.tensor(best, dtype=torch.int32)
    return out


@TOPK
@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("reduce", ["max", "sum"])
@pytest.mark.parametrize(("heads", "group", "q_len"), [(2, 1, 1), (1, 5, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lists(topk, paged, reduce, heads, group, q_len, dtype, device):
    """Whole numbers: scores are exact, and ties are many."""
    lengths = [130, 0, 7]
    case = cache_of(lengths, 4, paged=paged, heads=heads, dim=24, dtype=dtype, device=device)
    summaries = made_by(eager_summaries, *case, 4, "minmax")
    q = inputs.integers(3, heads * group, q_len, 24, seed=5, dtype=dtype, device=device)
    for k, first, last in ((5, 0, 1), (7, 2, 3)):
        options = (k, case[1], case[2], first, last, reduce)
        expected = exact_lists(q.cpu(), summaries, *options)
        assert torch.equal(topk(q, summaries, *options).cpu(), expected), (k, first, last)


@TOPK
def test_full_selection_lists_every_page(topk, device):
    cache, lengths, table = cache_of([37, 1, 0], 4, paged=True, device=device)
    summaries = made_by(eager_summaries, cache, lengths, table, 4, "minmax")
    q = inputs.normal(3, 4, 1, 16, seed=0, device=device)
    lists = topk(q, summaries, 10, lengths, table, 0, 1, "max")
    expected = [list(range(10)), [0] + [-1] * 9, [-1] * 10]
    assert lists.tolist() == [[row, row] for row in expected]


@TOPK
def test_more_pages_than_a_tile_holds(topk, device, monkeypatch):
    monkeypatch.setattr(selection_kernels, "MAX_TILE_SCORES", 128)
    case = cache_of([300, 130], 1, paged=False, heads=1, dim=8, device=device)
    summaries = made_by(eager_summaries, *case, 1, "mean")
    q = inputs.integers(2, 2, 1, 8, seed=2, device=device)
    for k in (3, 200):
        options = (k, case[1], None, 1, 2, "max")
        expected = exact_lists(q.cpu(), summaries, *options)
        assert torch.equal(topk(q, summaries, *options).cpu(), expected), k


@TOPK
def test_infinite_and_nan_scores(topk, device):
    """Pages that are not finite rank first: nobody knows what they hold. Kept pages before them."""
    low = torch.tensor([1.0, torch.nan, -torch.inf, 2.0, torch.inf, -0.0, 0.0, 1.0], device=device)
    low = low.view(1, 8, 1, 1)
    summaries, lengths = PageSummaries(low, low, 1), torch.tensor([8], device=device).int()
    q = torch.ones(1, 1, 1, 1, device=device)

    def chosen(k, *keep):
        return topk(q, summaries, k, lengths, None, *keep, "max").tolist()[0][0]

    assert chosen(3, 0, 0) == [1, 2, 4]
    assert chosen(1, 0, 1) == [7]
    assert chosen(2, 1, 0) == [0, 1]
    assert chosen(5, 0, 0) == [0, 1, 2, 3, 4]


def test_no_key_passes_the_score_of_its_page():
    """The page with the best key is never ranked behind one whose bound is lower than that key."""
    cache, lengths, table = cache_of([200, 150], 8, paged=True, dim=32)
    summaries = made_by(eager_summaries, cache, lengths, table, 8, "minmax")
    q = inputs.normal(2, 4, 1, 32, seed=3)
    for b in range(2):
        for h in range(4):
            keys = keys_of(cache, lengths, table, b, h // 2)
            exact = [part.amax().item() for part in (keys @ q[b, h, 0]).split(8)]
            row = q[b, h, 0]
            at = table[b, : len(exact)].long()
            low, high = summaries.low[at, h // 2], summaries.high[at, h // 2]
            bounds = torch.maximum(row * low, row * high).sum(-1)
            assert (bounds + 1e-3 >= torch.tensor(exact)).all()
            best = max(range(len(exact)), key=exact.__getitem__)
            needed = int((bounds >= exact[best] - 1e-3).sum())
            lists = eager_topk(
                q[:, h : h + 1].expand(-1, 2, -1, -1),
                summaries,
                needed,
                lengths,
                table,
                0,
                0,
                "max",
            )
            assert best in lists[b, h // 2].tolist()


@pytest.mark.parametrize("start", range(len(layouts.KINDS)))
def test_strides_of_their_own(start, device):
    cache, lengths, table = cache_of([20, 14], 4, paged=True, heads=3, dim=24, device=device)
    q = inputs.integers(2, 6, 2, 24, seed=5, device=device)
    expected = made_by(eager_summaries, cache, lengths, table, 4, "minmax")
    wide = torch.full((2, 100), -7, dtype=torch.int32, device=device)
    wide[:, : table.shape[1]] = table
    strange, other_q = layouts.different_layouts(cache, q, start=start)
    other_table = wide[:, : table.shape[1]]
    got = made_by(launch_page_summaries, strange, lengths, other_table, 4, "minmax")
    assert_same_bits(got.low, expected.low)
    lists = launch_topk(other_q, got, 4, lengths, other_table, 1, 1, "max")
    assert torch.equal(lists, eager_topk(q, expected, 4, lengths, table, 1, 1, "max"))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("paged", [True, False])
def test_touches_nothing_outside(side, paged, interpreted):
    cache, lengths, table = cache_of([41, 7], 8, paged=paged, dim=15)
    table = None if table is None else guard.guarded(table, side)
    cache, lengths = guard.guard_pages(cache, lengths, side=side)
    low, high = (
        guard.guarded(x, side) for x in empty_summaries(cache, "minmax", 8, paged=paged)[:2]
    )
    launch_page_summaries(low, high, cache, lengths, table, 8, None)
    q = guard.guarded(inputs.normal(2, 4, 3, 15, seed=0), side)
    lists = guard.guarded(torch.full((2, 2, 3), 9, dtype=torch.int32), side)
    call = TopkCall(q, low, high, lengths, table, 8, 3, 0, 1, "max")
    selection_kernels.launch_topk_pages(lists, call)
    assert lists[0, 0, 2] == 5 and lists[1].tolist() == [[0, -1, -1]] * 2
