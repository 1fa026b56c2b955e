"""Where the Hopper forward's warps look for barriers of K and V, read in its PTX."""

import json

import pytest

pytest.importorskip("triton")

from blackwell_sparsek.testing.machine_code import misplaced_barriers

from ...testing.child import printed

CASE = """
import ast
from blackwell_sparsek.testing.cases.attention import ForwardSm90, forward_sm90_case
case = forward_sm90_case(ForwardSm90(**ast.literal_eval(sys.argv[1])))
"""
GATED_CASE = """
from blackwell_sparsek.testing.cases.gated_attention import SM90_CASES, gated_sm90_case
case = gated_sm90_case(*SM90_CASES[int(sys.argv[1])])
"""
REPORT = """
print(json.dumps([
    config.placed_barriers(),
    config.tile_bytes + config.spare_at,
    config.programs_per_sm * (compiled.metadata.shared + 1024),
]))
"""
# what an SM of H100 and H200 has; each program also takes 1 KiB for the system
SHARED = 228 * 1024


MORE = [
    {"consumers": 2, "tile_d": 128, "tile_dv": 128, "long": True},
    {"consumers": 3, "tile_d": 64, "tile_dv": 64, "packed": True},
    {"consumers": 1, "tile_d": 64, "tile_dv": 64, "banded": True},
    {"consumers": 2, "tile_d": 128, "tile_dv": 128, "block_size": (128, 16)},
    {"consumers": 2, "tile_d": 192, "tile_dv": 128, "banded": True},
    {"consumers": 1, "tile_d": 256, "tile_dv": 256, "block_size": (64, 64)},
]


@pytest.mark.parametrize(
    "call",
    [
        {"consumers": 1, "tile_d": 128, "tile_dv": 128, "block_size": (64, 64)},
        *(pytest.param(call, marks=pytest.mark.exhaustive) for call in MORE),
    ],
    ids=str,
)
def test_the_barriers_lie_where_the_warps_look_for_them(call):
    check_barriers(CASE, repr(call))


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [0, 2])
def test_barriers_beside_gates(case):
    check_barriers(GATED_CASE, str(case))


def check_barriers(case, argument):
    head, ptx = printed(case, REPORT, argument).split("\n", 1)
    expected, spare, shared = json.loads(head)
    assert misplaced_barriers(ptx, [tuple(barrier) for barrier in expected]) == []
    # nothing else may lie where nobody reads
    assert expected[-1][0] > spare > max(place for place, _ in expected[: len(expected) // 4])
    assert shared <= SHARED
