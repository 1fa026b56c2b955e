"""`attention`: what it accepts, what it refuses and how it says so."""

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.attention.api import attention
from blackwell_sparsek.core.errors import InvalidInput, InvalidType, Unsupported
from blackwell_sparsek.masks import patterns as masks
from blackwell_sparsek.masks.block_mask import BlockMask
from blackwell_sparsek.masks.key_selection import KeySelection
from blackwell_sparsek.testing.inputs import qkv
from blackwell_sparsek.testing.layouts import strided_like


def tensors(**changes):
    sizes = {
        "batch": 2,
        "q_heads": 4,
        "kv_heads": 2,
        "q_len": 5,
        "kv_len": 6,
        "head_dim": 8,
    } | changes
    return qkv(**sizes, seed=1)


Q, K, V = tensors()
MASK = BlockMask.from_dense(torch.ones(1, 1).bool(), 16, (5, 6))


@pytest.mark.parametrize(
    ("args", "options", "error", "match"),
    [
        (([1.0], K, V), {}, InvalidType, r"attention: q is not a tensor; .*got list"),
        ((Q, K.to("meta"), V), {}, InvalidInput, r"q on cpu, k on meta, v on cpu"),
        ((Q.int(), K, V), {}, InvalidType, r"q has an unsupported dtype.*float16.*int32"),
        ((Q.to(torch.complex64), K, V), {}, InvalidType, r"unsupported dtype.*complex64"),
        ((Q.to_sparse(), K, V), {}, InvalidType, r"q has a sparse layout"),
        (
            (Q, torch.nested.nested_tensor([K[0]]), V),
            {},
            Unsupported,
            r"k is a tensor subclass.*nested",
        ),
        ((Q, K.half(), V), {}, InvalidType, r"autocast\), got q torch.float32, k torch.float16, v"),
        ((Q[0], K, V), {}, InvalidInput, r"q has a wrong rank; expected \[B, H, S, D\], got \[4,"),
        ((Q[:1], K, V), {}, InvalidInput, r"different batch sizes.*q \[1, 4, 5, 8\], k \[2,"),
        ((Q, K[..., :7].contiguous(), V), {}, InvalidInput, r"different head dims.*\[2, 2, 6, 7\]"),
        ((Q, K, V[:, :, :5]), {}, InvalidInput, r"do not match.*v \[2, 2, 5, 8\]"),
        ((Q[:, :3], K, V), {}, InvalidInput, r"3 query heads not divisible by 2 kv heads"),
        ((Q, K[:, :0], V[:, :0]), {}, InvalidInput, r"4 query heads not divisible by 0 kv heads"),
        (tensors(head_dim=257), {}, InvalidInput, r"unsupported head dim; expected 1 to 256.*257"),
        ((Q[..., :0], K[..., :0], V), {}, InvalidInput, r"expected 1 to 256, got 0"),
        ((strided_like(Q, "last_gap"), K, V), {}, InvalidInput, r"q is not contiguous.*strides \("),
        ((Q, K, V), {"scale": float("nan")}, InvalidInput, r"scale must be finite"),
        ((Q, K, V), {"scale": "1"}, InvalidType, r"scale is not a number; .*got str"),
        ((Q, K, V), {"softcap": 0.0}, InvalidInput, r"softcap is not positive"),
        ((Q, K, V), {"softcap": float("inf")}, InvalidInput, r"softcap must be finite"),
        ((Q, K, V), {"window": (-1, 0)}, InvalidInput, r"window is negative.*\(-1, 0\)"),
        ((Q, K, V), {"window": 0}, InvalidInput, r"window sees no key"),
        ((Q, K, V), {"window": 1.5}, InvalidType, r"window is malformed"),
        ((Q, K, V), {"causal": 1}, InvalidType, r"causal is not a bool"),
        ((Q, K, V), {"sinks": torch.zeros(3)}, InvalidInput, r"sinks has a wrong shape.*\[4\]"),
        ((Q, K, V), {"sinks": torch.zeros(4).int()}, InvalidType, r"sinks has an unsupported"),
        ((Q, K, V), {"block_mask": torch.ones(1)}, InvalidType, r"block_mask is not a block mask"),
        ((Q[:, :, :4], K, V), {"block_mask": MASK}, InvalidInput, r"was made for .*5, 6\]"),
        ((Q, K, V), {"deterministic": 1}, InvalidType, r"deterministic is not a bool"),
        ((Q, K, V), {"return_lse": "yes"}, InvalidType, r"return_lse is not a bool"),
        ((Q, K, V), {"impl": "cuda"}, InvalidInput, r"impl is unknown; expected one of 'auto'"),
        ((Q, K, V), {"impl": "sm90"}, Unsupported, r"impl='sm90' cannot run this"),
    ],
)
def test_refusals(args, options, error, match):
    with pytest.raises(error, match=match) as caught:
        attention(*args, **options)
    assert caught.type is error


GATE = (torch.zeros(2, 2, 6), torch.zeros(2, 2, 5))
OFFSETS_Q, OFFSETS_K = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (5, 6))
ENTRIES = KeySelection.from_indices(torch.zeros(2, 2, 5, 1).int(), granularity=16, kv_len=6)


def packed(x):
    return x.transpose(1, 2).flatten(0, 1)


