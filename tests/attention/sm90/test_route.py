"""The Hopper forward among the implementations; no GPU."""

import dataclasses

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.attention.op import forward_dispatch
from blackwell_sparsek.attention.sm90 import tuning as attention_sm90
from blackwell_sparsek.calls.attention import AttnProblem, AttnSpec
from blackwell_sparsek.core import compat
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.dispatch import machine


def test_it_is_asked_first():
    assert next(iter(forward_dispatch.candidates)) == "sm90"


def test_explain_says_why_not():
    q = torch.randn(1, 2, 64, 64)
    assert "needs sm_90" in bsk.explain(bsk.attention, q, q, q).reasons["sm90"]
    with pytest.raises(bsk.Unsupported, match=r"impl='sm90' cannot run this: needs sm_90"):
        bsk.attention(q, q, q, impl="sm90")


@pytest.mark.parametrize("version, known", [((3, 6), True), ((3, 9), True), ((3, 10), False)])
@pytest.mark.parametrize("name", ["why_not_forward", "why_not_backward"])
def test_releases_of_triton_whose_barriers_were_not_looked_at(monkeypatch, name, version, known):
    """In another place, a barrier that warps wait at would be somebody's data."""
    monkeypatch.setattr(machine, "why_triton_fails", lambda: None)
    q = torch.empty(1, 2, 64, 64, dtype=torch.float16)
    problem = AttnProblem.of(q, q, q, AttnSpec(0.1, max_q=64, max_k=64))
    problem = dataclasses.replace(problem, arch=Arch("cuda", 90, 132, 232448, False))
    monkeypatch.setattr(compat, "triton_version", lambda: version)
    why = compat.why_no_gluon()
    assert (why is None) is known
    assert getattr(attention_sm90, name)(problem) == why
