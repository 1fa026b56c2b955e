"""`memory_efficient_attention` of xFormers by this package: change an import, keep the calls.

    from blackwell_sparsek.integrations.xformers import memory_efficient_attention

Layouts are xFormers': [B, M, H, K], [B, M, K] for one head, and [B, M, G, H, K] for grouped heads,
whose keys are read once if they are expanded. Every class of `xformers.ops.fmha.attn_bias` (0.0.35)
is taken as it is; classes are told by their names, so that xFormers is not imported. Rows that see
no key are 0, where xFormers has NaN.
"""

from typing import Any, NamedTuple

import torch

from ..attention.api import attention
from ..attention.sdpa import scaled_dot_product_attention
from ..core.checks import check_tensor, message
from ..core.errors import InvalidInput, Unsupported
from ..ragged.api import attention_varlen

__all__ = ["memory_efficient_attention"]

OP = "memory_efficient_attention"
BIASES = "xformers.ops.fmha.attn_bias"


class Rule(NamedTuple):
    """The meaning of a class of biases."""

    keys: str
    """How keys lie: `dense`, or one sequence after the other: `packed`, `padded` or `gappy` with
    unused slots behind a sequence, `pages` of padded ones, and `gappy_pages`."""
    causal: bool = False
    top_left: bool = False
    local: bool = False
    """Whether it has a `_window_size`, or `window_left` and `window_right`."""


RULES = {
    "LowerTriangularMask": Rule("dense", causal=True, top_left=True),
    # its `_bias` is added to the scores
    "LowerTriangularMaskWithTensorBias": Rule("dense", causal=True, top_left=True),
    "LowerTriangularFromBottomRightMask": Rule("dense", causal=True),
    "LowerTriangularFromBottomRightLocalAttentionMask": Rule("dense", causal=True, local=True),
    "LocalAttentionFromBottomRightMask": Rule("dense", local=True),
    "BlockDiagonalMask": Rule("packed"),
    "BlockDiagonalCausalMask": Rule("packed", causal=True, top_left=True),
    "BlockDiagonalCausalFromBottomRightMask": Rule("packed", causal=True),
    "BlockDiagonalCausalLocalAttentionMask": Rule("packed", causal=True, top_left=True, local=True),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": Rule("packed", causal=True, local=True),
    "BlockDiagonalPaddedKeysMask": Rule("padded"),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": Rule("padded", causal=True),
    "BlockDiagonalLocalAttentionPaddedKeysMask": Rule("padded", local=True),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": Rule("padded", causal=True, local=True),
    "BlockDiagonalGappyKeysMask": Rule("gappy"),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": Rule("gappy", causal=True),
    "PagedBlockDiagonalPaddedKeysMask": Rule("pages"),
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": Rule("pages", causal=True),
    "PagedBlockDiagonalGappyKeysMask": Rule("gappy_pages"),
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask": Rule("gappy_pages", causal=True),
}


def memory_efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Drop-in for `xformers.ops.memory_efficient_attention`.

    Parameters
    ----------
    query : `[B, Mq, H, K]`, `[B, Mq, K]` or `[B, Mq, G, H, K]`
        B is 1 with biases that divide the tokens into sequences.
    key, value : as query, with Mkv in place of Mq
    attn_bias : bias of xFormers, or tensor broadcastable to `[B, H, Mq, Mkv]`, optional
        A tensor is added to the scores, see `scaled_dot_product_attention`. It may also be
        `[B, Mq, Mkv]` for `[B, Mq, K]`, `[B, G, H, Mq, Mkv]` for grouped heads. Biases with unused
        keys, pages, or sequences of unequal lengths aligned to the top left have no gradients.
    p : float
        Must be 0.
    scale : float, optional
        By default `1 / sqrt(K)`.
    op, output_dtype : None
        A kernel of xFormers, and a dtype other than that of query, are refused.

    Returns
    -------
    `[B, Mq, H, Kv]`, or the rank of query

    Raises
    ------
    Unsupported
        For dropout, `op`, another `output_dtype` and unknown biases.

    Examples
    --------
    >>> import torch
    >>> q, k, v = torch.randn(3, 2, 20, 4, 16)
    >>> memory_efficient_attention(q, k, v).shape
    torch.Size([2, 20, 4, 16])
    """
    if p != 0.0:
        raise Unsupported(f"{OP}: p is {p}; attention dropout is not available, pass 0.0")
    if op is not None:
        raise Unsupported(f"{OP}: op is a kernel of xFormers, none of which runs here; pass None")
    for arg, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(OP, arg, x)
        if x.dim() not in (3, 4, 5) or x.dim() != query.dim():
            expected = "three tensors [B, M, K], [B, M, H, K] or [B, M, G, H, K]"
            raise InvalidInput(message(OP, arg, "has a wrong rank", expected, list(x.shape)))
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        got = ", ".join(str(list(x.shape)) for x in (query, key, value))
        problem, expected = "have different batch sizes", "one batch size"
        raise InvalidInput(message(OP, "query/key/value", problem, expected, got))
    if output_dtype not in (None, query.dtype):
        raise Unsupported(
            f"{OP}: output_dtype is {output_dtype}; results have the dtype of query, convert them"
        )
    q, k, v = _with_heads(query, key, value)
    if attn_bias is None or isinstance(attn_bias, torch.Tensor):
        out = _dense(q, k, v, _added(attn_bias, query), scale)
    else:
        rule = _rule(attn_bias)
        if rule.keys != "dense":
            out = _sequences(q, k, v, attn_bias, rule, scale)
        elif rule.top_left:
            added = _added(getattr(attn_bias, "_bias", None), query)
            out = _dense(q, k, v, added, scale, top_left=True)
        else:
            out = _banded(q, k, v, attn_bias, rule, scale)
    return out.reshape(*query.shape[:-1], value.shape[-1])


def _with_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[B, M, H, K], with fewer heads in keys and values where groups of heads share them."""
    if q.dim() == 3:
        return q.unsqueeze(2), k.unsqueeze(2), v.unsqueeze(2)
    if q.dim() == 4:
        return q, k, v
    if all(x.shape[3] == 1 or x.stride(3) == 0 for x in (k, v)):
        return q.flatten(2, 3), k.select(3, 0), v.select(3, 0)
    return q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)


