"""Masks of packed documents against a search for each element."""

import itertools

import pytest
import torch

from blackwell_sparsek.core.errors import InvalidInput, InvalidType
from blackwell_sparsek.masks import documents as pattern_documents
from blackwell_sparsek.masks.band import band_of
from blackwell_sparsek.masks.block_mask import BlockMask
from blackwell_sparsek.masks.documents import documents


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
def test_elements(q_lengths, k_lengths, block, causal, window):
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


def test_bits_are_made_in_chunks(monkeypatch):
    lengths = [7, 30, 2, 61, 50]
    whole = documents(offsets(*lengths), 16, causal=True)
    monkeypatch.setattr(pattern_documents, "CHUNK_BLOCKS", 4)
    assert documents(offsets(*lengths), 16, causal=True).equals(whole)


def test_aligned_documents_share_bits():
    mask = documents(offsets(*[1024] * 64), 128, causal=True)
    assert mask.nnz_blocks == 64 * 36 and mask.bits.shape[0] == 1
    assert documents(offsets(*[1024] * 64), 128).bits.shape[0] == 0


def test_a_million_tokens_need_memory_of_the_tokens_and_the_bits(largest_tensor):
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
def test_refuses(cu, options, error, text):
    with pytest.raises(error, match=r"^masks.documents: .*" + text):
        documents(cu, **options)
