"""Lists made from masks: once for each, the same for all who ask."""

import gc
import weakref

import pytest
import torch

from blackwell_sparsek.launch.recording import recording
from blackwell_sparsek.launch.replay import Bound
from blackwell_sparsek.masks import derived_lists as module
from blackwell_sparsek.masks.block_mask import BlockMask
from blackwell_sparsek.masks.derived_lists import derived_list


@pytest.fixture
def gpu(monkeypatch):
    """CPU tensors count as a GPU's; `stream` and `capturing` are what it is asked for."""
    state = {"stream": 1, "capturing": False}
    monkeypatch.setattr(module, "raw_device", lambda: None)
    monkeypatch.setattr(module, "raw_stream", lambda device: state["stream"])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    return state


def rows(mask, width):
    return torch.zeros(width)


def from_rows(mask, width):
    """Cuts the lists, which nobody else may notice."""
    mask._trim()
    return derived_list(mask, rows, width).clone()


def masks():
    """As a user has it, and as operators get it."""
    mask = BlockMask.from_dense(torch.eye(2, dtype=torch.bool), 16)
    sizes = ((32, 32), (16, 16))
    return [mask, BlockMask._from_tensors(mask.tensors(), 1, 1, *sizes)], sizes


def test_a_list_is_made_once(gpu):
    for mask in masks()[0]:
        first = derived_list(mask, rows, 4)
        assert derived_list(mask, rows, 4) is first
        assert derived_list(mask, rows, 5) is not first
        gpu["stream"] = 2
        assert derived_list(mask, rows, 4) is not first
        gpu["stream"] = 1
        assert derived_list(mask, rows, 4) is first


def test_all_objects_for_the_tensors_of_a_mask_have_one_list(gpu):
    (mask, one), sizes = masks()
    another = BlockMask._from_tensors(mask.tensors(), 1, 1, *sizes)
    assert derived_list(one, rows, 4) is derived_list(another, rows, 4)


def test_a_list_made_from_another_is_made_from_the_one_that_is_kept(gpu):
    for mask in masks()[0]:
        mask._exact = False
        listed = mask._listed
        with recording() as record:
            first = derived_list(mask, rows, 4)
            second = derived_list(mask, from_rows, 4)
        assert derived_list(mask, rows, 4) is first and mask._listed is listed
        noted = dict(record.derived)
        assert noted[(rows, (4,))] is first and noted[(from_rows, (4,))] is second


def test_a_capture_keeps_nothing(gpu):
    (mask, tensors), _ = masks()
    kept = derived_list(tensors, rows, 4)
    gpu["capturing"], gpu["stream"] = True, 9
    assert derived_list(tensors, rows, 4) is kept and derived_list(mask, rows, 4) is kept
    assert derived_list(mask, rows, 5) is not derived_list(mask, rows, 5)


def test_what_a_graph_was_given_ends_with_the_mask(gpu, monkeypatch):
    """It replays with the addresses of the lists, whatever the mask is used for in between."""
    monkeypatch.setattr(module, "MAX_LISTS", 2)
    (mask, _), _ = masks()
    known = [derived_list(mask, rows, 4), derived_list(mask, rows, 5)]
    launches = Bound(lambda addresses: (), (*mask._forward, known[1]))
    gpu["capturing"] = True
    assert derived_list(mask, rows, 4) is known[0]
    launches([])
    inside = derived_list(mask, rows, 6)
    Bound(lambda addresses: (), (*mask._forward, inside))([])
    gpu["capturing"] = False
    alive = [weakref.ref(x) for x in known]
    of_pool = weakref.ref(inside)
    del known, launches, inside
    gc.collect()
    assert of_pool() is None
    for width in range(10, 15):
        derived_list(mask, rows, width)
    gc.collect()
    assert all(x() is not None for x in alive)
    del mask, _
    gc.collect()
    assert all(x() is None for x in alive)


def test_few_lists_are_kept_and_end_with_their_mask(gpu, monkeypatch):
    monkeypatch.setattr(module, "MAX_LISTS", 2)
    before = len(module._LISTS)
    made, _ = masks()
    for mask in made:
        for width in range(5):
            derived_list(mask, rows, width)
    assert len(made[0]._derived) <= 2 and len(module._LISTS) == before + 1
    del made, mask
    gc.collect()
    assert len(module._LISTS) == before
