"""What the exchange of `device/gluon/cluster.py` relies on, read in the PTX of its product."""

import re

import pytest

pytest.importorskip("triton")

from blackwell_sparsek.core.compat import warps_may_part

from ...testing.child import printed

pytestmark = pytest.mark.skipif(not warps_may_part(), reason="nothing runs it with this Triton")

CASE = """
import torch
from blackwell_sparsek.testing.cases import matmul
from blackwell_sparsek.testing.cases.fp8 import hopper_products
name = sys.argv[1]
cases = hopper_products() if "fp8" in name else matmul.split_cases()
case = next(case for case in cases if case.name == name)
if sys.argv[2] == "fp32":
    case = matmul.narrow_sm90_case(case.args["CFG"], out_dtype=torch.float32)
"""
REPORT = """
tiles = config.exchange_tiles * config.ITEM_BYTES * config.TILE_M * config.TILE_K
print("at", config.exchange_offset, "bytes", config.exchange_bytes, "tiles", tiles)
"""


MORE = [
    ("bsr_spmm_narrow_sm90/128x128-64x16x128-stages10-parts2", "same"),
    ("bsr_spmm_narrow_sm90/64x64-64x64x64-stages6-parts2-extras", "same"),
    ("bsr_spmm_narrow_fp8_sm90/parts2-128x128-n64", "same"),
]


@pytest.fixture(
    scope="module",
    params=[
        # moving sums takes the most memory
        ("bsr_spmm_narrow_sm90/128x128-64x64x128-stages6-parts2", "fp32"),
        *(pytest.param(case, marks=pytest.mark.exhaustive) for case in MORE),
    ],
    ids="-".join,
)
def ptx(request):
    return printed(CASE, REPORT, *request.param)


def test_nothing_else_lies_where_sums_arrive(ptx):
    begin, nbytes, room = map(int, re.search(r"at (\d+) bytes (\d+) tiles (\d+)", ptx).groups())
    end = begin + room
    # a barrier behind the sums
    assert begin + nbytes + 8 <= end
    bases = re.findall(r"mov\.b32\s+(%r\d+), global_smem;", ptx)
    assert bases
    known = rf"add\.s32\s+%r\d+, (?:{'|'.join(map(re.escape, bases))}), (\d+);"
    places = {int(place) for place in re.findall(known, ptx)}
    places |= {int(place) for place in re.findall(r"\[global_smem\+(\d+)\]", ptx)}
    assert not [place for place in places if begin <= place < end]
    # blocks lie before it and x behind it: the first copies of both, from outside of the tensors
    copies = re.findall(r"cp\.async\.bulk\.tensor\.2d\S* \[(%r\d+)\]", ptx)
    assert copies[0] in bases
    assert end in places


def test_the_exchange_does_not_wait_for_memory(ptx):
    assert "st.async.weak.shared::cluster" in ptx
    assert "release.cluster" not in ptx.replace("fence.mbarrier_init.release.cluster", "")
    sent, received = ptx.index("st.async"), ptx.rindex("ld.shared.v4.f32")
    assert sent < received
    assert "fence" not in ptx[sent:received]
    assert "bar.sync" not in ptx[sent:received]
