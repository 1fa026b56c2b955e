"""Against torch itself: same signature, same results."""

import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left

import blackwell_sparsek as bsk
from blackwell_sparsek.attention.sdpa import scaled_dot_product_attention
from blackwell_sparsek.core.errors import InvalidInput, InvalidType, Unsupported

torch_sdpa = torch.nn.functional.scaled_dot_product_attention


def compare(q, k, v, **options):
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    got, expected = scaled_dot_product_attention(*inputs, **options), torch_sdpa(*inputs, **options)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    weight = torch.randn_like(expected)
    a = torch.autograd.grad(got, inputs, weight)
    b = torch.autograd.grad(expected, inputs, weight)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def make(*shapes):
    return [torch.randn(shape) for shape in shapes]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(5, 5), (3, 9), (9, 3), (1, 70), (70, 65)])
def test_lengths_align_top_left(lengths, causal):
    sq, sk = lengths
    compare(*make((2, 3, sq, 8), (2, 3, sk, 8), (2, 3, sk, 4)), is_causal=causal)


@pytest.mark.parametrize(
    "shapes",
    [((5, 8), (6, 8)), ((3, 5, 8), (3, 6, 8)), ((2, 2, 3, 5, 8), (2, 2, 3, 6, 8))],
)
def test_any_number_of_leading_dimensions(shapes):
    compare(*make(shapes[0], shapes[1], shapes[1]), scale=0.7)


@pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
def test_last_dimensions_with_gaps(which):
    """Where torch takes any strides, so does its stand-in."""
    tensors = make((2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8))
    q, k, v = (x.mT.contiguous().mT if i == which else x for i, x in enumerate(tensors))
    assert (q, k, v)[which].stride(-1) != 1
    got, expected = scaled_dot_product_attention(q, k, v), torch_sdpa(q, k, v)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_leading_dimensions_broadcast():
    compare(*make((2, 4, 5, 8), (1, 4, 6, 8), (2, 1, 6, 8)))


def test_grouped_heads():
    compare(*make((2, 6, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8)), enable_gqa=True, is_causal=True)


@pytest.mark.parametrize("shape", [(7, 9), (1, 9), (7, 1), (3, 7, 9), (2, 1, 7, 9), (2, 3, 7, 9)])
def test_bool_masks(shape):
    mask = torch.rand(shape) > 0.4
    compare(*make((2, 3, 7, 8), (2, 3, 9, 8), (2, 3, 9, 8)), attn_mask=mask)


def test_fully_masked_rows_are_zero():
    mask = torch.ones(7, 9, dtype=torch.bool)
    mask[2] = False
    q, k, v = make((1, 2, 7, 8), (1, 2, 9, 8), (1, 2, 9, 8))
    compare(q, k, v, attn_mask=mask)
    assert (scaled_dot_product_attention(q, k, v, mask)[:, :, 2] == 0).all()


@pytest.mark.parametrize(
    ("query", "mask"),
    [
        ((2, 3, 7, 8), (1, 2, 3, 7, 9)),
        ((2, 3, 7, 8), (1, 1, 1, 7, 9)),
        ((3, 7, 8), (1, 3, 7, 9)),
        ((7, 8), (1, 7, 9)),
        ((2, 2, 3, 7, 8), (1, 2, 2, 3, 7, 9)),
    ],
)
def test_a_mask_with_more_dimensions_than_the_scores(query, mask):
    q, k, v = make(query, (*query[:-2], 9, 8), (*query[:-2], 9, 8))
    mask = torch.ones(mask, dtype=torch.bool)
    if q.dim() != 3:  # which torch broadcasts from 2.15 on
        with pytest.raises(RuntimeError):
            torch_sdpa(q, k, v, mask)
    with pytest.raises(InvalidInput, match=r"attn_mask has too many dimensions; expected at most"):
        scaled_dot_product_attention(q, k, v, mask)


