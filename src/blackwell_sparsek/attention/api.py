"""`bsk.attention`, and the part of `bsk.attention_varlen` for packed keys and values.

The public `attention_varlen`, in `ragged.api`, also takes caches and calls `attention_packed` for
the rest.
"""

from typing import Any, Literal, overload

import torch

from ..calls.attention import AttentionCall, check_impl_and_lse, returned
from ..core.checks import message
from ..core.errors import InvalidInput, Unsupported
from ..launch.replay import Cache, record, repeat
from ..masks.band import band_of
from ..masks.block_mask import BlockMask
from .autograd import attend
from .fp8_inputs import fp8_call, is_fp8_call
from .fp8_op import attend_fp8
from .gated.inputs import gated_call
from .gated.op import attend as attend_gated
from .inputs import (
    DENSE,
    PACKED,
    autocast_qkv,
    check_block_mask,
    check_head_dims,
    check_packed,
    check_qkv,
    checked_call,
    fitted_mask,
    overlaps,
)
from .replay import describe, given_offsets
from .resize import recorder, replayed_or_resized

# Recorded launches of fp8 calls without a mask.
_FP8: Cache = {}
# Recorded launches of calls with slopes, a bias or `out`, which `describe` does not cover.
_EXTENDED: Cache = {}


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    key_gate: tuple[torch.Tensor, torch.Tensor] | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    return_lse: Literal[False] = False,
    deterministic: bool | None = None,
    impl: str = "auto",
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    key_gate: tuple[torch.Tensor, torch.Tensor] | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    return_lse: Literal[True],
    deterministic: bool | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    key_gate: tuple[torch.Tensor, torch.Tensor] | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    key_gate: tuple[torch.Tensor, torch.Tensor] | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention with causal masks, sliding windows and block masks.

    Query i has position `i + Sk - Sq`, so the last query is aligned with the last key. A key is
    visible if `causal`, `window` and `block_mask` all allow it, and blocks without visible keys are
    skipped. A query that sees no key has output 0, lse -inf and zero gradients. NaN or inf in a
    hidden key never reaches a query. On a GPU, NaN or inf in a *value* row can reach queries that
    do not see it, if they share a tile with a query that does.

    Parameters
    ----------
    q : fp16, bf16, fp32, fp64 or float8_e4m3fn `[B, Hq, Sq, D]`
        Any strides with a contiguous last dimension, as for k and v. fp64 runs on `eager` and
        `reference` only. If one of q, k and v is fp8, all must be; fp8 has no gradients.
        `bsk.fp8.attention` quantizes 16-bit tensors for you.
    k : `[B, Hkv, Sk, D]`
        Query head h reads KV head `h // (Hq / Hkv)`.
    v : `[B, Hkv, Sk, Dv]`
        D and Dv from 1 to 256. In fp8, v can be contiguous along its tokens instead.
    causal : bool
        Hide the keys after a query's position.
    window : None, int or (left, right)
        Position p sees keys `p - left .. p + right`; None is unbounded. An int n means
        `(n - 1, 0)` if causal, the latest n keys, and `(n - 1, n - 1)` otherwise.
    block_mask : BlockMask, optional
        Made for `(Sq, Sk)`, with 1 or B masks along the batch and 1, Hkv or Hq along the heads;
        with Hkv, query heads that share a KV head share its mask (not in fp8, with `key_gate` or on
        `sm90`).
    scale : float, optional
        Factor of q k^T; `1 / sqrt(D)` by default.
    softcap : float, optional
        Scores become `softcap * tanh(score / softcap)`, after the scale and before the mask.
    sinks : float `[Hq]`, optional
        One logit per head that is added to the softmax denominator and has no value. The lse of a
        query that sees no key is then its sink.
    alibi_slopes : fp32 `[Hq]` or `[B, Hq]`, optional
        `slope * |position - key|` is subtracted from the scores, after the softcap.
    bias : fp16, bf16, fp32 or fp64 `[B|1, Hq|1, Sq, Sk]`, optional
        Added to the scores, after the softcap. Any strides, so an expanded tensor takes no memory.
        -inf hides a key, but the key is still computed and its value must be finite. Slopes and
        biases have no gradients.
    key_gate : (u, tau), optional
        Float `[B|1, Hg, Sk]` and `[B|1, Hg, Sq]`, alike in the first two sizes, where Hg is 1, Hkv
        or Hq. For query i, exp(score) of key j is multiplied by `clip(u[j] - tau[i], 0, 1)`. A key
        with factor 0 is hidden, as is one whose u is -inf. `sparsek_causal(u, k)` returns
        thresholds tau for which each query keeps about k keys. Keys with factor 0 are skipped (on a
        GPU in blocks of 64, and only without a `block_mask`). u and tau have gradients; lse
        includes the factors.
    q_descale, k_descale : fp32, one element, `[B|1, H|1]` or `[B|1, H|1, ceil(S / 128)]`, optional
        For fp8 only: factors of the stored values, 1 by default. The last form has one factor per
        128 tokens. H is Hq for queries and Hkv for keys.
    v_descale : fp32, one element, `[B|1, Hkv|1]` or `[B|1, Hkv|1, Dv]`, optional
        The same for values; the last form has one factor per channel.
    out_dtype : torch.dtype, optional
        For fp8 only: bf16 (the default), fp16 or fp32.
    out : `[B, Hq, Sq, Dv]`, dtype of q, optional
        A preallocated output, which must not overlap the inputs. Such a call has no gradients and
        cannot use fp8.
    return_lse : bool
        Also return the log-sum-exp of the scores, sinks included.
    deterministic : bool, optional
        Whether gradients must be bitwise reproducible; by default this follows
        `torch.use_deterministic_algorithms`. The forward pass is always deterministic.
    impl : str
        `auto`, `reference`, `eager`, `triton` or `sm90`; a named implementation never falls back.
        Gradients come from the backward of the same name or, if it has none, from `auto`.

    Returns
    -------
    out : `[B, Hq, Sq, Dv]`, dtype of q, or `out_dtype` for fp8
        Contiguous, or in the layout of q if q is a transposed `[B, S, H, D]`.
    lse : fp32 `[B, Hq, Sq]`
        Natural logarithm; only with `return_lse`. fp64 for fp64 inputs. Differentiable.

    Raises
    ------
    InvalidInput
        If shapes, dtypes or devices do not fit.
    Unsupported
        If `impl` cannot run this call.

    Examples
    --------
    >>> import torch
    >>> q = torch.randn(1, 8, 100, 64)
    >>> k = v = torch.randn(1, 2, 100, 64)
    >>> attention(q, k, v, causal=True, window=32).shape
    torch.Size([1, 8, 100, 64])
    """
    if block_mask is not None and all(isinstance(x, torch.Tensor) and x.dim() == 4 for x in (q, k)):
        block_mask = fitted_mask(block_mask, q.shape[2], k.shape[2])
    if key_gate is not None:
        op = "attention"
        check_impl_and_lse(op, impl, return_lse)
        gated = gated_call(
            *(op, q, k, v, key_gate),
            causal=causal,
            window=window,
            block_mask=block_mask,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            deterministic=deterministic,
            others={
                "alibi_slopes": alibi_slopes,
                "bias": bias,
                "q_descale": q_descale,
                "k_descale": k_descale,
                "v_descale": v_descale,
                "out_dtype": out_dtype,
                "out": out,
            },
        )
        gated_out, lse = attend_gated(gated, impl)
        return (gated_out, lse) if return_lse else gated_out
    if is_fp8_call(q, q_descale, k_descale, v_descale, out_dtype):
        op = "attention"
        _refuse_for_fp8(op, deterministic, alibi_slopes=alibi_slopes, bias=bias, out=out)
        check_impl_and_lse(op, impl, return_lse)
        scales = (q_descale, k_descale, v_descale)
        fp8_options = (causal, window, scale, softcap, out_dtype, impl)
        fp8_inputs = (q, k, v, *scales, sinks)
        results = repeat(_FP8, fp8_options, fp8_inputs) if block_mask is None else None
        if results is None:
            fp8 = fp8_call(
                op,
                *(q, k, v, DENSE, scales, out_dtype),
                band=band_of(op, causal, window),
                block_mask=block_mask,
                scale=scale,
                softcap=softcap,
                sinks=sinks,
            )
            if block_mask is not None:
                results = attend_fp8(fp8, impl)
            else:
                results = record(
                    *(_FP8, fp8_options, fp8_inputs, attend_fp8, fp8, impl),
                    operands=0,
                    closed=True,
                )
        return returned(results, None, return_lse)
    options = (return_lse, causal, window, scale, softcap, deterministic, impl)
    inputs = (q, k, v, sinks)
    further = (alibi_slopes, bias, out)
    is_extended = not (alibi_slopes is None and bias is None and out is None)
    if is_extended:
        found, results = None, _replay_extended(options, (*inputs, *further), block_mask)
    else:
        found = describe(options, inputs, block_mask)
        results = replayed_or_resized(found, options, inputs, block_mask)
    if results is None:
        op = "attention"
        check_qkv(op, q, k, v, DENSE)
        check_head_dims(op, q, v)
        band = band_of(op, causal, window)
        check_block_mask(op, block_mask, q, q.shape[0], q.shape[2], k.shape[2], k.shape[1])
        q, k, v = autocast_qkv(op, q, k, v)
        check_impl_and_lse(op, impl, return_lse)
        call = checked_call(
            op,
            q,
            k,
            v,
            band=band,
            block_mask=block_mask,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            deterministic=deterministic,
            max_q=q.shape[2],
            max_k=k.shape[2],
            alibi_slopes=alibi_slopes,
            bias=bias,
            out=out,
        )
        if is_extended:
            results = _attend_extended(options, (*inputs, *further), call, impl)
        else:
            with recorder(found, options, inputs, call, impl) as recording:
                results = recording.keep(attend(call, impl, plain=found is not None))
    return returned(results, out, return_lse)


def attention_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention within each of several packed sequences; see `attention` for the options.

    Sequence b owns queries `cu_seqlens_q[b] .. cu_seqlens_q[b + 1]` and keys likewise, and is a
    separate problem with its own positions and alignment. Lengths can be 0. Only the
    implementations that read `cu_seqlens_*` on the host check its values (`eager`, which waits for
    the device to do so, and `reference`).

    Parameters
    ----------
    q : fp16, bf16, fp32 or fp64 `[Tq, Hq, D]`
    k : `[Tk, Hkv, D]`
    v : `[Tk, Hkv, Dv]`
    cu_seqlens_q, cu_seqlens_k : int32 `[B + 1]`
        Offsets, from 0 to Tq and Tk, on the device of q.
    max_seqlen_q, max_seqlen_k : int
        At least the longest length.
    block_mask : BlockMask, optional
        Made for `(max_seqlen_q, max_seqlen_k)`, with 1 or B masks along the batch, indexed by
        positions inside each sequence.
    q_descale, k_descale, v_descale : fp32, one element or `[B|1, H|1]`, optional
        For fp8 only, as in `attention`; those of values may have one for each channel too.
    out : `[Tq, Hq, Dv]`, optional
        Where to write the output.
    causal, window, scale, softcap, sinks, alibi_slopes, out_dtype, return_lse, deterministic :
        As in `attention`; positions count inside each sequence.
    impl :
        As in `attention`.

    Returns
    -------
    out : `[Tq, Hq, Dv]`, dtype of q
    lse : fp32 `[Hq, Tq]`
        Only with `return_lse`.

    Examples
    --------
    >>> import torch
    >>> q = k = v = torch.randn(10, 4, 16)
    >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> attention_packed(
    ...     q, k, v, offsets, offsets, max_seqlen_q=7, max_seqlen_k=7, causal=True
    ... ).shape
    torch.Size([10, 4, 16])
    """
    if block_mask is not None and all(isinstance(n, int) for n in (max_seqlen_q, max_seqlen_k)):
        block_mask = fitted_mask(block_mask, max_seqlen_q, max_seqlen_k)
    if is_fp8_call(q, q_descale, k_descale, v_descale, out_dtype):
        op = "attention_varlen"
        _refuse_for_fp8(op, deterministic, alibi_slopes=alibi_slopes, out=out)
        check_impl_and_lse(op, impl, return_lse)
        check_packed(op, q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        scales = (q_descale, k_descale, v_descale)
        fp8_results = attend_fp8(
            fp8_call(
                op,
                *(q, k, v, PACKED, scales, out_dtype),
                band=band_of(op, causal, window),
                block_mask=block_mask,
                scale=scale,
                softcap=softcap,
                sinks=sinks,
                lengths=(max_seqlen_q, max_seqlen_k),
                cu_seqlens=(cu_seqlens_q, cu_seqlens_k),
            ),
            impl,
        )
        return returned(fp8_results, None, return_lse)
    options = (
        *(return_lse, max_seqlen_q, max_seqlen_k),
        *(causal, window, scale, softcap, deterministic, impl),
    )
    inputs = (q, k, v, sinks, *given_offsets(cu_seqlens_q, cu_seqlens_k))
    further = (alibi_slopes, out)
    is_extended = any(x is not None for x in further)
    if is_extended:
        found, results = None, _replay_extended(options, (*inputs, *further), block_mask)
    else:
        found = describe(options, inputs, block_mask)
        results = replayed_or_resized(found, options, inputs, block_mask, packed=True)
    if results is None:
        op = "attention_varlen"
        check_qkv(op, q, k, v, PACKED)
        check_head_dims(op, q, v)
        check_packed(op, q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        band = band_of(op, causal, window)
        batch = cu_seqlens_q.numel() - 1
        check_block_mask(op, block_mask, q, batch, max_seqlen_q, max_seqlen_k, k.shape[1])
        q, k, v = autocast_qkv(op, q, k, v)
        check_impl_and_lse(op, impl, return_lse)
        call = checked_call(
            op,
            q,
            k,
            v,
            band=band,
            block_mask=block_mask,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            deterministic=deterministic,
            max_q=max_seqlen_q,
            max_k=max_seqlen_k,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            alibi_slopes=alibi_slopes,
            out=out,
        )
        if is_extended:
            results = _attend_extended(options, (*inputs, *further), call, impl)
        else:
            with recorder(found, options, inputs, call, impl) as recording:
                results = recording.keep(attend(call, impl, plain=found is not None))
    return returned(results, out, return_lse)


def _replay_extended(options: Any, inputs: Any, mask: Any) -> tuple[torch.Tensor, ...] | None:
    """Replay a call of `_EXTENDED`; None if it must be made in full, as with a block mask."""
    *others, out = inputs
    if mask is not None:
        return None
    if out is not None and overlaps(out, *(x for x in others if x is not None)):
        return None
    return repeat(_EXTENDED, options, inputs)


def _attend_extended(
    options: Any, inputs: Any, call: AttentionCall, impl: str
) -> tuple[torch.Tensor, ...]:
    """Make a call in full, and record its launches for `_replay_extended` if they can be."""
    _, _, _, sinks, *_ = inputs
    # sinks with gaps are copied, and a replay would read this call's copy
    if call.spec.block_mask is not None or not (sinks is None or sinks.is_contiguous()):
        return attend(call, impl)
    return_lse, *_ = options
    wanted = (call.out is None) + bool(return_lse)
    return record(_EXTENDED, options, inputs, attend, call, impl, operands=3, wanted=wanted)


def _refuse_for_fp8(op: str, deterministic: Any, **further: Any) -> None:
    """Raise for options that fp8 calls do not have: those in `further`, and `deterministic`."""
    for arg, value in further.items():
        if value is not None:
            raise Unsupported(f"{op}: {arg} does not go with fp8 tensors; expected None")
    if deterministic is not None:
        expected = "None for fp8, which has no gradients"
        raise InvalidInput(
            message(op, "deterministic", "is about gradients", expected, deterministic)
        )
