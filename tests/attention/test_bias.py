"""ALiBi slopes and a bias: against the oracle, with gradients, by every entry to `attention`."""

from dataclasses import replace

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.attention.eager import backward as eager_backward
from blackwell_sparsek.attention.eager import forward as eager
from blackwell_sparsek.attention.eager import operands
from blackwell_sparsek.attention.sm90 import tuning as sm90
from blackwell_sparsek.calls.attention import (
    AttentionCall,
    AttnGradients,
    BackwardCall,
    empty_lse,
    empty_out,
)
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.masks.band import Band
from blackwell_sparsek.reference import attention as reference
from blackwell_sparsek.testing import poison
from blackwell_sparsek.testing.attention_cases import AttnCase, check_attention
from blackwell_sparsek.testing.attention_gradients import check_gradients, upstream
from blackwell_sparsek.testing.inputs import normal, qkv

HALF, FLOAT, BRAIN = torch.float16, torch.float32, torch.bfloat16

CASES = [
    AttnCase(1, FLOAT, heads=(4, 2), lengths=((33, 50),), alibi="heads"),
    AttnCase(2, HALF, batch=2, heads=(4, 2), lengths=((50, 33),), alibi="batch", softcap=5.0),
    AttnCase(3, FLOAT, batch=2, heads=(2, 2), lengths=((17, 65),), bias=(True, True), sinks=True),
    AttnCase(4, HALF, batch=2, heads=(6, 2), lengths=((33, 31),), bias=(False, False),
             band=Band(20, 0), scale=-0.3),
    AttnCase(5, FLOAT, batch=2, heads=(4, 1), lengths=((35, 47),), bias=(True, False),
             alibi="batch", head_dims=(24, 40), mask="elements", mask_broadcast=(True, True)),
    AttnCase(6, HALF, batch=2, heads=(4, 2), lengths=((47, 35),), bias=(False, True),
             alibi="heads", mask="blocks", mask_broadcast=(False, False), block_size=(16, 32)),
    AttnCase(7, FLOAT, heads=(4, 2), lengths=((5, 40), (0, 7), (33, 33)), varlen=True,
             alibi="batch", band=Band(None, 0)),
    AttnCase(8, HALF, heads=(2, 2), lengths=((40, 5), (17, 0), (1, 20)), varlen=True,
             alibi="heads", mask="elements", mask_broadcast=(False, True)),
]  # fmt: skip


@pytest.fixture
def small_steps(monkeypatch):
    """Steps of `eager` so small that a few dozen tokens need many of them."""
    monkeypatch.setattr(operands, "CPU_STEPS", operands.StepSizes(tile_q=8, keys=32, scores=2048))


def test_oracle():
    """The oracle against the formula, element by element."""
    q, k, v = qkv(2, 4, 2, 3, 5, 8, seed=1, dtype=torch.float64)
    slopes = torch.rand(2, 4, dtype=FLOAT)
    bias = normal(1, 4, 3, 5, seed=2, dtype=torch.float64)
    options = {"alibi_slopes": slopes, "bias": bias, "softcap": 2.0, "causal": True}
    out, lse = bsk.attention(q, k, v, **options, return_lse=True, impl="reference")
    for b, h, i in ((0, 0, 0), (1, 3, 2), (1, 2, 1), (0, 1, 2)):
        position, scores = i + 2, []
        for j in range(position + 1):
            score = 2.0 * torch.tanh(q[b, h, i] @ k[b, h // 2, j] / 8**0.5 / 2.0)
            scores.append(score + bias[0, h, i, j] - slopes[b, h].double() * abs(position - j))
        p = torch.stack(scores).softmax(0)
        torch.testing.assert_close(out[b, h, i], p @ v[b, h // 2, : position + 1])
        torch.testing.assert_close(lse[b, h, i], torch.stack(scores).logsumexp(0))


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.seed))
def test_eager(case, small_steps):
    q, k, v, spec = case.build("cpu")
    with poison.poisoned_empty():
        out, lse = eager.attention(q, k, v, spec)
    check_attention(out, lse, q, k, v, spec, what=str(case))
    dout, dlse = upstream(out, lse, case.seed)
    exact, exact_lse = reference.attention(q, k, v, spec)
    wanted = AttnGradients(q, k, v, spec.sinks)
    call = BackwardCall(AttentionCall(q, k, v, spec), dout, dlse, exact, exact_lse, wanted)
    made = eager_backward.attention_backward(call)
    made = AttnGradients(*(x if x is None else x.to(q.dtype) for x in made))
    check_gradients(made, dout, dlse, q, k, v, spec, what=str(case))


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.seed))
def test_portable_forward(case, device):
    pytest.importorskip("triton")
    from blackwell_sparsek.attention.triton.forward import launch_attn_fwd
    from blackwell_sparsek.attention.triton.tuning import AttnFwdConfig

    q, k, v, spec = case.build(device)
    tile_m, tile_n = ((32, 16), (16, 32))[case.seed // 2 % 2]
    if spec.block_mask is not None:
        tile_m = min(tile_m, spec.block_mask.block_size[0])
    out, lse = poison.poison_(empty_out(q, v.shape[-1])), poison.poison_(empty_lse(q))
    launch_attn_fwd(AttentionCall(q, k, v, spec), out, lse, AttnFwdConfig(tile_m, tile_n, 4, 2))
    check_attention(out, lse, q, k, v, spec, what=str(case))


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.seed))
def test_portable_backward(case, device):
    pytest.importorskip("triton")
    from blackwell_sparsek.attention.triton.backward import backward

    q, k, v, spec = case.build(device)
    out, lse = reference.attention(q, k, v, spec)
    dout, dlse = upstream(out, lse, case.seed)
    sinks = None if spec.sinks is None else poison.nan_like(spec.sinks)
    made = AttnGradients(*(poison.nan_like(x) for x in (q, k, v)), sinks)
    backward(BackwardCall(AttentionCall(q, k, v, spec), dout, dlse, out, lse, made))
    check_gradients(made, dout, dlse, q, k, v, spec, what=str(case))


