"""A second oracle: what the documentation says, as loops over rows, in plain PyTorch on the CPU.

Random calls (`fuzz`) are compared with it. It is written from the documented semantics and shares
no code with `reference`, the implementations or their records, so that a misreading in one of them
shows. Slow on purpose. Every function works in `dtype`: fp64 for the exact result, the precision
of a call for the result that plain PyTorch would give.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Window = int | tuple[int | None, int | None] | None


def limits(causal: bool, window: Window) -> tuple[int | None, int | None]:
    """How many keys before and after its position a query sees; None is all of them."""
    left: int | None = None
    right: int | None = None
    if isinstance(window, int):
        left, right = window - 1, (0 if causal else window - 1)
    elif window is not None:
        left, right = window
    if causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def in_band(sq: int, sk: int, causal: bool, window: Window) -> Tensor:
    """bool [Sq, Sk]; the last query is at the position of the last key."""
    left, right = limits(causal, window)
    seen = torch.zeros(sq, sk, dtype=torch.bool)
    for i in range(sq):
        position = i + sk - sq
        for j in range(sk):
            not_too_early = left is None or j >= position - left
            not_too_late = right is None or j <= position + right
            seen[i, j] = not_too_early and not_too_late
    return seen


class Softmax(NamedTuple):
    """What attention does with scores besides the mask."""

    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    """[Hq]"""


class Row(NamedTuple):
    """One query of one head: scores and weights of the keys it sees, derivative of the cap."""

    scores: Tensor
    weights: Tensor
    slope: Tensor
    lse: Tensor


def softmax_row(
    q: Tensor, k: Tensor, keys: Tensor, softmax: Softmax, head: int, factors: Tensor | None = None
) -> Row:
    """q [D] against the rows `keys` of k [Sk, D]; `factors` of exp(score), one for each of them."""
    scores = (k[keys] @ q) * softmax.scale
    slope = torch.ones_like(scores)
    if softmax.softcap:
        bent = torch.tanh(scores / softmax.softcap)
        scores, slope = softmax.softcap * bent, 1 - bent * bent
    logits = scores
    if softmax.sinks is not None:
        logits = torch.cat([scores, softmax.sinks[head].to(scores).view(1)])
    if logits.numel() == 0:
        return Row(scores, scores, slope, torch.tensor(-math.inf, dtype=q.dtype))
    peak = logits.max()
    parts = torch.exp(logits - peak)
    if factors is not None:
        parts[: len(scores)] *= factors
    total = parts.sum()
    return Row(scores, parts[: len(scores)] / total, slope, peak + torch.log(total))


def attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, softmax: Softmax, dtype: torch.dtype,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [B, Hq, Sq, Dv] and lse [B, Hq, Sq]; `seen` bool [B, Hq, Sq, Sk].

    `factors` [B, Hq, Sq, Sk] of exp(score); a key whose factor is 0 is not seen.
    """
    if factors is not None:
        seen = seen & (factors > 0)
    batch, heads, queries, _ = q.shape
    q, k, v = (x.detach().cpu().to(dtype) for x in (q, k, v))
    out = torch.zeros(batch, heads, queries, v.shape[-1], dtype=dtype)
    lse = torch.full((batch, heads, queries), -math.inf, dtype=dtype)
    group = heads // k.shape[1]
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                keys = seen[b, h, i].nonzero().flatten()
                own = None if factors is None else factors[b, h, i, keys].to(dtype)
                row = softmax_row(q[b, h, i], k[b, h // group], keys, softmax, h, own)
                out[b, h, i] = row.weights @ v[b, h // group][keys]
                lse[b, h, i] = row.lse
    return out, lse


class Gradients(NamedTuple):
    """Of the inputs of attention; `sinks` None without any."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None


def attention_gradients(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, softmax: Softmax, dout: Tensor, dlse: Tensor,
    dtype: torch.dtype, out_dtype: torch.dtype | None = None,
) -> Gradients:  # fmt: skip
    """Gradients of sum(out * dout) + sum(lse * dlse), row by row.

    With `out_dtype`, weights come from an lse in fp32 and the output is rounded to that dtype, as
    in every backward pass that reads what the forward pass wrote.
    """
    batch, heads, queries, _ = q.shape
    q, k, v, dout, dlse = (x.detach().cpu().to(dtype) for x in (q, k, v, dout, dlse))
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    dsinks = None if softmax.sinks is None else torch.zeros(heads, dtype=dtype)
    group = heads // k.shape[1]
    for b in range(batch):
        for h in range(heads):
            kv = h // group
            for i in range(queries):
                keys = seen[b, h, i].nonzero().flatten()
                row = softmax_row(q[b, h, i], k[b, kv], keys, softmax, h)
                values = v[b, kv][keys]
                weights, out = row.weights, row.weights @ values
                # what all weights of the row lose, because they sum to one
                shared = out @ dout[b, h, i]
                if out_dtype is not None:
                    weights = torch.exp(row.scores - row.lse.float().to(dtype))
                    out = out.to(out_dtype).to(dtype)
                    # in another order than `values @ dout`: with one key the two sums would cancel
                    # to the last bit, which no backward pass on tiles can promise
                    shared = out.flip(0) @ dout[b, h, i].flip(0)
                shared = shared - dlse[b, h, i]
                dscores = weights * (values @ dout[b, h, i] - shared)
                dscores = dscores * row.slope * softmax.scale
                dq[b, h, i] = dscores @ k[b, kv][keys]
                dk[b, kv].index_add_(0, keys, dscores[:, None] * q[b, h, i])
                dv[b, kv].index_add_(0, keys, weights[:, None] * dout[b, h, i])
                if dsinks is not None and softmax.sinks is not None:
                    sink = softmax.sinks[h].cpu().to(dtype)
                    dsinks[h] -= torch.exp(sink - row.lse) * shared
    return Gradients(dq, dk, dv, dsinks)


class SparsekRow(NamedTuple):
    """Weights [n] of a row, and their threshold."""

    weights: Tensor
    tau: Tensor


def sparsek_row(z: Tensor, k: float, dtype: torch.dtype) -> SparsekRow:
    """Weights [n] that add up to k, nearest to the scores z, and their threshold: by bisection."""
    exact = z.detach().cpu().double()
    if k >= len(exact):
        return SparsekRow(torch.ones(len(exact), dtype=dtype), torch.tensor(-math.inf, dtype=dtype))
    low, high = float(exact.min()) - 1, float(exact.max())
    for _ in range(60):
        middle = (low + high) / 2
        if float((exact - middle).clamp(0, 1).sum()) <= k:
            high = middle
        else:
            low = middle
    # weights between 0 and 1 determine the threshold, to the precision of `dtype`
    shared = (exact > high) & (exact < high + 1)
    tau = torch.tensor(high, dtype=dtype)
    if shared.any():
        whole = (exact >= high + 1).sum()
        tau = (exact[shared].to(dtype).sum() + whole - k) / shared.sum()
    return SparsekRow((exact.to(dtype) - tau).clamp(0, 1), tau.to(dtype))


def merged(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys, from the results over each, in fp64."""
    rows_a, rows_b = (x.cpu().double().flatten(0, -2) for x in (o_a, o_b))
    flat_a, flat_b = (x.cpu().double().flatten() for x in (lse_a, lse_b))
    out, lse = torch.zeros_like(rows_a), torch.full_like(flat_a, -math.inf)
    for i, (a, b) in enumerate(zip(flat_a.tolist(), flat_b.tolist(), strict=True)):
        peak = max(a, b)
        if peak == -math.inf:
            continue
        w_a, w_b = math.exp(a - peak), math.exp(b - peak)
        # an empty part is not read, whatever it holds
        parts = [w * x[i] for w, x in ((w_a, rows_a), (w_b, rows_b)) if w > 0]
        out[i] = torch.stack(parts).sum(0) / (w_a + w_b)
        lse[i] = peak + math.log(w_a + w_b)
    return out.view(o_a.shape), lse.view(lse_a.shape)


# Caches.


def cached(cache: Tensor, length: int, pages: Sequence[int] | None, b: int, head: int) -> Tensor:
    """The first `length` tokens of sequence `b` and a KV head: [length, D]."""
    if pages is None:
        return cache[b, head, :length]
    size = cache.shape[1]
    rows = [cache[pages[t // size], t % size, head] for t in range(length)]
    return torch.stack(rows) if rows else cache.new_zeros((0, cache.shape[-1]))


def stored_fp8(x: Tensor, scale: float) -> Tensor:
    """What an e4m3 cache holds of x, as fp64: x / scale rounded to nearest even, at most 448."""
    inverse = torch.tensor(1.0) / torch.tensor(scale)
    scaled = (x.cpu().float() * inverse).double()
    out = torch.zeros_like(scaled).flatten()
    for i, value in enumerate(scaled.flatten().tolist()):
        size = min(abs(value), 448.0)
        if size > 0:
            # three bits after the leading one, the smallest exponent is -6
            step = 2.0 ** (max(math.floor(math.log2(size)), -6) - 3)
            size = min(round(size / step) * step, 448.0)  # round() takes the even one of two
        out[i] = math.copysign(size, value) if not math.isnan(value) else math.nan
    return out.view(scaled.shape)


# Products.


def dense_of(
    data: Tensor, indptr: Tensor, indices: Tensor, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """The matrix that blocks in BSR form describe."""
    _, height, width = data.shape
    rows, cols = -(-shape[0] // height), -(-shape[1] // width)
    out = torch.zeros(rows * height, cols * width, dtype=dtype)
    values, starts, columns = data.detach().cpu().to(dtype), indptr.tolist(), indices.tolist()
    for row in range(rows):
        for entry in range(starts[row], starts[row + 1]):
            top, left = row * height, columns[entry] * width
            out[top : top + height, left : left + width] += values[entry]
    return out[: shape[0], : shape[1]]


def activated(x: Tensor, activation: str | None) -> Tensor:
    """relu, gelu with erf, silu, or x itself."""
    if activation is None:
        return x
    if activation == "relu":
        return torch.where(x > 0, x, torch.zeros_like(x))
    if activation == "gelu":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    assert activation == "silu", activation
    return x / (1 + torch.exp(-x))


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, an output row at a time; leading dimensions of either are a batch."""
    if a.dim() > 2:
        return torch.stack([product(x, b) for x in a])
    if b.dim() > 2:
        return torch.stack([product(a, x) for x in b])
    rows = [(row[:, None] * b).sum(0) for row in a]
    return torch.stack(rows) if rows else b.new_zeros((0, b.shape[1]))


def blocks_at(dense: Tensor, indptr: Tensor, indices: Tensor, block_shape: Sequence[int]) -> Tensor:
    """The blocks of a matrix at the places of a pattern, 0 beyond the edge of the matrix."""
    height, width = block_shape
    starts, found = indptr.tolist(), []
    for row in range(len(starts) - 1):
        for entry in range(starts[row], starts[row + 1]):
            top, left = row * height, int(indices[entry]) * width
            block = dense.new_zeros(height, width)
            inside = dense[top : top + height, left : left + width]
            block[: inside.shape[0], : inside.shape[1]] = inside
            found.append(block)
    return torch.stack(found) if found else dense.new_zeros((0, height, width))


def kept_blocks(
    sq: int, sk: int, block_size: tuple[int, int], sees: Callable[[int, int], bool]
) -> Tensor:
    """bool [rows, columns] of blocks: those with an element that `sees(i, j)`."""
    bq, bk = block_size
    keep = torch.zeros(-(-sq // bq), -(-sk // bk), dtype=torch.bool)
    for i in range(sq):
        for j in range(sk):
            if sees(i, j):
                keep[i // bq, j // bk] = True
    return keep
