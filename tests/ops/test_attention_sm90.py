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


def packed_call(tokens=10, lengths=(3, 7), same=False, options=(7, 7, *OPTIONS)):
    q = torch.empty(tokens, 2, 64, dtype=torch.float16)
    cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    cu_seqlens = (cu, cu if same else cu.clone())
    return attention_call(q, q, q, None, None, "auto", options, cu_seqlens), cu_seqlens


def test_keys_of_packed_calls(monkeypatch):
    """They hold sizes and the longest lengths, but not the lengths: launches read those."""
    monkeypatch.setattr("blackwell_sparsek.ops.attention_repeat.may_repeat", lambda *_: True)
    call, cu_seqlens = packed_call()
    assert call.inputs[4:] == cu_seqlens
    assert call.key == packed_call(lengths=(5, 5))[0].key
    others = [
        packed_call(tokens=11)[0],
        packed_call(lengths=(3, 3, 4))[0],
        packed_call(same=True)[0],
        packed_call(options=(8, 7, *OPTIONS))[0],
        packed_call(options=(7, 8, *OPTIONS))[0],
    ]
    assert len({call.key, *(other.key for other in others)}) == 6
    # offsets that serve queries and keys have one role
    same, (cu, _) = packed_call(same=True)
    assert same.inputs[4] is cu and same.inputs[5] is None
    q = call.inputs[0]
    assert attention_call(q, q, q, None, None, "auto", OPTIONS).known is not call.known


def test_offsets_that_are_no_tensors_reach_the_checks():
    q = torch.randn(4, 2, 16)
    for wrong in ([0, 4], None):
        assert attention_call(q, q, q, None, None, "auto", OPTIONS, (wrong, wrong)) is None
        with pytest.raises(bsk.BskError, match="cu_seqlens_q"):
            bsk.attention_varlen(q, q, q, wrong, wrong, max_seqlen_q=4, max_seqlen_k=4)
