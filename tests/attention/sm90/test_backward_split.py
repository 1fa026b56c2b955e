"""When the kernel of the queries gives memory back to copies, read in its PTX."""

import pytest

pytest.importorskip("triton")

from ...testing.child import printed

CASE = """
from blackwell_sparsek.testing.cases import attention
name = "attn_bwd_queries_sm90/bfloat16-d64-64-blocks64x64"
case = next(case for case in attention.split_sm90_cases() if case.name == name)
"""


def test_memory_is_given_back_behind_a_product_with_what_was_loaded_from_it():
    """Right behind the load, the next copy was there before all threads had read."""
    ptx = printed(CASE, "")
    assert ptx.count("ldmatrix") > 1
    behind = ptx.rpartition("ldmatrix")[2]
    until_given_back = behind.partition("mbarrier.arrive.shared")[0]
    assert "wgmma.wait_group.sync.aligned 0;" in until_given_back
    assert until_given_back.count("wgmma.mma_async") > 1
