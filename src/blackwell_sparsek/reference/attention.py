"""Attention as a formula: the oracle that every other implementation is measured against.

    s[i, j] = softcap(scale * q[i] . k[j]) + bias[i, j] - slope * |i + Sk - Sq - j|
                                                        where query i sees key j
    p[i, j] = exp(s[i, j] - lse[i])
    lse[i]  = log(sum_j exp(s[i, j]) + exp(sink))
    out[i]  = sum_j p[i, j] v[j]

Everything is dense and in fp64 (only tests pass another `precision`, to measure what a lower
precision costs). Gradients come from plain autograd. Positions that a query does not see are masked
out before any arithmetic, so that NaN or inf there changes no result and no gradient.
"""

import torch

from ..calls.attention import AttentionCall, AttnSpec, BackwardCall, fill_gradients, lse_dtype
from ..masks.band import Band
from ..masks.block_mask import BlockMask


def forward(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse, laid out as by other implementations."""
    call.check_lengths()
    out, lse = attention(call.q, call.k, call.v, call.spec)
    return call.empty_out().copy_(out), lse


def backward(call: BackwardCall) -> None:
    """Fill the gradients that are asked for."""
    given = call.forward
    gradients = attention_backward(call.dout, call.dlse, given.q, given.k, given.v, given.spec)
    fill_gradients(call.gradients, gradients)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttnSpec,
    precision: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv].

    Packed sequences (`spec.is_varlen`) are computed one by one: q [Tq, Hq, D], k [Tk, Hkv, D],
    v [Tk, Hkv, Dv] give out [Tq, Hq, Dv] and lse [Hq, Tq].
    """
    if spec.is_varlen:
        return _attention_varlen(q, k, v, spec, precision)
    sizes = (q.shape[2], k.shape[2])
    visible = visible_to_heads(visible_elements(*sizes, spec, q.device), q.shape[1])
    added = added_to_scores(*sizes, spec, precision)
    out, lse = _attend(q.to(precision), k.to(precision), v.to(precision), spec, visible, added)
    return out.to(q.dtype), lse.to(lse_dtype(q.dtype))


def _attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttnSpec, precision: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    assert spec.cu_seqlens_q is not None and spec.cu_seqlens_k is not None
    q_ends, k_ends = spec.cu_seqlens_q.tolist(), spec.cu_seqlens_k.tolist()
    outs, lses = [], []
    for sequence in range(len(q_ends) - 1):
        q_s = q[q_ends[sequence] : q_ends[sequence + 1]].transpose(0, 1).unsqueeze(0)
        k_s = k[k_ends[sequence] : k_ends[sequence + 1]].transpose(0, 1).unsqueeze(0)
        v_s = v[k_ends[sequence] : k_ends[sequence + 1]].transpose(0, 1).unsqueeze(0)
        sizes = (q_s.shape[2], k_s.shape[2])
        visible = visible_elements(*sizes, spec, q.device, sequence)
        visible = visible_to_heads(visible, q.shape[1])
        added = added_to_scores(*sizes, spec, precision, sequence)
        q_s, k_s, v_s = (x.to(precision) for x in (q_s, k_s, v_s))
        out, lse = _attend(q_s, k_s, v_s, spec, visible, added)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    none_out = q.new_zeros((0, q.shape[1], v.shape[2]), dtype=precision)
    none_lse = q.new_zeros((q.shape[1], 0), dtype=precision)
    out, lse = torch.cat([none_out, *outs], 0), torch.cat([none_lse, *lses], 1)
    return out.to(q.dtype), lse.to(lse_dtype(q.dtype))


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttnSpec,
    visible: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _visible_products(q, k, visible) * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if bias is not None:
        scores = scores + bias
    scores = torch.where(visible, scores, -torch.inf)

    # one more column holds the sink; -inf there means no sink
    column = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    if spec.sinks is not None:
        column = spec.sinks.to(q.dtype).view(1, -1, 1, 1).expand_as(column)
    logits = torch.cat([scores, column], dim=-1)

    peak = logits.amax(-1, keepdim=True).detach()
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    weights = torch.exp(logits - peak)
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -torch.inf, peak + torch.log(total))

    out = _visible_sum(weights[..., :-1] / total, v, visible)
    return out, lse.squeeze(-1)


