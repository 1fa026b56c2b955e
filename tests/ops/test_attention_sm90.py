"""The Hopper forward among the implementations, and calls that may be repeated; no GPU."""

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.ops.attention import forward_dispatch
from blackwell_sparsek.ops.attention_repeat import attention_call
from blackwell_sparsek.ops.repeat import may_repeat, tensor_key

OPTIONS = (False, None, None, None, None)


def test_it_is_asked_first():
    assert next(iter(forward_dispatch.candidates)) == "sm90"


def test_explain_says_why_not():
    q = torch.randn(1, 2, 64, 64)
    assert "needs sm_90" in bsk.explain(bsk.attention, q, q, q).reasons["sm90"]
    with pytest.raises(bsk.Unsupported, match=r"impl='sm90' cannot run this: needs sm_90"):
        bsk.attention(q, q, q, impl="sm90")


def test_calls_on_the_cpu_are_not_recorded():
    q = torch.randn(1, 2, 64, 64).half()
    assert not may_repeat([q, q], [None])
    assert attention_call(q, q, q, None, None, "auto", OPTIONS) is None


@pytest.mark.parametrize("wrong", [[1.0], None, 3])
def test_wrong_arguments_reach_the_checks(wrong):
    q = torch.randn(1, 2, 64, 64)
    assert attention_call(wrong, q, q, None, None, "auto", OPTIONS) is None
    with pytest.raises(bsk.BskError):
        bsk.attention(wrong, q, q)


def test_a_key_knows_strides():
    x = torch.empty(4, 4)
    assert tensor_key(x) != tensor_key(x.T)
    assert tensor_key(x) == tensor_key(torch.empty(4, 4))
    assert tensor_key(None) is None
