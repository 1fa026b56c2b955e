"""What was built before is launched again at once; CPU tensors in place of a GPU's."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek import BlockMask
from blackwell_sparsek.masks import build as block_mask_build
from blackwell_sparsek.masks import device_build as block_mask_kernels
from blackwell_sparsek.masks import list_kernels as kept_lists
from blackwell_sparsek.masks import order as block_order
from blackwell_sparsek.masks import order_kernels as row_order
from blackwell_sparsek.masks.band import EVERYTHING, Band

KEEP = torch.rand(1, 2, 4, 6, generator=torch.Generator().manual_seed(0)) < 0.5


class Launches:
    def __init__(self):
        self.repeated = []

    def repeat(self, addresses):
        self.repeated.append(addresses)


@pytest.fixture
def launches(monkeypatch):
    """What every builder gets back from its first launch."""
    module, found = block_mask_kernels, Launches()
    monkeypatch.setattr(module, "triton_interpreted", lambda: False)
    # the index that CPU tensors tell
    monkeypatch.setattr(module, "raw_device", lambda: -1)
    monkeypatch.setattr(module, "empty_on_gpu", torch._C._dynamo.guards._empty_strided_cpu)
    builds = module.kernels_build

    def kernels_build(device, *tensors):
        return builds(torch.device("cuda", 0), *tensors)

    for place in (module, block_mask_build, block_order):
        monkeypatch.setattr(place, "kernels_build", kernels_build)
    for known in ("_KEPT", "_TURNED", "_ORDERED"):
        monkeypatch.setattr(module, known, module.BuiltAgain())
    monkeypatch.setattr(kept_lists, "launch_kept_lists", lambda *args: found)
    monkeypatch.setattr(kept_lists, "launch_spread", lambda *args: found)
    monkeypatch.setattr(row_order, "launch_row_order", lambda *args, **options: found)
    return found


def test_a_second_mask_has_its_own_lists(launches):
    first, keep = BlockMask.from_dense(KEEP, 16, (64, 90)), KEEP.clone()
    assert not launches.repeated
    mask = BlockMask.from_dense(keep, 16, (64, 90))
    assert launches.repeated == [[x.data_ptr() for x in (*mask._listed, keep)]]
    assert [x.shape for x in mask._listed] == [x.shape for x in first._listed]
    assert not {x.data_ptr() for x in mask._listed} & {x.data_ptr() for x in first._listed}
    assert (mask.batch, mask.heads, mask.seq_lengths) == (1, 2, (64, 90))
    assert mask.block_size == (16, 16) and not mask._exact and mask.bits is first.bits


def test_sizes_in_a_list(launches):
    for _ in range(2):
        mask = BlockMask.from_dense(KEEP, [16, 32], [64, 192])
    assert len(launches.repeated) == 1 and mask.block_size == (16, 32)


@pytest.mark.parametrize(
    ("keep", "block", "lengths"),
    [
        (KEEP, 32, None),
        (KEEP, 16, (64, 90)),
        (KEEP[0], 16, None),
        (KEEP[:, :1], 16, None),
        (KEEP.transpose(2, 3).contiguous().transpose(2, 3), 16, None),
        (KEEP.clone()[..., 1:], 16, None),
    ],
    ids=["block", "lengths", "rank", "heads", "strides", "address"],
)
def test_other_masks_are_built_as_new_ones(launches, keep, block, lengths):
    BlockMask.from_dense(KEEP, 16)
    BlockMask.from_dense(keep, block, lengths)
    assert not launches.repeated


@pytest.mark.parametrize(
    ("keep", "block", "lengths"),
    [
        (KEEP, 16.0, (64, 96)),
        (KEEP, (16.0, 16), (64, 96)),
        (KEEP, 16, (64.0, 96)),
        (KEEP.int(), 16, (64, 96)),
        (KEEP.to_sparse(), 16, (64, 97)),
        ([[True]], 16, None),
        (KEEP, [16, {}], None),
    ],
)
def test_wrong_arguments_reach_the_checks(launches, keep, block, lengths):
    for size in (16, (16, 16)):
        BlockMask.from_dense(KEEP, size, (64, 96))
    with pytest.raises(bsk.BskError):
        BlockMask.from_dense(keep, block, lengths)
    assert not launches.repeated


def test_modes_see_how_masks_are_built(launches):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    BlockMask.from_dense(KEEP, 16)
    with Mode():
        assert BlockMask.from_dense(KEEP, 16).nnz_blocks == int(KEEP.sum())
    assert not launches.repeated


def test_masks_made_during_inference_may_be_saved(launches):
    for _ in range(2):
        with torch.inference_mode():
            mask = BlockMask.from_dense(KEEP, 16)
        assert not any(x.is_inference() for x in mask._listed)
    assert len(launches.repeated) == 1


def test_another_device_is_left_to_those_who_enter_it(launches, monkeypatch):
    BlockMask.from_dense(KEEP, 16)
    monkeypatch.setattr(block_mask_kernels, "raw_device", lambda: 3)
    BlockMask.from_dense(KEEP, 16)
    assert not launches.repeated


def test_transposed_lists(launches):
    masks = [BlockMask._from_parts(*parts) for parts in [_parts(), _parts()]]
    _ = masks[0]._listed_transposed
    assert not launches.repeated
    made, lists = masks[1]._listed_transposed, masks[1]._listed
    spread, listed = launches.repeated
    read = [x.data_ptr() for x in (lists.indptr, lists.indices, lists.bits_id)]
    assert spread[1:] == read and listed == [*[x.data_ptr() for x in made], spread[0]]


def _parts():
    lists = block_mask_kernels._room(8, 48, torch.device("cpu"))
    return lists, torch.empty(0, 16, 1, dtype=torch.int32), 1, 2, (64, 96), (16, 16)


def test_orders(launches):
    masks = [BlockMask._from_parts(*_parts()) for _ in range(2)]
    for mask in masks:
        _ = mask._listed_transposed
    launches.repeated.clear()
    for order, *args in (
        (block_order.longest_first, 1, 2, EVERYTHING, 2),
        (block_order.longest_first, 1, 2, Band(None, 0), 2),
        (block_order.longest_columns_first, 1, 1, 2, EVERYTHING, 1, 16),
    ):
        first = order(masks[0], *args)
        assert not launches.repeated
        second = order(masks[1], *args)
        columns = order is block_order.longest_columns_first
        lists = masks[1]._listed_transposed if columns else masks[1]._listed
        expected = [x.data_ptr() for x in (second, lists.indptr, lists.indices)]
        assert launches.repeated.pop() == expected
        assert second.shape == first.shape and second.data_ptr() != first.data_ptr()
