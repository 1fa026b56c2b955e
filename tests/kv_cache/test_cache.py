import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.kv_cache.append import append_dispatch, kv_append_op
from blackwell_sparsek.testing.kv_cases import append_case, appended, assert_same_bits

FP8 = torch.float8_e4m3fn


def tokens(batch, count, heads=2, dim=8, dtype=torch.float32):
    return torch.randn(batch, heads, count, dim).to(dtype)


def test_appends_and_lengths():
    cache = bsk.KVCache(2, 2, 10, 8, head_dim_v=4)
    lengths = cache.lengths
    k, v = tokens(2, 5), tokens(2, 5, dim=4)
    cache.append(k, v, counts=[5, 2])
    assert lengths.tolist() == [5, 2] and cache.host_lengths == (5, 2)
    more_k, more_v = tokens(2, 3), tokens(2, 3, dim=4)
    cache.append(more_k, more_v)
    assert lengths.tolist() == [8, 5]
    assert torch.equal(cache.k[0, :, :8], torch.cat((k[0], more_k[0]), 1))
    assert torch.equal(cache.v[1, :, :5], torch.cat((v[1, :, :2], more_v[1]), 1))
    assert not cache.k[1, :, 5:].any() and not cache.v[0, :, 8:].any()
    assert cache.memory_bytes == 2 * 2 * 10 * (8 + 4) * 4 and cache.max_tokens == 10
    cache.truncate([8, 1])
    assert lengths.tolist() == [8, 1]
    cache.reset()
    assert lengths.tolist() == [0, 0] and cache.host_lengths == (0, 0)


def test_reserve_and_write_are_the_two_halves_of_append():
    one, two = bsk.KVCache(2, 2, 10, 8), bsk.KVCache(2, 2, 10, 8)
    k, v = tokens(2, 4), tokens(2, 4)
    one.append(k, v, counts=[4, 0])
    two.reserve([4, 0])
    assert two.host_lengths == (4, 0)
    two.write(k, v)
    assert torch.equal(one.k, two.k) and torch.equal(one.v, two.v)
    with pytest.raises(bsk.InvalidInput, match="expected at least the 4 tokens that were reserved"):
        two.write(k[:, :, :3], v[:, :, :3])


def test_fp8_storage():
    scale = torch.tensor([0.5, 2.0])
    cache = bsk.KVCache(1, 2, 4, 8, dtype=FP8, k_scale=scale, v_scale=0.25)
    k, v = tokens(1, 3, dtype=torch.bfloat16), tokens(1, 3, dtype=torch.bfloat16)
    cache.append(k, v)
    expected = (k.float() / scale.view(1, 2, 1, 1)).to(FP8)
    assert_same_bits(cache.k[:, :, :3], expected)
    assert_same_bits(cache.v[:, :, :3], (v.float() / 0.25).to(FP8))
    assert cache.memory_bytes == 2 * 2 * 4 * 8 and cache.v_scale.shape == ()
    assert bsk.KVCache(1, 2, 4, 8, dtype=FP8).k_scale == 1
    assert bsk.KVCache(1, 2, 4, 8).k_scale is None


