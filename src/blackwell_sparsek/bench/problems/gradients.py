"""Gradients of attention: their work, and a check of one group of heads in fp64.

Gradients of a key need every query, so one key head is computed in full, in chunks of queries.
"""

from collections.abc import Callable
from functools import lru_cache

import torch

from ...testing.tolerance import assert_within_budget
from .attention import AttentionInputs, attend

# Elements of fp64 scores held at once.
_SCORES = 2**26
# Five products where the forward pass has two.
WORK = 2.5

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def upstream_gradient(inputs: AttentionInputs) -> torch.Tensor:
    """The gradient of the output, random and the same at each call."""
    generator = torch.Generator(inputs.q.device).manual_seed(1)
    q = inputs.q
    return torch.randn(q.shape, generator=generator, device=q.device, dtype=q.dtype)


def check_gradients(inputs: AttentionInputs) -> Callable[[Gradients], None]:
    """Compare dq, dk and dv, `[B, H, S, D]` each, on the middle one of the key heads."""

    def compare(found: Gradients) -> None:
        b, kv, heads, exact, plain = _expected(inputs)
        got = (found[0][b, heads.start : heads.stop], found[1][b, kv], found[2][b, kv])
        for name, x, right, usual in zip(("dq", "dk", "dv"), got, exact, plain, strict=True):
            what = f"{name} of key head {kv} of batch {b}"
            # in fp32, base-2 exponents round once more than the formula, and that is all the error
            factor = 3.0 if x.dtype == torch.float32 else 2.0
            assert_within_budget(x, right, usual.to(x.dtype), factor=factor, what=what)

    return compare


# all peers of a case are compared with the same; the next case lets go of it
@lru_cache(maxsize=1)
def _expected(inputs: AttentionInputs) -> tuple[int, int, range, Gradients, Gradients]:
    """A batch, its key head and query heads, and their gradients in fp64 and by plain PyTorch."""
    p = inputs.problem
    kv_heads = p.kv_heads or p.heads
    group = p.heads // kv_heads
    b, kv = divmod(p.batch * kv_heads // 2, kv_heads)
    heads = range(kv * group, (kv + 1) * group)
    upstream = upstream_gradient(inputs)
    exact = _gradients(inputs, upstream, b, kv, heads, torch.float64)
    plain = _gradients(inputs, upstream, b, kv, heads, inputs.k.dtype)
    return b, kv, heads, exact, plain


def _gradients(
    inputs: AttentionInputs,
    upstream: torch.Tensor,
    b: int,
    kv: int,
    heads: range,
    dtype: torch.dtype,
) -> Gradients:
    """Gradients of a key head and its query heads, computed in `dtype` by chunks of queries."""
    length = inputs.problem.length
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    k, v = (x[b, kv].detach().to(dtype) for x in (inputs.k, inputs.v))
    dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
    dq = []
    step = max(1, _SCORES // length)
    for h in heads:
        parts = []
        for start in range(0, length, step):
            rows = torch.arange(start, min(start + step, length), device=k.device)
            keys = inputs.keys_of(start, start + len(rows) - 1)
            q, dout = (x[b, h, rows].detach().to(dtype) for x in (inputs.q, upstream))
            step_of = _recomputed if dtype == torch.float32 else _by_autograd
            got = step_of(q, k[keys], v[keys], inputs.visible(h, rows)[:, keys], dout)
            parts.append(got[0])
            dk[keys] += got[1]
            dv[keys] += got[2]
        dq.append(torch.cat(parts))
    return torch.stack(dq), dk, dv


def _by_autograd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, dout: torch.Tensor
) -> Gradients:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        out = attend(q, k, v, seen)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    return dq, dk, dv


def _recomputed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, dout: torch.Tensor
) -> Gradients:
    """From an lse of the same dtype, as every fused backward: rounding it is no fault of one."""
    scale = q.shape[-1] ** -0.5
    scores = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    p = torch.where(seen, torch.exp(scores - lse), 0.0)
    delta = (p @ v * dout).sum(-1, keepdim=True)
    ds = p * (dout @ v.mT - delta) * scale
    return ds @ k, ds.mT @ q, p.mT @ dout
