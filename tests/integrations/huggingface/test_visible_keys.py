"""Which keys one query sees, with a window and padding at once."""

import pytest
import torch

pytest.importorskip("transformers")

from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from blackwell_sparsek.integrations.huggingface.visible_keys import make_visible_keys

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
