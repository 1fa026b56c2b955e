"""Compile cases of the kernels of KV caches: appending, page summaries, page selection."""

from collections.abc import Iterator

import torch

from ...calls.cache import AppendCall, SlotsCall, SummariesCall, TopkCall
from ...kv_cache.append_kernel import MIN_SM_CONVERTS_FP8, launch_kv_append
from ...kv_cache.selection_kernels import (
    _page_scores_kernel,
    _select_pages_kernel,
    launch_topk_pages,
    summarise,
)
from ...kv_cache.slots_kernel import launch_append_slots
from ..captured_launches import launched_case, meta
from ..compile_cases import ALL_ARCHS, CompileCase, compile_cases

_BATCH, _HEADS, _GROUP = 3, 8, 4
_PAGES, _PAGE_SIZE = 1000, 20
_FP16, _BF16, _FP32 = torch.float16, torch.bfloat16, torch.float32
_FP8 = torch.float8_e4m3fn


def _int32(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int32)


def _name(dtype: torch.dtype) -> str:
    # kernels take an fp8 cache as bytes
    return "uint8" if dtype == _FP8 else str(dtype).split(".")[-1]


def _cache(head_dim: int, stored: torch.dtype, paged: bool) -> torch.Tensor:
    """Pages [pages, page_size, H, D], or a contiguous cache [B, H, S, D]."""
    if paged:
        return meta(_PAGES, _PAGE_SIZE, _HEADS, head_dim, dtype=stored)
    return meta(_BATCH, _HEADS, _PAGE_SIZE * 16, head_dim, dtype=stored)


def _tokens(head_dim: int, dtype: torch.dtype, heads_inner: bool) -> torch.Tensor:
    """New keys [B, H, T, D], head by head or, `heads_inner`, token by token in memory."""
    if heads_inner:
        return meta(_BATCH, 16, _HEADS, head_dim, dtype=dtype).transpose(1, 2)
    return meta(_BATCH, _HEADS, 16, head_dim, dtype=dtype)


def append_case(
    dtype: torch.dtype, stored: torch.dtype, dims: tuple[int, int], converts: bool, paged: bool
) -> CompileCase:
    """A launch that appends tokens; those for a paged cache are token by token in memory."""
    kind = f"{'paged' if paged else 'contiguous'}-{_name(dtype)}-to-{_name(stored)}"
    head_dim, head_dim_v = dims
    scale = meta(_HEADS, dtype=_FP32) if stored == _FP8 else None
    call = AppendCall(
        k_cache=_cache(head_dim, stored, paged),
        v_cache=_cache(head_dim_v, stored, paged),
        k=_tokens(head_dim, dtype, paged),
        v=_tokens(head_dim_v, dtype, paged),
        cache_seqlens=_int32(_BATCH),
        counts=_int32(_BATCH),
        page_table=_int32(_BATCH, _PAGES) if paged else None,
        k_scale=scale,
        v_scale=scale,
    )
    return launched_case(
        f"kv_append/{kind}{'-converted' if converts else ''}-d{head_dim}-{head_dim_v}",
        launch_kv_append,
        call,
        converts_fp8=converts,
        archs=tuple(sm for sm in ALL_ARCHS if sm >= MIN_SM_CONVERTS_FP8 or not converts),
    )


@compile_cases
def latent_append_cases() -> Iterator[CompileCase]:
    """Appending to latent caches, whose values are a view of the keys."""
    call = AppendCall(
        k_cache=meta(_PAGES, 64, 1, 576, dtype=_BF16),
        v_cache=meta(_PAGES, 64, 1, 576, dtype=_BF16)[..., :512],
        k=meta(_BATCH, 1, 16, 576, dtype=_BF16),
        v=meta(_BATCH, 1, 16, 576, dtype=_BF16)[..., :512],
        cache_seqlens=_int32(_BATCH),
        page_table=_int32(_BATCH, _PAGES),
    )
    name = "kv_append/paged-latent-d576-512"
    yield launched_case(name, launch_kv_append, call, with_values=False)
    tokens = meta(16, 1, 576, dtype=_BF16)
    slots = meta(16, dtype=torch.int64)
    packed = SlotsCall(call.k_cache, call.v_cache, tokens, tokens[..., :512], slots)
    name = "kv_append_slots/latent-d576-512"
    yield launched_case(name, launch_append_slots, packed, with_values=False)


@compile_cases
def append_cases() -> Iterator[CompileCase]:
    """Appending, with and without conversion to fp8."""
    for paged in (False, True):
        yield append_case(_BF16, _BF16, (128, 128), False, paged)
        yield append_case(_FP16, _FP16, (64, 40), False, paged)
        yield append_case(_BF16, _FP8, (128, 128), False, paged)
        yield append_case(_BF16, _FP8, (128, 128), True, paged)
        yield append_case(_FP32, _FP32, (192, 320), False, paged)


