"""Making masks: from kept blocks or from a window to what attention takes."""

from collections.abc import Callable
from typing import Any

import torch

from ... import BlockMask, attention, masks
from ..case import Contender, Peer
from ..problems.attention import AttentionInputs
from .flashinfer import workspace
from .importing import load, needs
from .ours import options_of, ours
from .torch_attention import flex_mask, on_gpu

SERVED, SERVED_ANEW = "bsk_attention", "bsk_new_mask"


def _ours(inputs: AttentionInputs) -> Contender:
    p, keep = inputs.problem, inputs.keep
    if keep is not None:
        expected = int(keep.sum())
    else:
        assert p.window is not None
        expected = _window_blocks(p.length, p.window)
    return _contender(_builder(inputs), lambda mask: mask.nnz_blocks, expected)


def _builder(inputs: AttentionInputs) -> Callable[[], BlockMask]:
    p, keep = inputs.problem, inputs.keep
    if keep is None:
        width, device = p.window, inputs.q.device
        assert width is not None
        return lambda: masks.sliding_window(p.length, width, 128, causal=p.causal, device=device)
    assert p.block is not None
    block, planes = p.block, keep[None]
    return lambda: BlockMask.from_dense(planes, block)


def _attention_anew(inputs: AttentionInputs) -> Contender:
    """What a mask costs where each call has its own: also what is made of it at its first call."""
    make = _builder(inputs)
    options = options_of(inputs)

    def run() -> Any:
        return attention(inputs.q, inputs.k, inputs.v, **{**options, "block_mask": make()})

    return Contender(run, inputs.check(), inputs.flops)


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
        Peer(SERVED_ANEW, "that attention, a mask built for each call", _attention_anew),
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
