import random

import pytest
import torch

import blackwell_sparsek as bsk

FP8 = torch.float8_e4m3fn


def make(num_pages=10, page_size=4, **options):
    return bsk.PagedKVCache(num_pages, page_size, 2, 8, **{"max_sequences": 6, **options})


def tokens(batch, count, dim=8):
    return torch.randn(batch, 2, count, dim)


def gathered(cache, sequence):
    """Keys and values [Hkv, S, D] of one sequence, through the page table."""
    (length,) = cache.host_lengths([sequence])
    (table,) = cache.page_table([sequence])
    return [x[table.long()].flatten(0, 1)[:length].transpose(0, 1) for x in (cache.k, cache.v)]


def test_appends_to_many_sequences():
    cache = make(head_dim_v=6)
    a, b, c = cache.add_sequences(3)
    k, v = tokens(2, 7), tokens(2, 7, dim=6)
    cache.append([c, a], k, v, counts=[7, 3])
    more_k, more_v = tokens(3, 2), tokens(3, 2, dim=6)
    cache.append([a, b, c], more_k, more_v)
    assert cache.lengths([a, b, c]).tolist() == [5, 2, 9]
    assert cache.lengths([c, a]).dtype == torch.int32
    for sequence, expected in (
        (a, torch.cat((k[1, :, :3], more_k[0]), 1)),
        (b, more_k[1]),
        (c, torch.cat((k[0], more_k[2]), 1)),
    ):
        assert torch.equal(gathered(cache, sequence)[0], expected)
    assert torch.equal(gathered(cache, c)[1], torch.cat((v[0], more_v[2]), 1))
    assert cache.free_pages == 10 - 2 - 1 - 3
    assert cache.memory_bytes == 10 * 4 * 2 * (8 + 6) * 4


def test_page_tables_are_views_where_they_can_be():
    cache = make()
    a, b, c = cache.add_sequences(3)
    cache.append([a, b, c], tokens(3, 5), tokens(3, 5))
    assert cache.page_table([a, b]).data_ptr() == cache.page_table([a]).data_ptr()
    assert cache.page_table([c, a]).tolist() == [[4, 5], [0, 1]]
    assert cache.page_table([a], max_pages=4).tolist() == [[0, 1, -1, -1]]
    assert cache.page_table(cache.add_sequences(1)).tolist() == [[-1]]
    with pytest.raises(bsk.InvalidInput, match=r"max_pages is out of range; expected 2 \(in use\)"):
        cache.page_table([a], max_pages=1)


def test_forked_sequences_share_until_they_write():
    cache = make()
    (a,) = cache.add_sequences(1)
    k, v = tokens(1, 6), tokens(1, 6)
    cache.append([a], k, v)
    b = cache.fork(a)
    assert cache.free_pages == 8 and torch.equal(*(gathered(cache, s)[0] for s in (a, b)))
    new = tokens(2, 1), tokens(2, 1)
    cache.append([b, a], *new)
    assert cache.free_pages == 7
    for i, sequence in enumerate((b, a)):
        for got, old, more in zip(gathered(cache, sequence), (k, v), new, strict=True):
            assert torch.equal(got, torch.cat((old[0], more[i]), 1))
    cache.release(a)
    assert cache.free_pages == 8
    cache.release([b])
    assert cache.free_pages == 10


def test_rows_of_released_sequences_name_no_pages():
    """A table that still named them would let the next sequence of that row write there."""
    cache = make()
    a, b = cache.add_sequences(2)
    cache.append([a, b], tokens(2, 9), tokens(2, 9))
    cache.release(a)
    (c,) = cache.add_sequences(1)
    assert cache.page_table([c], max_pages=5).tolist() == [[-1] * 5]
    cache.truncate([b], 3)
    assert cache.page_table([b], max_pages=3).tolist() == [[3, -1, -1]]
    cache.reset()
    assert cache.free_pages == 10
    with pytest.raises(bsk.InvalidInput, match="was released"):
        cache.lengths([b])


def test_fp8_pages_are_copied_on_write():
    cache = make(dtype=FP8, k_scale=0.5)
    (a,) = cache.add_sequences(1)
    k = tokens(1, 3)
    cache.append([a], k, k)
    b = cache.fork(a)
    cache.append([b], *[tokens(1, 1)] * 2)
    first, second = gathered(cache, a)[0].float(), gathered(cache, b)[0].float()
    assert torch.equal(first, second[:, :3]) and torch.equal(first, (k[0] / 0.5).to(FP8).float())


