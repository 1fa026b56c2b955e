"""Masks of packed documents against a search for each element."""

import itertools

import pytest
import torch

from blackwell_sparsek.core.errors import InvalidInput, InvalidType
from blackwell_sparsek.masks import segments as segments_module
from blackwell_sparsek.masks.band import Band, band_of
from blackwell_sparsek.masks.block_mask import BlockMask
from blackwell_sparsek.masks.segments import (
    documents,
    every_block,
    every_key_block,
    segments,
    selected_blocks,
)

SIZES = [(1, 1), (1, 17), (15, 17), (40, 40), (33, 100), (65, 63)]
BLOCKS = [(16, 16), (16, 64), (64, 32)]


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def band_elements(band, sq, sk):
    left, right = band.scalars()
    distance = torch.arange(sk) - (torch.arange(sq)[:, None] + sk - sq)
    return (distance >= -left) & (distance <= right)


@pytest.mark.parametrize(("sq", "sk"), SIZES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("band", [Band(None, None), Band(None, 0), Band(9, 0)])
@pytest.mark.parametrize("sorted_numbers", [True, False])
def test_segments(sq, sk, block, band, sorted_numbers, generator):
    q = torch.randint(0, 3, (2, sq), generator=generator)
    k = torch.randint(0, 3, (2, sk), generator=generator)
    if sorted_numbers:
        q, k = q.sort(1).values, k.sort(1).values
    mask = segments(q, k, block, band=band)
    mask.validate()
    inside = band_elements(band, sq, sk)
    expected = (q[:, :, None] == k[:, None, :])[:, None] & inside
    assert torch.equal(mask.to_element_mask() & inside, expected)


def test_blocks_of_one_number_are_full_and_others_absent():
    numbers = torch.arange(4).repeat_interleave(32)[None]
    mask = segments(numbers, numbers, (16, 16))
    assert mask.nnz_blocks == 16 and mask.bits.shape[0] == 0


def test_blocks_outside_of_the_band_are_not_listed():
    numbers = torch.zeros(1, 64, dtype=torch.int64)
    assert segments(numbers, numbers, (16, 16), band=Band(None, 0)).nnz_blocks == 10
    assert segments(numbers, numbers, (16, 16), band=Band(15, 0)).nnz_blocks == 7


def test_segments_of_kept_blocks(generator):
    q = torch.randint(0, 2, (2, 40), generator=generator)
    keep = torch.rand(1, 3, 3, 3, generator=generator) < 0.5
    mask = segments(q, q, (16, 16), keep=keep)
    mask.validate()
    kept = keep.repeat_interleave(16, 2).repeat_interleave(16, 3)[..., :40, :40]
    expected = (q[:, :, None] == q[:, None, :])[:, None] & kept
    assert torch.equal(mask.to_element_mask(), expected)


@pytest.mark.parametrize(("sq", "sk"), SIZES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("padded", [False, True])
def test_selected_blocks(sq, sk, block, padded, generator):
    nb = -(-sk // block[1])
    selected = torch.rand(2, 3, sq, nb, generator=generator) < 0.5
    visible = torch.rand(2, sk, generator=generator) < 0.7 if padded else None
    mask = selected_blocks(selected, block, (sq, sk), visible_keys=visible)
    mask.validate()
    expected = selected.repeat_interleave(block[1], 3)[..., :sk]
    if visible is not None:
        expected = expected & visible[:, None, None]
    assert torch.equal(mask.to_element_mask(), expected)


@pytest.mark.parametrize(("sq", "sk"), SIZES)
@pytest.mark.parametrize("block", BLOCKS)
def test_masks_that_list_every_block(sq, sk, block, generator):
    keys = torch.rand(2, sk, generator=generator) < 0.5
    same = every_key_block(keys, sq, block)
    same.validate()
    expected = keys[:, None, None].expand(2, 1, sq, sk)
    assert torch.equal(same.to_element_mask(), expected)
    visible = torch.rand(2, 3, sq, sk, generator=generator) < 0.5
    mask = every_block(visible, block)
    mask.validate()
    assert torch.equal(mask.to_element_mask(), visible)
    assert mask.nnz_blocks == 6 * mask.grid[0] * mask.grid[1]


def test_bits_of_keys_do_not_grow_with_the_queries():
    keys = torch.ones(1, 256, dtype=torch.bool)
    short, long = (every_key_block(keys, sq, (64, 64)) for sq in (64, 4096))
    assert short.bits.numel() == long.bits.numel()


def offsets(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def by_definition(q_lengths, k_lengths, causal, window) -> torch.Tensor:
    left, right = band_of("op", causal, window).scalars()
    visible = torch.zeros(sum(q_lengths), sum(k_lengths), dtype=torch.bool)
    q0 = k0 = 0
    for nq, nk in zip(q_lengths, k_lengths, strict=True):
        position = torch.arange(nq).unsqueeze(1) + nk - nq
        key = torch.arange(nk)
        visible[q0 : q0 + nq, k0 : k0 + nk] = (key >= position - left) & (key <= position + right)
        q0, k0 = q0 + nq, k0 + nk
    return visible


LENGTHS = [
    ([], []),
    ([0], [0]),
    ([40], [40]),
    ([1, 15, 17, 32], [1, 15, 17, 32]),
    ([0, 20, 0, 33, 0], [0, 20, 0, 33, 0]),
    ([16, 32, 48], [16, 32, 48]),
    ([1] * 40, [1] * 40),
    ([5, 0, 7, 30], [50, 40, 0, 10]),
    ([3, 20], [0, 90]),
    ([64, 3], [2, 70]),
]


@pytest.mark.parametrize(("q_lengths", "k_lengths"), LENGTHS)
@pytest.mark.parametrize("block", [(16, 16), (32, 16), (16, 64)])
@pytest.mark.parametrize(
    ("causal", "window"), [(False, None), (True, None), (True, 4), (False, 3), (False, (None, 2))]
)
def test_documents(q_lengths, k_lengths, block, causal, window):
    cu_k = None if q_lengths == k_lengths else offsets(*k_lengths)
    cu_q = offsets(*q_lengths)
    mask = documents(cu_q, block, cu_seqlens_k=cu_k, causal=causal, window=window)
    mask.validate()
    expected = by_definition(q_lengths, k_lengths, causal, window)
    assert mask.equals(BlockMask.from_element_mask(expected, block))


def test_a_single_document_is_a_band():
    from blackwell_sparsek.masks.patterns import causal, sliding_window

    assert documents(offsets(100), 16, causal=True).equals(causal(100, 16))
    assert documents(offsets(100), 16, window=9).equals(sliding_window(100, 9, 16))


def test_bits_of_documents_are_made_in_chunks(monkeypatch):
    lengths = [7, 30, 2, 61, 50]
    whole = documents(offsets(*lengths), 16, causal=True)
    monkeypatch.setattr(segments_module, "DOCUMENT_CHUNK_BLOCKS", 4)
    assert documents(offsets(*lengths), 16, causal=True).equals(whole)


def test_aligned_documents_share_bits():
    mask = documents(offsets(*[1024] * 64), 128, causal=True)
    assert mask.nnz_blocks == 64 * 36 and mask.bits.shape[0] == 1
    assert documents(offsets(*[1024] * 64), 128).bits.shape[0] == 0


def test_documents_of_a_million_tokens_need_memory_of_the_tokens_and_the_bits(largest_tensor):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(100, 4000, (500,), generator=generator).tolist()
    with largest_tensor as largest:
        mask = documents(offsets(*lengths), 128, causal=True)
    partial = int((mask.forward.bits_id >= 0).sum())
    assert mask.nnz_blocks > 50_000
    assert largest.bytes <= max(16 * sum(lengths), 8 * 128 * 4 * partial)


@pytest.mark.parametrize(
    ("cu", "options", "error", "text"),
    [
        (offsets(4).long(), {}, InvalidType, r"cu_seqlens has an unsupported dtype; .*int32"),
        (offsets(4) + 1, {}, InvalidInput, r"cu_seqlens\[0\] is wrong; expected 0, got 1$"),
        (offsets(4, -1), {}, InvalidInput, r"cu_seqlens\[2\] falls; expected at least 4, got 3$"),
        (offsets(4), {"cu_seqlens_k": offsets(2, 2)}, InvalidInput, r"have different lengths"),
        (offsets(4), {"cu_seqlens_k": offsets(2) + 1}, InvalidInput, r"cu_seqlens_k\[0\] is wrong"),
        (offsets(4), {"window": 0}, InvalidInput, r"window sees no key"),
        (offsets(4), {"block_size": 17}, InvalidInput, r"block_size is unsupported"),
    ],
)
def test_documents_refuse(cu, options, error, text):
    with pytest.raises(error, match=r"^masks.documents: .*" + text):
        documents(cu, **options)
