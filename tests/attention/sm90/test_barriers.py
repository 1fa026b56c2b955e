"""Where the Hopper forward's warps look for barriers of K and V, read in its PTX."""

import json
import re

import pytest

pytest.importorskip("triton")

from ...testing.child import printed

CASE = """
import ast
from blackwell_sparsek.testing.cases.attention import ForwardSm90, forward_sm90_case
case = forward_sm90_case(ForwardSm90(**ast.literal_eval(sys.argv[1])))
"""
REPORT = """
first = config.tile_bytes
print(json.dumps([
    2 * config.Q_STAGES,
    [
        [first + config.barrier_at(array) + 8 * stage, config.arrivals if array % 2 else 1]
        for array in range(4)
        for stage in range(config.STAGES)
    ],
    first + config.spare_at,
    config.programs_per_sm * (compiled.metadata.shared + 1024),
]))
"""
# what an SM of H100 and H200 has; each program also takes 1 KiB for the system
SHARED = 228 * 1024


@pytest.mark.parametrize(
    "call",
    [
        {"consumers": 2, "tile_d": 128, "tile_dv": 128, "long": True},
        {"consumers": 3, "tile_d": 64, "tile_dv": 64, "packed": True},
        {"consumers": 1, "tile_d": 64, "tile_dv": 64, "banded": True},
        {"consumers": 2, "tile_d": 128, "tile_dv": 128, "block_size": (128, 16)},
        {"consumers": 1, "tile_d": 128, "tile_dv": 128, "block_size": (64, 64)},
    ],
    ids=str,
)
def test_the_barriers_lie_where_the_warps_look_for_them(call):
    head, ptx = printed(CASE, REPORT, repr(call)).split("\n", 1)
    skipped, expected, spare, shared = json.loads(head)
    base = re.search(r"mov\.b32\s+(%r\d+), global_smem;", ptx)[1]
    found = [
        [int(re.search(rf"add\.s32\s+{address}, {base}, (\d+);", ptx)[1]), int(arrivals)]
        for address, arrivals in re.findall(r"mbarrier\.init\.\S+ \[(%r\d+)\], (\d+)", ptx)
    ]
    assert found[skipped : skipped + len(expected)] == expected
    # nothing else may lie where nobody reads
    assert expected[-1][0] > spare > max(place for place, _ in expected[: len(expected) // 4])
    assert shared <= SHARED