def test_random_histories_keep_every_sequence():
    rng = random.Random(3)
    cache = make(num_pages=24, page_size=3, max_sequences=8, max_tokens=30)
    kept = {}
    for _ in range(400):
        action = rng.choice("aggggftr")
        try:
            if action == "a" or not kept:
                kept[cache.add_sequences(1)[0]] = torch.empty(2, 0, 8)
            elif action == "g":
                chosen = rng.sample(list(kept), rng.randint(1, len(kept)))
                counts = [rng.randint(0, 4) for _ in chosen]
                k = tokens(len(chosen), 4)
                cache.append(chosen, k, -k, counts)
                for i, (sequence, count) in enumerate(zip(chosen, counts, strict=True)):
                    kept[sequence] = torch.cat((kept[sequence], k[i, :, :count]), 1)
            elif action == "f":
                parent = rng.choice(list(kept))
                kept[cache.fork(parent)] = kept[parent]
            elif action == "t":
                sequence = rng.choice(list(kept))
                length = rng.randint(0, kept[sequence].shape[1])
                cache.truncate([sequence], length)
                kept[sequence] = kept[sequence][:, :length]
            else:
                sequence = rng.choice(list(kept))
                cache.release(sequence)
                del kept[sequence]
        except (bsk.OutOfPages, bsk.InvalidInput):
            pass
        for sequence, expected in kept.items():
            k, v = gathered(cache, sequence)
            assert torch.equal(k, expected) and torch.equal(v, -expected)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda cache, a: cache.append([a], tokens(1, 41), tokens(1, 41)),
            bsk.InvalidInput,
            r"PagedKVCache.append: tokens are too many; expected at most 40 \(max_tokens\)",
        ),
        (
            lambda cache, a: cache.append([a, a + 1], tokens(2, 37), tokens(2, 37)),
            bsk.OutOfPages,
            "PagedKVCache.append: cache has too few free pages, of 10 in all; expected 19 .* got 9",
        ),
        (
            lambda cache, a: cache.append([99], tokens(1, 1), tokens(1, 1)),
            bsk.InvalidInput,
            "PagedKVCache.append: sequence is unknown; .*, got 99",
        ),
        (
            lambda cache, a: cache.append([a, a], tokens(2, 1), tokens(2, 1)),
            bsk.InvalidInput,
            "sequences name one twice",
        ),
        (
            lambda cache, a: cache.append([a], tokens(2, 1), tokens(2, 1)),
            bsk.InvalidInput,
            "k has a wrong batch size; expected 1, the sequences, got 2",
        ),
        (
            lambda cache, a: cache.release([a, a]),
            bsk.InvalidInput,
            "PagedKVCache.release: sequences name one twice",
        ),
        (lambda cache, a: cache.fork(-1), bsk.InvalidInput, "sequence is unknown"),
        (lambda cache, a: cache.fork([a]), bsk.InvalidType, "fork: sequences are no ids"),
        (
            lambda cache, a: cache.append(a, tokens(1, 1), tokens(1, 1)),
            bsk.InvalidType,
            "append: sequences are not a list; expected a list of ids, got int",
        ),
        (lambda cache, a: cache.truncate(a, 0), bsk.InvalidType, "truncate: sequences are not a"),
        (lambda cache, a: cache.lengths(a), bsk.InvalidType, "lengths: sequences are no ids"),
        (lambda cache, a: cache.page_table([a], 2.0), bsk.InvalidType, "max_pages is not an int"),
        (lambda cache, a: cache.add_sequences(5), bsk.InvalidInput, "expected at most 4 more"),
        (
            lambda cache, a: cache.write(tokens(1, 1), tokens(1, 1)),
            bsk.InvalidInput,
            "cache has no reservation",
        ),
        (
            lambda cache, a: cache.reserve([a], [1, 2]),
            bsk.InvalidInput,
            "counts do not match the sequences",
        ),
    ],
)
def test_errors_change_nothing(call, error, text):
    cache = make()
    a, b = cache.add_sequences(2)
    cache.append([a], tokens(1, 2), tokens(1, 2))
    cache.truncate([a], 2)
    k = cache.k.clone()
    with pytest.raises(error, match=text) as caught:
        call(cache, a)
    assert type(caught.value) is error
    assert cache.lengths([a, b]).tolist() == [2, 0] and cache.free_pages == 9
    assert torch.equal(cache.k, k)


def test_fewer_tokens_than_were_reserved_are_refused():
    cache = make()
    a, b = cache.add_sequences(2)
    cache.reserve([a, b], [1, 3])
    k = cache.k.clone()
    text = "PagedKVCache.write: k is too short; expected at least the 3 tokens that were reserved"
    with pytest.raises(bsk.InvalidInput, match=text):
        cache.write(tokens(2, 2), tokens(2, 2))
    assert torch.equal(cache.k, k)
    cache.write(tokens(2, 3), tokens(2, 3))


SIZES = ("num_pages", "page_size", "heads_kv", "head_dim", "head_dim_v", "max_sequences")


@pytest.mark.parametrize("name", [*SIZES, "max_tokens"])
@pytest.mark.parametrize(
    ("value", "error", "text"),
    [(0, bsk.InvalidInput, "is too small"), (2.0, bsk.InvalidType, "is not an int")],
)
def test_wrong_sizes(name, value, error, text):
    sizes = dict.fromkeys(("num_pages", "page_size", "heads_kv", "head_dim"), 4) | {name: value}
    with pytest.raises(error, match=f"^PagedKVCache: {name} {text}") as caught:
        bsk.PagedKVCache(**sizes)
    assert type(caught.value) is error


def test_wrong_dtypes_and_scales():
    with pytest.raises(bsk.InvalidInput, match=r"^PagedKVCache: dtype is unknown"):
        make(dtype=torch.int8)
    with pytest.raises(bsk.InvalidInput, match=r"^PagedKVCache: v_scale is for fp8 caches only"):
        make(v_scale=1.0)


def test_released_twice():
    cache = make()
    (a,) = cache.add_sequences(1)
    cache.release(a)
    with pytest.raises(bsk.InvalidInput, match=r"PagedKVCache\.release: sequence was released"):
        cache.release(a)
