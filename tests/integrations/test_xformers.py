"""The front end for xFormers: its biases, materialised by xFormers itself, and what is refused."""

import math

import pytest
import torch

from blackwell_sparsek.core.errors import InvalidInput, Unsupported
from blackwell_sparsek.integrations.xformers import BIASES, RULES, memory_efficient_attention
from blackwell_sparsek.testing.inputs import normal
from blackwell_sparsek.testing.tolerance import assert_within_budget

DOUBLE = torch.float64


def formula(q, k, v, bias=None, scale=None):
    """[B, M, H, K]; rows that see nothing are 0."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (scale or 1 / math.sqrt(q.shape[-1]))
    if bias is not None:
        scores = scores + bias
    weights = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def tensors(batch, sq, sk, heads=4, kv=2, dims=(16, 24), dtype=DOUBLE):
    return (
        normal(batch, sq, heads, dims[0], seed=1, dtype=dtype),
        normal(batch, sk, kv, dims[0], seed=2, dtype=dtype),
        normal(batch, sk, kv, dims[1], seed=3, dtype=dtype),
    )


def check(out, q, k, v, bias=None, scale=None):
    exact = formula(q.double(), k.double(), v.double(), bias, scale)
    assert_within_budget(out, exact, formula(q, k, v, bias, scale))


@pytest.fixture
def biases():
    pytest.importorskip("xformers")
    from xformers.ops.fmha import attn_bias

    return attn_bias


def test_every_class_is_known(biases):
    """What a newer xFormers adds must be looked at."""
    classes = {
        name for name, kind in vars(biases).items()
        if isinstance(kind, type) and issubclass(kind, biases.AttentionBias)
    }  # fmt: skip
    assert biases.__name__ == BIASES
    assert classes - set(RULES) == {"AttentionBias"}
    assert set(RULES) <= classes


@pytest.mark.parametrize("sq, sk", [(19, 33), (33, 33), (33, 19), (1, 7)])
@pytest.mark.parametrize(
    "make",
    [
        lambda b: b.LowerTriangularMask(),
        lambda b: b.LowerTriangularFromBottomRightMask(),
        lambda b: b.LowerTriangularFromBottomRightMask().make_local_attention(5),
        lambda b: b.LocalAttentionFromBottomRightMask(window_left=3, window_right=0),
        lambda b: b.LocalAttentionFromBottomRightMask(window_left=0, window_right=4),
    ],
)
def test_bands(biases, make, sq, sk):
    q, k, v = tensors(2, sq, sk)
    bias = make(biases)
    out = memory_efficient_attention(q, k, v, bias, scale=0.3)
    check(out, q, k, v, bias.materialize((2, 4, sq, sk), dtype=DOUBLE), scale=0.3)


EQUAL, OTHER, LONGER = [3, 1, 20], [9, 2, 13], [4, 1, 21]


@pytest.mark.parametrize(
    "make",
    [
        lambda b: b.BlockDiagonalMask.from_seqlens(EQUAL, OTHER),
        lambda b: b.BlockDiagonalMask.from_seqlens(EQUAL).make_causal(),
        lambda b: b.BlockDiagonalMask.from_seqlens(EQUAL, OTHER).make_causal(),
        lambda b: b.BlockDiagonalMask.from_seqlens(EQUAL, LONGER).make_causal_from_bottomright(),
        lambda b: b.BlockDiagonalMask.from_seqlens(EQUAL, OTHER).make_local_attention(8),
        lambda b: b.BlockDiagonalMask.from_seqlens(
            EQUAL, LONGER
        ).make_local_attention_from_bottomright(2),
        lambda b: b.BlockDiagonalPaddedKeysMask.from_seqlens(EQUAL, 25, LONGER),
        lambda b: b.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(EQUAL, 25, LONGER),
        lambda b: b.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local(
            EQUAL, 25, LONGER, window_left=2, window_right=1
        ),
        lambda b: b.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(
            EQUAL, 25, LONGER, window_size=3
        ),
        lambda b: b.BlockDiagonalGappyKeysMask.from_seqlens(EQUAL, [0, 7, 9, 40], LONGER),
        lambda b: b.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(
            EQUAL, [2, 7, 9, 40], LONGER
        ),
    ],
)
def test_sequences(biases, make):
    bias = make(biases)
    sq, sk = bias.q_seqinfo.seqstart_py[-1], bias.k_seqinfo.seqstart_py[-1]
    q, k, v = tensors(1, sq, sk)
    out = memory_efficient_attention(q, k, v, bias)
    check(out, q, k, v, bias.materialize((1, 4, sq, sk), dtype=DOUBLE))


@pytest.mark.parametrize("sq, sk", [(19, 33), (33, 19)])
def test_a_causal_bias(biases, sq, sk):
    q, k, v = tensors(2, sq, sk)
    bias = biases.LowerTriangularMask().add_bias(torch.randn(2, 4, sq, sk, dtype=DOUBLE))
    out = memory_efficient_attention(q, k, v, bias)
    check(out, q, k, v, bias.materialize((2, 4, sq, sk), dtype=DOUBLE))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gappy", [False, True])
def test_pages(biases, causal, gappy):
    table = torch.tensor([[4, 0], [2, 1], [3, 5]], dtype=torch.int32)
    name = "CausalWithOffset" if causal else ""
    if gappy:
        # where each sequence has 32 slots, the first begins at 2 and the last at 5
        bias = biases.BlockDiagonalGappyKeysMask.from_seqlens(EQUAL, [2, 32, 69, 96], [4, 1, 25])
        kind = getattr(biases, f"PagedBlockDiagonal{name}GappyKeysMask")
        bias = bias.make_paged(table, 16, notional_padding=32, paged_type=kind)
    else:
        kind = getattr(biases, f"PagedBlockDiagonal{name}PaddedKeysMask")
        bias = kind.from_seqlens(q_seqlen=EQUAL, kv_seqlen=LONGER, block_tables=table, page_size=16)
    q, k, v = tensors(1, 24, 96)
    out = memory_efficient_attention(q, k, v, bias)
    check(out, q, k, v, bias.materialize((1, 4, 24, 96), dtype=DOUBLE))


def test_gradients(biases):
    """Of packed sequences of equal lengths, which need no option of caches."""
    bias = biases.BlockDiagonalMask.from_seqlens(EQUAL).make_causal()
    q, k, v = (x.requires_grad_() for x in tensors(1, 24, 24))
    dense = formula(q, k, v, bias.materialize((1, 4, 24, 24), dtype=DOUBLE))
    expected = torch.autograd.grad(dense.square().sum(), (q, k, v))
    out = memory_efficient_attention(q, k, v, bias)
    for got, want in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), expected, strict=True):
        assert (got - want).abs().max() < 1e-10


def test_ranks_and_grouped_heads():
    q, k, v = tensors(2, 9, 13, kv=4)
    whole = memory_efficient_attention(q, k, v)
    check(whole, q, k, v)
    one = memory_efficient_attention(*(x[:, :, 1] for x in (q, k, v)))
    assert one.shape == (2, 9, 24) and (one - whole[:, :, 1]).abs().max() < 1e-12
    five = [x.unflatten(2, (2, 2)) for x in (q, k, v)]
    own = memory_efficient_attention(*five)
    assert own.shape == (2, 9, 2, 2, 24) and own.flatten(2, 3).equal(whole)
    shared = [x[:, :, :, :1].expand(-1, -1, -1, 2, -1) for x in five[1:]]
    out = memory_efficient_attention(five[0], *shared)
    check(out.flatten(2, 3), q, *(x.select(3, 0) for x in shared))


def test_a_tensor_is_added():
    q, k, v = tensors(2, 9, 13, kv=4)
    bias = normal(2, 4, 9, 13, seed=5, dtype=DOUBLE)
    check(memory_efficient_attention(q, k, v, bias), q, k, v, bias)


@pytest.mark.parametrize("shape", [(2, 9, 13), (1, 9, 13), (9, 13), (2, 1, 9, 13)], ids=str)
def test_a_tensor_is_added_for_one_head(shape):
    """In [B, M, K], where three dimensions of a bias are those of the scores of each sequence."""
    q, k, v = tensors(2, 9, 13, heads=1, kv=1)
    bias = normal(*shape, seed=5, dtype=DOUBLE)
    out = memory_efficient_attention(*(x[:, :, 0] for x in (q, k, v)), bias)
    check(out.unsqueeze(2), q, k, v, bias.unsqueeze(1) if len(shape) == 3 else bias)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("heads", [(2, 3), (1, 1), (2, 1), (1, 3)], ids=str)
def test_a_tensor_is_added_for_grouped_heads(biases, heads, shared, causal):
    q, k, v = tensors(2, 9, 13, heads=6, kv=2 if shared else 6)
    bias = normal(2, *heads, 9, 13, seed=5, dtype=DOUBLE)
    keys = [
        x.unsqueeze(3).expand(-1, -1, -1, 3, -1) if shared else x.unflatten(2, (2, 3))
        for x in (k, v)
    ]
    given = biases.LowerTriangularMask().add_bias(bias) if causal else bias
    out = memory_efficient_attention(q.unflatten(2, (2, 3)), *keys, given)
    added = bias.expand(2, 2, 3, 9, 13).flatten(1, 2)
    if causal:
        added = added + biases.LowerTriangularMask().materialize((2, 6, 9, 13), dtype=DOUBLE)
    check(out.flatten(2, 3), q, k, v, added)


@pytest.mark.parametrize("trained", [False, True])
def test_tensors_that_do_not_fit(trained):
    q, k, v = tensors(2, 6, 7, kv=4)
    with pytest.raises(InvalidInput, match="query/key/value have different batch sizes"):
        memory_efficient_attention(q[:1], k, v)
    bias = torch.zeros(2, 3, 6, 7, dtype=DOUBLE, requires_grad=trained)
    with pytest.raises(InvalidInput, match="attn_mask does not broadcast"):
        memory_efficient_attention(q, k, v, bias)


@pytest.mark.parametrize(
    "module, name", [(__name__, "LowerTriangularMask"), (BIASES, "MaskOfAnotherRelease")]
)
def test_other_classes_are_refused(module, name):
    """One of the same name from elsewhere need not mean the same."""
    bias = type(name, (), {"__module__": module})()
    with pytest.raises(Unsupported, match=f"attn_bias is unknown.*got {module}.{name}$"):
        memory_efficient_attention(*tensors(2, 9, 13), bias)


def test_refusals(biases):
    q, k, v = tensors(1, 24, 24)
    cases = [
        ({"p": 0.1}, "dropout"), ({"op": object()}, "kernel of xFormers"),
        ({"output_dtype": torch.float16}, "dtype of query"), ({"attn_bias": object()}, "unknown"),
        (
            {"attn_bias": biases.BlockDiagonalGappyKeysMask.from_seqlens(
                [24], [0, 24], [25])}, "behind the start of the next",
        ),
    ]  # fmt: skip
    for options, why in cases:
        with pytest.raises(Unsupported, match=why):
            memory_efficient_attention(q, k, v, **options)
    with pytest.raises(InvalidInput, match="wrong rank"):
        memory_efficient_attention(q[0, 0], k, v)
    five = [x.unflatten(2, (2, -1)) for x in (q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1))]
    with pytest.raises(InvalidInput, match=r"does not broadcast.*\[1, 3, 2, 24, 24\]"):
        memory_efficient_attention(*five, torch.zeros(1, 3, 2, 24, 24))
    with pytest.raises(InvalidInput, match="batch of 1"):
        bias = biases.BlockDiagonalMask.from_seqlens([24])
        memory_efficient_attention(*(x.expand(2, -1, -1, -1) for x in (q, k, v)), bias)
    with pytest.raises(InvalidInput, match="inside a page"):
        bias = biases.PagedBlockDiagonalPaddedKeysMask.from_seqlens(
            q_seqlen=[24], kv_seqlen=[20], page_size=16,
            block_tables=torch.tensor([[0, 1]], dtype=torch.int32),
        )  # fmt: skip
        memory_efficient_attention(q, k, v, bias)
