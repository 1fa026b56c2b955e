"""Latent caches (MLA): the values are the first channels of the keys, in one memory."""

import copy
import pickle
import random

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.calls.cache import AppendCall
from blackwell_sparsek.calls.decode import values_are_keys
from blackwell_sparsek.kv_cache import slots
from blackwell_sparsek.testing.inputs import normal
from blackwell_sparsek.testing.kv_cases import append_case, appended, assert_same_bits

from .test_copies import ways

FP8 = torch.float8_e4m3fn


def make(kind, **options):
    options = {"head_dim_v": 9, "latent": True, **options}
    return bsk.KVCache(3, 2, 40, 15, **options) if kind is bsk.KVCache else paged(**options)


def paged(**options):
    return bsk.PagedKVCache(12, 4, 2, 15, max_sequences=6, **options)


def add(cache, k, counts=None):
    """Append to the three sequences of a cache of either kind."""
    if isinstance(cache, bsk.KVCache):
        cache.append(k, counts=counts)
    else:
        ids = [0, 1, 2] if len(cache._book.ids) else cache.add_sequences(3)
        cache.append(ids, k, counts=counts)


def keys(count, seed=0, batch=3):
    return normal(batch, 2, count, 15, seed=seed)


def stored(cache, b, length):
    """Keys and values [Hkv, length, D] of one sequence."""
    if isinstance(cache, bsk.KVCache):
        return cache.k[b, :, :length], cache.v[b, :, :length]
    (table,) = cache.page_table([b])
    tokens = [x[table.long()].flatten(0, 1)[:length] for x in (cache.k, cache.v)]
    return tuple(x.transpose(0, 1) for x in tokens)


both = pytest.mark.parametrize("kind", [bsk.KVCache, bsk.PagedKVCache])


@both
def test_keys_are_stored_once_and_values_are_a_view_of_them(kind):
    cache = make(kind)
    assert cache.latent and values_are_keys(cache.k, cache.v) and cache.v.shape[-1] == 9
    assert cache.memory_bytes == cache.k.nbytes == cache.k.untyped_storage().nbytes()
    first, second = keys(5), keys(2, seed=1)
    add(cache, first, [5, 0, 3])
    add(cache, second)
    for b, count in enumerate((5, 0, 3)):
        expected = torch.cat((first[b, :, :count], second[b]), 1)
        k, v = stored(cache, b, count + 2)
        assert torch.equal(k, expected) and torch.equal(v, expected[..., :9])


@both
def test_caches_with_values_of_their_own_say_so(kind):
    cache = make(kind, latent=False)
    assert not cache.latent and not values_are_keys(cache.k, cache.v)
    assert cache.memory_bytes == cache.k.nbytes + cache.v.nbytes


@ways
@both
def test_copies_are_latent_too(way, kind):
    cache = make(kind)
    add(cache, keys(6), [6, 3, 5])
    before = cache.k.clone()
    other = way(cache)
    assert other.latent and values_are_keys(other.k, other.v)
    assert other.memory_bytes == cache.memory_bytes and repr(other) == repr(cache)
    more = keys(3, seed=1)
    add(other, more)
    assert_same_bits(cache.k, before)
    add(cache, more)
    assert_same_bits(other.k, cache.k)
    assert_same_bits(other.v, cache.v)


@both
def test_a_copy_is_as_small_as_the_cache(kind):
    """Values that were saved too would be read back, or pickled, as a tensor of their own."""
    size = len(pickle.dumps(make(kind)))
    assert size < make(kind).k.nbytes + 4000
    assert make(kind).__getstate__()["v"] == 9


@pytest.mark.parametrize("channels", [0, 15, -1, 2**40, True])
@both
def test_a_state_with_a_wrong_number_of_channels_is_refused(kind, channels):
    state = {**make(kind).__getstate__(), "v": channels}
    with pytest.raises(bsk.InvalidInput, match=kind.__name__):
        kind.__new__(kind).__setstate__(state)


