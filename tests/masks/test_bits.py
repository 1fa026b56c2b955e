"""Bit masks: packing, transposing, intervals, merging."""

import pytest
import torch

from blackwell_sparsek.masks import bits


@pytest.mark.parametrize("bk", [1, 16, 31, 32, 33, 64, 128, 256])
def test_each_bit_stands_where_the_format_says(bk):
    packed = bits.pack(torch.eye(bk, dtype=torch.bool))
    assert packed.shape == (bk, -(-bk // 32)) and packed.dtype == torch.int32
    for j in range(bk):
        word = packed[j, j // 32].item() & 0xFFFFFFFF
        assert word == 1 << (j % 32)
        assert packed[j].count_nonzero() == 1


@pytest.mark.parametrize("shape", [(0, 16, 16), (3, 16, 16), (2, 64, 32), (2, 16, 256)])
def test_pack_and_transpose_round_trip(shape):
    visible = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5
    packed = bits.pack(visible)
    assert torch.equal(bits.unpack(packed, shape[-1]), visible)
    flipped = bits.transpose(packed, shape[-1])
    assert torch.equal(bits.unpack(flipped, shape[-2]), visible.transpose(1, 2))


@pytest.mark.parametrize("bk", [16, 32, 64, 128])
def test_intervals(bk):
    generator = torch.Generator().manual_seed(1)
    lo = torch.randint(-bk, 2 * bk, (5, 16), generator=generator)
    hi = lo + torch.randint(-3, bk, (5, 16), generator=generator)
    j = torch.arange(bk)
    expected = (j >= lo.unsqueeze(-1)) & (j < hi.unsqueeze(-1))
    assert torch.equal(bits.from_intervals(lo, hi, bk), bits.pack(expected))
    whole = bits.from_intervals(torch.zeros(1, 1).long(), torch.full((1, 1), 2**30), bk)
    assert bits.unpack(whole, bk).all()


def test_deduplicate_merges_equal_masks_only():
    distinct = torch.randint(
        -(2**31), 2**31, (300, 16, 2), generator=torch.Generator().manual_seed(2), dtype=torch.int32
    )
    order = torch.cat([torch.arange(300), torch.tensor([3, 0, 3, 4, 1, 0, 2, 4])])
    pool, ids = bits.deduplicate(distinct[order])
    assert pool.shape[0] == 300 and ids.dtype == torch.int32
    assert torch.equal(pool[ids], distinct[order])


def test_deduplicate_tells_single_bits_apart():
    masks = bits.pack(torch.eye(16 * 64, dtype=torch.bool).view(-1, 16, 64)).repeat(2, 1, 1)
    pool, ids = bits.deduplicate(masks)
    assert pool.shape[0] == 16 * 64
    assert torch.equal(pool[ids], masks)


def test_deduplicate_survives_a_collision_of_hashes(monkeypatch):
    real = torch.unique
    monkeypatch.setattr(torch, "unique", lambda x, **kw: real(torch.zeros_like(x), **kw))
    masks = torch.arange(6, dtype=torch.int32).view(3, 2, 1)
    pool, ids = bits.deduplicate(masks)
    assert torch.equal(pool[ids], masks)


@pytest.mark.parametrize("count", [0, 1])
def test_deduplicate_of_little(count):
    pool, ids = bits.deduplicate(torch.ones(count, 16, 1, dtype=torch.int32))
    assert pool.shape[0] == count and ids.tolist() == [0] * count
