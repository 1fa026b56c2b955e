"""Warps find the barriers of the rings by their address, which Triton chooses."""

import json

import pytest

pytest.importorskip("triton")

from blackwell_sparsek.testing.machine_code import misplaced_barriers

from ...testing.child import printed

CASE = """
from blackwell_sparsek.testing.cases import sparse_attention as cases
made = [*cases.sparse_attention_sm90_cases(), *cases.sparse_attention_backward_sm90_cases()]
made += [*cases.sparse_attention_gathered_cases()]
case, = (case for case in made if case.name == sys.argv[1])
"""
REPORT = "print(json.dumps([config.placed_barriers()]))"


MORE = [
    *("sparse_attn_fwd_sm90/nsa", "sparse_attn_dq_sm90/narrow-gated", "sparse_attn_gathered/qsa"),
    "sparse_attn_gathered/tokens",
]


@pytest.mark.parametrize(
    "name",
    [
        "sparse_attn_dq_sm90/nsa",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE),
    ],
)
def test_barriers_lie_behind_the_tiles(name):
    report, ptx = printed(CASE, REPORT, name).split("\n", 1)
    (placed,) = json.loads(report)
    assert misplaced_barriers(ptx, [(at, arrivals) for at, arrivals in placed]) == []