def _times(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x @ y; where y [B, Hkv, ...] has fewer heads than x, each of them serves its whole group."""
    if x.shape[:-2] == y.shape[:-2]:
        return x @ y
    batch, heads, rows, inner = x.shape
    # the rows of a group together: repeating y takes gigabytes where a group has 128 heads
    stacked = x.reshape(batch, y.shape[1], heads // max(y.shape[1], 1) * rows, inner)
    return (stacked @ y).reshape(batch, heads, rows, y.shape[-1])


def _visible_products(q: torch.Tensor, k: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """q[i] . k[j] where visible, 0 elsewhere; hidden pairs pass on neither values nor gradients."""
    finite_q, finite_k = torch.where(q.isfinite(), q, 0.0), torch.where(k.isfinite(), k, 0.0)
    products = _times(finite_q, finite_k.mT)
    if not (q.isfinite().all() and k.isfinite().all()):
        as_given = _times(q, k.mT).detach()
        products = products + torch.where(as_given.isfinite(), 0.0, as_given)
    return torch.where(visible, products, 0.0)


def _visible_sum(p: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """sum_j p[i, j] v[j] over visible keys only: 0 * NaN of a hidden key must not count."""
    total = _times(p, torch.where(v.isfinite(), v, 0.0))
    bad = (~v.isfinite()).any(-1).flatten(0, -2).any(0).nonzero().flatten()
    if bad.numel() == 0:
        return total
    seen = visible.expand(p.shape)[..., bad].unsqueeze(-1)
    bad_v = torch.where(v.isfinite(), 0.0, v)[..., bad, :].unsqueeze(-3)
    if p.shape[:-2] != v.shape[:-2]:
        bad_v = bad_v.repeat_interleave(p.shape[1] // v.shape[1], dim=1)
    return total + (p[..., bad].unsqueeze(-1) * torch.where(seen, bad_v, 0.0)).sum(-2)


def added_to_scores(
    sq: int, sk: int, spec: AttnSpec, precision: torch.dtype, sequence: int | None = None
) -> torch.Tensor | None:
    """Bias and ALiBi, broadcastable to [B, Hq, Sq, Sk]; None without either.

    `sequence` picks the slopes of one packed sequence, whose lengths are `sq` and `sk`.
    """
    added = None if spec.bias is None else spec.bias.to(precision)
    slopes = spec.alibi_slopes
    if slopes is not None:
        slopes = slopes.view(-1, slopes.shape[-1]).to(precision)
        if sequence is not None and slopes.shape[0] > 1:
            slopes = slopes[sequence : sequence + 1]
        position = torch.arange(sq, device=slopes.device)[:, None] + (sk - sq)
        distance = (position - torch.arange(sk, device=slopes.device)).abs()
        alibi = -slopes[:, :, None, None] * distance
        added = alibi if added is None else added + alibi
    return added


def visible_elements(
    sq: int, sk: int, spec: AttnSpec, device: torch.device, sequence: int | None = None
) -> torch.Tensor:
    """Which keys each query sees: bool, broadcastable to [B, Hq, Sq, Sk], or one per KV head.

    `sequence` picks the mask of one packed sequence, whose lengths are `sq` and `sk`.
    """
    visible = band_elements(sq, sk, spec.band).to(device)[None, None]
    if spec.block_mask is not None:
        elements = mask_elements(spec.block_mask).to(device)
        if sequence is not None and elements.shape[0] > 1:
            elements = elements[sequence : sequence + 1]
        visible = visible & elements[:, :, :sq, :sk]
    return visible


def visible_to_heads(visible: torch.Tensor, heads: int) -> torch.Tensor:
    """Visible elements [B, 1 or H, Sq, Sk] of each query head, from visible elements by KV head."""
    own = visible.shape[1]
    return visible if own in (1, heads) else visible.repeat_interleave(heads // own, dim=1)


def band_elements(sq: int, sk: int, band: Band) -> torch.Tensor:
    """bool [Sq, Sk]: query i is at position i + Sk - Sq and sees the band around it."""
    position = torch.arange(sq)[:, None] + (sk - sq)
    key = torch.arange(sk)[None, :]
    visible = torch.ones(sq, sk, dtype=torch.bool)
    if band.left is not None:
        visible &= key >= position - band.left
    if band.right is not None:
        visible &= key <= position + band.right
    return visible


def mask_elements(mask: BlockMask) -> torch.Tensor:
    """bool [Bm, Hm, Sq, Sk] of a block mask, by visiting its blocks one after another."""
    (sq, sk), (bq, bk) = mask.seq_lengths, mask.block_size
    rows, columns = -(-sq // bq), -(-sk // bk)
    elements = torch.zeros(mask.batch * mask.heads, rows * bq, columns * bk, dtype=torch.bool)
    indptr, _, indices, bits_id = (x.tolist() for x in mask.forward)
    bits = mask.bits.cpu()
    for row in range(mask.batch * mask.heads * rows):
        plane, top = row // rows, row % rows * bq
        for entry in range(indptr[row], indptr[row + 1]):
            left = indices[entry] * bk
            block = torch.ones(bq, bk, dtype=torch.bool)
            if bits_id[entry] >= 0:
                words = bits[bits_id[entry]]
                for column in range(bk):
                    block[:, column] = (words[:, column // 32] >> (column % 32)) & 1 == 1
            elements[plane, top : top + bq, left : left + bk] = block
    return elements.view(mask.batch, mask.heads, rows * bq, columns * bk)[:, :, :sq, :sk]


def attention_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttnSpec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of q, k, v and the sinks (None without sinks): autograd of the formula above.

    `torch.func.vjp` also works inside an operator, where `torch.autograd.grad` records nothing.
    """
    inputs = [q, k, v] if spec.sinks is None else [q, k, v, spec.sinks]

    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return attention(q, k, v, spec._replace(sinks=sinks))

    outputs, pull_back, *_ = torch.func.vjp(forward, *inputs)
    dlse = torch.zeros_like(outputs[1]) if dlse is None else dlse
    dq, dk, dv, *dsinks = pull_back((dout, dlse))
    return dq, dk, dv, dsinks[0] if dsinks else None
