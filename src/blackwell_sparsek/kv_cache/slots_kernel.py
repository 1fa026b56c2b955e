# mypy: ignore-errors
"""Write new keys and values to the slots that a mapping names, rotated on request.

    cache[slot // page_size, slot % page_size, h] = rotated(k[t, h])       slot = slot_mapping[t]

k [T, Hkv, D], v [T, Hkv, Dv]; pages [pages, page_size, Hkv, D], any strides with a contiguous last
dimension. One program handles TILE_ROWS of the T*Hkv rows of K and of V; another launch rotates the
T*Hq rows of Q. A row whose slot is -1 or does not exist is not written; a position without a row in
`cos` and `sin` gives NaN. fp8 caches are given as uint8. Called as impl "triton" of
`bsk::kv_append_slots`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..calls.cache import SlotsCall, keys_hold_values
from ..device.records import Strides
from ..launch.launcher import cdiv, launch, on_device_of
from .append_kernel import (
    INT32_MAX,
    MIN_SM_CONVERTS_FP8,
    MIN_SM_PDL,
    AppendStrides,
    HeadScale,
    Rows,
    as_stored,
    cache_strides,
    stored_as_bytes,
    tile_rows_of,
)


class Rotation(NamedTuple):
    """Tables of a rotary embedding, the positions of tokens, and the strides of the tables.

    Pointers are None where nothing is rotated.
    """

    cos: Any
    sin: Any
    positions: Any


class TableShape(NamedTuple):
    """Rows of the tables of a rotary embedding, and the strides from row to row."""

    rows: Any
    cos_stride: Any
    sin_stride: Any


@triton.jit
def _rotate(
    x, src, offs_d, there, angles, shape, token, exists,
    ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Columns `offs_d` of rows x, the first ROTATED of them rotated with their partners."""
    HALF: tl.constexpr = ROTATED // 2
    if INTERLEAVED:
        partner = offs_d ^ 1
        pair = offs_d // 2
        second = offs_d % 2 == 1
    else:
        partner = tl.where(offs_d < HALF, offs_d + HALF, offs_d - HALF)
        pair = offs_d % HALF
        second = offs_d >= HALF
    turns = (offs_d < ROTATED)[None, :]
    other = tl.load(src.ptr + src.offsets[:, None] + partner[None, :], there & turns, other=0.0)
    position = tl.load(angles.positions + token, mask=exists, other=0).to(tl.int64)
    known = (exists & (position >= 0) & (position < shape.rows))[:, None] & turns
    cos_at = angles.cos + (position * shape.cos_stride)[:, None] + pair[None, :]
    sin_at = angles.sin + (position * shape.sin_stride)[:, None] + pair[None, :]
    cos = tl.load(cos_at, known, other=float("nan")).to(tl.float32)
    sin = tl.load(sin_at, known, other=float("nan")).to(tl.float32)
    sin = tl.where(second[None, :], sin, -sin)
    turned = x.to(tl.float32) * cos + other.to(tl.float32) * sin
    return tl.where(turns, turned.to(x.dtype), x)


@triton.jit
def _copy_rows(
    to, src, scale, head, token, exists, live, angles, shape,
    HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    CONVERTS_FP8: tl.constexpr,
):  # fmt: skip
    """Copy rows of HEAD_DIM numbers, rotated if ROTATED > 0, as `to` stores them."""
    TILE_D: tl.constexpr = triton.next_power_of_2(min(HEAD_DIM, 256))
    for d_start in tl.static_range(0, HEAD_DIM, TILE_D):
        offs_d = d_start + tl.arange(0, TILE_D)
        inside = (offs_d < HEAD_DIM)[None, :]
        there = exists[:, None] & inside
        x = tl.load(src.ptr + src.offsets[:, None] + offs_d[None, :], mask=there, other=0.0)
        if ROTATED > 0:
            x = _rotate(x, src, offs_d, there, angles, shape, token, exists, ROTATED, INTERLEAVED)
        x = as_stored(x, scale, head, exists, to.ptr.dtype.element_ty, CONVERTS_FP8)
        tl.store(to.ptr + to.offsets[:, None] + offs_d[None, :], x, live[:, None] & inside)