def _added(bias: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """A tensor in xFormers' layout for the rank of `query`, with one dimension for all heads."""
    if bias is None:
        return None
    if query.dim() == 3 and bias.dim() == 3:
        return bias.unsqueeze(1)
    if query.dim() != 5 or bias.dim() != 5:
        return bias
    heads, own = query.shape[2:4], bias.shape[1:3]
    if any(n not in (1, most) for n, most in zip(own, heads, strict=True)):
        expected = f"[B, {heads[0]}, {heads[1]}, Mq, Mkv]"
        raise InvalidInput(
            message(OP, "attn_bias", "does not broadcast", expected, list(bias.shape))
        )
    if own.numel() > 1:
        bias = bias.expand(-1, *heads, -1, -1)
    return bias.flatten(1, 2)


def _rule(bias: Any) -> Rule:
    """The meaning of the class of `bias`."""
    kind = type(bias)
    if kind.__module__ == BIASES and kind.__name__ in RULES:
        return RULES[kind.__name__]
    expected = f"None, a tensor, or a class of {BIASES}"
    raise Unsupported(
        message(OP, "attn_bias", "is unknown", expected, f"{kind.__module__}.{kind.__name__}")
    )


def _window(bias: Any, rule: Rule) -> tuple[int | None, int | None] | None:
    """Keys before and after a query's own that it sees, or None for all."""
    if not rule.local:
        return None
    if rule.causal:
        return bias._window_size - 1, 0
    return bias.window_left, bias.window_right


def _dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float | None,
    top_left: bool = False,
) -> torch.Tensor:
    """Attention of all queries to all keys, or causal from the first query and key on."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = k.shape[1] != q.shape[1]
    return scaled_dot_product_attention(
        q, k, v, bias, is_causal=top_left, scale=scale, enable_gqa=grouped
    ).transpose(1, 2)


def _banded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, rule: Rule, scale: float | None
) -> torch.Tensor:
    """Attention in a band around the diagonal that ends at the last query and key."""
    out = attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        causal=rule.causal,
        window=_window(bias, rule),
        scale=scale,
    )
    assert isinstance(out, torch.Tensor)
    return out.transpose(1, 2)


def _sequences(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, rule: Rule, scale: float | None
) -> torch.Tensor:
    """Attention within the sequences that a bias divides the tokens into."""
    if q.shape[0] != 1 or k.shape[0] != 1:
        expected = "a batch of 1 with a bias that divides it into sequences"
        raise InvalidInput(message(OP, "query", "has a batch", expected, list(q.shape)))
    queries, keys = bias.q_seqinfo, bias.k_seqinfo
    options: dict[str, Any] = {
        "max_seqlen_q": queries.max_seqlen,
        "causal": rule.causal,
        "window": _window(bias, rule),
        "scale": scale,
    }
    q, k, v = q[0], k[0], v[0]
    if rule.keys in ("pages", "gappy_pages"):
        if k.shape[0] % bias.page_size:
            expected = f"a multiple of {bias.page_size} tokens, the size of a page"
            raise InvalidInput(message(OP, "key", "ends inside a page", expected, k.shape[0]))
        k, v = (x.unflatten(0, (-1, bias.page_size)) for x in (k, v))
        options |= {"cache_seqlens": keys.seqlen, "page_table": bias.block_tables}
        if rule.keys == "gappy_pages":
            options["leftpad_k"] = keys.seqstart[:-1]
    else:
        starts = keys.seqstart
        if first := keys.seqstart_py[0]:
            # a gap in front of all sequences
            k, v, starts = k[first:], v[first:], starts - first
        options |= {"cu_seqlens_k": starts, "max_seqlen_k": keys.max_seqlen}
        if rule.keys != "packed":
            _check_gaps(keys)
            options["seqused_k"] = keys.seqlen
            # of the slots of a sequence, used or not
            options["max_seqlen_k"] = max(end - start for start, end in _slots(keys))
        if rule.top_left and queries.seqstart_py != keys.seqstart_py:
            options["align"] = "top_left"
    out = attention_varlen(q, k, v, queries.seqstart, **options)
    assert isinstance(out, torch.Tensor)
    return out


def _slots(keys: Any) -> list[tuple[int, int]]:
    """Where the slots of each sequence begin and end."""
    return list(zip(keys.seqstart_py, keys.seqstart_py[1:], strict=False))


def _check_gaps(keys: Any) -> None:
    """Sequences must follow each other: offsets never fall, and no sequence reaches the next."""
    for i, ((start, end), used) in enumerate(zip(_slots(keys), keys.seqlen_py, strict=True)):
        if start + used > end:
            expected = f"at most {end}, where the next begins"
            problem = f"has keys of sequence {i} behind the start of the next"
            raise Unsupported(message(OP, "attn_bias", problem, expected, start + used))
