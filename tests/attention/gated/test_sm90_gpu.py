"""Attention whose keys have a gate by the Hopper forward, on a Hopper GPU."""

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.testing import inputs
from blackwell_sparsek.testing.poison import poisoned_empty

from . import problems

pytestmark = pytest.mark.sm90


def mask_of(lengths, block, heads=1):
    """Kept, absent and partial blocks."""
    visible = inputs.normal(1, heads, *lengths, seed=3, device="cuda") > 0.3
    visible[..., : lengths[0] // 2, : min(16, lengths[1])] = False
    return bsk.BlockMask.from_element_mask(visible, block)


CASES = {
    "one query": {"lengths": (1, 40)},
    "one query and three keys": {"lengths": (1, 3)},
    "more queries than keys": {"lengths": (170, 90)},
    "several tiles": {"lengths": (300, 1000), "keep": 90.5},
    "long rows with few keys": {"lengths": (2000, 2000), "keep": 20.0, "dims": (128, 128)},
    "a gate per KV head": {"heads": (6, 2), "gates": 2, "lengths": (200, 333)},
    "a gate per query head": {"batch": 2, "heads": (4, 2), "gates": 4, "lengths": (65, 127)},
    "one gate for a batch": {"batch": 2, "heads": (2, 2), "gates": 2, "gate_batch": 1},
    "not causal": {"causal": False, "dims": (80, 128), "lengths": (129, 257)},
    "a window": {"window": (90, 0), "lengths": (333, 333)},
    "keys that all count": {"keep": 1000.0, "lengths": (200, 300)},
    "no keys that count": {"keep": 0.0, "lengths": (70, 130)},
    "wide query blocks": {"lengths": (300, 400), "block_mask": (128, 64), "dims": (128, 128)},
    "narrow query blocks": {"lengths": (300, 400), "block_mask": (64, 64), "dims": (128, 128)},
    "small key blocks": {"lengths": (300, 400), "block_mask": (128, 16), "heads": (4, 2)},
    "all of it": {
        **{"heads": (4, 2), "gates": 2, "window": (200, 0), "sinks": True, "lengths": (90, 333)},
        **{"softcap": 2.0, "scale": 0.7},
    },
}


def problem(name):
    given = {"dims": (64, 64), **CASES[name]}
    block = given.pop("block_mask", None)
    tensors, options = problems.problem(**given, dtype=torch.bfloat16, device="cuda")
    if block is not None:
        heads = given.get("heads", (2, 1))[0]
        options["block_mask"] = mask_of(given["lengths"], block, heads)
    return tensors, options


@pytest.mark.parametrize("name", CASES)
def test_forward(name):
    with poisoned_empty():
        problems.check_forward(*problem(name), "sm90")


@pytest.mark.parametrize("name", ["a gate per KV head", "all of it"])
def test_gradients_are_those_of_the_portable_kernels(name):
    problems.check_gradients(*problem(name), "sm90")


def test_missing_keys_are_not_read():
    """A score of -inf hides a key, even where the threshold is -inf, whatever its value is."""
    tensors, options = problem("several tiles")
    tensors["u"][..., ::7] = -torch.inf
    tensors["tau"][..., :50] = -torch.inf
    problems.check_forward(tensors, options, "sm90")


@pytest.mark.parametrize("name, place", [("u", 40), ("tau", 7)])
def test_nan_shows(name, place):
    tensors, options = problem("several tiles")
    tensors[name][..., place] = torch.nan
    out, _ = problems.ours(tensors, options, "sm90")
    rows = out.isnan().all(-1)
    last = rows.shape[-1] - 1
    assert rows[..., place if name == "tau" else last].all()
    assert rows.all() == (name == "u")


def test_a_small_weight_of_the_only_key():
    tensors, options = problems.problem(
        lengths=(17, 17), dims=(64, 64), dtype=torch.bfloat16, device="cuda"
    )
    tensors["u"][:] = -9.0
    tensors["u"][..., 4] = 1e-6
    tensors["tau"][:] = 0.0
    out, _ = problems.check_forward(tensors, options, "sm90")
    assert torch.equal(out[0, 0, 9], tensors["v"][0, 0, 4])
