"""`attention_varlen`: packed sequences of different lengths, over packed keys or over a cache."""

from typing import Any, Literal, NoReturn, overload

import torch

from ..attention.api import attention_packed
from ..attention.fp8_inputs import is_fp8_call
from ..attention.inputs import is_deterministic, overlaps
from ..calls.attention import check_impl_and_lse, returned
from ..calls.ragged import RaggedCall
from ..core.checks import check_tensor, is_differentiated_by_func, message
from ..core.errors import InvalidInput, Unsupported
from ..core.torch_state import cast_operand
from ..decode.inputs import FP8
from ..launch.replay import record, repeat
from ..masks.block_mask import BlockMask
from .inputs import ragged_call, refuse_gradients
from .op import OP, attend

# Names of the options of caches, and of packed keys marked (*) below, that are None by default.
_FURTHER = (
    *("kv_blocks", "kv_block_size", "cache_batch_idx", "seqused_q", "seqused_k", "leftpad_k"),
    *("chunk", "k_scale", "v_scale", "page_table", "cache_seqlens"),
)
# Names of the arguments that only packed fp8 has.
_FOR_FP8 = ("q_descale", "k_descale", "v_descale", "out_dtype")
# Launches of earlier calls, for `repeat`.
_RECORDED: dict[Any, Any] = {}