@pytest.mark.parametrize("impl", ["eager", "triton"])
def test_strides_of_a_bias(impl, device):
    """A bias is read where it lies: expanded, transposed, with gaps."""
    q, k, v = qkv(2, 4, 2, 20, 30, 16, seed=3, device=device)
    kept = normal(30, 20, seed=4, device=device)
    row = normal(2, 1, 1, 60, seed=5, device=device)[..., ::2]
    for bias in (kept.T[None, None], row.expand(-1, 4, 20, -1), row.expand(-1, -1, 20, -1)):
        got = bsk.attention(q, k, v, bias=bias, impl=impl)
        expected = bsk.attention(q, k, v, bias=bias.contiguous(), impl=impl)
        assert got.equal(expected)
        assert not got.equal(bsk.attention(q, k, v, impl=impl))


@pytest.mark.parametrize("impl", ["eager", "triton", "reference"])
def test_rows_that_a_bias_hides_are_empty(impl, device):
    q, k, v = qkv(1, 2, 2, 20, 20, 16, seed=6, device=device)
    bias = torch.zeros(1, 1, 20, 20, device=device)
    bias[..., 3, :] = -torch.inf
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = bsk.attention(q, k, v, bias=bias, return_lse=True, impl=impl)
    assert out[:, :, 3].eq(0).all() and lse[:, :, 3].eq(-torch.inf).all()
    out.sum().backward()
    assert q.grad[:, :, 3].eq(0).all()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("impl", ["eager", "triton", "reference"])
def test_what_the_mask_hides_does_not_matter(impl, device):
    """NaN in a bias where causal hides the key reaches no result."""
    q, k, v = qkv(1, 2, 1, 40, 40, 16, seed=7, device=device)
    bias = normal(1, 2, 40, 40, seed=8, device=device)
    expected = bsk.attention(q, k, v, bias=bias, causal=True, impl=impl)
    hidden = torch.ones(40, 40, device=device, dtype=torch.bool).triu(1)
    bias = torch.where(hidden, torch.nan, bias)
    assert bsk.attention(q, k, v, bias=bias, causal=True, impl=impl).equal(expected)


def both(**changes):
    q, k, v = qkv(2, 4, 2, 21, 34, 16, seed=9)
    given = {"alibi_slopes": torch.rand(2, 4), "bias": normal(2, 1, 21, 34, seed=10)}
    return (q, k, v), given | changes


def options_of(spec):
    options = {"scale": spec.scale, "softcap": spec.softcap or None, "window": tuple(spec.band)}
    options |= {"block_mask": spec.block_mask, "alibi_slopes": spec.alibi_slopes}
    if not spec.is_varlen:
        return options | {"bias": spec.bias}
    options |= {"cu_seqlens_q": spec.cu_seqlens_q, "cu_seqlens_k": spec.cu_seqlens_k}
    return options | {"max_seqlen_q": spec.max_q, "max_seqlen_k": spec.max_k}


@pytest.mark.parametrize("case", [replace(CASES[4], mask="none", softcap=3.0), CASES[4], CASES[6]])
def test_autograd(case):
    """Gradients by autograd agree with the oracle; torch.func and a compiler give the same bits."""
    q, k, v, spec = case.build("cpu")
    options = options_of(spec)
    attend = bsk.attention_varlen if spec.is_varlen else bsk.attention

    def run(q, k, v):
        return attend(q, k, v, **options, return_lse=True)

    upstreams = upstream(*run(q, k, v), case.seed)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    made = torch.autograd.grad(run(*leaves), leaves, upstreams)
    check_gradients(AttnGradients(*made, None), *upstreams, q, k, v, spec, what=str(case))
    _, pull_back = torch.func.vjp(run, q, k, v)
    assert all(map(torch.equal, made, pull_back(upstreams)))
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, made, torch.autograd.grad(compiled(*leaves), leaves, upstreams)))


