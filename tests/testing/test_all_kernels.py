"""Every registered kernel builds for every architecture it claims, without spills."""

import pytest

pytest.importorskip("triton")

from blackwell_sparsek.testing.cases import KERNELS
from blackwell_sparsek.testing.compile_cases import ALL_ARCHS
from blackwell_sparsek.testing.compile_only import compile_kernels, table

# Hopper has more kernels than the others: in parts, so that no worker waits for one test.
# A newcomer's run builds for the oldest GPUs and for Hopper, where most kernels are.
PARTS = [
    pytest.param(arch, i, n, marks=[] if arch in (80, 90) else pytest.mark.exhaustive)
    for arch in ALL_ARCHS
    for n in [4 if arch == 90 else 1]
    for i in range(n)
]


@pytest.mark.parametrize("arch, part, parts", PARTS)
def test_kernels_compile(arch, part, parts):
    records = compile_kernels([arch], part=(part, parts))
    assert len(records) > 10
    failed = [record for record in records if record["problems"]]
    assert not failed, "\n" + table(failed)
    # `bsk compile` and `bsk profile` refuse every other name
    assert {record["name"].split("/")[0] for record in records} <= set(KERNELS)
