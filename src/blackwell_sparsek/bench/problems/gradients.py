"""Gradients of attention: their work, and a check of one group of heads in fp64.

Gradients of a key need every query, so one key head is computed in full, in chunks of queries.
"""

from collections.abc import Callable

import torch

from ...testing.tolerance import assert_within_budget
from .attention import AttentionInputs, attend, factor_of

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
        p = inputs.problem
        kv_heads = p.kv_heads or p.heads
        group = p.heads // kv_heads
        number = p.batch * kv_heads // 2
        b, kv = divmod(number, kv_heads)
        heads = range(kv * group, (kv + 1) * group)
        with torch.enable_grad():
            exact = _gradients(inputs, b, kv, heads, exact=True)
            plain = _gradients(inputs, b, kv, heads, exact=False)
        got = (found[0][b, heads.start : heads.stop], found[1][b, kv], found[2][b, kv])
        for name, x, right, usual in zip(("dq", "dk", "dv"), got, exact, plain, strict=True):
            what = f"{name} of key head {kv} of batch {b}"
            factor = factor_of(x.dtype)
            assert_within_budget(x, right, usual.to(x.dtype), factor=factor, what=what)

    return compare


def _gradients(inputs: AttentionInputs, b: int, kv: int, heads: range, *, exact: bool) -> Gradients:
    """Gradients of a key head and its query heads: in fp64, or as plain PyTorch rounds."""
    p, upstream = inputs.problem, upstream_gradient(inputs)
    wide = torch.float64 if exact else torch.float32
    dtype = wide if exact else inputs.k.dtype
    k, v = (x[b, kv].detach().to(dtype).requires_grad_() for x in (inputs.k, inputs.v))
    dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
    dq = []
    step = max(1, _SCORES // p.length)
    for h in heads:
        parts = []
        for start in range(0, p.length, step):
            rows = torch.arange(start, min(start + step, p.length), device=k.device)
            q = inputs.q[b, h, rows].detach().to(k.dtype).requires_grad_()
            seen = inputs.visible(h, rows)
            out = attend(q, k, v, seen)
            got = torch.autograd.grad(out, (q, k, v), upstream[b, h, rows].to(out.dtype))
            parts.append(got[0])
            dk += got[1]
            dv += got[2]
        dq.append(torch.cat(parts))
    return torch.stack(dq), dk, dv
