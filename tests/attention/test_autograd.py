"""Gradients by a function of our own and by the operator: the same, each where it belongs."""

from contextlib import nullcontext

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import blackwell_sparsek as bsk
from blackwell_sparsek.attention import autograd as module


def inputs(sinks=False, requires_grad=True):
    torch.manual_seed(0)
    made = [torch.randn(1, 2, 20, 8, dtype=torch.float64) for _ in range(3)]
    made += [torch.randn(2, dtype=torch.float64)] if sinks else []
    return [x.requires_grad_(requires_grad) for x in made]


def attend(tensors, **options):
    q, k, v, *sinks = tensors
    return bsk.attention(q, k, v, causal=True, sinks=sinks[0] if sinks else None, **options)


class Watching(TorchFunctionMode):
    """Sees every call, so that none may bypass the operator."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.fixture
def operator_calls(monkeypatch):
    """Counts calls that go through `bsk::attn_fwd` or `bsk::attn_fwd_into`."""
    calls = []

    def counting(operator):
        def counted(*args):
            calls.append(1)
            return operator(*args)

        return counted

    for name in ("attn_fwd", "attn_fwd_into"):
        monkeypatch.setattr(module, name, counting(getattr(module, name)))
    return calls


@pytest.mark.parametrize("mode", [nullcontext, Watching], ids=["function", "operator"])
def test_lists_for_gradients_are_made_only_where_gradients_are_wanted(mode):
    """Inference needs neither the time nor the memory, whether gradients are enabled or not."""
    mask = bsk.BlockMask.from_dense(torch.eye(2, dtype=torch.bool), 16, (20, 20))
    with mode():
        with torch.no_grad():
            attend(inputs(requires_grad=True), block_mask=mask)
        attend(inputs(requires_grad=False), block_mask=mask)
        assert mask._transposed is None
        attend(inputs(requires_grad=True), block_mask=mask)
    assert mask._transposed is not None


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_both_ways_give_the_same_gradients(operator_calls, sinks, masked):
    options = {"return_lse": True}
    if masked:
        options["block_mask"] = bsk.BlockMask.from_dense(
            torch.eye(2, dtype=torch.bool), 16, (20, 20)
        )
    tensors = inputs(sinks)
    weights = torch.randn(1, 2, 20, 8, dtype=torch.float64), torch.randn(1, 2, 20).double()
    found = []
    for mode in (nullcontext(), Watching()):
        assert not operator_calls
        with mode:
            results = attend(tensors, **options)
            found.append(torch.autograd.grad(results, tensors, weights))
    assert len(operator_calls) == 1
    for ours, expected in zip(*found, strict=True):
        assert torch.equal(ours, expected)


def test_only_what_is_asked_for(operator_calls):
    q, k, v = inputs(requires_grad=False)
    k.requires_grad_()
    attend([q, k, v]).sum().backward()
    assert k.grad is not None and q.grad is None and not operator_calls
    out, lse = attend([q, k, v], return_lse=True)
    (of_lse,) = torch.autograd.grad(lse.sum(), k)
    assert of_lse.abs().sum() > 0 and out.grad_fn is not None
    # nothing to derive: no function, and none of its memory
    assert attend([q, k.detach(), v]).grad_fn is None
    with torch.no_grad():
        assert attend([q, k, v]).grad_fn is None


@pytest.mark.parametrize("given", ["bias", "out", "odd addresses"])
def test_plain_calls_that_are_not_replayed_bypass_the_operator_too(operator_calls, given):
    tensors = inputs(requires_grad=False)
    options = {
        "bias": {"bias": torch.zeros(1, 2, 20, 20)},
        "out": {"out": torch.empty_like(tensors[0])},
    }
    if given == "odd addresses":
        tensors = [torch.cat([x.flatten(), x[0, 0, 0, :1]])[1:].view_as(x) for x in tensors]
    attend(tensors, **options.get(given, {}))
    assert not operator_calls
    with Watching():
        attend(tensors, **options.get(given, {}))
    assert len(operator_calls) == 1


def test_a_second_derivative_is_refused(operator_calls):
    tensors = inputs()
    grads = torch.autograd.grad(attend(tensors).sum(), tensors, create_graph=True)
    assert not operator_calls
    with pytest.raises(bsk.Unsupported, match="no backward of the backward"):
        grads[0].sum().backward()


def test_saved_tensors_may_be_packed_and_computed_again():
    tensors = inputs()
    expected = torch.autograd.grad(attend(tensors).sum(), tensors)
    packed = []

    def pack(x):
        packed.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = attend(tensors)
    assert len(packed) == 5
    again = checkpoint(lambda *x: attend(x), *tensors, use_reentrant=False)
    for result in (out, again):
        found = torch.autograd.grad(result.sum(), tensors)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_transforms_and_subclasses_meet_the_operator(operator_calls):
    q, k, v = inputs(requires_grad=False)
    torch.func.vmap(lambda x: attend([x, k, v]))(q[None])
    assert len(operator_calls) == 1
    attend([q.requires_grad_(), k, v])
    assert len(operator_calls) == 1

    class Subclass(torch.Tensor):
        pass

    attend([q.detach().as_subclass(Subclass).requires_grad_(), k, v])
    assert len(operator_calls) == 2
