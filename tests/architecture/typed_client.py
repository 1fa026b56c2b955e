"""A program that uses the library; `test_typing.py` runs mypy on it, strictly."""

import torch
from typing_extensions import assert_type

import blackwell_sparsek as bsk
from blackwell_sparsek.nn import BSRLinear

Pair = tuple[torch.Tensor, torch.Tensor]


def attend(q: torch.Tensor, lengths: torch.Tensor, with_lse: bool) -> None:
    """One result without `return_lse`, two with it, and either if that is not known."""
    assert_type(bsk.attention(q, q, q, causal=True), torch.Tensor)
    assert_type(bsk.attention(q, q, q, return_lse=False), torch.Tensor)
    assert_type(bsk.attention(q, q, q, return_lse=True), Pair)
    assert_type(bsk.attention(q, q, q, return_lse=with_lse), torch.Tensor | Pair)
    assert_type(bsk.attention_decode(q, q, q, cache_seqlens=lengths), torch.Tensor)
    assert_type(bsk.attention_decode(q, q, q, cache_seqlens=lengths, return_lse=True), Pair)
    packed = bsk.attention_varlen(q, q, q, lengths, lengths, max_seqlen_q=8, max_seqlen_k=8)
    assert_type(packed, torch.Tensor)
    assert_type(bsk.attention_varlen(q, q, q, lengths, max_seqlen_q=8, return_lse=True), Pair)
    assert_type(bsk.fp8.attention(q, q, q), torch.Tensor)
    assert_type(bsk.fp8.attention(q, q, q, return_lse=True), Pair)
    chosen = bsk.select_keys(q, q, granularity=16, pool="max", top_k=4)
    assert_type(bsk.sparse_attention(q, q, q, chosen), torch.Tensor)
    assert_type(bsk.sparse_attention(q, q, q, chosen, return_lse=True), Pair)
    assert_type(bsk.distributed.attention(q, q, q), torch.Tensor)
    assert_type(bsk.sparsek(q, 4.0), torch.Tensor)
    assert_type(bsk.sparsek(q, 4.0, return_threshold=True), Pair)
    assert_type(bsk.attention(q, q, q).shape, torch.Size)


def multiply(x: torch.Tensor, linear: torch.nn.Linear) -> None:
    """Matrices and layers, with blocks as an int or a pair."""
    matrix = bsk.BSRMatrix.from_dense(x, 16)
    assert_type(matrix, bsk.BSRMatrix)
    assert_type(BSRLinear.from_dense_linear(linear, (16, 32)), BSRLinear)
    assert_type(bsk.prune.sparsify_(linear, 16, 0.5).density, float)
    assert_type(bsk.BlockMask.from_function(lambda b, h, q, k: q >= k, 64), bsk.BlockMask)
