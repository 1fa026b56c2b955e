"""Which keys one query sees, with a window and padding at once."""

import pytest
import torch

pytest.importorskip("transformers")

from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

import blackwell_sparsek as bsk
from blackwell_sparsek.integrations.huggingface.visible_keys import VisibleKeys, make_visible_keys
from blackwell_sparsek.masks.band import Band
from blackwell_sparsek.testing.inputs import normal

LENGTH, WINDOW = 12, 4


def plan_for(padded, window=WINDOW, at=LENGTH - 1):
    """The plan of the query in slot `at`; the slots `padded` of the first sequence are padding."""
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    real[0, padded] = False
    function = (
        causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    )
    plan = make_visible_keys(
        2, 1, LENGTH, q_offset=at, mask_function=function, attention_mask=real, device="cpu"
    )
    slot = torch.arange(LENGTH)
    left = LENGTH if window is None else window
    return plan, (slot <= at) & (slot > at - left) & real


@pytest.mark.parametrize("hidden_by", ["block mask", "segments", "band alone"])
def test_every_reason_to_hide_a_key_is_among_the_elements(hidden_by):
    """A model gets them that computes attention itself; slots past the keys are empty."""
    numbers = torch.arange(LENGTH)[None] // 5
    mask = bsk.BlockMask.from_element_mask(normal(1, 1, LENGTH, LENGTH, seed=0) > 0, 16)
    options, shown = {
        "block mask": ({"block_mask": mask}, mask.to_element_mask()),
        "segments": ({"segments": (numbers, numbers)}, numbers[:, None, :, None] == numbers),
        "band alone": ({}, torch.tensor(True)),
    }[hidden_by]
    keys = VisibleKeys(LENGTH, 20, band=Band(None, 0), key_length=LENGTH, device="cpu", **options)
    expected = torch.zeros(1, 1, LENGTH, 20, dtype=torch.bool)
    expected[..., :LENGTH] = shown & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    assert torch.equal(keys.elements, expected)


@pytest.mark.parametrize("at", [LENGTH - 1, LENGTH - 3])
@pytest.mark.parametrize("back", range(WINDOW))
def test_padding_inside_the_window_is_hidden(at, back):
    plan, expected = plan_for([at - back], at=at)
    assert plan.lengths.tolist() == [at + 1] * 2
    assert torch.equal(plan.visible, expected)


@pytest.mark.parametrize("at", [LENGTH - 1, LENGTH - 3])
def test_padding_outside_the_window_needs_no_list(at):
    hidden = [at - WINDOW, *range(at + 1, LENGTH)]
    plan, _ = plan_for(hidden, at=at)
    assert plan.visible is None and plan.band.left == WINDOW - 1
    plan, expected = plan_for(hidden, window=None, at=at)
    assert torch.equal(plan.visible, expected)
