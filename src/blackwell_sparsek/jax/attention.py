"""`attention` for JAX: checks, defaults, and the choice of an implementation."""

import math
from typing import Any

import jax.numpy as jnp

import jax

from ..core.errors import InvalidInput, InvalidType
from ..core.messages import check_flag, message
from ..masks.band import Band, band_of
from .arrays import as_jax, check_array, check_number, check_same_dtype
from .attention_jnp import Options, attention_jnp, dense_block
from .attention_sm90 import hopper_problem, passed_over, why_not_sm90
from .attention_triton import attention_triton, kernel_options, why_not_triton
from .block_mask import BlockMask
from .choice import Kernels, choose, platform_of
from .kernel_calls import arch_of, device_of, why_no_kernels

LAYOUT = "[B, H, S, D]"


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Softmax attention over the keys that causal, window and block mask leave visible.

    Means what `bsk.attention` means: query i sits at position `i + Sk - Sq`; causal, window and
    block mask intersect; a query that sees nothing gives output 0, lse -inf and no gradient. Works
    under `jit`, `grad`, `vmap` and `shard_map` over batch and heads.

    Parameters
    ----------
    q : fp16, bf16, fp32 or fp64 `[B, Hq, Sq, D]`
    k : `[B, Hkv, Sk, D]`, dtype of q
        Query head h reads KV head `h // (Hq / Hkv)`.
    v : `[B, Hkv, Sk, Dv]`, dtype of q
    causal : bool
        Hide the keys after a query's position.
    window : None, int or (left, right)
        Position p sees keys `p - left .. p + right`; None is unbounded. `n` is the n latest keys
        including its own: `(n - 1, 0)` under causal and `(n - 1, n - 1)` otherwise.
    block_mask : BlockMask, optional
        Made for `(Sq, Sk)`, with 1 or B masks along the batch and 1 or Hq along the heads. All its
        blocks are computed, also those that causal or window hide.
    scale : float, optional
        Multiplies q k^T; by default `1 / sqrt(D)`.
    softcap : float, optional
        Scores become `softcap * tanh(score / softcap)`, after the scale and before the mask.
    sinks : float `[Hq]`, optional
        A logit per head that joins the softmax denominator and carries no value.
    return_lse : bool
        Also return the log-sum-exp of the scores, sinks included.
    impl : "auto", "jnp", "sm90" or "triton"
        "triton" launches the portable kernels of `bsk.attention` on a GPU, through jax-triton, or
        says why it cannot; "sm90" the forward kernel for Hopper, with the portable ones for
        gradients. Their gradients have no gradients. `explain` says what "auto" takes.

    Returns
    -------
    out : `[B, Hq, Sq, Dv]`, dtype of q
    lse : fp32 `[B, Hq, Sq]`
        Natural logarithm; only with `return_lse`. fp64 for fp64 inputs. Differentiable.

    Raises
    ------
    InvalidInput
        If shapes, dtypes or devices do not fit.
    Unsupported
        If `impl` cannot run this call.

    Notes
    -----
    Causal, window, scale and softcap are known while tracing: another value compiles again. So
    does a mask with another number of blocks; other blocks of the same number do not.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> q, k = jnp.zeros((1, 8, 100, 64)), jnp.zeros((1, 2, 100, 64))
    >>> attention(q, k, k, causal=True, window=32).shape
    (1, 8, 100, 64)
    """
    op = "attention"
    check_flag(op, "return_lse", return_lse)
    q, k, v = (check_array(op, n, x, 4, LAYOUT) for n, x in (("q", q), ("k", k), ("v", v)))
    check_qkv(op, {"q": q, "k": k, "v": v})
    band = band_of(op, causal, window)
    (batch, heads, sq, dim), sk = q.shape, k.shape[2]
    if block_mask is not None:
        if not isinstance(block_mask, BlockMask):
            got = f"{type(block_mask).__module__}.{type(block_mask).__qualname__}"
            expected = "blackwell_sparsek.jax.BlockMask (from_torch converts)"
            raise InvalidType(message(op, "block_mask", "is not a block mask", expected, got))
        block_mask.check_problem(op, batch, heads, sq, sk)
    if sinks is not None:
        sinks = check_sinks(op, sinks, heads)
    factors = score_options(op, scale, softcap, dim)
    device = device_of(q)

    def why_not() -> str | None:
        reason = why_no_kernels(device, q.dtype)
        return reason or why_not_triton(q, k, v, block_mask, arch_of(device))

    block = None if block_mask is None else block_mask.block_size
    facts = hopper_problem(q, k, v, block, band, factors, arch_of(device))

    def why_not_hopper() -> str | None:
        # gradients are those of the portable kernels
        return why_not() or why_not_sm90(facts)

    hopper = Kernels("sm90", why_not_hopper, lambda: passed_over(facts))
    portable = Kernels("triton", why_not)
    chosen = choose(op, impl, _problem(q, k, v, band, block_mask), hopper, portable)
    if chosen != "jnp":
        name = device.device_kind
        kernels = kernel_options(
            *factors, band, arch_of(device), name, q.dtype, hopper=chosen == "sm90"
        )
        out, lse = attention_triton(q, k, v, block_mask, sinks, kernels)
    else:
        block = (dense_block(sq), dense_block(sk)) if block_mask is None else block_mask.block_size
        options = Options(*factors, band, (sq, sk), block)
        out, lse = attention_jnp(q, k, v, block_mask, sinks, options)
    return (out, lse) if return_lse else out


def check_qkv(op: str, arrays: dict[str, jax.Array]) -> None:
    """Dtypes and shapes that fit one another; the batch of a paged cache is not checked here."""
    check_same_dtype(op, arrays)
    q, k, v = arrays.values()
    got = ", ".join(f"{arg} {list(x.shape)}" for arg, x in arrays.items())
    names = "/".join(arrays)
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise InvalidInput(message(op, names, "have different batch sizes", "one", got))
    if q.shape[-1] != k.shape[-1]:
        raise InvalidInput(message(op, names, "have different head dims", "q and k alike", got))
    if min(q.shape[-1], v.shape[-1]) < 1:
        raise InvalidInput(message(op, names, "have an empty head dim", "1 or more", got))
    if k.shape[:-1] != v.shape[:-1]:
        expected = "k and v alike but for the last dimension"
        raise InvalidInput(message(op, names, "do not match", expected, got))
    check_heads(op, q.shape[1], k.shape[1])


def check_heads(op: str, heads_q: int, heads_kv: int) -> None:
    """Query heads must share KV heads evenly."""
    if heads_kv < 1 or heads_q < 1 or heads_q % heads_kv:
        expected = f"a multiple of the {heads_kv} heads of k"
        raise InvalidInput(message(op, "q", "has a wrong number of heads", expected, heads_q))


def check_sinks(op: str, sinks: Any, heads: int) -> jax.Array:
    """A logit for each query head."""
    array = as_jax(op, "sinks", sinks)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise InvalidType(message(op, "sinks", "has a wrong dtype", "a float", array.dtype.name))
    if array.shape != (heads,):
        raise InvalidInput(message(op, "sinks", "has a wrong shape", [heads], list(array.shape)))
    return array


def score_options(op: str, scale: Any, softcap: Any, dim: int) -> tuple[float, float]:
    """Scale and softcap with their defaults; 0 for no softcap."""
    factor = 1 / math.sqrt(dim) if scale is None else check_number(op, "scale", scale)
    if softcap is None:
        return factor, 0.0
    cap = check_number(op, "softcap", softcap)
    if cap <= 0:
        raise InvalidInput(message(op, "softcap", "is not positive", "None or > 0", softcap))
    return factor, cap


def _problem(q: jax.Array, k: jax.Array, v: jax.Array, band: Band, mask: BlockMask | None) -> str:
    extras = [] if band == (None, None) else ["causal or window"]
    if mask is not None:
        extras.append(f"blocks {mask.block_size[0]} x {mask.block_size[1]}")
    return (
        f"on {platform_of(q)}, {q.dtype.name}, batch {q.shape[0]}, "
        f"heads {q.shape[1]}:{k.shape[1]}, queries {q.shape[2]}, keys {k.shape[2]}, "
        f"head dim {q.shape[3]}/{v.shape[3]}" + (f", {', '.join(extras)}" if extras else "")
    )
