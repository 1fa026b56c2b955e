"""Lists for sums of dq in a fixed order."""

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.attention.sm90 import backward_plan as attention_bwd_plan
from blackwell_sparsek.attention.sm90.backward_plan import Columns, Walk, planned_sums
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.masks.band import EVERYTHING, Band
from blackwell_sparsek.masks.block_mask import BlockMask
from blackwell_sparsek.masks.turns import turns_of_blocks

SMS = 3


@pytest.fixture
def mask(monkeypatch, device):
    """Of four query heads on two, made for few SMs, with nothing kept from call to call."""
    monkeypatch.setattr(attention_bwd_plan, "derived_list", lambda mask, make, *a: make(mask, *a))
    monkeypatch.setattr(
        attention_bwd_plan, "arch_of", lambda _: Arch("cuda", 90, SMS, 232448, False)
    )
    keep = torch.rand(1, 4, 3, 2, device=device) < 0.7
    return BlockMask.from_dense(keep, (64, 128), (180, 256))


def columns(band=EVERYTHING):
    return Columns(batch=1, heads=2, group_size=2, band=band, section=1, tile=128)


def test_in_any_order_there_are_no_turns(mask):
    order, turns, visits = planned_sums(mask, columns(), Walk(1, 1), deterministic=False)
    assert turns is None and visits is None
    assert sorted(order.tolist()) == [0, 1, 2, 3]


def test_turns_of_a_block_of_queries_are_all_there(mask):
    order, turns, visits = planned_sums(mask, columns(), Walk(1, 1), deterministic=True)
    lists = mask.transposed
    seen, heads = visits[: lists.indices.numel(), 0], lists.row_indices() // 2
    for head, block in {(int(h), int(b)) for h, b in zip(heads, seen, strict=True)}:
        of_block = turns.flatten()[(heads == head) & (seen == block)]
        assert sorted(of_block.tolist()) == list(range(len(of_block)))
    # where each program's tiles begin and end, then the tiles
    assert order[0] == 0 and order[SMS] == 4 and len(order) == SMS + 1 + 4
    assert sorted(order[SMS + 1 :].tolist()) == [0, 1, 2, 3]


def test_a_band_leaves_visits_as_they_are(mask):
    band = Band(None, 0)
    order, turns, visits = planned_sums(mask, columns(band), Walk(1, 1), deterministic=True)
    assert visits is None
    assert sorted(order.tolist()) == [0, 1, 2, 3]
    assert turns.equal(turns_of_blocks(mask, order, 2, 2, band, 128))
