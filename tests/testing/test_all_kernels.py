"""Every registered kernel builds for every architecture it claims, without spills."""

import pytest

pytest.importorskip("triton")

from blackwell_sparsek.testing.cases import KERNELS
from blackwell_sparsek.testing.compile_cases import ALL_ARCHS
from blackwell_sparsek.testing.compile_only import compile_kernels, table

# All variants are built for the oldest GPUs and for Hopper, which has more kernels than the others:
# in parts, so that no worker waits for one test. `python -m blackwell_sparsek.testing.compile_only
# --arch sm_120` builds all of them for another GPU, which takes ten minutes.
PARTS = [(80, i, 2) for i in range(2)] + [(90, i, 8) for i in range(8)]
OTHERS = [arch for arch in ALL_ARCHS if arch not in (80, 90)]


def check(records):
    failed = [record for record in records if record["problems"]]
    assert not failed, "\n" + table(failed)
    # `bsk compile` and `bsk profile` refuse every other name
    assert {record["name"].split("/")[0] for record in records} <= set(KERNELS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", OTHERS)
def test_a_kernel_of_each_kind_compiles_for_other_gpus(arch):
    records = compile_kernels([arch], one_of_each=True)
    assert len(records) > 10
    check(records)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch, part, parts", PARTS)
def test_kernels_compile(arch, part, parts):
    records = compile_kernels([arch], part=(part, parts))
    assert len(records) > 10
    check(records)
