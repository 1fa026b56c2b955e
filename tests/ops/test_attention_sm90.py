"""The Hopper forward among the implementations; no GPU."""

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.ops.attention import forward_dispatch


def test_it_is_asked_first():
    assert next(iter(forward_dispatch.candidates)) == "sm90"


def test_explain_says_why_not():
    q = torch.randn(1, 2, 64, 64)
    assert "needs sm_90" in bsk.explain(bsk.attention, q, q, q).reasons["sm90"]
    with pytest.raises(bsk.Unsupported, match=r"impl='sm90' cannot run this: needs sm_90"):
        bsk.attention(q, q, q, impl="sm90")