def _cache(**options):
    return bsk.KVCache(2, 2, 4, 8, **options)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: bsk.KVCache(0, 2, 4, 8), bsk.InvalidInput, "KVCache: batch is too small"),
        (lambda: bsk.KVCache(2, 2, 4, 8.0), bsk.InvalidType, "head_dim is not an int"),
        (lambda: _cache(dtype=torch.int8), bsk.InvalidInput, "KVCache: dtype is unknown"),
        (lambda: _cache(k_scale=1.0), bsk.InvalidInput, "k_scale is for fp8 caches only"),
        (lambda: _cache(dtype=FP8, v_scale=0.0), bsk.InvalidInput, "v_scale must be positive"),
        (
            lambda: _cache(dtype=FP8, v_scale=torch.ones(3)),
            bsk.InvalidInput,
            r"v_scale has a wrong shape; expected one element or \[2\], got \[3\]",
        ),
        (
            lambda: _cache().append(tokens(2, 5), tokens(2, 5)),
            bsk.InvalidInput,
            r"KVCache.append: tokens are too many; expected at most 4 \(max_tokens\), got 0 \+ 5",
        ),
        (
            lambda: _cache().append(tokens(2, 1), tokens(2, 1), counts=[1]),
            bsk.InvalidInput,
            "counts do not match the sequences; expected an int or 2, one for each .*, got 1$",
        ),
        (
            lambda: _cache().append(tokens(2, 1), tokens(2, 1), counts=2),
            bsk.InvalidInput,
            r"counts are out of range; expected 0 to 1 \(T\), got 2",
        ),
        (
            lambda: _cache().append(tokens(2, 1), tokens(2, 1), counts=[1, -1]),
            bsk.InvalidInput,
            "counts is too small",
        ),
        (
            lambda: _cache().append(tokens(2, 1), tokens(2, 1), counts=[1, 0.5]),
            bsk.InvalidType,
            "counts is not an int",
        ),
        (
            lambda: _cache().append(tokens(2, 1), tokens(2, 1), counts=torch.tensor([1, 1])),
            bsk.InvalidType,
            r"counts are a tensor; expected ints on the host \(bsk.kv_append takes .*, got Tensor",
        ),
        (
            lambda: _cache().append(tokens(3, 1), tokens(3, 1)),
            bsk.InvalidInput,
            r"KVCache.append: k has a wrong shape; expected \[2, 2, 1, 8\], got \[3, 2, 1, 8\]",
        ),
        (
            lambda: _cache().append(tokens(2, 1), tokens(2, 2)),
            bsk.InvalidInput,
            "KVCache.append: v has a wrong shape",
        ),
        (
            lambda: _cache().append(*[tokens(2, 1, dtype=torch.float16)] * 2),
            bsk.InvalidType,
            "k has an unsupported dtype; expected one of torch.float32, got torch.float16",
        ),
        (
            lambda: _cache().append(tokens(2, 1).requires_grad_(), tokens(2, 1)),
            bsk.InvalidInput,
            "k requires gradients, which do not flow through a cache",
        ),
        (
            lambda: _cache().append(tokens(2, 1), tokens(2, 1), counts=1.5),
            bsk.InvalidType,
            "counts are of a wrong type; expected an int or 2, one for each sequence, got float",
        ),
        (lambda: _cache(dtype=FP8, k_scale="1"), bsk.InvalidType, "k_scale is not a number"),
        (lambda: _cache(dtype=FP8, k_scale=float("inf")), bsk.InvalidInput, "a finite number"),
        (lambda: _cache().truncate(1), bsk.InvalidInput, "expected 0 to 0, got 1 for sequence 0"),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text) as caught:
        call()
    assert type(caught.value) is error


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_scales_are_fp32_whatever_the_default_dtype_is(default, scale):
    was = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        cache = bsk.KVCache(2, 2, 4, 8, dtype=FP8, k_scale=scale, v_scale=scale)
        cache.append(tokens(2, 1), tokens(2, 1))
    finally:
        torch.set_default_dtype(was)
    assert cache.k_scale.dtype == cache.v_scale.dtype == torch.float32


def test_the_default_device_is_not_that_of_the_accounts():
    """With a GPU as the default device they would be made there, where memory cannot be pinned."""
    with torch.device("meta"):
        cache = bsk.KVCache(2, 2, 4, 8, device="cpu")
        paged = bsk.PagedKVCache(4, 4, 2, 8, device="cpu")
        sequences = paged.add_sequences(2)
        cache.reserve(3)
        paged.reserve(sequences, 3)
    assert cache.lengths.tolist() == paged.lengths(sequences).tolist() == [3, 3]


def test_caches_made_in_inference_mode_are_written_outside_of_it():
    with torch.inference_mode():
        cache, paged = bsk.KVCache(2, 2, 4, 8), bsk.PagedKVCache(4, 4, 2, 8)
        sequences = paged.add_sequences(2)
        cache.append(tokens(2, 1), tokens(2, 1))
    k, v = tokens(2, 1), tokens(2, 1)
    cache.append(k, v)
    paged.append(sequences, k, v)
    assert torch.equal(cache.k[:, :, 1:2], k) and torch.equal(paged.k[:2, 0], k[:, :, 0])


def test_a_failed_append_leaves_the_cache_as_it_was():
    cache = _cache()
    cache.append(tokens(2, 3), tokens(2, 3), counts=[3, 1])
    k, v = cache.k.clone(), cache.v.clone()
    with pytest.raises(bsk.InvalidInput, match="for sequence 0"):
        cache.append(tokens(2, 2), tokens(2, 2))
    with pytest.raises(bsk.InvalidInput):
        cache.append(tokens(2, 1), tokens(2, 1, dim=7))
    assert cache.lengths.tolist() == [3, 1]
    assert torch.equal(cache.k, k) and torch.equal(cache.v, v)