ATTENTION_FUNCTIONS = {
    "dense": lambda **options: attention(Q, K, V, **options),
    "gated": lambda **options: attention(Q, K, V, key_gate=GATE, **options),
    "fp8": lambda **options: attention(*(x.to(torch.float8_e4m3fn) for x in (Q, K, V)), **options),
    "rounded": lambda **options: bsk.fp8.attention(Q, K, V, **options),
    "packed": lambda **options: bsk.attention_varlen(
        *map(packed, (Q, K, V)), OFFSETS_Q, OFFSETS_K, max_seqlen_q=5, max_seqlen_k=6, **options
    ),
    "chunked": lambda **options: bsk.attention_varlen(
        *map(packed, (Q, K, V)), OFFSETS_Q, OFFSETS_K, max_seqlen_q=5, max_seqlen_k=6, chunk=4,
        **options,
    ),
    "decode": lambda **options: bsk.attention_decode(
        Q, K, V, cache_seqlens=torch.tensor([5, 6], dtype=torch.int32), **options
    ),
    "sparse": lambda **options: bsk.sparse_attention(Q, K, V, ENTRIES, **options),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION_FUNCTIONS)
def test_only_a_bool_says_whether_lse_is_returned(name):
    function = ATTENTION_FUNCTIONS[name]
    _, lse = function(return_lse=True)
    assert lse.shape[-1] in (5, 10)
    for value in (1, 0, 1.0, None, "yes", torch.tensor(True)):
        with pytest.raises(InvalidType, match="return_lse is not a bool; expected bool, got "):
            function(return_lse=value)


@pytest.mark.parametrize(
    ("args", "options"),
    [
        (tensors(head_dim=256), {}),
        (tensors(head_dim=1), {}),
        ((Q, K[:, :1], V[:, :1]), {}),
        ((Q, K, V), {"window": (0, 0)}),
        ((Q, K, V), {"window": 1}),
        ((Q, K, V), {"scale": -1}),
        ((Q, K, V), {"scale": 0.0}),
        ((Q, K, V), {"softcap": 1e-3}),
        ((Q, K, V), {"sinks": torch.zeros(4).half()}),
        ((Q, K, V), {"block_mask": MASK, "causal": True, "window": 2}),
        ((Q, K, V), {"deterministic": True}),
        ((strided_like(Q, "row_gap"), K.expand(2, 2, 6, 8), V), {}),
    ],
)
def test_accepted_at_the_boundary(args, options):
    out = attention(*args, **options)
    assert out.shape == (*args[0].shape[:3], args[2].shape[3]) and out.isfinite().all()
    torch.testing.assert_close(out, attention(*args, **options, impl="reference"))


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"q_len": 0}, {"kv_len": 0}])
def test_empty_problems(sizes):
    q, k, v = (x.requires_grad_() for x in tensors(**sizes))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert out.shape == q.shape and (out == 0).all() and (lse == -torch.inf).all()
    out.sum().backward()
    assert all((x.grad == 0).all() and x.grad.shape == x.shape for x in (q, k, v))


def test_meta_tensors():
    out, lse = attention(*(x.to("meta") for x in (Q, K, V)), return_lse=True)
    assert out.is_meta and out.shape == Q.shape and lse.dtype == torch.float32


def test_inference_mode_and_inference_tensors():
    with torch.inference_mode():
        inside = Q.clone()
        out = attention(inside, K, V)
    assert torch.equal(out, attention(Q, K, V))
    assert torch.equal(out, attention(inside, K, V))


def test_mixed_dtypes_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(Q, K.bfloat16(), V).dtype == torch.bfloat16
        assert attention(Q.double(), K.double(), V.double()).dtype == torch.float64


def test_global_switch_asks_for_determinism(monkeypatch):
    from blackwell_sparsek.attention.inputs import is_deterministic

    assert not is_deterministic("attention", None)
    torch.use_deterministic_algorithms(True)
    try:
        assert is_deterministic("attention", None) and not is_deterministic("attention", False)
    finally:
        torch.use_deterministic_algorithms(False)


def test_projection_layout_needs_no_copy():
    x = torch.randn(2, 7, 4 * 8)
    q = x.view(2, 7, 4, 8).transpose(1, 2)
    out = attention(q, q, q).transpose(1, 2)
    assert out.is_contiguous()


def test_sink_of_a_row_that_sees_nothing():
    """Its denominator is the sink alone."""
    sinks = torch.tensor([0.5, 1.0, -1.0, 2.0])
    out, lse = attention(Q, K[:, :, :2], V[:, :, :2], causal=True, sinks=sinks, return_lse=True)
    assert (out[:, :, :3] == 0).all()
    torch.testing.assert_close(lse[:, :, :3], sinks.view(1, 4, 1).expand(2, 4, 3))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_transposed_lists_are_made_for_gradients_only(needs_grad):
    mask = masks.topk(torch.randn(1, 1, 2, 2), 1, 16, seq_lengths=(20, 30))
    q, k, v = qkv(1, 2, 2, 20, 30, 8, seed=5)
    expected = attention(q, k, v, block_mask=mask, impl="reference")
    assert mask._transposed is None
    out = attention(q.requires_grad_(needs_grad), k, v, block_mask=mask)
    assert (mask._transposed is not None) == needs_grad
    assert torch.allclose(out, expected, atol=1e-6)
    if needs_grad:
        out.sum().backward()
        assert q.grad.isfinite().all()


def test_a_mask_of_flex_attention_is_named_by_its_module():
    from torch.nn.attention.flex_attention import create_block_mask

    flex = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu")
    q = torch.randn(1, 2, 128, 8)
    match = (
        r"block_mask is not a block mask; expected blackwell_sparsek\.BlockMask "
        r"\(BlockMask\.from_flex converts\), got torch\.nn\.attention\.flex_attention\.BlockMask"
    )
    with pytest.raises(InvalidType, match=match):
        attention(q, q, q, block_mask=flex)
    with pytest.raises(InvalidType, match=r"is not a block mask; expected .*, got Tensor"):
        attention(q, q, q, block_mask=torch.ones(1, 1, 1, 1).bool())
