"""Where the warps of the Hopper kernel look for barriers of K and V, read in its PTX."""

import json

import pytest

pytest.importorskip("triton")

from blackwell_sparsek.testing.machine_code import misplaced_barriers

from ..testing.child import printed

CASE = """
from blackwell_sparsek.testing.cases.ragged import ragged_sm90_cases
case = next(case for case in ragged_sm90_cases() if case.name.endswith(sys.argv[1]))
"""
REPORT = """
places = [config.placed_barriers(), config.tile_bytes + config.spare_at]
print(json.dumps([*places, compiled.metadata.shared]))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["pages256", "everything"])
def test_the_barriers_lie_where_the_warps_look_for_them(name):
    head, ptx = printed(CASE, REPORT, name).split("\n", 1)
    expected, spare, shared = json.loads(head)
    assert misplaced_barriers(ptx, [tuple(barrier) for barrier in expected]) == []
    # nothing else may lie where nobody reads
    assert expected[-1][0] > spare > max(place for place, _ in expected[: len(expected) // 4])
    # what a program may have on H100 and H200
    assert shared <= 227 * 1024
