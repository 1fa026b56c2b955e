"""Every registered kernel builds for every architecture it claims, without spills."""

import pytest

pytest.importorskip("triton")

from blackwell_sparsek.core.compile_cases import ALL_ARCHS
from blackwell_sparsek.testing.compile_only import compile_kernels, table


@pytest.mark.parametrize("arch", ALL_ARCHS)
def test_kernels_compile(arch):
    records = compile_kernels([arch])
    assert any(record["name"].startswith("merge_states/") for record in records)
    failed = [record for record in records if record["problems"]]
    assert not failed, "\n" + table(failed)
