"""Masks built by kernels, through the public functions, against those that torch builds."""

import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import blackwell_sparsek as bsk
from blackwell_sparsek import BlockMask, masks
from blackwell_sparsek.masks import block_mask, device_build, from_bools, parts, topk
from blackwell_sparsek.masks import list_kernels as kept_lists
from blackwell_sparsek.masks import order as block_order
from blackwell_sparsek.masks import order_kernels as row_order
from blackwell_sparsek.masks.band import EVERYTHING, Band
from blackwell_sparsek.masks.topk import kept_blocks

pytest.importorskip("triton")


@pytest.fixture
def by_kernels(monkeypatch, device):
    """Calls a function with the kernels switched on, interpreted where there is no GPU."""
    on_gpu = torch.device(device).type == "cuda"

    def call(make, *args, **kwargs):
        with monkeypatch.context() as patch:
            if not on_gpu:
                for module in (block_mask, from_bools, block_order, topk, parts):
                    patch.setattr(module, "kernels_build", lambda *tensors: True)
            return make(*args, **kwargs)

    return call


def kept(shape, density=0.4, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density


def same_lists(a, b):
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(a, b, strict=True))


KEEPS = [
    (kept((2, 3, 5, 7)), (16, 32), (75, 200)),
    (kept((9, 4)), 16, None),
    (torch.zeros(1, 1, 3, 3).bool(), 64, 190),
    (torch.ones(1, 2, 3, 4).bool(), 64, None),
    (torch.eye(5).bool()[None, None].expand(2, 3, 5, 5), 16, 78),
    (kept((1, 2, 1, 1)), 128, 1),
]


@pytest.mark.parametrize(("keep", "block", "lengths"), KEEPS)
def test_from_dense(keep, block, lengths, by_kernels, device):
    expected = BlockMask.from_dense(keep, block, lengths)
    mask = by_kernels(BlockMask.from_dense, keep.to(device), block, lengths)
    assert mask._listed.indices.numel() == keep.numel()
    assert by_kernels(lambda: mask._listed_transposed).indices.numel() == keep.numel()
    assert mask.nnz_blocks == expected.nnz_blocks == int(keep.sum())
    assert mask.density == expected.density
    assert same_lists(mask.forward, expected.forward)
    assert same_lists(mask.transposed, expected.transposed)
    assert mask.equals(expected.to(device))
    assert torch.equal(mask.to_dense().cpu(), expected.to_dense())
    mask.validate()


def test_kept_lists_know_their_count_before_they_leave(by_kernels, device):
    keep = kept((1, 2, 5, 6))
    expected = BlockMask.from_dense(keep, 16)

    def fresh():
        return by_kernels(BlockMask.from_dense, keep.to(device), 16)

    assert same_lists(pickle.loads(pickle.dumps(fresh()))._listed, expected._listed)
    assert f"nnz_blocks={expected.nnz_blocks}" in repr(fresh())
    assert fresh().equals(fresh())
    transposed = fresh().T
    assert same_lists(transposed._listed, expected.T._listed)
    assert same_lists(transposed.transposed, expected.forward)
    mask = fresh()
    listed = mask.tensors(for_gradients=False)
    assert listed[0] is mask._listed.indptr and listed[2].numel() == keep.numel()


def test_transposed_lists_of_partial_blocks(by_kernels, device):
    elements = torch.rand(2, 1, 70, 90, generator=torch.Generator().manual_seed(3)) < 0.5
    elements[..., 16:48, :] = True
    elements[..., 48:64, 32:] = False
    expected = BlockMask.from_element_mask(elements, (16, 32))
    mask = BlockMask.from_element_mask(elements.to(device), (16, 32))
    assert same_lists(by_kernels(lambda: mask.transposed), expected.transposed)


@pytest.mark.parametrize("lengths", [1, 200, (65, 300), (300, 65), (0, 5)])
@pytest.mark.parametrize("window", [1, 40, (None, 3), (17, None)])
def test_windows(lengths, window, by_kernels, device):
    expected = masks.sliding_window(lengths, window, (16, 64))
    mask = by_kernels(masks.sliding_window, lengths, window, (16, 64), device=device)
    assert same_lists(mask.forward, expected.forward)
    assert torch.equal(mask.bits.cpu(), expected.bits)
    assert same_lists(by_kernels(lambda: mask.transposed), expected.transposed)


