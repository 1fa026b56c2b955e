"""The attention functions that transformers calls, for sequences, single queries, paged batches."""

from functools import partial
from typing import Any

import torch

from ...attention.api import attention_packed
from ...attention.inputs import MAX_HEAD_DIM
from ...core.errors import InvalidInput, Unsupported
from ...core.fp8 import E4M3
from ...core.torch_state import cast_operand
from ...decode.api import attention_decode
from ...decode.portable_tuning import LARGEST_HEAD_DIM
from ...masks.band import Band
from ...masks.block_mask import BlockMask
from ...masks.segments import every_key_block
from .block_sparse import BlockSparse, mask_of_selection
from .dense import dense_attention, elements, warn_once, why_dense
from .fp8 import Fp8, attend_prompt, check_scales, decode_scales, refuse_in_fp8
from .ready_mask import sparse_under_ready_mask
from .visible_keys import (
    OP,
    VisibleKeys,
    attentions_of,
    block_size_for,
    listed_tokens,
    visible_of_user,
    visible_to_one,
)

# Arguments that change the result of attention and are not supported here.
REFUSED = ("head_mask", "layer_head_mask", "alibi")


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
    sinks: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    block_sparse: BlockSparse | None = None,
    fp8: Fp8 | None = None,
    output_attentions: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of one layer, with transformers' arguments.

    Dropout, biases and `output_attentions` run in plain PyTorch, with a warning.

    Parameters
    ----------
    query : `[B, Hq, Sq, D]`
    key, value : `[B, Hkv, Sk, D]`
        As they come from the cache, which may hold more slots than tokens.
    attention_mask : VisibleKeys, a ready 4-D mask of the user, or None
        None shows all keys up to the query's position; the last query is at the last key.
    s_aux : `[Hq]`, optional
    sinks : `[B, Hq, Sq, 1]`, optional
        Logits of sinks: one for each head, or one for each query.
    indices : int `[B, Sq, n]`, optional
        The keys that each query selected, -1 for none.

    Returns
    -------
    `[B, Sq, Hq, Dv]`, contiguous, and the weights `[B, Hq, Sq, Sk]` or None, as nothing else forms
    them.
    """
    refuse(kwargs)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    check_scales(fp8, key)
    if key.dtype != E4M3:
        # caches too, in which autocast can leave keys and values of two dtypes
        query, key, value = cast_operand(query), cast_operand(key), cast_operand(value)
    if sinks is not None and s_aux is not None:
        raise Unsupported(f"{OP}: sinks together with s_aux; leave out one of the two")
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    dims = (query.shape[3], value.shape[3])
    if sinks is not None:
        options["sinks"] = sinks
    if indices is not None or block_indices is not None:
        refuse_in_fp8(key, "selected keys")
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        refuse_in_fp8(key, "cu_seq_lens_q")
        if indices is not None or block_indices is not None:
            raise Unsupported(f"{OP}: cu_seq_lens_q together with indices of selected keys")
        reason = why_dense(dropout, output_attentions, position_bias, None, sinks)
        refuse_dense("cu_seq_lens_q", reason)
        lengths = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        given = (causal, sliding_window, block_sparse)
        return _packed(query, key, value, attention_mask, lengths, *given, options)
    if attention_mask is None:
        left = None if sliding_window is None else sliding_window - 1
        band = Band(left, 0 if causal else left)
        sizes, batch = (query.shape[2], key.shape[2]), query.shape[0]
        plan = VisibleKeys(*sizes, band=band, batch=batch, device=query.device)
    elif isinstance(attention_mask, VisibleKeys):
        plan = attention_mask
    else:
        plan = visible_of_user(attention_mask, query, key)
        key, value = key[:, :, : plan.kv_length], value[:, :, : plan.kv_length]
    plan.check_layer(query, key)
    is_ready = attention_mask is not None and not isinstance(attention_mask, VisibleKeys)
    if block_sparse is not None and is_ready and causal:
        if not attentions_of(type(getattr(module, "config", None))):
            raise Unsupported(f"{OP}: block_sparse in a model that supports eager attention alone")
        # from here on, the plan shows what the mask and the pattern both show
        plan, block_sparse = sparse_under_ready_mask(plan, block_sparse, query, key), None
    if block_sparse is not None and plan.is_evaluated and causal:
        raise Unsupported(
            f"{OP}: block_sparse together with a mask that is evaluated element by element "
            "(chunks, functions of the user; under torch.compile also prompts over a static "
            "cache and calls without a cache): leave it out in this layer, or under "
            "torch.compile use a dynamic cache (use_cache=True)"
        )
    if indices is not None:
        if block_sparse is not None:
            raise Unsupported(f"{OP}: block_sparse in a layer that selects its keys by itself")
        plan = plan.limited_to(indices)
    reason = why_dense(dropout, output_attentions, position_bias, plan.bias, sinks)
    # the decode kernel takes larger heads
    if reason is None and max(dims) > MAX_HEAD_DIM and not _decodes(plan, query, key, value):
        reason = f"heads of {max(dims)}, above {MAX_HEAD_DIM}"
    if position_bias is not None and position_bias.shape[-1] == plan.kv_length:
        position_bias = position_bias[..., : plan.key_length]
    if plan.key_length != plan.kv_length:
        key, value = key[:, :, : plan.key_length], value[:, :, : plan.key_length]
    refuse_in_fp8(key, reason)
    sparse = block_sparse if plan.band.right == 0 else None
    if reason is not None:
        bias = position_bias if plan.bias is None else plan.bias
        if plan.bias is not None and position_bias is not None:
            bias = plan.bias + position_bias
        visible = _visible_elements(module, query, key, plan, sparse, block_indices)
        if not torch.compiler.is_compiling():
            warn_once(reason)
        made, weights = dense_attention(
            *(query, key, value, visible),
            bias=bias,
            dropout=dropout,
            with_weights=bool(output_attentions),
            **options,
        )
        if weights is not None:
            weights = torch.nn.functional.pad(weights, (0, plan.kv_length - weights.shape[3]))
        return made.transpose(1, 2).contiguous(), weights
    if plan.lengths is not None:
        out = attend_one(module, query, key, value, plan, options, sparse, block_indices, fp8)
        return out.transpose(1, 2).contiguous(), None
    band, block_mask = _layer_mask(module, query, key, plan, sparse, block_indices)
    window = (band.left, band.right)
    out = attend_prompt(query, key, value, fp8, window=window, block_mask=block_mask, **options)
    return out.transpose(1, 2).contiguous(), None


def _decodes(
    plan: VisibleKeys, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> bool:
    """Whether `attend_one` runs the decode kernel, whatever is visible."""
    if plan.lengths is None or max(query.shape[3], value.shape[3]) > LARGEST_HEAD_DIM:
        return False
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    listed = plan.visible is None or as_token_pages(key, value) is not None
    return listed and not differentiable


def _layer_mask(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    plan: VisibleKeys,
    sparse: BlockSparse | None,
    block_indices: torch.Tensor | None,
) -> tuple[Band, BlockMask | None]:
    """The keys that the queries of a prompt see."""
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
    return band, block_mask


def _visible_elements(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    plan: VisibleKeys,
    sparse: BlockSparse | None,
    block_indices: torch.Tensor | None,
) -> torch.Tensor:
    """The keys that the queries see, bool `[B or 1, H or 1, Sq, Sk]`."""
    sq, sk = query.shape[2], key.shape[2]
    if plan.lengths is None:
        if sparse is None and block_indices is None:
            return plan.elements[..., :sk]
        band, block_mask = _layer_mask(module, query, key, plan, sparse, block_indices)
        return elements(band, block_mask, sq, sk, query.device)
    left = (plan.band if sparse is None else sparse.band(plan.band)).left
    visible = visible_to_one(plan, left, sk)
    if sparse is not None and sparse.is_fixed and not sparse.is_window:
        visible = visible & sparse.keys(plan.lengths, sk)
    if block_indices is not None:
        size = module.indexer.block_size
        return mask_of_selection(block_indices, size, query, sk, visible).to_element_mask()
    return visible[:, None, None]


def refuse_dense(what: str, reason: str | None) -> None:
    """Raise if a call asks for what kernels do not compute."""
    if reason is not None:
        raise Unsupported(f"{OP}: {what} together with {reason}; leave out one of the two")


def refuse(kwargs: dict[str, Any]) -> None:
    """Raise for arguments that are not supported."""
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
        q_segment, k_segment = plan.segments
        if bool(q_segment.any()):
            raise Unsupported(f"{OP}: block_indices together with packed sequences")
        visible = k_segment == 0
    return mask_of_selection(block_indices, size, query, sk, visible)


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    lengths: tuple[Any, Any, Any, Any],
    causal: bool,
    sliding_window: int | None,
    block_sparse: BlockSparse | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """Attention of sequences packed into a batch of 1, given by offsets, not by position_ids."""
    if query.shape[0] != 1:
        raise InvalidInput(
            f"{OP}: cu_seq_lens_q describes one packed sequence, got a batch of {query.shape[0]}"
        )
    left = None if sliding_window is None else sliding_window - 1
    band = Band(left, 0 if causal else left)
    if isinstance(attention_mask, VisibleKeys):
        band = attention_mask.band
        given = (attention_mask.block_mask, attention_mask.visible, attention_mask.bias)
        if any(x is not None for x in given):
            raise Unsupported(f"{OP}: cu_seq_lens_q together with a mask of single elements")
    elif attention_mask is not None:
        raise Unsupported(f"{OP}: cu_seq_lens_q together with an attention_mask")
    if block_sparse is not None and band.right == 0:
        if not block_sparse.is_window:
            raise Unsupported(
                f"{OP}: cu_seq_lens_q together with block_sparse other than a window; pack the "
                "sequences by position_ids alone"
            )
        band = block_sparse.band(band)
    cu_q, cu_k, max_q, max_k = lengths
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = attention_packed(
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


# Decoding: one query of each sequence attends to its cache.


def attend_one(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: VisibleKeys,
    options: dict[str, Any],
    block_sparse: BlockSparse | None,
    block_indices: torch.Tensor | None,
    fp8: Fp8 | None = None,
) -> Any:
    """Output `[B, Hq, 1, Dv]` of the query at the end of each sequence, without waiting.

    The decode kernel reads lengths on the device. If padding hides keys, it gets a list of the
    visible ones. Calls that need gradients use the forward kernel, which has a backward.
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
    refuse_in_fp8(key, "gradients" if differentiable else None)
    scales = decode_scales(fp8, key)
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
            *(query, key, value),
            **{"cache_seqlens": lengths, "window": window, **blocks, **scales, **options},
        )
    visible = visible_to_one(plan, window[0], key.shape[2])
    if block_sparse is not None:
        visible = visible & block_sparse.keys(lengths, key.shape[2])
    if not differentiable and block_indices is None:
        key_of_list = ("tokens", window[0], block_sparse)
        tokens, counts = plan.shared(key_of_list, partial(listed_tokens, visible))
        caches = as_token_pages(key, value)
        if caches is not None:
            k_pages, v_pages, step = caches
            first = torch.arange(key.shape[0], dtype=torch.int32, device=key.device) * step
            table = tokens + first[:, None]
            return attention_decode(
                *(query, k_pages, v_pages),
                **{"cache_seqlens": counts, "page_table": table, **scales, **options},
            )
    if block_indices is not None:
        if torch.compiler.is_compiling():
            raise Unsupported(f"{OP}: block_indices with padding under torch.compile")
        size = module.indexer.block_size
        mask = mask_of_selection(block_indices, size, query, key.shape[2], visible)
    else:
        mask = every_key_block(visible, 1, block_size_for(1, key.shape[2]))
    return attend_prompt(query, key, value, fp8, block_mask=mask, **options)


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

    Also the number of pages from one sequence to the next. None if strides do not allow it.
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


