"""One query of each sequence over its cache."""

from functools import partial
from typing import Any

import torch

from ...attention.api import attention
from ...core.errors import Unsupported
from ...decode.api import attention_decode
from ...masks.segments import every_key_block
from .block_sparse import BlockSparse, mask_of_selection
from .visible_keys import OP, VisibleKeys, block_size_for, listed_tokens


def attend_one(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: VisibleKeys,
    options: dict[str, Any],
    block_sparse: BlockSparse | None,
    block_indices: torch.Tensor | None,
) -> Any:
    """Output `[B, Hq, 1, Dv]` of the query at the end of each sequence, without waiting.

    The decode kernel reads lengths on the device. Where padding hides keys, it gets a list of the
    others. Gradients need a derivative, which the forward kernel has.
    """
    lengths, window = plan.lengths, (plan.band.left, plan.band.right)
    assert lengths is not None
    if block_sparse is not None:
        band = block_sparse.band(plan.band)
        window = (band.left, band.right)
        if block_sparse.is_window or not block_sparse.is_fixed:
            block_sparse = None
    inputs = (query, key, value, *(x for x in options.values() if isinstance(x, torch.Tensor)))
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if plan.visible is None and not differentiable:
        blocks: dict[str, Any] = {}
        if block_indices is not None:
            blocks = {
                "kv_blocks": block_indices[:, :, 0].to(torch.int32),
                "kv_block_size": module.indexer.block_size,
            }
        elif block_sparse is not None:
            blocks = {
                "kv_blocks": plan.shared(
                    (block_sparse, key.shape[1]),
                    partial(_listed_blocks, block_sparse, lengths, key),
                ),
                "kv_block_size": block_sparse.block_size,
            }
        return attention_decode(
            query, key, value, cache_seqlens=lengths, window=window, **blocks, **options
        )
    visible = _visible(plan, lengths, window[0], key.shape[2])
    if block_sparse is not None:
        visible = visible & block_sparse.keys(lengths, key.shape[2])
    if not differentiable and block_indices is None:
        key_of_list = ("tokens", window[0], block_sparse)
        tokens, counts = plan.shared(key_of_list, partial(listed_tokens, visible))
        caches = as_token_pages(key, value)
        if caches is not None:
            first = torch.arange(key.shape[0], dtype=torch.int32, device=key.device) * caches[2]
            table = tokens + first[:, None]
            return attention_decode(
                query, *caches[:2], cache_seqlens=counts, page_table=table, **options
            )
    if block_indices is not None:
        if torch.compiler.is_compiling():
            raise Unsupported(f"{OP}: block_indices with padding under torch.compile")
        size = module.indexer.block_size
        mask = mask_of_selection(block_indices, size, query, key.shape[2], visible)
    else:
        mask = every_key_block(visible, 1, block_size_for(1, key.shape[2]))
    return attention(query, key, value, block_mask=mask, **options)


def _listed_blocks(
    block_sparse: BlockSparse, lengths: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    """int32 `[B, Hkv, n]`"""
    listed = block_sparse.kv_blocks(lengths, key.shape[2])
    return listed[:, None].expand(-1, key.shape[1], -1).contiguous()


def as_token_pages(
    key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int] | None:
    """Caches `[B, H, S, D]` as views `[pages, 1, H, D]` in which every token is a page.

    Also the number of pages from one sequence to the next. None where strides do not allow it.
    """
    steps = {x.stride(0) // x.stride(2) for x in (key, value)}
    if len(steps) != 1 or any(x.stride(0) % x.stride(2) for x in (key, value)):
        return None
    (step,) = steps
    batch, heads, length, _ = key.shape
    pages = (batch - 1) * step + length
    k_pages, v_pages = (
        x.as_strided(
            (pages, 1, heads, x.shape[3]), (x.stride(2), x.stride(2), x.stride(1), x.stride(3))
        )
        for x in (key, value)
    )
    return k_pages, v_pages, step


def _visible(
    plan: VisibleKeys, lengths: torch.Tensor, left: int | None, kv_length: int
) -> torch.Tensor:
    slot = torch.arange(kv_length, device=lengths.device)
    visible = slot < lengths[:, None]
    if left is not None:
        visible &= slot >= lengths[:, None] - 1 - left
    return visible if plan.visible is None else visible & plan.visible
