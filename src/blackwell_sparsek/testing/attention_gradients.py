"""The check of attention's gradients that all implementations of the backward share."""

import torch

from ..calls.attention import AttnGradients, AttnSpec
from ..reference.attention import added_to_scores, visible_elements, visible_to_heads
from ..reference.attention import attention as oracle
from .inputs import normal
from .tolerance import assert_within_budget


def upstream(out: torch.Tensor, lse: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random gradients of the results `out` and `lse`."""
    dout = normal(*out.shape, seed=seed * 8 + 5, dtype=out.dtype, device=out.device)
    return dout, normal(*lse.shape, seed=seed * 8 + 6, dtype=lse.dtype, device=lse.device)


def oracle_gradients(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttnSpec,
    precision: torch.dtype = torch.float64,
) -> AttnGradients:
    """Gradients of the formula in `precision`, by autograd; `dsinks` is None without sinks."""
    with torch.enable_grad():
        q, k, v = (x.detach().to(precision).requires_grad_() for x in (q, k, v))
        inputs = [q, k, v]
        if spec.sinks is not None:
            sinks = spec.sinks.detach().to(precision).requires_grad_()
            spec = spec._replace(sinks=sinks)
            inputs.append(sinks)
        out, lse = oracle(q, k, v, spec, precision=precision)
        pairs = [(out, dout.to(out.dtype))]
        if dlse is not None:
            pairs.append((lse, dlse.to(lse.dtype)))
        outputs, upstreams = zip(*pairs, strict=True)
        gradients = torch.autograd.grad(outputs, inputs, upstreams, materialize_grads=True)
    dq, dk, dv, *dsinks = gradients
    return AttnGradients(dq, dk, dv, dsinks[0] if dsinks else None)


def recomputed_gradients(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttnSpec,
    precision: torch.dtype | None = None,
) -> AttnGradients:
    """The dense formula in `precision`, by default that of q, from an lse of that dtype and from an
    output in the dtype of q.

    An implementation is not to blame for these roundings, and autograd of a softmax does not have
    them. Rounding lse causes an error of |lse| * eps / 2 in each probability. Rounding the output
    causes one in delta, and nothing but delta is left where a query sees one key and a sink.
    """
    precision, given = precision or q.dtype, q.dtype
    dout, q, k, v = (x.to(precision) for x in (dout, q, k, v))
    if spec.sinks is not None:
        spec = spec._replace(sinks=spec.sinks.to(precision))
    out, lse = oracle(q, k, v, spec, precision=precision)
    out = out.to(given).to(precision)
    dlse = torch.zeros_like(lse) if dlse is None else dlse.to(lse.dtype)
    if not spec.is_varlen:
        visible = visible_elements(q.shape[2], k.shape[2], spec, q.device)
        added = added_to_scores(q.shape[2], k.shape[2], spec, precision)
        return _recompute(dout, dlse, q, k, v, out, lse, spec, visible, added)
    assert spec.cu_seqlens_q is not None and spec.cu_seqlens_k is not None
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    dsinks = None if spec.sinks is None else torch.zeros_like(spec.sinks)
    q_ends, k_ends = spec.cu_seqlens_q.tolist(), spec.cu_seqlens_k.tolist()
    for i in range(len(q_ends) - 1):
        queries, keys = slice(q_ends[i], q_ends[i + 1]), slice(k_ends[i], k_ends[i + 1])
        do, q_s, o_s = (x[queries].transpose(0, 1)[None] for x in (dout, q, out))
        k_s, v_s = (x[keys].transpose(0, 1)[None] for x in (k, v))
        terms = (dlse[None, :, queries], lse[None, :, queries])
        visible = visible_elements(q_s.shape[2], k_s.shape[2], spec, q.device, i)
        added = added_to_scores(q_s.shape[2], k_s.shape[2], spec, precision, i)
        part = _recompute(do, terms[0], q_s, k_s, v_s, o_s, terms[1], spec, visible, added)
        for whole, span, piece in (
            (dq, queries, part.dq),
            (dk, keys, part.dk),
            (dv, keys, part.dv),
        ):
            assert piece is not None
            whole[span] = piece[0].transpose(0, 1)
        if dsinks is not None and part.dsinks is not None:
            dsinks += part.dsinks
    return AttnGradients(dq, dk, dv, dsinks)


def _recompute(
    dout: torch.Tensor,
    dlse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    spec: AttnSpec,
    visible: torch.Tensor,
    added: torch.Tensor | None,
) -> AttnGradients:
    visible = visible_to_heads(visible, q.shape[1])
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ wide_k.mT * spec.scale
    slope = torch.ones_like(s)
    if spec.softcap:
        tanh = torch.tanh(s / spec.softcap)
        s, slope = spec.softcap * tanh, 1 - tanh * tanh
    if added is not None:
        s = s + added
    shift = lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]
    p = torch.where(visible, torch.exp(s - shift), 0.0)
    delta = (out * dout).sum(-1, keepdim=True) - dlse[..., None]
    ds = p * (dout @ wide_v.mT - delta) * slope * spec.scale
    dk, dv = (x.reshape(*k.shape[:2], group, *x.shape[2:]).sum(2) for x in (ds.mT @ q, p.mT @ dout))
    dsinks = None
    if spec.sinks is not None:
        p_sink = torch.exp(spec.sinks[:, None, None] - shift)
        dsinks = -(p_sink * delta).sum((0, 2, 3))
    return AttnGradients(ds @ wide_k, dk, dv, dsinks)


def _farther(a: torch.Tensor, b: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Whichever of `a` and `b` errs more, element by element."""
    a, b = a.to(exact.dtype), b.to(exact.dtype)
    return torch.where((b - exact).abs() > (a - exact).abs(), b, a)


def check_gradients(
    gradients: AttnGradients,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttnSpec,
    what: str = "",
) -> None:
    """Compare those gradients that are not None with the oracle under the error budget."""
    exact = oracle_gradients(dout, dlse, q, k, v, spec)
    from_rounded = exact
    if q.dtype == torch.float32:
        plain = recomputed_gradients(dout, dlse, q, k, v, spec)
    else:
        plain = oracle_gradients(dout, dlse, q, k, v, spec, q.dtype)
        from_rounded = recomputed_gradients(dout, dlse, q, k, v, spec, torch.float64)
    # a softcap is applied to scores that are rounded already; in fp32, base-2 exponents round once
    # more than the formula does, which is the whole error there
    factor = 3.0 if spec.softcap or q.dtype == torch.float32 else 2.0
    columns = (AttnGradients._fields, gradients, exact, plain, from_rounded)
    for name, got, want, low, rounded in zip(*columns, strict=True):
        if got is not None:
            assert want is not None and low is not None and rounded is not None, name
            low = _farther(low, rounded, want)
            # the gradient of a sink sums delta, computed from the rounded output, over all queries;
            # and the error of plain PyTorch on a handful of heads may be small by luck
            slack = 2.0 if name == "dsinks" else 1.0
            assert_within_budget(
                got, want, low.to(got.dtype), factor=slack * factor, what=f"{what} {name}"
            )
