"""Continuous batching: attention over transformers' paged cache."""

from typing import Any

import torch

from ...attention.api import attention_varlen
from ...core.errors import Unsupported
from .attention_function import refuse
from .visible_keys import OP


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
        Of the new tokens; the cache adds the others.

    Returns
    -------
    `[1, Tq, Hq, Dv]` and None
    """
    refuse(dropout, kwargs)
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
    out = attention_varlen(
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
    """Stand for a sparse configuration, which continuous batching does not have."""
    raise Unsupported(f"{OP}: continuous batching with block_sparse; register it without")
