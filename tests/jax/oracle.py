"""What results mean, in NumPy: dense, one element mask, no blocks.

In fp64 the formulas are the oracle; in fp32 they are the plain computation by which errors are
judged. NumPy compiles nothing, which takes most of the time of a test of JAX.
"""

import numpy as np


def as64(x):
    return np.asarray(x).astype(np.float64)


def as32(x):
    return np.asarray(x).astype(np.float32)


def visible_elements(sq, sk, causal=False, window=None):
    """Which keys each query sees, bool [Sq, Sk]: the last query is aligned with the last key."""
    ahead = np.arange(sk) - (np.arange(sq)[:, None] + sk - sq)
    left, right = (None, None) if window is None else window
    shown = np.ones((sq, sk), bool)
    if left is not None:
        shown &= ahead >= -left
    if right is not None:
        shown &= ahead <= right
    return shown & (ahead <= 0) if causal else shown


def attention(q, k, v, visible, scale=None, softcap=None, sinks=None, to=as64):
    """Output and lse; `visible` broadcasts to [B, Hq, Sq, Sk]."""
    q, k, v = to(q), to(k), to(v)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat(group, 1), v.repeat(group, 1)
    scores = q @ k.swapaxes(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(visible, scores, -np.inf)
    if sinks is not None:
        column = np.broadcast_to(to(sinks)[:, None, None], (*scores.shape[:3], 1))
        scores = np.concatenate([scores, column], -1)
    peak = scores.max(-1, keepdims=True, initial=-1e30)
    weights = np.exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, peak + np.log(total), -np.inf)
    weights = weights / np.where(total > 0, total, 1)
    return weights[..., : k.shape[2]] @ v, lse[..., 0]


def gradients(q, k, v, visible, dout, dlse, scale=None, softcap=None, sinks=None, to=as64):
    """dq, dk, dv and dsinks (None without sinks) of sum(out * dout) + sum(lse * dlse).

    The plain formula has the output as it is kept, in the dtype of the queries.
    """
    out, lse = attention(q, k, v, visible, scale, softcap, sinks, to)
    if to is as32:
        out = to(out.astype(q.dtype))
    q, k, v, dout = to(q), to(k), to(v), to(dout)
    batch, kv_heads = k.shape[:2]
    group = q.shape[1] // kv_heads
    k_all, v_all = k.repeat(group, 1), v.repeat(group, 1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q @ k_all.swapaxes(2, 3) * scale
    slope = 1.0
    if softcap is not None:
        slope = 1 - np.tanh(scores / softcap) ** 2
        scores = softcap * np.tanh(scores / softcap)
    shift = np.where(np.isinf(lse), 0, lse)[..., None]
    weights = np.where(visible, np.exp(np.where(visible, scores, -np.inf) - shift), 0)
    delta = (dout * out).sum(-1) - to(dlse)
    delta = np.where(np.isinf(lse), 0, delta)[..., None]
    dscores = weights * (dout @ v_all.swapaxes(2, 3) - delta) * slope * scale
    dq = dscores @ k_all
    dk = (dscores.swapaxes(2, 3) @ q).reshape(batch, kv_heads, group, *k.shape[2:]).sum(2)
    dv = (weights.swapaxes(2, 3) @ dout).reshape(batch, kv_heads, group, *v.shape[2:]).sum(2)
    if sinks is None:
        return dq, dk, dv, None
    dsinks = -(np.exp(to(sinks)[:, None] - lse)[..., None] * delta).sum((0, 2, 3))
    return dq, dk, dv, dsinks


EPS = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-23, "float64": 2**-52}


def within_budget(found, exact, plain, factor=2):
    """Ours may err `factor` times as much as the plain formula in the same precision, and an eps
    more."""
    eps = EPS[found.dtype.name]
    found, plain = as64(found), as64(np.asarray(plain).astype(found.dtype))
    assert found.shape == exact.shape == plain.shape
    finite = np.isfinite(exact)
    assert np.array_equal(found[~finite], exact[~finite], equal_nan=True)
    if not finite.any():
        return
    error = np.abs(found[finite] - exact[finite]).max()
    allowed = factor * np.abs(plain[finite] - exact[finite]).max()
    assert error <= allowed + eps * np.abs(exact[finite]).max(), (error, allowed)
