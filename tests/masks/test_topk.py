"""Masks of the highest scores: what they keep, and that they never wait for the device."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from blackwell_sparsek.core.errors import InvalidInput, InvalidType
from blackwell_sparsek.masks import topk as pattern_topk
from blackwell_sparsek.masks.block_mask import BlockMask
from blackwell_sparsek.masks.patterns import causal
from blackwell_sparsek.masks.topk import kept_blocks, topk

LENGTHS = [(1, 1), (1, 70), (40, 40), (17, 65), (65, 17), (64, 64), (33, 100)]
BLOCKS = [(16, 16), (32, 16), (16, 64)]


def causal_elements(sq: int, sk: int) -> torch.Tensor:
    return torch.arange(sk) <= torch.arange(sq).unsqueeze(1) + sk - sq


def whole_blocks(keep, seq, block) -> torch.Tensor:
    elements = keep.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return elements[..., : seq[0], : seq[1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_topk_keeps_the_highest(dtype, k):
    order = torch.rand(2, 3, 5, 7, generator=torch.Generator().manual_seed(0)).argsort(-1)
    scores = (order.to(dtype) - 3).requires_grad_()
    mask = topk(scores, k, (32, 16), seq_lengths=(150, 110))
    mask.validate()
    assert torch.equal(mask.to_dense(), order >= 7 - k)
    assert mask.forward.indptr.tolist() == list(range(0, 2 * 3 * 5 * k + 1, k))


@pytest.mark.parametrize(("seq", "block"), list(itertools.product(LENGTHS, BLOCKS)))
def test_causal_topk_chooses_among_visible_blocks(seq, block):
    grid = -(-seq[0] // block[0]), -(-seq[1] // block[1])
    scores = torch.randn(2, 2, *grid, generator=torch.Generator().manual_seed(0))
    band = BlockMask.from_element_mask(causal_elements(*seq), block).to_dense()[0, 0]
    for k in {1, (grid[1] + 1) // 2, grid[1]}:
        mask = topk(scores, k, block, seq_lengths=seq, causal=True)
        mask.validate()
        keep = mask.to_dense()
        ranks = scores.masked_fill(~band, float("-inf")).argsort(-1, descending=True).argsort(-1)
        assert torch.equal(keep, (ranks < k) & band)
        assert torch.equal(
            mask.to_element_mask(), whole_blocks(keep, seq, block) & causal_elements(*seq)
        )


def test_topk_prefers_visible_blocks_whatever_their_score():
    scores = torch.full((4, 4), float("-inf"))
    scores[1, 3] = float("nan")
    scores[2, 3] = float("inf")
    mask = topk(scores, 4, 16, causal=True)
    assert torch.equal(mask.to_dense()[0, 0], torch.ones(4, 4).tril().bool())
    assert mask.equals(causal(64, 16))


def test_topk_reads_no_tensor_on_the_host():
    """Under fake tensors any read of a value raises, as it would wait for a GPU."""
    with FakeTensorMode():
        mask = topk(torch.empty(2, 3, 8, 8), 3, 64, seq_lengths=(500, 510), causal=True)
        assert mask.nnz_blocks == 2 * 3 * (2 + 3 * 7)
        assert [x.dtype for x in mask.tensors()] == [torch.int32] * 9
        with pytest.raises(DynamicOutputShapeException):
            BlockMask.from_dense(torch.ones(2, 2, dtype=torch.bool), 16)


def test_topk_inside_torch_compile():
    def build(scores):
        mask = topk(scores, 2, 16, causal=True)
        return [*mask.tensors(), *mask.T.tensors()]

    scores = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(build, fullgraph=True, backend="eager")
    assert all(map(torch.equal, compiled(scores), build(scores)))


@pytest.mark.parametrize("causal_too", [False, True])
@pytest.mark.parametrize(("seq", "block"), [((40, 40), 16), ((17, 65), (32, 16)), ((65, 17), 16)])
def test_topk_by_kernels(monkeypatch, device, seq, block, causal_too):
    pytest.importorskip("triton")
    sides = (block, block) if isinstance(block, int) else block
    grid = -(-seq[0] // sides[0]), -(-seq[1] // sides[1])
    scores = torch.randn(2, 3, *grid, generator=torch.Generator().manual_seed(1))
    scores[0, 0, 0, 0] = float("-inf")
    for k in {1, (grid[1] + 1) // 2, grid[1]}:
        expected = topk(scores, k, block, seq_lengths=seq, causal=causal_too)
        with monkeypatch.context() as patch:
            patch.setattr(pattern_topk, "kernels_build", lambda *tensors: True)
            mask = topk(scores.to(device), k, block, seq_lengths=seq, causal=causal_too)
        made = zip(mask.tensors(), expected.tensors(), strict=True)
        assert all(torch.equal(a.cpu(), b) for a, b in made)
        mask.validate()


@pytest.mark.gpu
def test_topk_does_not_wait_for_the_gpu():
    scores = torch.randn(2, 3, 16, 16, device="cuda")
    topk(scores, 3, 64, causal=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = topk(scores, 3, 64, causal=True).tensors()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = topk(scores.cpu(), 3, 64, causal=True).tensors()
    assert all(torch.equal(a.cpu(), b) for a, b in zip(made, expected, strict=True))


ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((ONES, 4, 16), InvalidInput, r"k is too large; expected at most 3 \(Nb\), got 4$"),
        ((ONES, 0, 16), InvalidInput, r"k is too small; expected at least 1, got 0$"),
        ((ONES, 1.0, 16), InvalidType, r"k is not an int; expected int, got float$"),
        ((ONES.int(), 1, 16), InvalidType, r"scores has an unsupported dtype; .*got torch.int32$"),
        ((ONES[0], 1, 16), InvalidInput, r"scores has a wrong rank; .*Mb, Nb\], got \[3\]$"),
        ((ONES, 1, 17), InvalidInput, r"block_size is unsupported"),
    ],
)
def test_refuses(arguments, error, text):
    with pytest.raises(error, match=r"^masks.topk: " + text):
        topk(*arguments)


def test_refuses_other_lengths():
    assert topk(ONES, 3, 16, seq_lengths=(17, 33)).seq_lengths == (17, 33)
    text = r"scores do not match; expected 2 x 3 blocks, got .*which are 3 x 3$"
    with pytest.raises(InvalidInput, match=text):
        topk(ONES, 1, 16, seq_lengths=(33, 48))


@pytest.mark.parametrize(("sq", "sk"), [(1, 1), (40, 100), (64, 64), (33, 17)])
@pytest.mark.parametrize("block", [(16, 16), (16, 32)])
def test_kept_blocks(sq, sk, block):
    mb, nb = -(-sq // block[0]), -(-sk // block[1])
    keep = torch.rand(2, 3, mb, nb, generator=torch.Generator().manual_seed(0)) < 0.4
    most = int(keep.sum(-1).max())
    expected = keep.repeat_interleave(block[0], 2).repeat_interleave(block[1], 3)
    for room in (most, most + 1, nb + 5):
        mask = kept_blocks(keep, room, block, (sq, sk))
        mask.validate()
        assert torch.equal(mask.to_element_mask(), expected[:, :, :sq, :sk])
        assert mask.nnz_blocks == 6 * mb * min(room, nb)


@pytest.mark.parametrize(("mb", "nb"), [(1, 1), (3, 7), (4, 40)])
def test_kept_blocks_by_kernels(monkeypatch, device, mb, nb):
    pytest.importorskip("triton")
    keep = torch.rand(2, 3, mb, nb, generator=torch.Generator().manual_seed(0)) < 0.4
    sizes = ((16, 32), (16 * mb, 32 * nb))
    for room in {int(keep.sum(-1).max()), nb, nb + 5}:
        expected = kept_blocks(keep, room, *sizes)
        with monkeypatch.context() as patch:
            patch.setattr(pattern_topk, "kernels_build", lambda *tensors: True)
            mask = kept_blocks(keep.to(device), room, *sizes)
        assert (mask.batch, mask.heads, mask.block_size, mask.seq_lengths) == (2, 3, *sizes)
        made = zip(mask.tensors(), expected.tensors(), strict=True)
        assert all(torch.equal(a.cpu(), b) for a, b in made)


def test_fillers_of_kept_blocks_come_from_the_end():
    keep = torch.zeros(1, 1, 1, 8, dtype=torch.bool)
    keep[..., 2] = True
    mask = kept_blocks(keep, 3, (16, 16), (16, 128))
    assert mask.forward.indices.tolist() == [6, 7, 2]
    assert mask.forward.bits_id.tolist() == [0, 0, -1]


def test_kept_blocks_do_not_wait_under_compile():
    keep = torch.rand(1, 2, 4, 5) < 0.4

    def build(keep):
        return kept_blocks(keep, 5, (16, 16), (64, 80)).tensors(for_gradients=False)

    found = torch.compile(build, fullgraph=True, backend="eager")(keep)
    assert all(map(torch.equal, found, build(keep)))
