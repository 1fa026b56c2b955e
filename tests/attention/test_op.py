"""bsk::attn_fwd and bsk::attn_bwd as operators: opcheck, strides, compile, gradcheck, dispatch."""

import pytest
import torch

from blackwell_sparsek.attention import op as attention_op
from blackwell_sparsek.attention.api import attention
from blackwell_sparsek.attention.op import attn_bwd, attn_fwd, attn_fwd_into
from blackwell_sparsek.core.errors import Unsupported
from blackwell_sparsek.dispatch.dispatcher import explain
from blackwell_sparsek.masks.block_mask import BlockMask
from blackwell_sparsek.testing.inputs import qkv
from blackwell_sparsek.testing.layouts import strided_like


def arguments(kind, layout="contiguous", impl="auto"):
    q, k, v = (strided_like(x, layout) for x in qkv(2, 4, 2, 17, 20, 8, seed=1, v_dim=4))
    cu_q = cu_k = sinks = slopes = bias = None
    mask, mask_shape, max_q, max_k = [], [], 17, 20
    if kind == "varlen":
        q, k, v = (x.flatten(0, 0)[0].transpose(0, 1).contiguous() for x in (q, k, v))
        cu_q = torch.tensor([0, 5, 17], dtype=torch.int32)
        cu_k = torch.tensor([0, 0, 20], dtype=torch.int32)
    if kind == "mask":
        block_mask = BlockMask.from_element_mask(torch.rand(2, 4, 17, 20) > 0.3, 16)
        mask, mask_shape = block_mask.tensors(), [2, 4, 17, 20, 16, 16]
    if kind == "sinks":
        sinks = torch.randn(4, requires_grad=True)
    if kind == "bias":
        slopes, bias = torch.rand(2, 4), torch.randn(2, 1, 17, 20).expand(-1, 4, -1, -1)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    options = (cu_q, cu_k, max_q, max_k, mask, mask_shape, 9, 0, 0.3, 2.0, sinks)
    options = (*options, slopes, bias, False)
    return (q, k, v), options, impl


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("kind", ["plain", "varlen", "mask", "sinks", "bias"])
def test_opcheck_forward(kind, impl):
    tensors, options, impl = arguments(kind, impl=impl)
    torch.library.opcheck(attn_fwd, (*tensors, *options, impl))


@pytest.mark.parametrize("kind", ["plain", "varlen", "bias"])
def test_opcheck_into(kind):
    tensors, options, impl = arguments(kind)
    q, k, v = (x.detach() for x in tensors)
    out = torch.empty(*q.shape[:-1], v.shape[-1])
    torch.library.opcheck(attn_fwd_into, (out, q, k, v, *options, impl))


@pytest.mark.parametrize("layout", ["swapped", "row_gap", "outer_gap", "offset"])
def test_opcheck_forward_layouts(layout):
    tensors, options, impl = arguments("plain", layout)
    torch.library.opcheck(attn_fwd, (*tensors, *options, impl))


@pytest.mark.parametrize("kind", ["plain", "varlen", "mask", "sinks", "bias"])
def test_opcheck_backward(kind):
    """The oracle's backward stands aside: its vjp wraps tensors, which opcheck cannot look into."""
    tensors, options, impl = arguments(kind)
    with torch.no_grad():
        out, lse = attn_fwd(*tensors, *options, impl)
        tensors = [x.detach() for x in tensors]
        options = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in options)
        needs = [True, False, True, kind == "sinks"]
        args = (torch.ones_like(out), torch.ones_like(lse), *tensors, out, lse, *options, needs)
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(attn_bwd, (*args, impl), test_utils=tests)
        gradients, exact = attn_bwd(*args, impl), attn_bwd(*args, "reference")
    assert [g.numel() > 0 for g in gradients] == needs
    torch.testing.assert_close(gradients, exact)


@pytest.mark.parametrize("masked", [False, True])
def test_gradcheck(masked):
    q, k, v = (x.double().requires_grad_() for x in qkv(1, 4, 2, 5, 6, 3, seed=2))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    mask = BlockMask.from_element_mask(torch.rand(5, 6) > 0.3, 16) if masked else None

    def call(q, k, v, sinks):
        out, lse = attention(
            q, k, v, window=(3, 1), softcap=2.0, sinks=sinks, block_mask=mask, return_lse=True
        )
        return out, lse

    assert torch.autograd.gradcheck(call, (q, k, v, sinks))