@triton.jit(do_not_specialize=["num_rows", "heads", "pages", "page_size"])
def _append_slots_kernel(
    k_cache_ptr,
    v_cache_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    k_scale_ptr,
    v_scale_ptr,
    angles,
    shape,
    strides,
    scale_strides,
    num_rows,
    heads,
    pages,
    page_size,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    CONVERTS_FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """Append rows [pid * TILE_ROWS, (pid + 1) * TILE_ROWS) of K and, unless it is None, of V.

    PDL: the next kernel may start at once; it waits before it reads the cache.
    """
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    exists = row < num_rows
    head = (row % heads).to(tl.int64)
    token = (row // heads).to(tl.int64)
    slot = tl.load(slots_ptr + token, mask=exists, other=-1).to(tl.int64)
    live = exists & (slot >= 0) & (slot < tl.cast(pages, tl.int64) * page_size)
    page = slot // page_size
    slot = slot % page_size
    k_to = Rows(
        k_cache_ptr,
        page * strides.k_cache.batch + head * strides.k_cache.head + slot * strides.k_cache.token,
    )
    v_to = Rows(
        v_cache_ptr,
        page * strides.v_cache.batch + head * strides.v_cache.head + slot * strides.v_cache.token,
    )
    k_from = Rows(k_ptr, token * strides.k.token + head * strides.k.head)
    v_from = Rows(v_ptr, token * strides.v.token + head * strides.v.head)
    k_scale = HeadScale(k_scale_ptr, scale_strides[0])
    v_scale = HeadScale(v_scale_ptr, scale_strides[1])
    _copy_rows(
        k_to, k_from, k_scale, head, token, exists, live, angles, shape,
        HEAD_DIM, ROTATED, INTERLEAVED, CONVERTS_FP8,
    )  # fmt: skip
    if v_cache_ptr is not None:
        _copy_rows(
            v_to, v_from, v_scale, head, token, exists, live, angles, shape,
            HEAD_DIM_V, 0, INTERLEAVED, CONVERTS_FP8,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "heads"])
def _rotate_kernel(
    out_ptr,
    q_ptr,
    angles,
    shape,
    strides,
    num_rows,
    heads,
    HEAD_DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rotate rows [pid * TILE_ROWS, (pid + 1) * TILE_ROWS) of Q into a contiguous tensor.

    PDL: starts while `_append_slots_kernel` still runs, of which it needs nothing. What both read
    was complete before that one began. It ends after it, so that kernels which wait for the end of
    this one also wait for the cache.
    """
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    exists = row < num_rows
    head = (row % heads).to(tl.int64)
    token = (row // heads).to(tl.int64)
    to = Rows(out_ptr, row.to(tl.int64) * HEAD_DIM)
    src = Rows(q_ptr, token * strides.token + head * strides.head)
    _copy_rows(
        to, src, HeadScale(None, 0), head, token, exists, exists, angles, shape,
        HEAD_DIM, ROTATED, INTERLEAVED, False,
    )  # fmt: skip
    if PDL:
        gdc_wait()


def append(call: SlotsCall) -> None:
    """Write into the caches of a validated call, and into `q_out`."""
    launch_append_slots(
        call,
        converts_fp8=call.problem.arch.sm >= MIN_SM_CONVERTS_FP8,
        with_values=not keys_hold_values(call),
        pdl=call.problem.arch.sm >= MIN_SM_PDL,
    )


def launch_append_slots(
    call: SlotsCall, *, converts_fp8: bool = False, with_values: bool = True, pdl: bool = False
) -> None:
    """Write into the caches of a call, and into `q_out`, which is contiguous.

    Parameters
    ----------
    call : caches of the dtype of k, or float8_e4m3fn; k and v in fp16, bf16 or fp32
    converts_fp8 : whether the GPU has an instruction for it (sm_89 on); the bits are the same
    with_values : whether values are written; those of a latent cache are part of its keys
    pdl : let each kernel start before the one before it has ended, and the next one before these
        have (sm_90 on)
    """
    k_cache, v_cache, k, v, q = call.k_cache, call.v_cache, call.k, call.v, call.q
    tokens, heads, head_dim = k.shape
    rotated = 0 if call.cos is None else 2 * call.cos.shape[1]
    angles = Rotation(call.cos, call.sin, call.positions)
    shape = TableShape(
        0 if call.cos is None else call.cos.shape[0],
        0 if call.cos is None else call.cos.stride(0),
        0 if call.sin is None else call.sin.stride(0),
    )
    with on_device_of(k):
        if tokens * heads:
            tile_rows = tile_rows_of(head_dim, v.shape[-1])
            assert tokens * heads <= INT32_MAX - tile_rows, tokens
            args = (
                stored_as_bytes(k_cache),
                stored_as_bytes(v_cache) if with_values else None,
                k,
                v if with_values else None,
                call.slot_mapping,
                call.k_scale,
                call.v_scale,
                angles,
                shape,
                AppendStrides(
                    cache_strides(k_cache, (0, 2, 1)),
                    cache_strides(v_cache, (0, 2, 1)),
                    _packed_strides(k),
                    _packed_strides(v),
                ),
                tuple(
                    0 if x is None or x.numel() == 1 else x.stride(0)
                    for x in (call.k_scale, call.v_scale)
                ),
                tokens * heads,
                heads,
                *k_cache.shape[:2],
                head_dim,
                v.shape[-1],
                rotated,
                call.interleaved,
                tile_rows,
                converts_fp8 and k_cache.dtype == torch.float8_e4m3fn,
                pdl,
            )
            launch(_append_slots_kernel, cdiv(tokens * heads, tile_rows), args, num_warps=4)
        if q is not None and q.numel():
            rows, tile_rows = tokens * q.shape[1], tile_rows_of(head_dim, 1)
            assert rows <= INT32_MAX - tile_rows, rows
            args = (
                *(call.q_out, q, angles, shape, _packed_strides(q), rows, q.shape[1]),
                *(head_dim, rotated, call.interleaved, tile_rows, pdl),
            )
            # the interpreter does not know the option
            options = {"launch_pdl": True} if pdl else {}
            launch(_rotate_kernel, cdiv(rows, tile_rows), args, num_warps=4, **options)


def _packed_strides(x: torch.Tensor) -> Strides:
    """Strides of [T, H, D]."""
    return Strides(0, *(x.stride(d) if x.shape[d] > 1 else 0 for d in (1, 0)))