@pytest.mark.parametrize("lengths", [(5, 5), (3, 9), (9, 3), (1, 70), (70, 65), (4, 0), (0, 4)])
@pytest.mark.parametrize("variant", [causal_upper_left, causal_lower_right])
@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
def test_causal_biases(variant, lengths):
    sq, sk = lengths
    compare(*make((2, 3, sq, 8), (2, 3, sk, 8), (2, 3, sk, 4)), attn_mask=variant(sq, sk))


def test_a_causal_bias_is_no_mask_in_memory(monkeypatch):
    """Both variants are bands of the kernels: nothing of size Sq x Sk is made."""
    monkeypatch.setattr(CausalBias, "_materialize", None)
    q, k, v = make((1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8))
    expected = bsk.attention(q, k, v, causal=True)
    assert torch.equal(scaled_dot_product_attention(q, k, v, causal_lower_right(5, 7)), expected)


@pytest.mark.parametrize("bias", [causal_upper_left(9, 4), causal_lower_right(9, 9)])
def test_sizes_of_a_causal_bias_that_torch_ignores(bias):
    compare(*make((1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8)), attn_mask=bias)


@pytest.mark.parametrize(
    ("size", "causal", "match"),
    [
        ((4, 6), False, r"attn_mask is a CausalBias of other sizes; expected \[5, 6\], got \[4, 6"),
        ((5, 6), True, r"attn_mask is a CausalBias; expected is_causal=False, got is_causal=True"),
    ],
)
def test_causal_biases_that_do_not_fit(size, causal, match):
    q, k, v = make((1, 2, 5, 8), (1, 2, 6, 8), (1, 2, 6, 8))
    with pytest.raises(InvalidInput, match=match):
        scaled_dot_product_attention(q, k, v, causal_lower_right(*size), is_causal=causal)


ZERO_SIZES = {
    "no queries": ((2, 3, 0, 8), (2, 3, 4, 8), (2, 3, 4, 5)),
    "no keys": ((2, 3, 4, 8), (2, 3, 0, 8), (2, 3, 0, 5)),
    "neither": ((2, 3, 0, 8), (2, 3, 0, 8), (2, 3, 0, 5)),
    "no heads": ((2, 0, 4, 8), (2, 0, 6, 8), (2, 0, 6, 5)),
    "no batch": ((0, 3, 4, 8), (0, 3, 6, 8), (0, 3, 6, 5)),
    "no head dim": ((2, 3, 4, 0), (2, 3, 6, 0), (2, 3, 6, 5)),
    "no value dim": ((2, 3, 4, 8), (2, 3, 6, 8), (2, 3, 6, 0)),
    "three dimensions": ((0, 4, 8), (0, 6, 8), (0, 6, 5)),
    "two dimensions": ((0, 8), (6, 8), (6, 5)),
    "five dimensions": ((2, 0, 3, 4, 8), (2, 0, 3, 6, 8), (2, 0, 3, 6, 5)),
}


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.5}])
@pytest.mark.parametrize("sizes", ZERO_SIZES)
def test_zero_sizes(sizes, options):
    compare(*make(*ZERO_SIZES[sizes]), **options)


@pytest.mark.parametrize("sizes", ["no queries", "no keys", "neither", "no heads", "no batch"])
def test_zero_sizes_with_a_bool_mask(sizes):
    q, k, v = make(*ZERO_SIZES[sizes])
    compare(q, k, v, attn_mask=torch.ones(q.shape[2], k.shape[2]).bool())
    compare(q, k, v, attn_mask=torch.ones(*q.shape[:3], k.shape[2]).bool())


def test_no_query_heads_over_some_key_heads():
    q, k, v = make((2, 0, 4, 8), (2, 2, 6, 8), (2, 2, 6, 5))
    compare(q, k, v, enable_gqa=True)


