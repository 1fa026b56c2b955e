import pytest
import torch

from blackwell_sparsek.attention.api import attention
from blackwell_sparsek.attention.merge import merge_states, merge_states_bwd
from blackwell_sparsek.attention.merge import merge_states_op as merge_op
from blackwell_sparsek.core.errors import Unsupported
from blackwell_sparsek.reference import merge as reference
from blackwell_sparsek.testing.inputs import qkv


def states(dtype=torch.float64):
    o_a, o_b = torch.randn(2, 2, 3, 5, 4, dtype=dtype).unbind(0)
    lse_a, lse_b = torch.randn(2, 2, 3, 5, dtype=dtype).unbind(0)
    return tuple(x.contiguous().requires_grad_() for x in (o_a, lse_a, o_b, lse_b))


def test_opcheck():
    torch.library.opcheck(merge_op, (*states(torch.float32), "auto"))
    with torch.no_grad():
        args = [x.detach() for x in states(torch.float32)]
        do, dlse = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5)
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(merge_states_bwd, (do, dlse, *args), test_utils=tests)


def test_gradcheck():
    assert torch.autograd.gradcheck(merge_states, states())


def test_second_derivative_is_refused():
    inputs = states()
    o, _ = merge_states(*inputs)
    (gradient,) = torch.autograd.grad(o.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(Unsupported, match=r"^merge_states: no backward of the backward$"):
        gradient.sum().backward()


def test_equals_oracle_with_empty_rows_and_finite_gradients():
    o_a, lse_a, o_b, lse_b = (x.detach().clone() for x in states())
    lse_a[0] = -torch.inf
    o_a[0] = torch.nan
    lse_b[:, 1] = -torch.inf
    inputs = [x.requires_grad_() for x in (o_a, lse_a, o_b, lse_b)]
    got, expected = merge_states(*inputs), reference.merge_states(*inputs)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    empty = got[1] == -torch.inf
    assert empty[0, 1].all() and (got[0][0, 1] == 0).all() and not empty[1].any()
    (got[0].sum() + got[1][~empty].sum()).backward()
    assert all(x.grad.isfinite().all() for x in inputs)


def test_merge_of_split_keys_is_the_whole():
    q, k, v = (x.double().requires_grad_() for x in qkv(1, 4, 2, 20, 33, 8, seed=1))
    sinks = torch.randn(4, dtype=torch.float64)
    whole = attention(q, k, v, sinks=sinks, return_lse=True)
    parts = [
        attention(q, k[:, :, a:b], v[:, :, a:b], sinks=sinks if a == 0 else None, return_lse=True)
        for a, b in ((0, 7), (7, 7), (7, 33))
    ]
    merged = merge_states(*merge_states(*parts[0], *parts[1]), *parts[2])
    for a, b in zip(merged, whole, strict=True):
        torch.testing.assert_close(a, b)
    grads = [
        torch.autograd.grad(o.square().sum() + lse.sum(), (q, k, v)) for o, lse in (merged, whole)
    ]
    torch.testing.assert_close(grads[0], grads[1])