# Continuous batching: attention over transformers' paged cache.


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cache: Any = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: Any = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: Any = 0,
    read_index: Any = None,
    write_index: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer over all requests of a step, packed into a batch of 1.

    Parameters
    ----------
    query : `[1, Hq, Tq, D]`
    key, value : `[1, Hkv, Tq, D]`
        Those of the new tokens; the cache adds the others.

    Returns
    -------
    `[1, Tq, Hq, Dv]` and None
    """
    refuse(kwargs)
    asked = [kwargs.get(name) for name in ("output_attentions", "position_bias", "sinks")]
    weights, bias, sinks = asked
    refuse_dense("continuous batching", why_dense(dropout, weights, bias, None, sinks))
    if cache is None or cu_seq_lens_q is None:
        raise Unsupported(
            f"{OP}: the paged implementation works inside of continuous batching alone; "
            "set attn_implementation to the name without 'paged|'"
        )
    if attention_mask is not None:
        raise Unsupported(f"{OP}: continuous batching with an attention_mask")
    window = getattr(module, "sliding_window", None)
    if isinstance(cu_seq_lens_k, dict):
        kind = "sliding_attention" if window else "full_attention"
        cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k[kind], max_seqlen_k[kind]
    key, value = cache.update(
        key_states=key,
        value_states=value,
        layer_idx=module.layer_idx,
        read_index=read_index,
        write_index=write_index,
    )
    out = attention_packed(
        query[0].transpose(0, 1),
        key,
        value,
        cu_seq_lens_q.to(torch.int32),
        cu_seq_lens_k.to(torch.int32),
        max_seqlen_q=int(max_seqlen_q),
        max_seqlen_k=int(max_seqlen_k),
        causal=True,
        window=window or None,
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
    )
    assert isinstance(out, torch.Tensor)
    return out.unsqueeze(0), None


def refuse_paged(*args: Any, **kwargs: Any) -> Any:
    """Raise for a sparse configuration, which continuous batching does not support."""
    raise Unsupported(f"{OP}: continuous batching with block_sparse; register it without")
