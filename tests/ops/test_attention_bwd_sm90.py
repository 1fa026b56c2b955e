"""Which releases of Triton build the Hopper backward."""

import dataclasses

import pytest
import torch

from blackwell_sparsek.core import compat
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.formats.attention_spec import AttnSpec
from blackwell_sparsek.ops.attention_bwd_sm90 import why_not_backward
from blackwell_sparsek.tuning.problem_attention import AttnProblem


@pytest.mark.parametrize(
    ("dims", "release", "reason"),
    [
        ((128, 128), (3, 8), None),
        ((64, 64), (3, 7), None),
        ((64, 64), (3, 8), "needs triton 3.6 or 3.7 for head dimensions up to 64, got 3.8"),
        ((128, 64), (3, 9), "needs triton 3.6 or 3.7 for head dimensions up to 64, got 3.9"),
    ],
)
def test_small_heads_need_tiles_in_part_of_the_memory(monkeypatch, dims, release, reason):
    monkeypatch.setattr(compat, "triton_version", lambda: release)
    q, v = (torch.empty(1, 2, 256, dim, dtype=torch.bfloat16) for dim in dims)
    problem = AttnProblem.of(q, q, v, AttnSpec(0.1, max_q=256, max_k=256), backward=True)
    problem = dataclasses.replace(problem, arch=Arch("cuda", 90, 132, 232448, False))
    assert why_not_backward(problem) == reason