@both
def test_a_state_in_fp8_is_refused(kind):
    state = make(kind).__getstate__()
    state["k"] = state["k"].to(FP8).view(torch.uint8)
    with pytest.raises(bsk.Unsupported, match="dtype is not for latent caches"):
        kind.__new__(kind).__setstate__(state)


def test_a_cache_on_the_meta_device_stays_latent():
    with torch.device("meta"):
        cache = make(bsk.KVCache, device="meta")
    assert copy.deepcopy(cache).latent


def test_reserve_and_write():
    one, two = make(bsk.KVCache), make(bsk.KVCache)
    k = keys(4)
    one.append(k, counts=[4, 0, 1])
    two.reserve([4, 0, 1])
    two.write(k)
    assert_same_bits(one.v, two.v)
    one, two = paged(head_dim_v=9, latent=True), paged(head_dim_v=9, latent=True)
    for cache in (one, two):
        cache.add_sequences(3)
    one.append([2, 0, 1], k, counts=[4, 0, 1])
    two.reserve([2, 0, 1], [4, 0, 1])
    two.write(k)
    assert_same_bits(one.k, two.k)


def test_forks_copy_a_shared_page_before_they_write():
    cache = make(bsk.PagedKVCache)
    (a,) = cache.add_sequences(1)
    k = keys(6, batch=1)
    cache.append([a], k)
    b = cache.fork(a)
    new = keys(1, seed=1, batch=2)
    cache.append([b, a], new)
    for i, sequence in enumerate((b, a)):
        expected = torch.cat((k[0], new[i]), 1)
        got, values = stored(cache, sequence, 7)
        assert torch.equal(got, expected) and torch.equal(values, expected[..., :9])


def test_random_histories_keep_every_sequence():
    rng = random.Random(5)
    cache = bsk.PagedKVCache(24, 3, 2, 15, head_dim_v=9, latent=True, max_sequences=8)
    kept = {}
    for step in range(150):
        action = rng.choice("aggggftr") if kept else "a"
        sequence = rng.choice(list(kept)) if kept else None
        try:
            if action == "a":
                kept[cache.add_sequences(1)[0]] = torch.empty(2, 0, 15)
            elif action == "g":
                chosen = rng.sample(list(kept), rng.randint(1, len(kept)))
                counts = [rng.randint(0, 4) for _ in chosen]
                k = keys(4, seed=step, batch=len(chosen))
                cache.append(chosen, k, counts=counts)
                for i, (x, count) in enumerate(zip(chosen, counts, strict=True)):
                    kept[x] = torch.cat((kept[x], k[i, :, :count]), 1)
            elif action == "f":
                kept[cache.fork(sequence)] = kept[sequence]
            elif action == "t":
                length = rng.randint(0, kept[sequence].shape[1])
                cache.truncate([sequence], length)
                kept[sequence] = kept[sequence][:, :length]
            else:
                cache.release(sequence)
                del kept[sequence]
        except (bsk.OutOfPages, bsk.InvalidInput):
            pass
        for x, expected in kept.items():
            k, v = stored(cache, x, expected.shape[1])
            assert torch.equal(k, expected) and torch.equal(v, expected[..., :9])


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"head_dim_v": None}, bsk.InvalidInput, "head_dim_v is missing; .*512 for MLA, got None"),
        ({"head_dim_v": 15}, bsk.InvalidInput, "head_dim_v is too large; expected less than .* 15"),
        ({"head_dim_v": 16}, bsk.InvalidInput, "head_dim_v is too large"),
        ({"head_dim_v": 0}, bsk.InvalidInput, "head_dim_v is too small"),
        ({"latent": 512}, bsk.InvalidType, "latent is not a bool"),
        (
            {"dtype": FP8},
            bsk.Unsupported,
            "dtype is not for latent caches; expected torch.float16, .*got torch.float8_e4m3fn",
        ),
        ({"k_scale": 1.0}, bsk.InvalidInput, "k_scale is for fp8 caches only"),
    ],
)
@both
def test_what_no_latent_cache_has_is_refused(kind, options, error, text):
    with pytest.raises(error, match=f"^{kind.__name__}: {text}") as caught:
        make(kind, **options)
    assert type(caught.value) is error


