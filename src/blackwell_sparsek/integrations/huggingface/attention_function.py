"""transformers' attention interface: one layer's attention through this package."""

from typing import Any

import torch

from ...attention.api import attention, attention_varlen
from ...core.errors import InvalidInput, Unsupported
from ...masks.band import Band
from ...masks.block_mask import BlockMask
from .block_sparse import BlockSparse, mask_of_selection
from .decode import attend_one
from .visible_keys import OP, VisibleKeys, block_size_for, visible_of_user

# Arguments that change what attention computes and that nothing here computes.
REFUSED = ("position_bias", "head_mask", "layer_head_mask", "alibi")


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    block_sparse: BlockSparse | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, with transformers' arguments.

    Parameters
    ----------
    query : `[B, Hq, Sq, D]`
    key, value : `[B, Hkv, Sk, D]`
        As they come from the cache, which may hold more slots than tokens.
    attention_mask : VisibleKeys, a ready 4-D mask of the user, or None
        None shows all keys up to the query's own position, the last query being at the last key.

    Returns
    -------
    `[B, Sq, Hq, Dv]`, contiguous, and None for the weights, which are never formed.
    """
    refuse(dropout, kwargs)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        lengths = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        return _packed(query, key, value, attention_mask, lengths, causal, sliding_window, options)
    if attention_mask is None:
        left = None if sliding_window is None else sliding_window - 1
        band = Band(left, 0 if causal else left)
        plan = VisibleKeys(query.shape[2], key.shape[2], band=band, batch=query.shape[0])
    elif isinstance(attention_mask, VisibleKeys):
        plan = attention_mask
    else:
        plan = visible_of_user(attention_mask, query, key)
        key, value = key[:, :, : plan.kv_length], value[:, :, : plan.kv_length]
    plan.check_layer(query, key)
    if plan.key_length != plan.kv_length:
        key, value = key[:, :, : plan.key_length], value[:, :, : plan.key_length]
    sparse = block_sparse if plan.band.right == 0 else None
    if plan.lengths is not None:
        out = attend_one(module, query, key, value, plan, options, sparse, block_indices)
        return out.transpose(1, 2).contiguous(), None
    band, block_mask = plan.band, plan.block_mask
    if block_indices is not None:
        size = module.indexer.block_size
        block_mask = _selection(plan, block_indices, size, query, key.shape[2])
    elif sparse is not None and not sparse.is_window:
        if plan.block_mask is None and plan.segments is None:
            block_mask = sparse.mask(query, key)
        else:
            block = (sparse.block_size, sparse.block_size)
            block_mask = plan.mask_with(sparse.keep(query, key), block)
    else:
        band = band if sparse is None else sparse.band(band)
        block_mask = plan.mask_with(None, block_size_for(plan.q_length, plan.key_length))
    window = (band.left, band.right)
    out = attention(query, key, value, window=window, block_mask=block_mask, **options)
    assert isinstance(out, torch.Tensor)
    return out.transpose(1, 2).contiguous(), None


def refuse(dropout: float, kwargs: dict[str, Any]) -> None:
    """Raise for what cannot be honoured."""
    if dropout != 0.0:
        raise Unsupported(f"{OP}: dropout {dropout} on attention weights; set attention_dropout=0")
    if kwargs.get("output_attentions"):
        raise Unsupported(
            f"{OP}: output_attentions asks for weights that are never formed; "
            "use attn_implementation='eager' to look at them"
        )
    for name in REFUSED:
        if kwargs.get(name) is not None:
            raise Unsupported(f"{OP}: {name} is not supported; use attn_implementation='sdpa'")


def _selection(
    plan: VisibleKeys, block_indices: torch.Tensor, size: int, query: torch.Tensor, sk: int
) -> BlockMask:
    if plan.block_mask is not None:
        raise Unsupported(f"{OP}: block_indices together with a mask of single elements")
    visible = None
    if plan.segments is not None:
        if bool(plan.segments[0].any()):
            raise Unsupported(f"{OP}: block_indices together with packed sequences")
        visible = plan.segments[1] == 0
    return mask_of_selection(block_indices, size, query, sk, visible)


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    lengths: tuple[Any, Any, Any, Any],
    causal: bool,
    sliding_window: int | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """Sequences packed into a batch of 1, described by offsets rather than by position_ids."""
    if query.shape[0] != 1:
        raise InvalidInput(
            f"{OP}: cu_seq_lens_q describes one packed sequence, got a batch of {query.shape[0]}"
        )
    band = Band(None if sliding_window is None else sliding_window - 1, 0 if causal else None)
    if isinstance(attention_mask, VisibleKeys):
        band = attention_mask.band
    elif attention_mask is not None:
        raise Unsupported(f"{OP}: cu_seq_lens_q together with an attention_mask")
    cu_q, cu_k, max_q, max_k = lengths
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = attention_varlen(
        q,
        k,
        v,
        cu_q.to(torch.int32),
        cu_k.to(torch.int32),
        max_seqlen_q=query.shape[2] if max_q is None else int(max_q),
        max_seqlen_k=key.shape[2] if max_k is None else int(max_k),
        window=(band.left, band.right),
        **options,
    )
    assert isinstance(out, torch.Tensor)
    return out.unsqueeze(0), None
