"""What `device/gluon/cluster.py` relies on, read in the PTX of the product that uses it."""

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
case = next(case for case in matmul.paired_cases() if case.name.endswith("64x64-paired-wide"))
"""
REPORT = """
print("barriers", config.placed_barriers())
print("tiles", config.a_offset, config.x_offset, "shared", compiled.metadata.shared)
print("bytes", config.shared_bytes, "parameters", config.a_parameter, config.x_parameter)
"""


@pytest.fixture(scope="module")
def ptx():
    return printed(CASE, REPORT)


def test_the_barriers_lie_where_the_partner_looks_for_them(ptx):
    expected = ast.literal_eval(re.search(r"barriers (.*)", ptx)[1])
    found = barriers_in(ptx)
    assert set(expected) <= set(found)
    # the compiler's own come behind the KiB of these, and all fits
    offset = expected[0][0]
    assert all(at >= offset + 1024 for at, _ in set(found) - set(expected))
    shared, allowed = (int(re.search(rf"{name} (\d+)", ptx)[1]) for name in ("shared", "bytes"))
    assert shared <= allowed


def test_the_tiles_lie_where_they_are_copied_to(ptx):
    """Larger allocations come first: X is at 0, and both consumers look for A behind it."""
    a, x = map(int, re.search(r"tiles (\d+) (\d+)", ptx).groups())
    assert x == 0 < a
    roles = re.split(r"setmaxnreg\.\S+\s+\d+;", ptx)
    products = [role for role in roles if "wgmma.mma_async" in role]
    assert len(products) == 2
    assert all(re.search(rf"add\.s32\s+%r\d+, %r\d+, {a};", role) for role in products)


def test_the_descriptors_have_the_names_that_assembly_gives_them(ptx):
    a, x = re.search(r"parameters (\w+) (\w+)", ptx).groups()
    declared = re.findall(r"\.param \.align 64 \.b8 (\w+)\[128\]", ptx)
    assert declared[:2] == [a, x]
    assert set(re.findall(r"mov\.b64 d, (\w+);", ptx)) == {a, x}


def test_nothing_waits_for_memory_in_the_loops(ptx):
    """A release to the cluster and a fence before each copy took longer than the copies."""
    assert "arrive.release.cluster" not in ptx
    assert re.findall(r"atom\.global\.\S+", ptx) == ["atom.global.gpu.relaxed.add.u32"]
    producer = ptx.split("cp.async.bulk.tensor.3d")[1:]
    assert not any("fence.proxy.async" in part for part in producer[:-1])
