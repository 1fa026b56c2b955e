"""A mask from whole blocks, made without lengths, fits every length that has as many blocks."""

import copy
import pickle
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek import InvalidInput
from blackwell_sparsek.testing.inputs import normal

KEEP = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 0], [0, 1, 1, 0]], dtype=torch.bool)
LENGTHS = [(48, 64), (33, 49), (47, 50)]


def inputs(sq, sk, dtype=torch.float32):
    return (normal(2, 4, sq, 16, seed=0).to(dtype), *(normal(2, 2, sk, 16, seed=s) for s in (1, 2)))


@pytest.mark.parametrize("impl", ["eager", "reference"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_results_are_those_of_a_mask_made_for_the_lengths(lengths, impl):
    q, k, v = inputs(*lengths)
    q.requires_grad_(True)
    results = []
    for mask in (
        bsk.BlockMask.from_dense(KEEP, 16),
        bsk.BlockMask.from_dense(KEEP, 16, seq_lengths=lengths),
    ):
        out = bsk.attention(q, k, v, causal=True, block_mask=mask, impl=impl)
        results.append((out, torch.autograd.grad(out.square().sum(), q)[0]))
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)


def test_one_mask_serves_several_lengths_and_makes_each_once():
    mask = bsk.BlockMask.from_dense(KEEP, 16)
    for lengths in (*LENGTHS, *LENGTHS):
        q, k, v = inputs(*lengths)
        expected = bsk.BlockMask.from_dense(KEEP, 16, seq_lengths=lengths)
        ours = bsk.attention(q, k, v, block_mask=mask)
        assert torch.equal(ours, bsk.attention(q, k, v, block_mask=expected))
    assert mask.for_lengths(33, 49) is mask.for_lengths(33, 49)
    assert mask.for_lengths(48, 64) is mask
    assert mask.for_lengths(33, 49).seq_lengths == (33, 49)


def test_packed_sequences_take_it_too():
    mask = bsk.BlockMask.from_dense(KEEP[:, :3], 16)
    offsets = torch.tensor([0, 40, 70], dtype=torch.int32)
    q, k, v = (normal(70, 2, 16, seed=s) for s in range(3))
    lengths = {"max_seqlen_q": 40, "max_seqlen_k": 40}
    ours = bsk.attention_varlen(q, k, v, offsets, offsets, **lengths, block_mask=mask)
    exact = bsk.BlockMask.from_dense(KEEP[:, :3], 16, seq_lengths=40)
    expected = bsk.attention_varlen(q, k, v, offsets, offsets, **lengths, block_mask=exact)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("lengths", [(32, 64), (48, 65), (49, 64)])
def test_other_numbers_of_blocks_are_refused(lengths):
    q, k, v = inputs(*lengths)
    told = rf"was made for .*48, 64\]; expected .*{lengths[0]}, {lengths[1]}\]"
    with pytest.raises(InvalidInput, match=told):
        bsk.attention(q, k, v, block_mask=bsk.BlockMask.from_dense(KEEP, 16))


def test_given_lengths_are_meant():
    q, k, v = inputs(33, 49)
    mask = bsk.BlockMask.from_dense(KEEP, 16, seq_lengths=(48, 64))
    with pytest.raises(InvalidInput, match="was made for"):
        bsk.attention(q, k, v, block_mask=mask)
    with pytest.raises(InvalidInput, match=r"for_lengths: mask was made for given lengths.*48, 64"):
        mask.for_lengths(33, 49)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_copies_fit_as_well(copied):
    q, k, v = inputs(33, 49)
    mask = bsk.BlockMask.from_dense(KEEP, 16)
    expected = bsk.attention(q, k, v, block_mask=mask)
    assert torch.equal(bsk.attention(q, k, v, block_mask=copied(mask)), expected)


def test_moved_and_transposed_masks_fit_as_well():
    mask = bsk.BlockMask.from_dense(KEEP, 16)
    assert mask.T.for_lengths(49, 33).seq_lengths == (49, 33)
    assert mask.to("meta").for_lengths(33, 49).seq_lengths == (33, 49)


@pytest.mark.gpu
def test_on_a_gpu_repeated_calls_of_several_lengths_agree():
    mask = bsk.BlockMask.from_dense(KEEP.cuda(), 64)
    for lengths in [(192, 256), (150, 200)] * 4:
        q = normal(1, 4, lengths[0], 64, seed=0).cuda().bfloat16()
        k, v = (normal(1, 2, lengths[1], 64, seed=s).cuda().bfloat16() for s in (1, 2))
        exact = bsk.BlockMask.from_dense(KEEP.cuda(), 64, seq_lengths=lengths)
        ours = bsk.attention(q, k, v, block_mask=mask)
        assert torch.equal(ours, bsk.attention(q, k, v, block_mask=exact))


def test_parts_and_combinations_fit_every_length_too():
    mask = bsk.BlockMask.from_dense(torch.stack([KEEP, ~KEEP]), 16)
    either = bsk.BlockMask.from_dense(torch.ones_like(KEEP), 16)
    for whole, part in ((mask[:, 1], ~KEEP), (mask[:, 0] & mask[:, 1], KEEP & ~KEEP),
                        (mask | mask, torch.stack([KEEP, ~KEEP]))):  # fmt: skip
        expected = bsk.BlockMask.from_dense(part, 16, seq_lengths=(33, 49))
        assert whole.for_lengths(33, 49).equals(expected)
    causal = bsk.masks.causal((33, 49), 16)
    for combined in (causal & either, either & causal):
        assert combined.equals(causal)
        with pytest.raises(InvalidInput, match="was made for given lengths"):
            combined.for_lengths(48, 64)


def test_threads_share_what_was_made():
    """Lengths that are dropped by one thread may be dropped by another at the same time."""
    mask, interval = bsk.BlockMask.from_dense(KEEP[:2, :2], 16), sys.getswitchinterval()

    def fit(seed):
        drawn = random.Random(seed)
        for _ in range(6000):
            lengths = (drawn.randint(17, 32), drawn.randint(17, 32))
            assert mask.for_lengths(*lengths).seq_lengths == lengths

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(fit, range(8)))
    finally:
        sys.setswitchinterval(interval)
