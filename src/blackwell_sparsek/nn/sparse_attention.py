"""Self-attention layers that choose their keys: NSA, MoBA, an indexer as in DSA, SparseK.

Thin modules around `select_keys`, `sparse_attention` and `attention`, for training and for prompts:
hidden states `[B, T, hidden]` in, the same out, always causal. What they choose follows from the
hidden states, so there is nothing to configure per call.
"""

from typing import Any

import torch
import torch.nn as nn

from ..attention.api import attention
from ..core.checks import check_tensor, message
from ..core.errors import InvalidInput, InvalidType
from ..core.kept_part import KeptPart
from ..core.torch_state import without_autocast
from ..masks.check import check_count
from ..masks.key_selection import KeySelection
from ..select_keys.api import select_keys
from ..sparse_attention.api import sparse_attention
from ..sparsek.api import sparsek_causal

# Scores of compressed keys, or of an indexer, that exist at the same time.
CHUNK = 2**24


class _SelfAttention(nn.Module):
    """Projections to queries, keys and values, and back.

    Parameters of all layers here
    -----------------------------
    hidden : int
        Size of the hidden states.
    heads, kv_heads : int
        Query heads, and KV heads that divide them.
    head_dim : int, optional
        `hidden // heads` by default.
    impl : str
        Of the attention, as in `bsk.attention`.
    """

    def __init__(
        self, hidden: int, heads: int, kv_heads: int, head_dim: int | None, impl: str, **kind: Any
    ):
        super().__init__()
        op = type(self).__name__
        for arg, value in (("hidden", hidden), ("heads", heads), ("kv_heads", kv_heads)):
            check_count(op, arg, value, at_least=1)
        if heads % kv_heads:
            raise InvalidInput(
                message(op, "heads", "do not fit", f"a multiple of {kv_heads}", heads)
            )
        self.heads: int = heads
        self.kv_heads: int = kv_heads
        self.impl: str = impl
        head_dim = hidden // heads if head_dim is None else head_dim
        self.head_dim: int = check_count(op, "head_dim", head_dim, at_least=1)
        self.q: nn.Linear = nn.Linear(hidden, heads * self.head_dim, bias=False, **kind)
        self.k: nn.Linear = nn.Linear(hidden, kv_heads * self.head_dim, bias=False, **kind)
        self.v: nn.Linear = nn.Linear(hidden, kv_heads * self.head_dim, bias=False, **kind)
        self.out: nn.Linear = nn.Linear(heads * self.head_dim, hidden, bias=False, **kind)

    def _project(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q `[B, Hq, T, D]`, k and v `[B, Hkv, T, D]`, rotated by `rotary`."""
        op = type(self).__name__
        check_tensor(op, "x", x)
        if x.dim() != 3 or x.shape[2] != self.q.in_features:
            expected = f"[B, T, {self.q.in_features}]"
            raise InvalidInput(message(op, "x", "has a wrong shape", expected, list(x.shape)))
        q, k, v = (
            made.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for made in (self.q(x), self.k(x), self.v(x))
        )
        if rotary is not None:
            cos, sin = _checked_pair(op, rotary)
            q, k = _rotated(op, q, cos, sin), _rotated(op, k, cos, sin)
        return q, k, v

    def _merge(self, out: torch.Tensor) -> torch.Tensor:
        """`[B, Hq, T, D]` back to hidden states."""
        merged: torch.Tensor = self.out(out.transpose(1, 2).flatten(2))
        return merged

    def _pairs(self, tokens: int, seen: torch.Tensor) -> KeptPart:
        """Pairs of queries and keys of a causal prompt, from the keys of each query."""
        return KeptPart(int(seen.sum()), tokens * (tokens + 1) // 2, "pairs")


def _keys_of_blocks(last: torch.Tensor, block: int, top_k: int) -> torch.Tensor:
    """Keys of queries at positions `last` in `top_k` blocks, their own among them."""
    others = (last // block).clamp(max=top_k - 1)
    return others * block + last % block + 1


def _checked_pair(op: str, rotary: Any) -> tuple[torch.Tensor, torch.Tensor]:
    is_pair = isinstance(rotary, tuple | list) and len(rotary) == 2
    if not is_pair or not all(isinstance(x, torch.Tensor) for x in rotary):
        expected = "(cos, sin), two tensors [T, head_dim]"
        got = type(rotary).__name__
        raise InvalidType(message(op, "rotary", "is not a pair of tensors", expected, got))
    cos, sin = rotary
    return cos, sin


def _rotated(op: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of halves: x cos + (-x2, x1) sin."""
    if cos.shape != x.shape[2:] or sin.shape != x.shape[2:]:
        got = f"{list(cos.shape)} and {list(sin.shape)}"
        raise InvalidInput(
            message(op, "rotary", "has a wrong shape", f"cos and sin {list(x.shape[2:])}", got)
        )
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


class MixtureOfBlockAttention(_SelfAttention):
    """MoBA: each query of each head attends to the blocks whose mean keys score highest.

    The score of a block is the product of the query with the mean of its keys. A query
    always takes its own block, and the best `top_k - 1` earlier ones. The selection has no gradient
    and no weights.

    Parameters
    ----------
    hidden, heads, kv_heads, head_dim : int
        Sizes; head_dim is `hidden // heads` by default.
    block : int
        Keys of a block: 16, 32, 64 or 128.
    top_k : int
        Blocks of each query, its own among them.
    impl : str
        As in `attention`.
    device, dtype :
        Of the weights.

    Raises
    ------
    InvalidInput
        If heads are no multiple of KV heads, or if x or `rotary` has a wrong shape.

    Examples
    --------
    >>> import torch
    >>> layer = MixtureOfBlockAttention(32, heads=4, kv_heads=2, block=16, top_k=2)
    >>> layer(torch.randn(1, 50, 32)).shape
    torch.Size([1, 50, 32])
    """

    def __init__(
        self,
        hidden: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int | None = None,
        block: int = 64,
        top_k: int = 8,
        impl: str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(hidden, heads, kv_heads, head_dim, impl, device=device, dtype=dtype)
        self.block: int = block
        self.top_k: int = top_k

    @property
    def pattern(self) -> str:
        """A description of the keys that a query attends to."""
        return f"best {self.top_k} blocks of {self.block}"

    def kept_of(self, tokens: int) -> KeptPart:
        """How many pairs of a causal prompt a head computes."""
        return self._pairs(tokens, _keys_of_blocks(torch.arange(tokens), self.block, self.top_k))

    def forward(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Hidden states `[B, T, hidden]`; `rotary` is cos and sin `[T, head_dim]`."""
        q, k, v = self._project(x, rotary)
        chosen = select_keys(
            q.detach(),
            k.detach(),
            pool="mean",
            granularity=self.block,
            top_k=self.top_k,
            force_last=1,
        )
        out: Any = sparse_attention(q, k, v, chosen, impl=self.impl)
        return self._merge(out)


class NativeSparseAttention(_SelfAttention):
    """NSA: compressed keys of all blocks, the keys of a few blocks, and a window, with gates.

    Three attentions over the same keys and values, added with a gate of each head and query:

    - *compressed*: over one key and value for each past block, a learned weighted mean of its own;
    - *selected*: over the keys of `top_k` blocks, those to which the compressed attention of the
      heads of a KV head gives the most weight together, the first and the latest always among them;
    - *window*: over the `window` latest keys.

    The selection has no gradient; it follows the compressed attention, which does.

    Parameters
    ----------
    hidden, heads, kv_heads, head_dim : int
        Sizes; head_dim is `hidden // heads` by default.
    block : int
        Keys of a block, compressed and selected: 16, 32, 64 or 128.
    top_k : int
        Blocks of each query and KV head, at least 2.
    window : int
        Keys of the window, the query's own among them.
    impl : str
        As in `attention`.
    device, dtype :
        Of the weights.

    Raises
    ------
    InvalidInput
        If heads are no multiple of KV heads, or if x or `rotary` has a wrong shape.

    Examples
    --------
    >>> import torch
    >>> layer = NativeSparseAttention(32, heads=4, kv_heads=2, block=16, top_k=3, window=8)
    >>> layer(torch.randn(1, 50, 32)).shape
    torch.Size([1, 50, 32])
    """

    def __init__(
        self,
        hidden: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int | None = None,
        block: int = 64,
        top_k: int = 16,
        window: int = 512,
        impl: str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(hidden, heads, kv_heads, head_dim, impl, device=device, dtype=dtype)
        op = type(self).__name__
        self.block: int = check_count(op, "block", block, at_least=1)
        self.top_k: int = check_count(op, "top_k", top_k, at_least=2)
        self.window: int = check_count(op, "window", window, at_least=1)
        # logits of the weights of a block's keys and values in their means
        shape = (2, kv_heads, block)
        self.pooling: nn.Parameter = nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))
        self.gates: nn.Linear = nn.Linear(hidden, 3 * heads, device=device, dtype=dtype)

    @property
    def pattern(self) -> str:
        """A description of the keys that a query attends to."""
        means = f"means of blocks of {self.block}"
        return f"{means}, best {self.top_k} of these blocks, window {self.window}"

    def kept_of(self, tokens: int) -> KeptPart:
        """How many pairs of a causal prompt a head computes in all three branches.

        More than all of them in a short prompt, where the branches overlap.
        """
        last = torch.arange(tokens)
        near = (last + 1).clamp(max=self.window)
        means = (last + 1) // self.block
        return self._pairs(tokens, means + near + _keys_of_blocks(last, self.block, self.top_k))

    def forward(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Hidden states `[B, T, hidden]`; `rotary` is cos and sin `[T, head_dim]`."""
        q, k, v = self._project(x, rotary)
        k_mean, v_mean = self._compressed(k, v)
        gate = self._past_blocks(q.shape[2], k_mean.shape[2], q.device)
        made: Any = attention(q, k_mean, v_mean, key_gate=gate, return_lse=True, impl=self.impl)
        compressed, lse = made
        with torch.no_grad(), without_autocast(q.device):
            chosen = self._chosen(q, k_mean, lse)
        selected: Any = sparse_attention(q, k, v, chosen, impl=self.impl)
        near: Any = attention(q, k, v, causal=True, window=self.window, impl=self.impl)
        weights = torch.sigmoid(self.gates(x)).unflatten(-1, (3, self.heads)).permute(2, 0, 3, 1)
        branches = (compressed, selected, near)
        mixed = sum(w[..., None] * part for w, part in zip(weights, branches, strict=True))
        return self._merge(mixed.to(q.dtype))

    def _compressed(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weighted means `[B, Hkv, blocks, D]` of the keys and values of whole blocks."""
        whole = k.shape[2] // self.block * self.block
        weights = self.pooling.softmax(-1).to(k.dtype)
        k_mean, v_mean = (
            torch.einsum("bhnld,hl->bhnd", y[:, :, :whole].unflatten(2, (-1, self.block)), w)
            for y, w in zip((k, v), weights, strict=True)
        )
        return k_mean.contiguous(), v_mean.contiguous()

    def _past_blocks(
        self, tokens: int, blocks: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A gate that shows a query the blocks that end at its place or before: 1, or 0."""
        ends = self.block * torch.arange(1, blocks + 1, device=device, dtype=torch.float32)
        seen = torch.arange(1, tokens + 1, device=device, dtype=torch.float32)
        return -ends.view(1, 1, -1), (-seen - 1).view(1, 1, -1)

    def _chosen(self, q: torch.Tensor, k_mean: torch.Tensor, lse: torch.Tensor) -> KeySelection:
        """The blocks with the largest probabilities of compressed attention."""
        batch, _, tokens, _ = q.shape
        group, past = self.heads // self.kv_heads, k_mean.shape[2]
        blocks = -(-tokens // self.block)
        top = min(self.top_k, blocks)
        number = torch.arange(blocks, device=q.device)
        indices = []
        step = max(1, CHUNK // max(batch * self.heads * blocks, 1))
        for first in range(0, max(tokens, 1), step):
            own = slice(first, min(first + step, tokens))
            rows = q[:, :, own].unflatten(1, (self.kv_heads, group)).float()
            scores = torch.einsum("bhgtd,bhnd->bhgtn", rows, k_mean.float())
            shift = lse[:, :, own].unflatten(1, (self.kv_heads, group))[..., None]
            p = torch.exp(scores * self.head_dim**-0.5 - shift).sum(2)
            p = nn.functional.pad(p, (0, blocks - past))
            current = (torch.arange(own.start, own.stop, device=q.device) // self.block)[:, None]
            # blocks that are not yet whole have no probability; the latest is taken always
            p = p.masked_fill((number == 0) | (number == current), torch.inf)
            p = p.masked_fill(number > current, -1.0)
            best = p.topk(top, -1)
            indices.append(best.indices.masked_fill(best.values < 0, -1))
        # checking them would wait for the device, and topk lists each block once
        return KeySelection.from_indices(
            torch.cat(indices, 2), granularity=self.block, kv_len=tokens, check=False
        )


class IndexerAttention(_SelfAttention):
    """Attention to the keys that a small indexer scores highest, as in DSA.

    The score of key j for query t is `sum_h w[t, h] relu(q_index[t, h] . k_index[j])`, over index
    heads with one key in common; each query takes the `top_k` highest. The choice has no gradient.
    The indexer has its own loss: the divergence of its softmax over the selected keys from the
    attention weights of all heads together. Request it with `with_loss` and add it to the loss of
    the model; its gradient reaches only the weights of the indexer.

    Parameters
    ----------
    hidden, heads, kv_heads, head_dim : int
        Sizes; head_dim is `hidden // heads` by default.
    index_heads, index_dim : int
        Heads of the indexer and their size.
    top_k : int
        Keys of each query.
    impl : str
        As in `attention`.
    device, dtype :
        Of the weights.

    Raises
    ------
    InvalidInput
        If heads are no multiple of KV heads, or if x or `rotary` has a wrong shape.

    Examples
    --------
    >>> import torch
    >>> layer = IndexerAttention(32, heads=4, kv_heads=1, index_heads=2, index_dim=8, top_k=5)
    >>> out, loss = layer(torch.randn(1, 50, 32), with_loss=True)
    >>> out.shape, loss.shape
    (torch.Size([1, 50, 32]), torch.Size([]))
    """

    def __init__(
        self,
        hidden: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int | None = None,
        index_heads: int = 4,
        index_dim: int = 64,
        top_k: int = 2048,
        impl: str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(hidden, heads, kv_heads, head_dim, impl, device=device, dtype=dtype)
        op = type(self).__name__
        self.index_heads: int = check_count(op, "index_heads", index_heads, at_least=1)
        self.top_k: int = check_count(op, "top_k", top_k, at_least=1)
        kind = {"device": device, "dtype": dtype}
        index_dim = check_count(op, "index_dim", index_dim, at_least=1)
        self.q_index: nn.Linear = nn.Linear(hidden, index_heads * index_dim, bias=False, **kind)
        self.k_index: nn.Linear = nn.Linear(hidden, index_dim, bias=False, **kind)
        self.index_weights: nn.Linear = nn.Linear(hidden, index_heads, bias=False, **kind)

    @property
    def pattern(self) -> str:
        """A description of the keys that a query attends to."""
        return f"best {self.top_k} keys"

    def kept_of(self, tokens: int) -> KeptPart:
        """How many pairs of a causal prompt a head computes."""
        return self._pairs(tokens, torch.arange(1, tokens + 1).clamp(max=self.top_k))

    def forward(
        self,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
        *,
        with_loss: bool = False,
    ) -> Any:
        """Hidden states `[B, T, hidden]`, and the loss of the indexer if asked for it.

        `rotary` is cos and sin `[T, head_dim]`; the indexer does not rotate.
        """
        q, k, v = self._project(x, rotary)
        # the loss of the model does not reach the indexer, nor its loss the model
        q_index, k_index, weights = self._index(x.detach())
        chosen = select_keys(
            q_index.detach(),
            k_index.detach(),
            weights=weights.detach(),
            activation="relu",
            granularity=1,
            top_k=self.top_k,
        )
        made: Any = sparse_attention(q, k, v, chosen, return_lse=True, impl=self.impl)
        out, lse = made
        merged = self._merge(out)
        if not with_loss:
            return merged
        model = (q.detach(), k.detach(), lse.detach())
        with without_autocast(q.device):
            return merged, self._loss(*model, q_index, k_index, weights, chosen)

    def _index(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Index heads `[B, Hi, T, Di]`, their keys `[B, 1, T, Di]`, weights `[B, Hi, T]`."""
        q_index = self.q_index(x).unflatten(-1, (self.index_heads, -1)).transpose(1, 2)
        weights = self.index_weights(x) * self.index_heads**-0.5
        return q_index, self.k_index(x)[:, None], weights.transpose(1, 2).contiguous()

    def _loss(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        lse: torch.Tensor,
        q_index: torch.Tensor,
        k_index: torch.Tensor,
        weights: torch.Tensor,
        chosen: KeySelection,
    ) -> torch.Tensor:
        """Mean over queries of KL(attention || indexer) over the chosen keys."""
        batch, _, tokens, _ = q.shape
        ids, counts = chosen.ids[:, 0].long(), chosen.counts[:, 0]
        listed = torch.arange(ids.shape[2], device=q.device) < counts[..., None]
        # places past the count hold anything
        ids = torch.where(listed, ids, 0)
        of_batch = torch.arange(batch, device=q.device)[:, None, None]
        total = q.new_zeros((), dtype=torch.float32)
        group = self.heads // self.kv_heads
        step = max(1, CHUNK // max(batch * ids.shape[2] * self.heads * self.head_dim, 1))
        for first in range(0, tokens, step):
            own = slice(first, first + step)
            at, there = ids[:, own], listed[:, own]
            with torch.no_grad():
                keys = k.transpose(1, 2)[of_batch, at].float()
                rows = q[:, :, own].unflatten(1, (self.kv_heads, group)).float()
                scores = torch.einsum("bhgtd,btnhd->bhgtn", rows, keys).flatten(1, 2)
                p = torch.exp(scores * self.head_dim**-0.5 - lse[:, :, own, None]).sum(1)
                p = torch.where(there, p, 0.0)
                p = p / p.sum(-1, keepdim=True)
            keys = k_index[:, 0][of_batch, at].float()
            products = torch.einsum("bhtd,btnd->bhtn", q_index[:, :, own].float(), keys)
            scores = (weights[:, :, own, None].float() * products.relu()).sum(1)
            predicted = scores.masked_fill(~there, -torch.inf).log_softmax(-1)
            predicted = torch.where(there, predicted, 0.0)
            total = total + (torch.xlogy(p, p) - p * predicted).sum()
        return total / max(batch * tokens, 1)


class SparsekAttention(_SelfAttention):
    """SparseK attention: the score of a token determines how long later queries see it.

    u = x w for each KV head. Token j has the weight `clip(u[j] - tau[t], 0, 1)` for query t, with
    thresholds tau from `sparsek_causal`, under which these add up to `keep`. Thresholds never fall:
    what is dropped stays dropped, so decoding needs memory for about `keep` tokens
    (`SparsekCache`). Everything is differentiable.

    Parameters
    ----------
    hidden, heads, kv_heads, head_dim : int
        Sizes; head_dim is `hidden // heads` by default.
    keep : float
        Sum of the weights of a query.
    impl : str
        As in `attention`.
    device, dtype :
        Of the weights.

    Raises
    ------
    InvalidInput
        If heads are no multiple of KV heads, or if x or `rotary` has a wrong shape.

    Examples
    --------
    >>> import torch
    >>> layer = SparsekAttention(32, heads=4, kv_heads=2, keep=8)
    >>> layer(torch.randn(1, 50, 32)).shape
    torch.Size([1, 50, 32])
    """

    def __init__(
        self,
        hidden: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int | None = None,
        keep: float = 512.0,
        impl: str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(hidden, heads, kv_heads, head_dim, impl, device=device, dtype=dtype)
        self.keep: float = float(keep)
        self.score: nn.Linear = nn.Linear(hidden, kv_heads, bias=False, device=device, dtype=dtype)
        # all tokens begin with the same weight: those with weights of 0 and 1 have no gradient
        nn.init.zeros_(self.score.weight)

    @property
    def pattern(self) -> str:
        """A description of the keys that a query attends to."""
        return f"SparseK weights that add up to {self.keep:g}"

    def kept_of(self, tokens: int) -> KeptPart:
        """All pairs of a causal prompt; how many a head computes follows from its scores."""
        return KeptPart(None, tokens * (tokens + 1) // 2, "pairs")

    def forward(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Hidden states `[B, T, hidden]`; `rotary` is cos and sin `[T, head_dim]`."""
        q, k, v = self._project(x, rotary)
        u = self.score(x).transpose(1, 2).contiguous()
        gate = (u, sparsek_causal(u, self.keep))
        out: Any = attention(q, k, v, causal=True, key_gate=gate, impl=self.impl)
        return self._merge(out)
