"""Making masks: from kept blocks or from a window to what attention takes."""

from collections.abc import Callable
from typing import Any

import torch

from ... import BlockMask, masks
from ..case import Contender, Peer
from ..problems.attention import AttentionInputs
from .flashinfer import workspace
from .importing import load, needs
from .ours import ours
from .torch_attention import flex_mask, on_gpu

SERVED = "bsk_attention"


def _ours(inputs: AttentionInputs) -> Contender:
    p, keep = inputs.problem, inputs.keep
    if keep is None:
        assert p.window is not None
        width, device = p.window, inputs.q.device
        return _contender(
            lambda: masks.sliding_window(p.length, width, 128, causal=p.causal, device=device),
            lambda mask: mask.nnz_blocks,
            _window_blocks(p.length, p.window),
        )
    assert p.block is not None
    block = p.block
    return _contender(
        lambda: BlockMask.from_dense(keep[None], block),
        lambda mask: mask.nnz_blocks,
        int(keep.sum()),
    )


def _contender(make: Callable[[], Any], blocks: Callable[[Any], int], expected: int) -> Contender:
    def check(made: Any) -> None:
        if (got := blocks(made)) != expected:
            raise AssertionError(f"expected {expected} blocks, got {got}")

    return Contender(make, check)


def _window_blocks(length: int, window: int, side: int = 128) -> int:
    """Blocks that a causal window touches."""
    rows = range(-(-length // side))
    return sum(row - max(0, row * side - window + 1) // side + 1 for row in rows)


def _flex(inputs: AttentionInputs) -> Contender:
    if inputs.keep is not None:
        expected = int(inputs.keep.sum())
    else:
        assert inputs.problem.window is not None
        expected = _window_blocks(inputs.problem.length, inputs.problem.window)

    def blocks(mask: Any) -> int:
        full = mask.full_kv_num_blocks
        return int(mask.kv_num_blocks.sum()) + (0 if full is None else int(full.sum()))

    return _contender(lambda: flex_mask(inputs), blocks, expected)


def _flashinfer(inputs: AttentionInputs) -> Contender:
    p, keep, device = inputs.problem, inputs.keep, inputs.q.device
    assert keep is not None and p.block is not None
    wrapper = load("flashinfer.sparse", "VariableBlockSparseAttentionWrapper")(workspace(device))
    int32: Any = {"dtype": torch.int32, "device": device}
    rows = torch.full(keep.shape[:2], p.block[0], **int32)
    columns = torch.full((p.heads, keep.shape[2]), p.block[1], **int32)

    def make() -> None:
        wrapper.plan(keep, rows, columns, p.heads, p.heads, p.head_dim, q_data_type=p.dtype)

    return Contender(make, lambda made: None)


def _blocks_only(inputs: AttentionInputs) -> str | None:
    return on_gpu(inputs) or ("plans block masks only" if inputs.keep is None else None)


BUILDERS = {
    peer.name: peer
    for peer in (
        Peer("bsk", "blackwell_sparsek BlockMask", _ours),
        Peer(SERVED, "the attention that the mask is for", ours.prepare),
        Peer("flex", "FlexAttention block mask", _flex, supports=on_gpu, rival=True),
        Peer(
            "flashinfer",
            "FlashInfer plan()",
            _flashinfer,
            available=needs("flashinfer.sparse", "VariableBlockSparseAttentionWrapper"),
            supports=_blocks_only,
            rival=True,
        ),
    )
}