@pytest.mark.parametrize("most", [1, 3, 6, 200])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 5, 7), (1, 2, 9, 130)])
def test_kept_blocks_with_a_bound(shape, most, by_kernels, device):
    # some rows keep more than the bound, some nothing, some all
    keep = kept(shape, 0.4)
    keep[0, 0, 0] = True
    keep[-1, -1, -1] = False
    sizes = (16, 16), (shape[2] * 16, shape[3] * 16 - 3)
    expected = kept_blocks(keep, most, *sizes)
    mask = by_kernels(kept_blocks, keep.to(device), most, *sizes)
    assert same_lists((*mask.forward, mask.bits), (*expected.forward, expected.bits))


def test_causal(by_kernels, device):
    expected = masks.causal((100, 140), 32)
    mask = by_kernels(masks.causal, (100, 140), 32, device=device)
    assert same_lists((*mask.forward, mask.bits), (*expected.forward, expected.bits))


@pytest.mark.parametrize("band", [EVERYTHING, Band(30, 0)])
def test_order_of_lists_with_spare_entries(band, by_kernels, device):
    keep = kept((1, 2, 9, 9), seed=5)
    expected = block_order.longest_first(BlockMask.from_dense(keep, 16), 2, 2, band, 2)
    mask = by_kernels(BlockMask.from_dense, keep.to(device), 16)
    made = by_kernels(block_order.longest_first, mask, 2, 2, band, 2)
    assert torch.equal(made.cpu(), expected)
    assert mask._listed.indices.numel() == keep.numel()


def test_columns_of_lists_with_spare_entries(by_kernels, device):
    keep = kept((1, 4, 9, 7), seed=6)
    args = (2, 2, 2, EVERYTHING, 1, 16)
    expected = block_order.longest_columns_first(BlockMask.from_dense(keep, 16), *args)
    mask = by_kernels(BlockMask.from_dense, keep.to(device), 16)
    made = by_kernels(block_order.longest_columns_first, mask, *args)
    assert torch.equal(made.cpu(), expected)


def test_trimmed_lists_stay_where_they_are(by_kernels, device):
    """A CUDA graph that was captured before has their addresses."""
    keep = kept((1, 2, 9, 9), seed=5)
    mask = by_kernels(BlockMask.from_dense, keep.to(device), 16)
    listed = [*mask._listed, *by_kernels(lambda: mask._listed_transposed)]
    assert all(x.numel() > keep.sum() for x in (listed[2], listed[6]))
    trimmed = [*mask.forward, *mask.transposed]
    assert all(x.numel() == keep.sum() for x in (trimmed[2], trimmed[6]))
    assert [x.data_ptr() for x in trimmed] == [x.data_ptr() for x in listed]


def test_large_masks_are_left_to_torch(monkeypatch, by_kernels, device):
    monkeypatch.setattr(from_bools, "MAX_LISTED_BLOCKS", 20)
    keep = kept((1, 1, 5, 5))
    mask = by_kernels(BlockMask.from_dense, keep.to(device), 16)
    assert mask._listed.indices.numel() == int(keep.sum())


def test_kernels_build_nothing_on_the_cpu_or_while_traced():
    assert not device_build.kernels_build(torch.device("cpu"))
    with torch._subclasses.FakeTensorMode():
        assert not device_build.kernels_build(torch.device("cuda"))


# Builds that repeat recorded launches, with CPU tensors in place of a GPU's.

KEEP = torch.rand(1, 2, 4, 6, generator=torch.Generator().manual_seed(0)) < 0.5


class Launches:
    def __init__(self):
        self.repeated = []

    def repeat(self, addresses):
        self.repeated.append(addresses)


@pytest.fixture
def launches(monkeypatch):
    """What every builder gets back from its first launch."""
    module, found = device_build, Launches()
    monkeypatch.setattr(module, "triton_interpreted", lambda: False)
    # the index that CPU tensors tell
    monkeypatch.setattr(module, "raw_device", lambda: -1)
    monkeypatch.setattr(module, "empty_on_gpu", torch._C._dynamo.guards._empty_strided_cpu)
    builds = module.kernels_build

    def kernels_build(device, *tensors):
        return builds(torch.device("cuda", 0), *tensors)

    for place in (module, block_mask, from_bools, block_order):
        monkeypatch.setattr(place, "kernels_build", kernels_build)
    for known in ("_KEPT", "_TRANSPOSED", "_ORDERED"):
        monkeypatch.setattr(module, known, module.BuildPlans())
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
    monkeypatch.setattr(device_build, "raw_device", lambda: 3)
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
    lists = device_build._empty_lists(8, 48, torch.device("cpu"))
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
