"""Which blocks need an element mask, and that those that do get theirs."""

import pytest
import torch

from blackwell_sparsek.attention.eager import forward as eager
from blackwell_sparsek.attention.eager.visits import Extent, block_visits
from blackwell_sparsek.calls.attention import AttnSpec
from blackwell_sparsek.masks.band import Band
from blackwell_sparsek.masks.block_mask import BlockMask
from blackwell_sparsek.reference import attention as reference
from blackwell_sparsek.testing.inputs import qkv
from blackwell_sparsek.testing.tolerance import assert_within_budget


def mask_with_one_partial_block(hidden):
    visible = torch.ones(32, 48, dtype=torch.bool)
    visible[hidden] = False
    return BlockMask.from_element_mask(visible, 16)


@pytest.mark.parametrize("hidden", [(3, 5), (20, 47)])
def test_the_only_partial_block_has_its_bits(hidden):
    """Its bits have id 0, which is not the -1 of a full block."""
    mask = mask_with_one_partial_block(hidden)
    assert mask.forward.bits_id.tolist().count(0) == 1
    visits = block_visits(mask, Band(None, None), Extent(32, 48))
    assert visits.cut_count.tolist() == [int(hidden[0] < 16), int(hidden[0] >= 16)]
    q, k, v = qkv(1, 1, 1, 32, 48, 8, seed=1)
    spec = AttnSpec(scale=0.5, block_mask=mask)
    out, lse = eager.attention(q, k, v, spec)
    exact = reference.attention(q.double(), k.double(), v.double(), spec)
    plain = reference.attention(q, k, v, spec, precision=torch.float32)
    assert_within_budget(out, exact[0], plain[0], what="out")
    assert_within_budget(lse, exact[1], plain[1], what="lse")
