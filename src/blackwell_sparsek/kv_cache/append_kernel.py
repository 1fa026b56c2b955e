# mypy: ignore-errors
"""Write new keys and values behind what a cache holds.

    cache[b, h, cache_seqlens[b] + t] = k[b, h, t]        for t < counts[b]

k [B, Hkv, T, D], v [B, Hkv, T, Dv]; contiguous caches [B, Hkv, S, D] or pages
[pages, page_size, Hkv, D] that a table [B, max_pages] orders; any strides with a contiguous last
dimension. One program handles TILE_ROWS of the B*T*Hkv rows of K and of V. A row whose slot does
not exist is not written: past the capacity, a negative length, a page id out of range. fp8 caches
are given as uint8 and take `x / scale`, saturated. Called as impl "triton" of `bsk::kv_append`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..calls.cache import AppendCall, keys_hold_values
from ..device.fp8 import e4m3_bits
from ..device.records import Strides
from ..launch.launcher import cdiv, launch, on_device_of

# Elements of one tile: one 16-byte load for each of 128 threads. With two, rows that cannot be
# loaded in vectors (D = 40) need so many addresses that sm_120 spills.
TILE_ELEMENTS = 1024
MAX_TILE_D = 256
# Rows and slots are int32: divisions of int64 cost more than the copy of a decoding step.
INT32_MAX = 2**31 - 1
# From here on GPUs have an instruction that converts to fp8.
MIN_SM_CONVERTS_FP8 = 89


class AppendStrides(NamedTuple):
    """Strides of each tensor."""

    k_cache: Strides
    v_cache: Strides
    k: Strides
    v: Strides


class Rows(NamedTuple):
    """Rows in memory: a pointer, and an offset for each of them."""

    ptr: Any
    offsets: Any


class HeadScale(NamedTuple):
    """Scales of an fp8 cache, None without, and their stride from head to head."""

    ptr: Any
    stride: Any


@triton.jit
def as_stored(x, scale, head, exists, STORED: tl.constexpr, CONVERTS_FP8: tl.constexpr):
    """Rows [rows, columns] as a cache of STORED holds them; uint8 stands for fp8."""
    if tl.uint8 == STORED:
        x = x.to(tl.float32)
        if scale.ptr is not None:
            of_head = tl.load(scale.ptr + head * scale.stride, mask=exists, other=1.0)
            x = x * tl.math.div_rn(tl.full(of_head.shape, 1.0, tl.float32), of_head)[:, None]
        x = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True) if CONVERTS_FP8 else e4m3_bits(x)
    return x


@triton.jit
def _write_rows(
    cache, src, scale, head, exists, live, HEAD_DIM: tl.constexpr, CONVERTS_FP8: tl.constexpr
):
    """Copy rows of HEAD_DIM elements from `src` to `cache`, converted to what the cache stores.

    All rows that exist are loaded, so that loads need not wait for the page table; live ones are
    stored.
    """
    TILE_D: tl.constexpr = triton.next_power_of_2(min(HEAD_DIM, 256))
    STORED: tl.constexpr = cache.ptr.dtype.element_ty
    for d_start in tl.static_range(0, HEAD_DIM, TILE_D):
        offs_d = d_start + tl.arange(0, TILE_D)
        there = exists[:, None]
        written = live[:, None]
        if HEAD_DIM % TILE_D != 0:
            there = there & (offs_d < HEAD_DIM)[None, :]
            written = written & (offs_d < HEAD_DIM)[None, :]
        x = tl.load(src.ptr + src.offsets[:, None] + offs_d[None, :], mask=there, other=0.0)
        x = as_stored(x, scale, head, exists, STORED, CONVERTS_FP8)
        tl.store(cache.ptr + cache.offsets[:, None] + offs_d[None, :], x, mask=written)


@triton.jit
def _offsets(outer, head, token, strides):
    """Offsets of rows from strides of batch (or page), head and token."""
    return outer * strides.batch + head * strides.head + token * strides.token


@triton.jit(
    do_not_specialize=[
        "table_stride", "num_rows", "tokens", "heads", "capacity", "pages", "page_size",
    ]
)  # fmt: skip
def _kv_append_kernel(
    k_cache_ptr,
    v_cache_ptr,
    k_ptr,
    v_ptr,
    cache_seqlens_ptr,
    counts_ptr,
    page_table_ptr,
    k_scale_ptr,
    v_scale_ptr,
    strides,
    scale_strides,
    table_stride,
    num_rows,
    tokens,
    heads,
    capacity,
    pages,
    page_size,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    HEADS_INNER: tl.constexpr,
    CONVERTS_FP8: tl.constexpr,
):
    """Append rows [pid * TILE_ROWS, (pid + 1) * TILE_ROWS) of K and, unless it is None, of V."""
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    exists = row < num_rows
    batch = (row // (heads * tokens)).to(tl.int64)
    if HEADS_INNER:
        head = (row % heads).to(tl.int64)
        token = (row // heads % tokens).to(tl.int64)
    else:
        head = (row // tokens % heads).to(tl.int64)
        token = (row % tokens).to(tl.int64)

    length = tl.load(cache_seqlens_ptr + batch, mask=exists, other=0).to(tl.int64)
    slot = length + token
    live = exists & (length >= 0) & (slot < capacity)
    if counts_ptr is not None:
        live = live & (token < tl.load(counts_ptr + batch, mask=exists, other=0))
    outer = batch
    if page_table_ptr is not None:
        slot = slot.to(tl.int32)
        page_ptrs = page_table_ptr + batch * table_stride + slot // page_size
        outer = tl.load(page_ptrs, mask=live, other=-1).to(tl.int64)
        live = live & (outer >= 0) & (outer < pages)
        slot = (slot % page_size).to(tl.int64)

    k_to = Rows(k_cache_ptr, _offsets(outer, head, slot, strides.k_cache))
    k_from = Rows(k_ptr, _offsets(batch, head, token, strides.k))
    k_scale = HeadScale(k_scale_ptr, scale_strides[0])
    _write_rows(k_to, k_from, k_scale, head, exists, live, HEAD_DIM, CONVERTS_FP8)
    if v_cache_ptr is not None:
        v_to = Rows(v_cache_ptr, _offsets(outer, head, slot, strides.v_cache))
        v_from = Rows(v_ptr, _offsets(batch, head, token, strides.v))
        v_scale = HeadScale(v_scale_ptr, scale_strides[1])
        _write_rows(v_to, v_from, v_scale, head, exists, live, HEAD_DIM_V, CONVERTS_FP8)


def tile_rows_of(head_dim: int, head_dim_v: int) -> int:
    """Rows of a tile, for rows of these lengths."""
    widest = triton.next_power_of_2(max(head_dim, head_dim_v, 1))
    return max(TILE_ELEMENTS // min(widest, MAX_TILE_D), 1)


def append(call: AppendCall) -> None:
    """Write into the caches of a validated call."""
    launch_kv_append(
        call,
        converts_fp8=call.problem.arch.sm >= MIN_SM_CONVERTS_FP8,
        with_values=not keys_hold_values(call),
    )


def launch_kv_append(
    call: AppendCall, *, converts_fp8: bool = False, with_values: bool = True
) -> None:
    """Write into the caches of a call.

    Parameters
    ----------
    call : caches of the dtype of k, or float8_e4m3fn; k and v in fp16, bf16 or fp32
    converts_fp8 : whether the GPU has an instruction for it (sm_89 on); the bits are the same
    with_values : whether values are written; those of a latent cache are part of its keys
    """
    k_cache, v_cache, k, v, page_table = call.k_cache, call.v_cache, call.k, call.v, call.page_table
    batch, heads, tokens, head_dim = k.shape
    num_rows = batch * heads * tokens
    if num_rows == 0:
        return
    if page_table is None:
        capacity, pages, page_size, order = k_cache.shape[2], 0, 1, (0, 1, 2)
    else:
        pages, page_size = k_cache.shape[:2]
        capacity, order = page_table.shape[1] * page_size, (0, 2, 1)
    tile_rows = tile_rows_of(head_dim, v.shape[-1])
    assert num_rows <= INT32_MAX - tile_rows, num_rows
    args = (
        stored_as_bytes(k_cache),
        stored_as_bytes(v_cache) if with_values else None,
        k,
        v if with_values else None,
        call.cache_seqlens,
        call.counts,
        page_table,
        call.k_scale,
        call.v_scale,
        AppendStrides(
            cache_strides(k_cache, order),
            cache_strides(v_cache, order),
            cache_strides(k, (0, 1, 2)),
            cache_strides(v, (0, 1, 2)),
        ),
        tuple(
            0 if x is None or x.numel() == 1 else x.stride(0) for x in (call.k_scale, call.v_scale)
        ),
        0 if page_table is None else page_table.stride(0),
        num_rows,
        tokens,
        heads,
        min(capacity, INT32_MAX),
        pages,
        page_size,
        head_dim,
        v.shape[-1],
        tile_rows,
        # in the order in which the new tokens lie in memory: steps of 2 MB halve the speed
        tokens == 1 or k.stride(1) < k.stride(2),
        converts_fp8 and k_cache.dtype == torch.float8_e4m3fn,
    )
    with on_device_of(k):
        launch(_kv_append_kernel, cdiv(num_rows, tile_rows), args, num_warps=4)


def stored_as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """An fp8 cache as uint8, which every GPU can load; others as they are."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def cache_strides(x: torch.Tensor, order: tuple[int, int, int]) -> Strides:
    """Strides of the dimensions in `order`: page or batch, head, token."""
    # a dimension of size 1 may have any stride; 0 keeps it from compiling another variant
    return Strides(*(x.stride(d) if x.shape[d] > 1 else 0 for d in order))
