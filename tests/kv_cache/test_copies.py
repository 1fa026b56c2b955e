"""Copies of caches: deepcopy, pickle and torch.save give caches that go on where these were."""

import copy
import io
import pickle

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.testing.kv_cases import assert_same_bits

FP8 = torch.float8_e4m3fn


def through_torch(x, **options):
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer, **options)


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "oldest pickle": lambda x: pickle.loads(pickle.dumps(x, protocol=2)),
    "torch.save": lambda x: through_torch(x, weights_only=False),
    "weights only": lambda x: through_torch(x, weights_only=True),
    "twice": lambda x: through_torch(copy.deepcopy(x), weights_only=True),
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def tokens(batch, count, dim=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 2, count, dim, generator=generator)


@ways
@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_a_copied_cache_goes_on_and_shares_nothing(way, dtype):
    scale = None if dtype != FP8 else torch.tensor([0.5, 2.0])
    cache = bsk.KVCache(3, 2, 10, 8, head_dim_v=4, dtype=dtype, k_scale=scale)
    cache.append(tokens(3, 5), tokens(3, 5, 4), counts=[5, 0, 2])
    before = [x.clone() for x in (cache.k, cache.v, cache.lengths)]
    other = way(cache)
    assert other.host_lengths == (5, 0, 2) and other.lengths.tolist() == [5, 0, 2]
    lengths = other.lengths
    more = tokens(3, 4, seed=1), tokens(3, 4, 4, seed=1)
    other.append(*more, counts=[4, 3, 1])
    assert other.lengths is lengths and lengths.tolist() == [9, 3, 3]
    for x, kept in zip((cache.k, cache.v, cache.lengths), before, strict=True):
        assert_same_bits(x, kept)
    cache.append(*more, counts=[4, 3, 1])
    assert_same_bits(other.k, cache.k)
    assert_same_bits(other.v, cache.v)
    assert repr(other) == repr(cache)
    q = tokens(3, 1, seed=2)
    scales = {} if dtype != FP8 else {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
    if dtype != FP8:
        expected = bsk.attention_decode(q, cache.k, cache.v, cache_seqlens=cache.lengths, **scales)
        got = bsk.attention_decode(q, other.k, other.v, cache_seqlens=lengths, **scales)
        assert torch.equal(got, expected)
    else:
        assert torch.equal(other.k_scale, scale)
    other.truncate([1, 1, 1])
    other.reset()
    assert cache.lengths.tolist() == [9, 3, 3] and lengths.tolist() == [0, 0, 0]


@ways
def test_a_reservation_can_be_written_after_the_copy(way):
    cache = bsk.KVCache(2, 2, 10, 8)
    cache.append(tokens(2, 3), tokens(2, 3))
    cache.reserve([4, 1])
    other = way(cache)
    k, v = tokens(2, 4, seed=1), tokens(2, 4, seed=2)
    with pytest.raises(bsk.InvalidInput, match="the 4 tokens that were reserved"):
        other.write(k[:, :, :3], v[:, :, :3])
    for one in (cache, other):
        one.write(k, v)
    assert torch.equal(other.k, cache.k) and torch.equal(other.v, cache.v)
    assert torch.equal(other.k[0, :, 3:7], k[0])
    assert other.host_lengths == (7, 4)


@ways
@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_a_copied_paged_cache_goes_on_and_shares_nothing(way, dtype):
    cache = bsk.PagedKVCache(12, 4, 2, 8, head_dim_v=4, dtype=dtype, max_sequences=6, max_tokens=20)
    a, b, c = cache.add_sequences(3)
    cache.append([a, b, c], tokens(3, 6), tokens(3, 6, 4), counts=[6, 3, 5])
    d = cache.fork(a)
    cache.release(b)
    before = [x.clone() for x in (cache.k, cache.v, cache.page_table([a, c, d]))]
    other = way(cache)
    more = tokens(2, 3, seed=1), tokens(2, 3, 4, seed=1)
    for one in (other, cache):
        # the fork shares a page that is only partly filled: the first to append copies it
        one.append([d, c], *more)
        assert one.add_sequences(1) == [4]
        if one is other:
            after = cache.k, cache.v, cache.page_table([a, c, d])
            for x, kept in zip(after, before, strict=True):
                assert_same_bits(x, kept)
            assert cache.host_lengths([a, c, d]) == [6, 5, 6]
    assert_same_bits(other.k, cache.k)
    assert_same_bits(other.v, cache.v)
    ids = [a, c, d, 4]
    assert torch.equal(other.page_table(ids, 5), cache.page_table(ids, 5))
    assert other.host_lengths(ids) == cache.host_lengths(ids) == [6, 8, 9, 0]
    assert other.free_pages == cache.free_pages and repr(other) == repr(cache)
    with pytest.raises(bsk.InvalidInput, match="was released"):
        other.lengths([b])
    other.reset()
    assert other.free_pages == 12 and cache.free_pages == 12 - 6


@ways
def test_a_paged_reservation_can_be_written_after_the_copy(way):
    cache = bsk.PagedKVCache(8, 4, 2, 8)
    a, b = cache.add_sequences(2)
    cache.append([a, b], tokens(2, 3), tokens(2, 3))
    cache.reserve([b, a], [2, 4])
    other = way(cache)
    k, v = tokens(2, 4, seed=1), tokens(2, 4, seed=2)
    for one in (cache, other):
        one.write(k, v)
    assert torch.equal(other.k, cache.k) and torch.equal(other.v, cache.v)
    other.truncate([a], 1)
    with pytest.raises(bsk.InvalidInput, match="has no reservation"):
        way(other).write(k, v)


@ways
@pytest.mark.parametrize("kind", ["minmax", "mean"])
def test_copied_summaries_choose_the_same_pages(way, kind):
    cache = small_paged()
    table, lengths = cache.page_table([0, 1]), cache.lengths([0, 1])
    made = bsk.page_summaries(cache.k, cache_seqlens=lengths, page_table=table, kind=kind)
    other = way(made)
    # the mean is stored once
    assert other.kind == kind and other.paged and other.page_size == made.page_size
    asked = {"cache_seqlens": lengths, "page_table": table, "keep_last": 0}
    q = tokens(2, 1, seed=5)
    got, expected = (bsk.topk_pages(q, x, 1, **asked) for x in (other, made))
    assert torch.equal(got, expected)
    other.low.fill_(99.0)
    assert not (made.low == 99.0).any()


@pytest.mark.parametrize(
    "cache", [bsk.KVCache(1, 2, 4, 8), bsk.PagedKVCache(2, 4, 2, 8)], ids=["contiguous", "paged"]
)
def test_a_shallow_copy_is_refused(cache):
    with pytest.raises(bsk.Unsupported, match=r"shallow copy.*use copy\.deepcopy"):
        copy.copy(cache)


def test_copies_keep_the_device_and_map_location_moves_all_of_it():
    cache = bsk.KVCache(1, 2, 4, 8)
    cache.append(tokens(1, 2), tokens(1, 2))
    moved = through_torch(cache, weights_only=True, map_location="meta")
    assert {x.device.type for x in (moved.k, moved.v, moved.lengths)} == {"meta"}


def changed(state, path, value):
    """The state with one entry replaced."""
    first, *rest = path
    copied = dict(state) if isinstance(state, dict) else list(state)
    copied[first] = changed(copied[first], rest, value) if rest else value
    return copied


def small_paged():
    cache = bsk.PagedKVCache(6, 4, 2, 8, max_sequences=4, max_tokens=16)
    a, b = cache.add_sequences(2)
    cache.append([a, b], tokens(2, 6), tokens(2, 6), counts=[6, 3])
    return cache


def small():
    cache = bsk.KVCache(2, 2, 10, 8)
    cache.append(tokens(2, 3), tokens(2, 3))
    return cache


BOOK = ("book", "sequences")
MALFORMED = [
    (small, ("lengths", 0), 11, "lengths in a saved cache does not fit; expected 0 to 10, got 11"),
    (small, ("lengths", 1), -1, "lengths .* expected 0 to 10, got -1"),
    (small, ("lengths",), [1], "lengths .* expected 2 of them, got 1"),
    (small, ("lengths", 0), 2, "lengths before the reservation .* got -1"),
    (small, ("reserved", 0), 2**40, "reserved .* expected 0 to 10"),
    (small, ("lengths", 0), 3.0, "expected a list of ints"),
    (small, ("k",), "keys", "k is not a tensor"),
    (small, ("k",), torch.zeros(2, 2, 9, 8), "k/v .* equal sizes up to the last"),
    (small, ("v",), torch.zeros(2, 2, 10, 8, dtype=torch.int32), "dtype of v"),
    (small, ("k_scale",), torch.ones(3), "k_scale is for fp8 caches only"),
    (small_paged, (*BOOK, 0, 2, 0), 6, "pages .* expected 0 to 5, got 6"),
    (small_paged, (*BOOK, 0, 2, 0), -1, "pages .* expected 0 to 5, got -1"),
    (small_paged, (*BOOK, 0, 2, 0), 1, "pages .* expected each once in a sequence"),
    (small_paged, (*BOOK, 0, 1), 9, "pages .* expected 3 of them, got 2"),
    (small_paged, (*BOOK, 0, 0), 1, "rows/pages .* expected each free once or used"),
    (small_paged, (*BOOK, 0, 0), 4, "rows .* expected 0 to 3, got 4"),
    (small_paged, ("book", "free_pages", 0), 0, "rows/pages .* expected each free once or used"),
    (small_paged, ("book", "free_pages"), [], "free_pages .* expected 3 of them, got 0"),
    (small_paged, ("book", "max_pages"), 7, "max_pages .* expected 1 to 6, got 7"),
    (small_paged, ("book", "next_id"), 1, "sequences .* expected 0 to 0, got 1"),
    (small_paged, ("book",), {}, "book .* expected"),
    (small_paged, (*BOOK, 0), [0, 6], r"sequences .* expected \[row, length, pages\] for each"),
    (small_paged, (*BOOK, 0, 1), 6.0, "row and length .* expected a list of ints"),
    (small_paged, ("reserved",), [[0, 1]], r"reserved .* expected \[sequences, counts\]"),
    (small_paged, ("reserved", 1, 0), 7, "reserved .* expected 0 to 6, got 7"),
    (small_paged, ("reserved", 0, 0), 9, "sequence is unknown"),
]


@pytest.mark.parametrize(("make", "path", "value", "problem"), MALFORMED)
def test_a_malformed_state_is_refused(make, path, value, problem):
    cache = make()
    state = cache.__getstate__()
    type(cache).__new__(type(cache)).__setstate__(state)
    with pytest.raises(bsk.InvalidInput, match=problem):
        type(cache).__new__(type(cache)).__setstate__(changed(state, path, value))


def test_an_empty_state_is_refused():
    for cache in (bsk.KVCache, bsk.PagedKVCache):
        with pytest.raises(bsk.InvalidInput, match="state in a saved cache does not fit"):
            cache.__new__(cache).__setstate__({})
