"""What `device/gluon/warps.py` relies on, read in the PTX of the product that uses it."""

import ast
import re

import pytest

pytest.importorskip("triton")

from blackwell_sparsek.core.compat import warps_may_part
from blackwell_sparsek.testing.machine_code import barriers_in

from ...testing.child import printed

pytestmark = pytest.mark.skipif(not warps_may_part(), reason="nothing runs it with this Triton")

CASE = """
from blackwell_sparsek.testing.cases import matmul
case = next(case for case in matmul.warp_rows_cases())
"""
REPORT = """
print("ring bytes", config.STAGES * config.chunk_bytes)
print("barriers", config.placed_barriers())
"""


@pytest.fixture(scope="module")
def ptx():
    return printed(CASE, REPORT)


def test_the_barriers_lie_where_the_warps_look_for_them(ptx):
    ring = int(re.search(r"ring bytes (\d+)", ptx)[1])
    expected = ast.literal_eval(re.search(r"barriers (.*)", ptx)[1])
    assert expected[0] == (ring, 1)
    assert set(barriers_in(ptx)) == set(expected)
    # and that is the offset which is added to the address in `shared_address`
    offset = re.search(r"mov\.b32 t, global_smem; add\.u32 %r\d+, t, (%r\d+);", ptx)[1]
    assert re.search(rf"mov\.b32\s+{offset}, {ring};", ptx)


def test_no_barrier_of_all_warps_lies_in_the_loops_of_the_warps(ptx):
    set_up, loops = ptx.split("mov.b32 t, global_smem;")
    assert "bar.sync" in set_up
    assert re.findall(r"\bbar\.sync\b", loops) == []
    assert len(re.findall("ldmatrix", loops)) == len(re.findall(r"mma\.sync", loops)) // 2