def _summaries(head_dim: int, kept: torch.dtype, paged: bool, blocks: int = 16) -> torch.Tensor:
    """Summaries [pages, H, D], or [B, blocks, H, D] of a contiguous cache."""
    of = (_PAGES,) if paged else (_BATCH, blocks)
    return meta(*of, _HEADS, head_dim, dtype=kept)


def summaries_case(stored: torch.dtype, head_dim: int, paged: bool, mean: bool) -> CompileCase:
    """A launch that summarises pages by their extremes, or by their mean."""
    kept = _BF16 if stored == _FP8 else stored
    low = _summaries(head_dim, kept, paged)
    call = SummariesCall(
        low=low,
        high=None if mean else low,
        k_cache=_cache(head_dim, stored, paged),
        cache_seqlens=_int32(_BATCH),
        page_table=_int32(_BATCH, _PAGES) if paged else None,
        page_size=_PAGE_SIZE,
        new_tokens=1000,
    )
    return launched_case(f"page_summaries/{_name(stored)}-d{head_dim}", summarise, call)


@compile_cases
def summaries_cases() -> Iterator[CompileCase]:
    """Summaries of pages."""
    yield summaries_case(_BF16, 128, paged=True, mean=False)
    yield summaries_case(_FP16, 40, paged=False, mean=True)
    yield summaries_case(_FP8, 128, paged=True, mean=True)
    yield summaries_case(_FP32, 256, paged=False, mean=False)


def _topk_call(
    dtype: torch.dtype,
    kept: torch.dtype,
    head_dim: int,
    *,
    paged: bool,
    by_sum: bool = False,
    columns: int = _PAGES,
) -> TopkCall:
    """Queries, token by token in memory, that choose among `columns` pages."""
    low = _summaries(head_dim, kept, paged, columns)
    return TopkCall(
        q=meta(_BATCH, 3, _GROUP * _HEADS, head_dim, dtype=dtype).transpose(1, 2),
        low=low,
        high=low,
        cache_seqlens=_int32(_BATCH),
        page_table=_int32(_BATCH, columns) if paged else None,
        page_size=_PAGE_SIZE,
        k=100,
        keep_first=3,
        keep_last=3,
        reduce="sum" if by_sum else "max",
    )


@compile_cases
def topk_cases() -> Iterator[CompileCase]:
    """Scores of pages, and the lists of the best ones."""
    kv_blocks = _int32(_BATCH, _HEADS, 100)
    for dtype, kept, head_dim, paged, by_sum in (
        (_BF16, _BF16, 128, True, False),
        (_FP16, _BF16, 64, True, True),
        (_FP16, _FP16, 40, False, False),
        (_FP32, _FP32, 256, False, True),
    ):
        yield launched_case(
            f"page_scores/{_name(dtype)}-by-{_name(kept)}-d{head_dim}",
            launch_topk_pages,
            kv_blocks,
            _topk_call(dtype, kept, head_dim, paged=paged, by_sum=by_sum),
            kernel=_page_scores_kernel,
        )
    # pages that fit one tile, or need more
    for name, columns in (("128", 100), ("2048", 2000), ("8192", 8000), ("8192-and-more", 9000)):
        yield launched_case(
            f"select_pages/{name}",
            launch_topk_pages,
            kv_blocks,
            _topk_call(_BF16, _BF16, 128, paged=True, columns=columns),
            kernel=_select_pages_kernel,
        )


def _slots(dtype: torch.dtype, stored: torch.dtype, rotary: int, interleaved: bool) -> SlotsCall:
    """Tokens of a packed batch with heads of 128, the first `rotary` numbers of which rotate."""
    tokens, dim = 100, 128
    cache, new = _cache(dim, stored, True), meta(tokens, _HEADS, dim, dtype=dtype)
    q = meta(tokens, _HEADS * _GROUP, dim, dtype=dtype) if rotary else None
    table = meta(4096, rotary // 2, dtype=_FP32) if rotary else None
    scale = meta(_HEADS, dtype=_FP32) if stored == _FP8 else None
    positions = _int32(tokens) if rotary else None
    slots = meta(tokens, dtype=torch.int64)
    rotation = (table, table, interleaved, positions, q, q)
    return SlotsCall(cache, cache, new, new, slots, *rotation, scale, scale)


@compile_cases
def slots_cases() -> Iterator[CompileCase]:
    """Appending by slot mapping, without and with rotary embedding."""
    kinds = {
        "plain": _slots(_BF16, _BF16, 0, False),
        "halves": _slots(_BF16, _BF16, 128, False),
        "interleaved-fp8": _slots(_BF16, _FP8, 64, True),
        "odd-half": _slots(_FP16, _FP16, 10, True),
    }
    for name, call in kinds.items():
        for sm in (80, 90):
            yield launched_case(
                f"kv_append_slots/{name}-sm_{sm}",
                launch_append_slots,
                call,
                sm=sm,
                archs=(sm,),
                converts_fp8=sm >= MIN_SM_CONVERTS_FP8,
            )