@both
def test_values_beside_keys_are_refused_and_nothing_is_written(kind):
    cache, k = make(kind), keys(1)
    add(cache, k)
    before = cache.k.clone()
    calls = [
        lambda v: cache.append(*((k,) if kind is bsk.KVCache else ([0, 1, 2], k)), v),
        lambda v: cache.write(k, v),
    ]
    for call in calls:
        with pytest.raises(bsk.InvalidInput, match=r"v is given; expected None: .*k\[..., :9\]"):
            call(k[..., :9])
    with pytest.raises(bsk.InvalidInput, match=r"k has a wrong shape; .*, got \[3, 2, 1, 14\]"):
        add(cache, k[..., :14])
    with pytest.raises(bsk.InvalidType, match="k is not a tensor"):
        add(cache, [0.0])
    with pytest.raises(bsk.InvalidInput, match="k has a wrong rank"):
        add(cache, torch.zeros(()))
    assert_same_bits(cache.k, before)


@both
def test_values_that_are_missing_are_named(kind):
    cache = make(kind, latent=False)
    with pytest.raises(bsk.InvalidType, match=r"v is not a tensor; .*, got None"):
        add(cache, keys(1))


def latent_case(tokens=5, **options):
    """An append to a latent cache; what must be in the cache afterwards."""
    case = append_case([3, 9], tokens, dims=(24, 16), **options)
    case = case._replace(v_cache=case.k_cache[..., :16], v=case.k[..., :16])
    return case, appended(case)[0]


def run(case, impl="auto"):
    options = dict(zip(case._fields[4:], case[4:], strict=True))
    bsk.kv_append(*case[:4], **options, impl=impl)


@pytest.mark.parametrize("impl", ["auto", "eager", "triton"])
@pytest.mark.parametrize("page_size", [None, 8])
def test_function_writes_the_keys(page_size, impl):
    if impl == "triton":
        pytest.importorskip("triton")
    case, expected = latent_case(page_size=page_size, counts=[5, 2], dtype=torch.float16)
    run(case, impl)
    assert_same_bits(case.k_cache, expected)


def packed(tokens=7):
    pages = torch.zeros(5, 4, 3, 24)
    return pages, normal(tokens, 3, 24, seed=2), torch.tensor([3, -1, 0, 19, 7, 8, 12])


@pytest.mark.parametrize("impl", ["auto", "eager", "triton"])
def test_slots(impl):
    if impl == "triton":
        pytest.importorskip("triton")
    pages, k, mapping = packed()
    expected = pages.clone().view(20, 3, 24)
    expected[mapping[mapping >= 0]] = k[mapping >= 0]
    bsk.kv_append(pages, pages[..., :16], k, k[..., :16], slot_mapping=mapping, impl=impl)
    assert_same_bits(pages.view(20, 3, 24), expected)


def test_kernels_leave_the_values_out(interpreted):
    """They would be written to the places of the keys a second time."""
    from blackwell_sparsek.kv_cache.append_kernel import launch_kv_append

    case, expected = latent_case()
    launch_kv_append(AppendCall(*case._replace(v=case.v * torch.nan)), with_values=False)
    assert_same_bits(case.k_cache, expected)


OTHER_VALUES = {
    "a copy": lambda k: k[..., :16].clone(),
    "the last channels": lambda k: k[..., 8:],
    "of other keys": lambda k: k.clone()[..., :16],
}


@pytest.mark.parametrize("values", OTHER_VALUES.values(), ids=OTHER_VALUES)
def test_new_values_that_are_not_the_new_keys_are_refused(values):
    text = r"v is not a view of k, as v_cache is of k_cache; expected k\[..., :16\], got another"
    case, _ = latent_case()
    before = case.k_cache.clone()
    with pytest.raises(bsk.InvalidInput, match=f"^kv_append: {text}"):
        run(case._replace(v=values(case.k)))
    assert_same_bits(case.k_cache, before)
    pages, k, mapping = packed()
    with pytest.raises(bsk.InvalidInput, match=f"^kv_append: {text}"):
        bsk.kv_append(pages, pages[..., :16], k, values(k), slot_mapping=mapping)
    assert not pages.any()


