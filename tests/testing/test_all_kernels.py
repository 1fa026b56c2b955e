"""Every registered kernel builds for every architecture it claims, without spills."""

import pytest

pytest.importorskip("triton")

from blackwell_sparsek.testing.cases import KERNELS
from blackwell_sparsek.testing.compile_cases import ALL_ARCHS
from blackwell_sparsek.testing.compile_only import compile_kernels, table

# Hopper has more kernels than the others: in parts, so that no worker waits for one test.
PARTS = [(arch, i, n) for arch in ALL_ARCHS for n in [8 if arch == 90 else 1] for i in range(n)]


def check(records):
    failed = [record for record in records if record["problems"]]
    assert not failed, "\n" + table(failed)
    # `bsk compile` and `bsk profile` refuse every other name
    assert {record["name"].split("/")[0] for record in records} <= set(KERNELS)


# A newcomer's run builds for the oldest GPUs and for Hopper, where most kernels are.
@pytest.mark.parametrize("arch, part, parts", [(80, 0, 1), (90, 0, 2), (90, 1, 2)])
def test_a_kernel_of_each_kind_compiles(arch, part, parts):
    records = compile_kernels([arch], part=(part, parts), one_of_each=True)
    assert len(records) > 10
    check(records)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch, part, parts", PARTS)
def test_kernels_compile(arch, part, parts):
    records = compile_kernels([arch], part=(part, parts))
    assert len(records) > 10
    check(records)