def test_gradients_see_later_writes():
    """A bias that changes between forward and backward is noticed, as autograd notices it."""
    (q, k, v), options = both()
    out = bsk.attention(q.requires_grad_(), k, v, **options)
    options["bias"].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("arg", ["alibi_slopes", "bias"])
def test_gradients_of_what_is_added_are_refused(arg):
    tensors, options = both()
    options[arg].requires_grad_()
    with pytest.raises(bsk.Unsupported, match=f"attention: {arg} requires a gradient.*detach"):
        bsk.attention(*tensors, **options)
    with torch.no_grad():
        bsk.attention(*tensors, **options)
    with pytest.raises(bsk.Unsupported, match=f"{arg} requires a gradient"):
        torch.func.grad(lambda x: bsk.attention(*tensors, **(options | {arg: x})).sum())(
            options[arg].detach()
        )


@pytest.mark.parametrize(
    ("changes", "error", "why"),
    [
        ({"alibi_slopes": [0.5]}, bsk.InvalidInput, r"alibi_slopes is not a tensor.*list"),
        ({"alibi_slopes": torch.rand(4).half()}, bsk.InvalidInput, r"alibi_slopes has an uns.*32"),
        ({"alibi_slopes": torch.rand(2)}, bsk.InvalidInput, r"wrong shape; expected \[4\]"),
        ({"alibi_slopes": torch.rand(3, 4)}, bsk.InvalidInput, r"expected \[2, 4\], got \[3, 4\]"),
        ({"alibi_slopes": torch.rand(4, 2).T}, bsk.InvalidInput, r"alibi_slopes is not contig"),
        ({"bias": torch.zeros(21, 34)}, bsk.InvalidInput, r"bias has a wrong rank"),
        ({"bias": torch.zeros(2, 2, 21, 34)}, bsk.InvalidInput,
         r"bias has a wrong shape; expected \[2 or 1, 4 or 1, 21, 34\].*got \[2, 2, 21, 34\]"),
        ({"bias": torch.zeros(1, 1, 1, 34)}, bsk.InvalidInput, r"bias has a wrong shape.*expand"),
        ({"bias": torch.zeros(1, 1, 21, 34).bool()}, bsk.InvalidInput, r"bias has an unsupported"),
        ({"bias": torch.zeros(1, 1, 21, 34, device="meta")}, bsk.InvalidInput, r"bias on meta"),
    ],
)  # fmt: skip
def test_refusals(changes, error, why):
    tensors, options = both(**changes)
    with pytest.raises(error, match=why):
        bsk.attention(*tensors, **options)


def test_fp8_is_refused():
    (q, k, v), options = both()
    fp8 = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    for arg, value in options.items():
        with pytest.raises(bsk.Unsupported, match=f"{arg} does not go with fp8"):
            bsk.attention(*fp8, **{arg: value})


def test_out_takes_both():
    tensors, options = both()
    out = torch.empty(2, 4, 21, 16)
    assert bsk.attention(*tensors, **options, out=out) is out
    assert out.equal(bsk.attention(*tensors, **options))
    with pytest.raises(bsk.InvalidInput, match="out overlaps bias"):
        memory = torch.zeros(2, 4, 21, 34)
        bsk.attention(*tensors, bias=memory, out=memory[..., :16])


def test_hopper_says_why_not():
    """The Hopper forward adds both; its backward names what it lacks."""
    tensors, options = both()
    problem = AttentionCall(*tensors, AttnCase(1, lengths=((21, 34),)).build("cpu")[3]).problem
    hopper = replace(problem, arch=Arch("cuda", 90, 132, 2**18, False), dtype=HALF, tma=True)
    with_slopes = replace(hopper, alibi=True)
    for added in (with_slopes, replace(hopper, bias=True)):
        assert sm90.attn_fwd_sm90_unsupported(added) is None
        why = sm90.attn_bwd_sm90_unsupported(replace(added, backward=True))
        assert why == "has no gradients of scores with alibi_slopes or a bias"
    long = replace(with_slopes, max_k=2**24 + 1)
    assert "at most 16777216 tokens" in sm90.attn_fwd_sm90_unsupported(long)
    assert "no gradients" in sm90.attn_bwd_sm90_unsupported(with_slopes)
    decided = bsk.explain(bsk.attention, *tensors, **options)
    assert decided.chosen == "eager" and "alibi, bias" in str(decided.problem)