def test_fp8_is_refused():
    case, _ = latent_case(stored=FP8)
    text = "k_cache is not for values that are a view of the keys; expected torch.float16, "
    with pytest.raises(bsk.Unsupported, match=text):
        run(case)
    pages, k, mapping = packed()
    pages = pages.to(FP8)
    with pytest.raises(bsk.Unsupported, match=text):
        bsk.kv_append(pages, pages[..., :16], k, k[..., :16], slot_mapping=mapping)


@pytest.mark.parametrize("compiled", [False, True])
def test_rotary_is_refused(compiled):
    """It rotates the first channels of a key: the values, which must not be rotated."""
    pages, k, mapping = packed()
    rotary = bsk.Rotary(torch.ones(9, 4), torch.ones(9, 4))

    def call(pages, k):
        how = {"slot_mapping": mapping, "rotary": rotary, "positions": torch.arange(7)}
        bsk.kv_append(pages, pages[..., :16], k, k[..., :16], **how)
        return k * 2

    if compiled:
        call = torch.compile(call, backend="aot_eager")
    with pytest.raises(bsk.Unsupported, match="rotary rotates the first channels of a key"):
        call(pages, k)
    assert not pages.any()


def test_compiles_in_one_piece():
    case, expected = latent_case()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(k_cache, k, lengths):
        new = k * 2 - k
        bsk.kv_append(k_cache, k_cache[..., :16], new, new[..., :16], cache_seqlens=lengths)
        return lengths + 5

    assert step(case.k_cache, case.k, case.cache_seqlens).tolist() == [8, 14]
    assert_same_bits(case.k_cache, expected)


def recorded(monkeypatch):
    """The options, inputs and operands of every call that is recorded."""
    seen = []

    def record(cache, options, inputs, run, *args, operands):
        seen.append((options, inputs[:4], operands))
        return run(*args)

    monkeypatch.setattr(slots, "record", record)
    return seen


def test_a_recording_has_keys_and_cache_once(monkeypatch):
    """Keys and values at one address would be two roles of one tensor."""
    seen = recorded(monkeypatch)
    case, _ = latent_case()
    run(case)
    ((options, (k, v, k_cache, v_cache), operands),) = seen
    assert options == ("auto", 16) and operands == 1
    assert k is case.k and k_cache is case.k_cache and v is None and v_cache is None
    seen.clear()
    pages, rows, mapping = packed()
    bsk.kv_append(pages, pages[..., :16], rows, rows[..., :16], slot_mapping=mapping)
    ((options, (k, v, k_cache, v_cache), operands),) = seen
    assert options == ("auto", False, 16) and operands == 1
    assert k is rows and k_cache is pages and v is None and v_cache is None


def test_a_call_with_the_sizes_of_a_latent_cache_is_not_recorded(monkeypatch):
    """A latent call would replay it, and nothing would look at its new values."""
    seen = recorded(monkeypatch)
    case, _ = latent_case()
    wide = torch.zeros_like(case.k_cache)
    run(case._replace(v_cache=wide[..., :16], v=case.k[..., :16].clone()))
    assert torch.equal(wide[1, :, 9:14, :16], case.v[1]) and not wide[..., 16:].any()
    pages, rows, mapping = packed()
    wide = torch.zeros_like(pages)
    bsk.kv_append(pages, wide[..., :16], rows, rows[..., 8:], slot_mapping=mapping)
    assert torch.equal(wide[0, 3, :, :16], rows[0, :, 8:])
    assert not seen
    run(case._replace(v_cache=torch.zeros(*case.k_cache.shape[:3], 16)))
    assert len(seen) == 1