@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    cache_seqlens: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    kv_blocks: torch.Tensor | None = None,
    kv_block_size: int | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    chunk: int | None = None,
    align: str = "bottom_right",
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: Literal[False] = False,
    batch_invariant: bool = False,
    deterministic: bool | None = None,
    impl: str = "auto",
) -> torch.Tensor: ...
@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    cache_seqlens: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    kv_blocks: torch.Tensor | None = None,
    kv_block_size: int | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    chunk: int | None = None,
    align: str = "bottom_right",
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: Literal[True],
    batch_invariant: bool = False,
    deterministic: bool | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    cache_seqlens: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    kv_blocks: torch.Tensor | None = None,
    kv_block_size: int | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    chunk: int | None = None,
    align: str = "bottom_right",
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    deterministic: bool | None = None,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    cache_seqlens: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    kv_blocks: torch.Tensor | None = None,
    kv_block_size: int | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    chunk: int | None = None,
    align: str = "bottom_right",
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    deterministic: bool | None = None,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention within each of several packed sequences, over packed keys or over a KV cache.

    Sequence b owns the queries `cu_seqlens_q[b] .. cu_seqlens_q[b + 1]` and is a separate problem
    with its own positions and alignment. Its keys are either

    - packed too: `k[cu_seqlens_k[b] : cu_seqlens_k[b + 1]]`; or
    - the first `cache_seqlens[b]` keys of its cache, including those of its queries. One call can
      mix decoding steps, chunks of prompts and whole prompts.

    Lengths can be 0. Gradients and `block_mask` are available for packed keys without the options
    marked (*). All other calls have no gradients and never wait for the device: lengths, offsets,
    tables and lists are read there, so you can replay a CUDA graph after changing them, within
    `max_seqlen_q` and the shapes. Long sequences are split over all programs of a launch. Results
    are bitwise reproducible.

    Parameters
    ----------
    q : fp16, bf16, fp32, fp64 or float8_e4m3fn `[Tq, Hq, D]`
        Any strides with a contiguous last dimension, as for all tensors here. D and Dv from 1 to
        256. fp64 runs on `eager` and `reference` only. With a cache, or an option marked (*), rows
        after the last sequence are padding, whose output is 0. fp8 is for packed keys in fp8
        without (*), `alibi_slopes`, `out` and gradients.
    k : `[Tk, Hkv, D]`
        With `cache_seqlens` a cache `[B, Hkv, S, D]`, or pages `[pages, page_size, Hkv, D]` with
        `page_table`; pages with heads outermost are `pages.transpose(1, 2)`. dtype of q, or
        float8_e4m3fn.
    v : as k, with Dv in place of D
    cu_seqlens_q, cu_seqlens_k : int32 `[B + 1]`
        Offsets from 0, on the device of q; `cu_seqlens_k` for packed keys only.
    max_seqlen_q, max_seqlen_k : int
        At least the longest length. `max_seqlen_k` is optional with a cache.
    cache_seqlens : int32 `[B]`, optional
        Keys of each sequence in the cache; 0 gives output 0, and an lse of -inf, or of the sink.
    page_table : int32 or int64 `[B, max_pages]`, optional
        Page j of sequence b is `k[page_table[b, j]]`. Entries past the length or outside of the
        band are not read.
    kv_blocks : int32 `[B, Hkv, n]`, optional
        (*) Sparse attention: the blocks that a sequence reads, in any order; -1 for none.
        Block j holds the positions from `j * kv_block_size` on: with pages, page j.
    kv_block_size : int, optional
        Tokens of a block of `kv_blocks`; pages have their own.
    cache_batch_idx : int32 `[B]`, optional
        Which row of a contiguous cache holds a sequence; by default row b.
    seqused_q, seqused_k : int32 `[B]`, optional
        (*) The number of queries, and of packed keys, that a sequence uses, counted from its first.
        The output of the other queries is 0.
    leftpad_k : int32 `[B]`, optional
        (*) The index of the first key of a sequence. Keys before it are hidden, but still count as
        positions.
    causal, window : as in `attention`
    chunk : int, optional
        (*) Chunked attention: position p sees only the keys of chunk `p // chunk`.
    align : `bottom_right` or `top_left`
        Align the last query with the last key, or (*) the first query with the first key.
    block_mask : BlockMask, optional
        Made for `(max_seqlen_q, max_seqlen_k)`, with 1 or B masks along the batch, indexed by
        positions inside each sequence. For packed keys without (*).
    scale, softcap, sinks : as in `attention`
    alibi_slopes : fp32 `[Hq]` or `[B, Hq]`, optional
        `slope * |position - key|` is subtracted from the scores, after softcap; slopes themselves
        have no gradient.
    k_scale, v_scale : fp32 scalar tensor or `[Hkv]`, optional
        Factors of keys and values in fp8 that queries in 16 bits or more read; 1 by default.
    q_descale, k_descale, v_descale : fp32, one element or `[B|1, H|1]`, optional
        Factors of the values in packed q, k and v that are all float8_e4m3fn, as in `attention`;
        v_descale also for each channel, `[B|1, H|1, Dv]`.
    out_dtype : torch.dtype, optional
        For packed float8_e4m3fn only: bf16, the default, fp16 or fp32.
    out : `[Tq, Hq, Dv]`, optional
        A preallocated output, which must not overlap the inputs. Such a call has no gradients.
    return_lse : bool
        Also return the log-sum-exp of the scores, sinks and slopes included.
    batch_invariant : bool
        (*) Make the result of a sequence bitwise independent of the other sequences and of
        `max_seqlen_q`. Long sequences are then not split.
    deterministic : bool, optional
        As in `attention`; affects gradients only.
    impl : str
        `auto`, `reference`, `eager`, `triton` or `sm90`; a named implementation never falls back.

    Returns
    -------
    out : `[Tq, Hq, Dv]`, dtype of q; in fp8 `out_dtype`
    lse : fp32 `[Hq, Tq]`
        Only with `return_lse`.

    Raises
    ------
    InvalidInput
        If shapes, dtypes or devices do not fit.
    Unsupported
        If `impl` cannot run this call.

    Notes
    -----
    With a cache, an out-of-range length, page, block or row is never read. `triton` sets the
    outputs and lse that depend on it to NaN; `eager` and `reference`, which wait for the device
    anyway, raise `InvalidInput`. For packed keys without (*), only `eager` and `reference` check
    the values of `cu_seqlens_*`.

    Examples
    --------
    >>> import torch
    >>> q = k = v = torch.randn(10, 4, 16)
    >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> attention_varlen(
    ...     q, k, v, offsets, offsets, max_seqlen_q=7, max_seqlen_k=7, causal=True
    ... ).shape
    torch.Size([10, 4, 16])

    A decoding step of one sequence together with a prompt of nine tokens, over pages:

    >>> pages = torch.randn(2, 8, 16, 4, 16)
    >>> out = attention_varlen(
    ...     q, pages[0], pages[1], torch.tensor([0, 1, 10], dtype=torch.int32), max_seqlen_q=9,
    ...     cache_seqlens=torch.tensor([20, 9], dtype=torch.int32),
    ...     page_table=torch.tensor([[5, 2], [7, -1]]), causal=True,
    ... )
    >>> out.shape
    torch.Size([10, 4, 16])
    """
    further = (
        *(kv_blocks, kv_block_size, cache_batch_idx, seqused_q, seqused_k, leftpad_k),
        *(chunk, k_scale, v_scale, page_table, cache_seqlens),
    )
    plain = all(x is None for x in further) and align == "bottom_right"
    plain = plain and batch_invariant is False
    for_fp8 = (q_descale, k_descale, v_descale, out_dtype)
    in_fp8 = is_fp8_call(q, *for_fp8)
    # the kernels for caches know slopes too, and keys alone in fp8, but neither gradients nor masks
    if plain and (
        in_fp8
        or (alibi_slopes is None and getattr(k, "dtype", None) != FP8)
        or block_mask is not None
        or _wants_gradients(q, k, v, sinks)
    ):
        if cu_seqlens_k is None or max_seqlen_k is None:
            missing = "cu_seqlens_k" if cu_seqlens_k is None else "max_seqlen_k"
            expected = "cu_seqlens_k and max_seqlen_k for packed keys, or cache_seqlens for a cache"
            raise InvalidInput(message(OP, missing, "is missing", expected, None))
        return attention_packed(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            causal=causal,
            window=window,
            block_mask=block_mask,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            out_dtype=out_dtype,
            out=out,
            return_lse=return_lse,
            deterministic=deterministic,
            impl=impl,
        )
    if in_fp8:
        _refuse_fp8(q, further, align, batch_invariant, for_fp8)
    options = (
        *(return_lse, max_seqlen_q, max_seqlen_k, kv_block_size, causal, window, chunk, align),
        *(scale, softcap, batch_invariant, deterministic, impl),
        # missing offsets must not count as the same offsets passed twice
        cu_seqlens_k is None,
    )
    # replay identifies tensors by address, and the same offsets may be passed twice
    own_offsets = None if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k
    inputs = (
        *(q, k, v, cu_seqlens_q, own_offsets, cache_seqlens, page_table, kv_blocks),
        *(cache_batch_idx, seqused_q, seqused_k, leftpad_k, sinks, alibi_slopes),
        *(k_scale, v_scale, out),
    )
    others = (x for x in (sinks, alibi_slopes, k_scale, v_scale) if x is not None)
    fits = out is None or not overlaps(out, q, k, v, *others)
    results = repeat(_RECORDED, options, inputs) if fits else None
    if results is None:
        _refuse_others(block_mask, deterministic)
        check_impl_and_lse(OP, impl, return_lse)
        check_tensor(OP, "q", q)
        if cu_seqlens_k is not None:
            # operands like q; caches are never cast
            k, v = _cast_packed(k), _cast_packed(v)
        call = ragged_call(
            OP,
            cast_operand(q),
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            cache_seqlens=cache_seqlens,
            page_table=page_table,
            kv_blocks=kv_blocks,
            kv_block_size=kv_block_size,
            cache_batch_idx=cache_batch_idx,
            seqused_q=seqused_q,
            seqused_k=seqused_k,
            leftpad_k=leftpad_k,
            causal=causal,
            window=window,
            chunk=chunk,
            align=align,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            k_scale=k_scale,
            v_scale=v_scale,
            batch_invariant=batch_invariant,
            out=out,
        )
        refuse_gradients(OP, call, "a cache" if cu_seqlens_k is None else "this option")
        wanted = (out is None) + bool(return_lse)
        copied = any(x is not None and not x.is_contiguous() for x in (sinks, alibi_slopes))
        if copied:
            # a replay would read this call's copy
            results = _results(call, impl, out)
        else:
            results = record(
                *(_RECORDED, options, inputs, _results, call, impl, out),
                operands=1,
                wanted=wanted,
            )
    return returned(results, out, return_lse)


def _refuse_fp8(
    q: Any, further: tuple[Any, ...], align: Any, batch_invariant: Any, for_fp8: tuple[Any, ...]
) -> NoReturn:
    """Say why a call is not one of packed fp8: it has options that such calls do not have."""
    if is_fp8_call(q):
        given = [arg for arg, x in zip(_FURTHER, further, strict=True) if x is not None]
        given += [] if align == "bottom_right" else ["align"]
        given += [] if batch_invariant is False else ["batch_invariant"]
        instead = "packed q, k and v without it, or q in 16 bits"
        names = ", ".join(given)
        raise Unsupported(f"{OP}: q in fp8 does not go with {names}; expected {instead}")
    arg = next(arg for arg, x in zip(_FOR_FP8, for_fp8, strict=True) if x is not None)
    expected = "None with caches and the other options of packed keys (k_scale, v_scale)"
    raise InvalidInput(message(OP, arg, "goes with packed fp8 keys", expected, "a value"))


def _wants_gradients(*tensors: Any) -> bool:
    """Whether autograd or a transform asks for the gradient of any of these."""
    given = [x for x in tensors if isinstance(x, torch.Tensor)]
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    return recorded or is_differentiated_by_func(*given)


def _cast_packed(x: Any) -> Any:
    """Packed keys or values as autocast has them; those in fp8 stay, with their factors."""
    return x if not isinstance(x, torch.Tensor) or x.dtype == FP8 else cast_operand(x)


def _results(call: RaggedCall, impl: str, out: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Run a call; return the results that it allocated."""
    attend(call, impl)
    return (call.out, call.lse) if out is None else (call.lse,)


def _refuse_others(block_mask: Any, deterministic: Any) -> None:
    """Check what is about other keys, or about gradients."""
    if block_mask is not None:
        raise Unsupported(
            f"{OP}: block_mask goes with packed keys and none of the options of caches; use "
            "kv_blocks, or pass keys with cu_seqlens_k alone"
        )
    is_deterministic(OP, deterministic)