@pytest.mark.parametrize("shape", [(3, 1, 5, 6), (3, 4, 1, 6), (1, 4, 5, 6), (2, 1, 1, 1, 6)])
@pytest.mark.parametrize("kind", ["bool", "bias"])
def test_masks_broadcast_over_more_than_one_batch(shape, kind):
    """Dimensions count from the last: the first of these may be the second of the batch."""
    mask = torch.randn(shape) if kind == "bias" else torch.rand(shape) < 0.7
    mask[..., 0] = 1
    compare(*make((2, 3, 4, 5, 8), (2, 3, 4, 6, 8), (2, 3, 4, 6, 8)), attn_mask=mask)


def test_bool_mask_with_five_dimensions():
    mask = torch.rand(2, 1, 3, 7, 9) > 0.4
    compare(*make((2, 2, 3, 7, 8), (2, 2, 3, 9, 8), (2, 2, 3, 9, 8)), attn_mask=mask)


@pytest.mark.parametrize("shape", [(9, 9), (2, 1, 1, 9)])
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_bool_masks_without_data(kind, shape):
    with torch.device("meta") if kind == "meta" else FakeTensorMode():
        q, k, v = (torch.randn(2, 4, 9, 8) for _ in range(3))
        got = scaled_dot_product_attention(q, k, v, torch.ones(shape, dtype=torch.bool))
    assert got.shape == q.shape and got.device == q.device


def test_bool_masks_that_vmap_maps_over():
    q, k, v = torch.randn(3, 5, 2, 4, 9, 8)
    mask = torch.rand(5, 9, 9) < 0.5
    mask[..., 0] = True
    mask[0, 3] = False
    got = torch.vmap(scaled_dot_product_attention)(q, k, v, mask)
    expected = torch_sdpa(q, k, v, mask[:, None, None])
    torch.testing.assert_close(got, expected.nan_to_num(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_autocast_takes_float_masks_of_any_dtype(dtype):
    q, k, v = torch.randn(3, 2, 4, 9, 8)
    bias = torch.randn(9, 9, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        got = scaled_dot_product_attention(q, k, v, bias)
    assert got.dtype == torch.bfloat16
    expected = torch_sdpa(q, k, v, bias.float())
    torch.testing.assert_close(got.float(), expected, rtol=0.05, atol=0.05)


def test_float_mask_and_its_gradient():
    q, k, v = make((2, 3, 7, 8), (2, 3, 9, 8), (2, 3, 9, 8))
    bias = torch.randn(3, 7, 9, requires_grad=True)
    compare(q, k, v, attn_mask=bias)
    scaled_dot_product_attention(q, k, v, bias).sum().backward()
    assert bias.grad is not None


def test_signature_is_torchs():
    parameters = inspect.signature(scaled_dot_product_attention).parameters
    assert list(parameters) == [
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
    ]  # fmt: skip
    defaults = [p.default for p in parameters.values()][3:]
    assert defaults == [None, 0.0, False, None, False]


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"dropout_p": 0.1}, Unsupported, r"dropout_p asks for dropout"),
        ({"attn_mask": torch.ones(5, 6).int()}, InvalidType, r"attn_mask has an unsupported"),
        ({"attn_mask": torch.ones(5, 7).bool()}, InvalidInput, r"attn_mask does not broadcast"),
        ({"attn_mask": [True]}, InvalidType, r"attn_mask is not a tensor"),
    ],
)
def test_refusals(options, error, match):
    q, k, v = make((2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8))
    with pytest.raises(error, match="scaled_dot_product_attention: .*" + match):
        scaled_dot_product_attention(q, k, v, **options)


def test_heads_that_do_not_match():
    q, k, v = make((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8))
    with pytest.raises(InvalidInput, match=r"query/key/value do not match.*enable_gqa"):
        scaled_dot_product_attention(q, k, v)
    assert scaled_dot_product_attention(q, k, v, enable_gqa=True).shape == q.shape
