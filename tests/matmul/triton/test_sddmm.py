from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.calls.matmul import PatternTensors
from blackwell_sparsek.core.errors import InvalidInput
from blackwell_sparsek.matmul.api import sddmm
from blackwell_sparsek.matmul.triton.sddmm import launch_sddmm
from blackwell_sparsek.matmul.triton.tuning import SddmmConfig
from blackwell_sparsek.testing.bsr import assert_sddmm, random_bsr
from blackwell_sparsek.testing.guard import guarded, huge_zeros
from blackwell_sparsek.testing.inputs import integers, normal
from blackwell_sparsek.testing.layouts import different_layouts
from blackwell_sparsek.testing.poison import nan_like

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
BLOCKS = [(16, 16), (48, 32), (32, 96), (128, 16), (16, 128)]
SMALL = SddmmConfig(16, 16, 16, 2, 2, "ieee", 1)


def launch(out, a, b, pattern, config, guard=lambda x: x):
    tensors = PatternTensors(*(guard(x) for x in pattern.tensors()))
    launch_sddmm(out, a, b, tensors, config)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_shape", BLOCKS)
def test_keeps_the_budget(device, dtype, block_shape):
    bh, bw = block_shape
    pattern = random_bsr((3 * bh - 7, 2 * bw + 5), block_shape, seed=1, dtype=dtype, device=device)
    a = normal(2, 3 * bh - 7, 37, seed=2, dtype=dtype, device=device)
    b = normal(2, 37, 2 * bw + 5, seed=3, dtype=dtype, device=device)
    assert_sddmm(*different_layouts(a, b, start=1), pattern, impl="triton")
    # the strides of a weight's gradient
    assert_sddmm(a.mT.contiguous().mT, b, pattern, impl="triton")


@pytest.mark.parametrize("k", [1, 15, 17, 63, 65, 300])
def test_awkward_lengths_of_the_sum(device, k):
    pattern = random_bsr((33, 47), (16, 16), seed=4, device=device)
    a, b = normal(33, k, seed=5, device=device), normal(k, 47, seed=6, device=device)
    assert_sddmm(a, b, pattern, impl="triton")


def test_batches_of_any_layout(device):
    pattern = random_bsr((20, 40), (16, 16), seed=7, device=device)
    a = normal(2, 3, 20, 5, seed=8, device=device)
    b = normal(2, 3, 5, 40, seed=9, device=device)
    assert_sddmm(a.transpose(0, 1), b.transpose(0, 1), pattern, impl="triton")
    assert_sddmm(a[:, :1].expand(2, 3, 20, 5), b, pattern, impl="triton")


def test_nothing_to_sum(device):
    pattern = random_bsr((20, 40), (16, 16), seed=10, device=device)
    zero = torch.zeros(20, 0, device=device), torch.zeros(0, 40, device=device)
    assert not sddmm(*zero, pattern, impl="triton").data.any()
    no_batch = torch.zeros(0, 20, 3, device=device), torch.zeros(0, 3, 40, device=device)
    assert not sddmm(*no_batch, pattern, impl="triton").data.any()
    none = random_bsr((16, 40), (16, 16), seed=10, density=0.0, device=device)
    a, b = torch.zeros(16, 3, device=device), torch.zeros(3, 40, device=device)
    assert sddmm(a, b, none, impl="triton").data.shape == (0, 16, 16)


@pytest.mark.parametrize("split_k", [1, 2, 3, 50])
def test_shared_sums_of_whole_numbers_are_exact(device, split_k):
    pattern = random_bsr((33, 47), (16, 16), seed=11, device=device).pattern
    a = integers(2, 33, 70, seed=12, dtype=torch.float16, device=device)
    b = integers(2, 70, 47, seed=13, dtype=torch.float16, device=device)
    out = nan_like(torch.empty(pattern.nnz_blocks, 16, 16, device=device))
    launch(out, a, b, pattern, replace(SMALL, split_k=split_k))
    assert torch.equal(out, sddmm(a.float(), b.float(), pattern, impl="reference").data)


@pytest.mark.parametrize("tiles", [(16, 32), (64, 16), (64, 64)])
def test_tiles_of_a_block(device, tiles):
    pattern = random_bsr((70, 100), (64, 64), seed=14, device=device).pattern
    a, b = integers(1, 70, 30, seed=15, device=device), integers(1, 30, 100, seed=16, device=device)
    out = nan_like(torch.empty(pattern.nnz_blocks, 64, 64, device=device))
    launch(out, a, b, pattern, replace(SMALL, tile_m=tiles[0], tile_n=tiles[1]))
    assert torch.equal(out, sddmm(a, b, pattern, impl="reference").data)


@pytest.mark.parametrize("side", ["left", "right"])
def test_nothing_outside_of_the_tensors_is_touched(interpreted, side):
    pattern = random_bsr((40, 45), (16, 16), seed=17).pattern
    a, b = normal(2, 40, 19, seed=18), normal(2, 19, 45, seed=19)
    expected = sddmm(a, b, pattern, impl="reference").data
    out = guarded(nan_like(expected), side)
    launch(out, guarded(a, side), guarded(b, side), pattern, SMALL, lambda x: guarded(x, side))
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("far", ["a", "b"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_strides_past_2_to_the_31(interpreted, far, dim):
    pattern = random_bsr((32, 32), (16, 16), seed=20, density=1.0).pattern
    tensors = {"a": integers(3, 32, 33, seed=21), "b": integers(3, 33, 32, seed=22)}
    expected = sddmm(tensors["a"], tensors["b"], pattern, impl="reference").data
    like = tensors[far]
    strides = [4096, 64, 1]
    strides[dim] = 2**31 // (like.shape[dim] - 1) + 1
    tensors[far] = huge_zeros(like.shape, like.dtype, strides)
    tensors[far].copy_(like)
    assert torch.equal(
        launch(nan_like(expected), tensors["a"], tensors["b"], pattern, SMALL), expected
    )


def test_a_config_that_does_not_fit_is_refused(device):
    pattern = random_bsr((48, 48), (48, 48), seed=23, device=device).pattern
    a = torch.zeros(1, 48, 48, device=device)
    out = torch.empty(pattern.nnz_blocks, 48, 48, device=device)
    with pytest.raises(InvalidInput, match="tile_n=32 does not divide the block width 48"):
        launch(out, a, a, pattern, replace(SMALL, tile_n=32))
    launch(out, a, a, pattern, SMALL)
