"""Masks built by kernels, through the public functions, against those that torch builds."""

import pickle

import pytest
import torch

from blackwell_sparsek import BlockMask, masks
from blackwell_sparsek.masks import build as block_mask_build
from blackwell_sparsek.masks import device_build as block_mask_kernels
from blackwell_sparsek.masks import order as block_order
from blackwell_sparsek.masks import parts as pattern_parts
from blackwell_sparsek.masks import topk as pattern_kept
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
                for module in (block_mask_build, block_order, pattern_kept, pattern_parts):
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
def test_order_of_lists_with_room(band, by_kernels, device):
    keep = kept((1, 2, 9, 9), seed=5)
    expected = block_order.longest_first(BlockMask.from_dense(keep, 16), 2, 2, band, 2)
    mask = by_kernels(BlockMask.from_dense, keep.to(device), 16)
    made = by_kernels(block_order.longest_first, mask, 2, 2, band, 2)
    assert torch.equal(made.cpu(), expected)
    assert mask._listed.indices.numel() == keep.numel()


def test_columns_of_lists_with_room(by_kernels, device):
    keep = kept((1, 4, 9, 7), seed=6)
    args = (2, 2, 2, EVERYTHING, 1, 16)
    expected = block_order.longest_columns_first(BlockMask.from_dense(keep, 16), *args)
    mask = by_kernels(BlockMask.from_dense, keep.to(device), 16)
    made = by_kernels(block_order.longest_columns_first, mask, *args)
    assert torch.equal(made.cpu(), expected)


def test_large_masks_are_left_to_torch(monkeypatch, by_kernels, device):
    monkeypatch.setattr(block_mask_build, "MAX_ROOM", 20)
    keep = kept((1, 1, 5, 5))
    mask = by_kernels(BlockMask.from_dense, keep.to(device), 16)
    assert mask._listed.indices.numel() == int(keep.sum())


def test_kernels_build_nothing_on_the_cpu_or_while_traced():
    assert not block_mask_kernels.kernels_build(torch.device("cpu"))
    with torch._subclasses.FakeTensorMode():
        assert not block_mask_kernels.kernels_build(torch.device("cuda"))