@pytest.mark.parametrize("page_size", [None, 8])
@pytest.mark.parametrize("impl", ["auto", "eager", "triton"])
def test_function_writes_what_the_rule_says(page_size, impl):
    if impl == "triton":
        pytest.importorskip("triton")
    case = append_case([3, 9], 4, counts=[4, 1], page_size=page_size)
    expected = appended(case)
    k_cache, v_cache, k, v, *rest = case
    names = case._fields[4:]
    bsk.kv_append(k_cache, v_cache, k, v, **dict(zip(names, rest, strict=True)), impl=impl)
    assert_same_bits(k_cache, expected[0])
    assert_same_bits(v_cache, expected[1])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"cache_seqlens": torch.tensor([0, 38]).int()}, "cache_seqlens leave no room"),
        ({"cache_seqlens": torch.tensor([-1, 0]).int()}, "got -1 for sequence 0"),
        ({"cache_seqlens": torch.tensor([0, 0])}, "cache_seqlens has an unsupported dtype"),
        ({"cache_seqlens": torch.zeros(3).int()}, "cache_seqlens has a wrong shape"),
        ({"counts": torch.tensor([5, 0]).int()}, "counts are out of range; expected 0 to 4"),
        ({"page_table": torch.full((2, 5), 40).int()}, "page_table names a page that does not"),
        ({"page_table": torch.full((2, 5), -1).int()}, "got -1 for sequence 0"),
        ({"page_table": torch.zeros(3, 5).int()}, "page_table has a wrong shape"),
        ({"k_scale": torch.ones(2)}, "k_scale is for fp8 caches only"),
        ({"k": torch.zeros(2, 2, 16, 4).mT}, "k is not contiguous in its last dimension"),
        ({"v": torch.zeros(2, 2, 16, 4).mT}, "v is not contiguous in its last dimension"),
        ({"v_cache": [0.0]}, "v_cache is not a tensor"),
        ({"v_cache": torch.zeros(13, 8, 2, 16).int()}, "v_cache has an unsupported dtype"),
        ({"v_cache": torch.zeros(13, 8, 2, 16).double()}, "k_cache/v_cache have different dtypes"),
        (
            {"v_cache": torch.zeros(13, 2, 16)},
            r"v_cache has a wrong rank; expected \[pages, page_size, Hkv, D\]",
        ),
        (
            {"v_cache": torch.zeros(12, 8, 2, 16)},
            r"v_cache has a wrong shape; expected \[13, 8, 2, 16\], got \[12, 8, 2, 16\]",
        ),
        ({"v_cache": torch.zeros(13, 8, 16, 2).mT}, "v_cache is not contiguous in its last"),
        (
            {"page_table": None},
            r"k has a wrong shape; expected \[13, 8, 4, 16\], got \[2, 2, 4, 16\]",
        ),
    ],
)
def test_function_refuses_what_does_not_exist_and_writes_nothing(change, text):
    case = append_case([3, 9], 4, capacity=40, page_size=8)._replace(**change)
    before = case.k_cache.clone()
    options = {name: getattr(case, name) for name in case._fields[4:]}
    with pytest.raises(bsk.InvalidInput, match=text):
        bsk.kv_append(*case[:4], **options)
    assert_same_bits(case.k_cache, before)


@pytest.mark.parametrize("arg", ["k_cache", "v_cache"])
@pytest.mark.parametrize(
    ("page_size", "layout"),
    [(None, r"\[B, Hkv, S, D\]"), (8, r"\[pages, page_size, Hkv, D\]")],
)
def test_a_wrong_rank_names_the_layout_that_was_expected(arg, page_size, layout):
    case = append_case([3, 9], 4, page_size=page_size)
    case = case._replace(**{arg: getattr(case, arg)[0]})
    options = {name: getattr(case, name) for name in case._fields[4:]}
    with pytest.raises(bsk.InvalidInput, match=rf"^kv_append: {arg} has a wrong rank.*{layout}"):
        bsk.kv_append(*case[:4], **options)


@pytest.mark.parametrize("page_size", [None, 8])
def test_opcheck(page_size):
    case = append_case([3, 9], 4, counts=[4, 1], page_size=page_size)
    zeros = case._replace(k_cache=case.k_cache.zero_(), v_cache=case.v_cache.zero_())
    torch.library.opcheck(kv_append_op, (*zeros, "auto"))


def test_compiles_in_one_piece():
    case = append_case([3, 9], 4)
    expected = appended(case)

    def step(k_cache, v_cache, k, v, lengths):
        bsk.kv_append(k_cache, v_cache, k * 2 - k, v, cache_seqlens=lengths)
        return lengths + k.shape[2]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert compiled(*case[:5]).tolist() == [7, 13]
    assert_same_bits(case.k_cache, expected[0])


def test_explains_its_choice():
    case = append_case([3, 9], 4)
    chosen = bsk.explain(bsk.kv_append, *case[:4], cache_seqlens=case.cache_seqlens)
    assert "a contiguous cache on cpu" in str(chosen)
    assert chosen.chosen == "eager" and chosen.op == append_dispatch.op
    with pytest.raises(bsk.Unsupported, match="kv_append has no sm90 implementation"):
        bsk.kv_append(*case[:4], cache_seqlens=case.cache_seqlens, impl="sm90")