def test_only_needed_gradients():
    q, k, v = qkv(1, 2, 2, 5, 5, 8, seed=3)
    v.requires_grad_()
    attention(q, k, v).sum().backward()
    assert v.grad is not None and q.grad is None and k.grad is None


def test_gradient_of_lse_alone():
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 2, 5, 5, 8, seed=4))
    attention(q, k, v, return_lse=True)[1].sum().backward()
    expected = torch.autograd.grad(torch.logsumexp(q @ k.mT / 8**0.5, -1).sum(), (q, k))
    torch.testing.assert_close(q.grad, expected[0])
    torch.testing.assert_close(k.grad, expected[1])


def test_implementations_get_gradients_whose_last_dimension_is_contiguous(monkeypatch):
    """That of a sum is expanded, and copied; any other is passed on as it is."""
    seen = []
    run = attention_op.backward_dispatch.run

    def watched(impl, call):
        seen.append(call.dout)
        return run(impl, call)

    monkeypatch.setattr(attention_op.backward_dispatch, "run", watched)
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 2, 5, 5, 8, seed=4))
    out = attention(q, k, v)
    rows = torch.randn(1, 5, 2, 8).transpose(1, 2)
    for dout in (torch.ones(()).expand(out.shape), rows):
        got = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        expected = torch.autograd.grad(out, (q, k, v), dout.contiguous(), retain_graph=True)
        torch.testing.assert_close(got, expected)
    assert all(dout.stride(-1) == 1 for dout in seen)
    assert seen[2].stride() == rows.stride() != seen[3].stride()


def test_second_derivative_is_refused():
    q, k, v = (x.requires_grad_() for x in qkv(1, 1, 1, 4, 4, 8, seed=5))
    (dq,) = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(Unsupported, match="attn_bwd: no backward of the backward"):
        dq.sum().backward()


@pytest.mark.parametrize("masked", [False, True])
def test_compile_fullgraph(masked):
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 1, 40, 40, 8, seed=6))
    mask = BlockMask.from_element_mask(torch.rand(40, 40) > 0.3, 16) if masked else None

    def model(q, k, v):
        out = attention(q * 2, k, v, causal=True, window=8, block_mask=mask)
        return out.transpose(1, 2).flatten(2)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected, got = model(q, k, v), compiled(q, k, v)
    torch.testing.assert_close(got, expected)
    a = torch.autograd.grad(expected.square().sum(), (q, k, v))
    b = torch.autograd.grad(got.square().sum(), (q, k, v))
    torch.testing.assert_close(b, a)


def test_compile_scales_that_change():
    """torch.compile makes a number symbolic when it changes between calls."""

    def model(q, k, v, scale):
        return attention(q, k, v, scale=scale, softcap=2 * scale)

    inputs = qkv(1, 2, 2, 5, 7, 8, seed=7)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for scale in (0.3, 0.5, 0.7):
        assert torch.equal(compiled(*inputs, scale), model(*inputs, scale))


def test_lengths_do_not_recompile():
    counts = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(attention, fullgraph=True, backend=counts, dynamic=True)
    for length in (17, 33, 50, 64):
        compiled(*qkv(1, 2, 2, length, length, 8, seed=7), causal=True)
    assert counts.frame_count <= 2


def test_explain_and_explicit_impl():
    q, k, v = qkv(1, 2, 2, 4, 4, 8, seed=8)
    decision = explain(attention, q, k, v, causal=True)
    assert decision.chosen == "eager" and decision.problem.banded
    assert str(decision.problem).startswith("forward on ")
    assert decision.reasons["reference"] == "only runs when asked for"
    with pytest.raises(Unsupported, match=r"attn_fwd: impl='sm90' cannot run this"):
        attention(q, k, v, impl="sm90")


def test_autocast_does_not_reach_inside():
    q, k, v = qkv(1, 2, 2, 33, 33, 8, seed=9)
    expected = attention(*(x.bfloat16() for x in (q, k, v)))
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)


def test_same_bits_every_time():
    q, k, v = (x.requires_grad_() for x in qkv(1, 4, 2, 70, 70, 8, seed=10))
    mask = BlockMask.from_dense(torch.rand(1, 4, 5, 5) > 0.4, 16, (70, 70))
    runs = []
    for _ in range(3):
        out = attention(q, k, v, block_mask=mask, deterministic=True)
        runs.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))
