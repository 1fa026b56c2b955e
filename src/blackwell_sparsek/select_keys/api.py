"""`select_keys`: the keys of highest scores of each query token."""

from typing import Any

import torch

from ..attention.inputs import DENSE, DTYPES
from ..calls.select_keys import SelectCall, SelectOptions
from ..core.checks import (
    check_choice,
    check_dtype,
    check_last_dim_contiguous,
    check_rank,
    check_same_device,
    check_same_dtype,
    check_shape,
    check_tensor,
    message,
)
from ..core.env import IMPLS
from ..core.errors import InvalidInput, InvalidType
from ..launch.launcher import cdiv
from ..masks.check import check_count
from ..masks.key_selection import GRANULARITIES, KeySelection
from .op import select

INDEX_DTYPES = (*DTYPES, torch.float8_e4m3fn)


def select_keys(
    q_index: torch.Tensor,
    k_index: torch.Tensor,
    *,
    weights: torch.Tensor | None = None,
    activation: str | None = None,
    pool: str | None = None,
    granularity: int,
    top_k: int | None = None,
    top_p: float | None = None,
    force_first: int = 0,
    force_last: int = 0,
    causal: bool = True,
    lists: int | None = None,
    impl: str = "auto",
) -> KeySelection:
    """Select, for each query token, the keys or entries of keys with the highest scores.

    The score of key j is `sum_h weights[h] * activation(q_index[h] . k_index[j])` over the index
    heads of a list; that of an entry is the largest or the mean score of its keys that the query
    sees. Scores are computed in fp32 (fp64 for fp64), some queries at a time. Ties go
    to the lower entry, so every run selects the same entries. The selection has no gradient:
    train an indexer through the `gate` of `sparse_attention`, or with a loss on its scores.

    DSA: `weights` and `activation="relu"`, granularity 1. MSA: one index head for each KV head,
    `pool="max"`, granularity 128. MoBA: `pool="mean"`, `force_last=1`.

    Parameters
    ----------
    q_index : fp8 (e4m3), fp16, bf16, fp32 or fp64 `[B, Hi, Tq, D]`
        Contiguous in the last dimension, as k_index.
    k_index : dtype of q_index `[B, Hk, Tk, D]`
        Index head h reads head `h // (Hi / Hk)`.
    weights : float `[B, Hi, Tq]`, optional
    activation : None or "relu"
    pool : None, "max" or "mean"
        How an entry's score comes from those of its keys; None with granularity 1.
    granularity : int
        Keys of an entry: 1, 4, 16, 32, 64 or 128.
    top_k : int, optional
        Entries of each query; those that see fewer take all of them.
    top_p : float, optional
        Take entries until their share of the softmax over all scores reaches this; with `top_k`, at
        most that many. One of the two is required.
    force_first, force_last : int
        Always take this many of the first, or latest, visible entries; they count in `top_k`.
    causal : bool
        Hide the keys after a query's position, `i + Tk - Tq`.
    lists : int, optional
        Number of groups whose index heads are summed; each group has one list. By default 1 with
        `weights`, else Hi.
    impl : str
        `auto`, `reference`, `eager` or `triton`; a name never falls back.

    Returns
    -------
    KeySelection
        `[B, lists, Tq, K]`; K is `top_k`, or the number of all entries if that is less or there is
        no `top_k`.

    Raises
    ------
    InvalidInput
        If shapes, dtypes or devices do not fit.
    Unsupported
        If `impl` cannot run this call.

    Examples
    --------
    >>> import torch
    >>> k_index = torch.tensor([3.0, 1.0, 2.0, 5.0]).view(1, 1, 4, 1)
    >>> chosen = select_keys(torch.ones(1, 1, 4, 1), k_index, granularity=1, top_k=2)
    >>> chosen.counts.tolist(), chosen.ids[0, 0, 2].tolist()
    ([[[1, 2, 2, 2]]], [0, 2])
    """
    op = "select_keys"
    _check_index(op, q_index, k_index, weights)
    check_choice(op, "activation", activation, (None, "relu"))
    check_choice(op, "granularity", granularity, GRANULARITIES)
    check_choice(op, "pool", pool, (None,) if granularity == 1 else ("max", "mean"))
    check_choice(op, "causal", causal, (False, True))
    check_choice(op, "impl", impl, IMPLS)
    heads, kv_len = q_index.shape[1], k_index.shape[2]
    if lists is None:
        lists = heads if weights is None else min(heads, 1)
    elif heads % check_count(op, "lists", lists, at_least=1):
        raise InvalidInput(
            message(op, "lists", "does not fit", f"a divisor of the {heads} index heads", lists)
        )
    most = cdiv(kv_len, granularity)
    if top_k is not None:
        most = min(most, check_count(op, "top_k", top_k, at_least=1))
    elif top_p is None:
        raise InvalidInput(message(op, "top_k/top_p", "are both missing", "one or both", None))
    first = check_count(op, "force_first", force_first)
    last = check_count(op, "force_last", force_last)
    if top_k is not None and first + last > top_k:
        got = f"{first} + {last}"
        expected = f"at most top_k, {top_k}, together"
        raise InvalidInput(message(op, "force_first/force_last", "are too many", expected, got))
    options = SelectOptions(
        granularity,
        lists,
        most,
        _checked_share(op, top_p),
        first,
        last,
        activation or "none",
        pool or "none",
        causal,
    )
    ids, counts = select(SelectCall(q_index, k_index, weights, options), impl)
    return KeySelection._from_tensors(ids, counts, granularity, kv_len)


def _check_index(op: str, q: Any, k: Any, weights: Any) -> None:
    for arg, x in (("q_index", q), ("k_index", k)):
        check_tensor(op, arg, x)
        check_dtype(op, arg, x, INDEX_DTYPES)
        check_rank(op, arg, x, DENSE)
        check_last_dim_contiguous(op, arg, x)
    if weights is not None:
        check_tensor(op, "weights", weights)
    check_same_device(op, {"q_index": q, "k_index": k, "weights": weights})
    check_same_dtype(op, {"q_index": q, "k_index": k}, autocasts=False)
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        got = f"{list(q.shape)} and {list(k.shape)}"
        raise InvalidInput(message(op, "q_index/k_index", "do not match", "one B and one D", got))
    if q.shape[1] % k.shape[1] if k.shape[1] else q.shape[1]:
        got = f"{q.shape[1]} heads over {k.shape[1]}"
        expected = "a multiple of the heads of k_index"
        raise InvalidInput(message(op, "q_index", "has a wrong number of heads", expected, got))
    if weights is not None:
        check_dtype(op, "weights", weights, DTYPES)
        check_shape(op, "weights", weights, q.shape[:3])


def _checked_share(op: str, top_p: Any) -> float:
    """`top_p` as the operator carries it: 0 is off."""
    if top_p is None:
        return 0.0
    if isinstance(top_p, bool) or not isinstance(top_p, (int, float)):
        got = type(top_p).__name__
        raise InvalidType(message(op, "top_p", "is not a number", "a float", got))
    if not 0 < top_p <= 1:
        raise InvalidInput(message(op, "top_p", "is out of range", "above 0, up to 1", top_p))
    return float(top_p)
