import pytest
import torch

from blackwell_sparsek.attention.api import attention, attention_packed
from blackwell_sparsek.core.errors import InvalidInput, InvalidType
from blackwell_sparsek.masks.block_mask import BlockMask
from blackwell_sparsek.testing.inputs import normal

CU = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
Q, K = normal(10, 4, 8, seed=1), normal(10, 2, 8, seed=2)


def call(q=Q, k=K, v=K, cu_q=CU, cu_k=CU, max_q=7, max_k=7, **options):
    return attention_packed(q, k, v, cu_q, cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k, **options)


def offsets(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"q": Q[None]}, InvalidInput, r"q has a wrong rank; expected \[T, H, D\]"),
        ({"cu_q": CU.long()}, InvalidType, r"cu_seqlens_q.*int32"),
        ({"cu_q": CU[None]}, InvalidInput, r"cu_seqlens_q has a wrong shape"),
        ({"cu_k": CU.to("meta")}, InvalidInput, r"cu_seqlens_k.*int32 on cpu"),
        ({"cu_k": offsets(0, 10)}, InvalidInput, r"have different lengths"),
        ({"cu_q": offsets(1, 3, 3, 10)}, InvalidInput, r"cu_seqlens_q\[0\]"),
        ({"cu_q": offsets(0, 5, 3, 10)}, InvalidInput, r"cu_seqlens_q\[2\] falls"),
        ({"cu_k": offsets(0, 3, 3, 9)}, InvalidInput, r"cu_seqlens_k\[3\].*expected 10, got 9"),
        ({"max_q": 6}, InvalidInput, r"cu_seqlens_q\[3\].*at most 6 tokens, got 7"),
        ({"max_k": 7.0}, InvalidType, r"max_seqlen_k is not an int; expected int, got float"),
        ({"max_k": -1}, InvalidInput, r"max_seqlen_k is negative"),
        (
            {"block_mask": BlockMask.from_dense(torch.ones(1, 1).bool(), 16, (7, 8))},
            InvalidInput,
            r"block_mask was made for",
        ),
    ],
)
def test_refusals(changes, error, match):
    with pytest.raises(error, match="attention_varlen: .*" + match):
        call(**changes)


def test_equals_one_call_per_sequence():
    out, lse = call(causal=True, window=4, return_lse=True)
    assert out.shape == Q.shape and lse.shape == (4, 10)
    for a, b in ((0, 3), (3, 10)):
        parts = [x[a:b].transpose(0, 1)[None] for x in (Q, K, K)]
        expected = attention(*parts, causal=True, window=4, return_lse=True)
        torch.testing.assert_close(out[a:b].transpose(0, 1)[None], expected[0])
        torch.testing.assert_close(lse[None, :, a:b], expected[1])


def test_every_sequence_has_its_own_mask():
    visible = torch.rand(3, 1, 7, 7) > 0.4
    out = call(block_mask=BlockMask.from_element_mask(visible, 16))
    for i, (a, b) in enumerate(((0, 3), (3, 3), (3, 10))):
        parts = [x[a:b].transpose(0, 1)[None] for x in (Q, K, K)]
        mask = BlockMask.from_element_mask(visible[i : i + 1, :, : b - a, : b - a], 16)
        expected = attention(*parts, block_mask=mask)
        torch.testing.assert_close(out[a:b].transpose(0, 1)[None], expected)


@pytest.mark.parametrize("masks", [2, 4])
def test_masks_for_another_number_of_sequences(masks):
    mask = BlockMask.from_dense(torch.ones(masks, 1, 1, 1).bool(), 16, (7, 7))
    with pytest.raises(InvalidInput, match=r"attention_varlen: block_mask"):
        call(block_mask=mask)


def test_larger_maximum_changes_nothing_and_no_sequences_work():
    assert torch.equal(call(max_q=100, max_k=7), call())
    nothing = call(Q[:0], K[:0], K[:0], offsets(0), offsets(0))
    assert nothing.shape == (0, 4, 8)


def test_compile_fullgraph_with_gradients():
    q = Q.clone().requires_grad_()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    (expected,) = torch.autograd.grad(call(q, causal=True).square().sum(), q)
    (got,) = torch.autograd.grad(compiled(q, causal=True).square().sum(), q)
    torch.testing.assert_close(got, expected)
