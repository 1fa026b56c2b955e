"""The backward kernels as implementation `triton`: who takes them, and that they are what runs."""

import dataclasses

import pytest
import torch

from blackwell_sparsek.attention.api import attention, attention_packed
from blackwell_sparsek.attention.op import attn_bwd, attn_fwd, backward_dispatch
from blackwell_sparsek.attention.triton import tuning as attention_bwd_triton
from blackwell_sparsek.calls.attention import AttnProblem, AttnSpec
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.core.errors import Unsupported
from blackwell_sparsek.masks.block_mask import BlockMask
from blackwell_sparsek.testing.inputs import qkv

pytest.importorskip("triton")

A100 = Arch("cuda", 80, 108, 166912, False)


def problem(arch=A100, **changes):
    q = torch.empty(1, 4, 8, 64, dtype=torch.float16)
    k = torch.empty(1, 2, 8, 64, dtype=torch.float16)
    spec = AttnSpec(0.125, max_q=8, max_k=8)
    made = AttnProblem.of(q, k, k, spec, backward=True)
    return dataclasses.replace(made, arch=arch, **changes)


@pytest.mark.parametrize("deterministic", [False, True])
def test_auto_prefers_triton_on_a_gpu(deterministic):
    asked = problem(deterministic=deterministic)
    assert backward_dispatch.decide("auto", asked).chosen == "triton"


@pytest.mark.parametrize("interpreted", [False, True])
def test_auto_never_takes_triton_on_a_cpu(interpreted):
    cpu = Arch("cpu", 0, 1, 0, interpreted)
    assert backward_dispatch.decide("auto", problem(cpu)).chosen == "eager"
    assert backward_dispatch.decide("triton", problem(cpu)).chosen == (
        "triton" if interpreted else None
    )


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dtype": torch.float64}, "needs float16, bfloat16 or float32, got torch.float64"),
        ({"head_dim": 257}, "needs head dimensions of 1 to 256, got 257 and 64"),
        ({"max_k": 2**30}, "needs sequences of at most 1073741823 tokens"),
        ({"batch": 2**20, "heads_q": 2**12}, "needs at most 2147483647 query tiles"),
        (
            {"batch": 2**10, "heads_kv": 2**10, "max_k": 2**16, "max_q": 1},
            "needs at most 2147483647 key tiles over batch and heads",
        ),
        ({"arch": Arch("cpu", 0, 1, 0, False)}, "needs a CUDA GPU of sm_80 or newer, got cpu"),
    ],
)
def test_what_the_kernels_cannot_run(changes, reason):
    why = attention_bwd_triton.why_not_backward(problem(**changes))
    assert why is not None and why.startswith(reason)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float32},
        {"head_dim": 256, "head_dim_v": 1},
        {"batch": 2**10, "heads_kv": 2**10, "max_k": 2**14, "max_q": 1},
        {"mask_block": (16, 256)},
        {"varlen": True, "softcap": True, "sinks": True},
    ],
)
def test_what_they_can_run(changes):
    assert attention_bwd_triton.why_not_backward(problem(**changes)) is None


OPTIONS = (
    {"window": (7, 3), "softcap": 4.0},
    {"causal": True, "sinks": True},
    {"mask": (16, 32), "window": 11, "scale": -0.3},
)


def gradients_of(impl, device, options, wanted=(0, 1, 2)):
    q, k, v = (x.to(device) for x in qkv(1, 2, 1, 17, 35, 16, seed=3, v_dim=24))
    options = {**options}
    inputs = [x.requires_grad_(i in wanted) for i, x in enumerate((q, k, v))]
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-1, 1, 2, device=device, requires_grad=True)
        inputs.append(options["sinks"])
    if "mask" in options:
        visible = torch.rand(2, 17, 35, generator=torch.Generator().manual_seed(1)) < 0.4
        mask = BlockMask.from_element_mask(visible.to(device), options.pop("mask"))
        options["block_mask"] = mask
    out, lse = attention(q, k, v, return_lse=True, impl=impl, **options)
    seen = torch.where(lse == -torch.inf, 0.0, lse)
    loss = out.square().sum() + (seen * torch.arange(17, device=device)).sum()
    loss.backward()
    return [x.grad for x in inputs]


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_agree_with_eager(options, device):
    ours, theirs = (gradients_of(impl, device, options) for impl in ("triton", "eager"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wanted", [(0,), (2,), (1, 2)])
def test_only_needed_gradients(wanted, device):
    some = gradients_of("triton", device, {"causal": True}, wanted)
    everything = gradients_of("triton", device, {"causal": True})
    for i, (x, y) in enumerate(zip(some, everything, strict=True)):
        assert x.equal(y) if i in wanted else x is None


def test_gradient_of_sinks_alone(device):
    """It needs delta, which the gradients of queries and keys would have brought along."""
    options = {"causal": True, "sinks": True}
    ours, theirs = (gradients_of(impl, device, options, ()) for impl in ("triton", "eager"))
    assert ours[:3] == [None] * 3
    torch.testing.assert_close(ours[3], theirs[3], rtol=1e-4, atol=1e-5)


def test_varlen_agrees_with_eager(device):
    cu = torch.tensor([0, 5, 5, 20], dtype=torch.int32, device=device)
    options = {"max_seqlen_q": 15, "max_seqlen_k": 15, "causal": True}
    found = []
    for impl in ("triton", "eager"):
        q = torch.linspace(-2, 2, 20 * 2 * 16, device=device).view(20, 2, 16).sin()
        q.requires_grad_()
        attention_packed(q, q, q, cu, cu, impl=impl, **options).square().sum().backward()
        found.append(q.grad)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_an_expanded_gradient(device):
    q = torch.linspace(-2, 2, 320, device=device).view(1, 1, 20, 16).requires_grad_()
    attention(q, q, q, impl="triton").sum().backward()
    ones = torch.ones(1, 1, 20, 16, device=device)
    (expected,) = torch.autograd.grad(attention(q, q, q, impl="triton"), q, ones)
    assert q.grad.equal(expected)


def test_opcheck(device):
    """Shapes, strides and what is written, against the fakes."""
    q, k, v = (x.to(device) for x in qkv(1, 2, 1, 17, 20, 16, seed=5))
    sinks = torch.zeros(2, device=device)
    options = (None, None, 17, 20, [], [], 2**30, 0, 0.3, 0.0, sinks, None, None, True)
    out, lse = attn_fwd(q, k, v, *options, "triton")
    args = (torch.ones_like(out), None, q, k, v, out, lse, *options, [True, False, True, True])
    torch.library.opcheck(
        attn_bwd, (*args, "triton"), test_utils=("test_schema", "test_faketensor")
    )


def test_an_explicit_choice_does_not_fall_back(device):
    q = torch.randn(1, 1, 4, 8, dtype=torch.float64, device=device)
    lse = torch.zeros(1, 1, 4, dtype=torch.float64, device=device)
    options = (None, None, 4, 4, [], [], 2**30, 0, 0.3, 0.0, None, None, None, False)
    needs = [True, True, True, False]
    with pytest.raises(Unsupported, match="attn_bwd: impl='triton' cannot run this: needs float16"):
        attn_bwd(q, None, q, q, q, q, lse, *options, needs, "triton")
