"""What `device/gluon/cluster.py` relies on, read in the PTX of the product that uses it."""

import re

import pytest

pytest.importorskip("triton")

from blackwell_sparsek.core.compat import warps_may_part

from ...testing.child import printed

pytestmark = pytest.mark.skipif(not warps_may_part(), reason="nothing runs it with this Triton")

CASE = """
from blackwell_sparsek.testing.cases import matmul
case = next(case for case in matmul.paired_cases() if case.name.endswith("64x64-paired-wide"))
"""
REPORT = """
print("offset", config.bars_offset, "stages", config.STAGES, "shared", compiled.metadata.shared)
print("bytes", config.shared_bytes, "parameters", config.a_parameter, config.x_parameter)
"""


@pytest.fixture(scope="module")
def ptx():
    return printed(CASE, REPORT)


def test_the_barriers_lie_where_the_partner_looks_for_them(ptx):
    offset, stages = map(int, re.search(r"offset (\d+) stages (\d+)", ptx).groups())
    base = re.search(r"mov\.b32\s+(%r\d+), global_smem;", ptx)[1]
    inits = re.findall(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\], (\d+);", ptx)
    places = dict(re.findall(rf"add\.s32\s+(%r\d+), {base}, (\d+);", ptx))
    found = [(int(places[register]) - offset, int(count)) for register, count in inits]
    ring = [(8 * i, 1) for i in range(stages)] + [(8 * (stages + i), 16) for i in range(stages)]
    scheduler = [(16 * stages, 1), (16 * stages + 8, 2)]
    assert sorted(found)[: 2 * stages + 2] == ring + scheduler
    # the compiler's own come behind it, and all fits
    shared, allowed = (
        int(re.search(r"shared (\d+)", ptx)[1]),
        int(re.search(r"bytes (\d+)", ptx)[1]),
    )
    assert all(place < 0 or place >= 1024 for place, _ in sorted(found)[2 * stages + 2 :])
    assert shared <= allowed


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
