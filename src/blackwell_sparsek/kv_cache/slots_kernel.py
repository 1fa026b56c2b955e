# mypy: ignore-errors
"""Write new keys and values to the slots that a mapping names, rotated on request.

    cache[slot // page_size, slot % page_size, h] = rotated(k[t, h])       slot = slot_mapping[t]

k [T, Hkv, D], v [T, Hkv, Dv]; pages [pages, page_size, Hkv, D], any strides with a contiguous last
dimension. One program handles TILE_ROWS of the T*Hkv rows of K and of V, or rotates TILE_ROWS of
the T*Hq rows of Q into a tensor of their own. A row whose slot is -1 or does not exist is not
written; a position without a row in `cos` and `sin` gives NaN. fp8 caches are given as uint8.
Called as impl "triton" of `bsk::kv_append_slots`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..calls.cache import SlotsCall, keys_hold_values
from ..device.records import Strides
from ..launch.launcher import cdiv, launch, on_device_of
from .append_kernel import (
    INT32_MAX,
    MIN_SM_CONVERTS_FP8,
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
def _store(to, offs_d, inside, x, scale, head, exists, live, CONVERTS_FP8: tl.constexpr):
    """Store columns `offs_d` of rows as `to` holds them."""
    x = as_stored(x, scale, head, exists, to.ptr.dtype.element_ty, CONVERTS_FP8)
    tl.store(to.ptr + to.offsets[:, None] + offs_d[None, :], x, live[:, None] & inside[None, :])


@triton.jit
def _write_rotated(
    to, src, scale, head, token, exists, live, angles, shape,
    ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, CONVERTS_FP8: tl.constexpr,
):  # fmt: skip
    """Rotate the first ROTATED numbers of rows.

    Both numbers of a pair are loaded once and share their cosine and sine. The tables are fp32: if
    each result loads its own, the instructions that load limit the speed, not memory.
    """
    PAIRS: tl.constexpr = ROTATED // 2
    TILE: tl.constexpr = triton.next_power_of_2(min(PAIRS, 128))
    position = tl.load(angles.positions + token, mask=exists, other=0).to(tl.int64)
    known = (exists & (position >= 0) & (position < shape.rows))[:, None]
    for start in tl.static_range(0, PAIRS, TILE):
        pair = start + tl.arange(0, TILE)
        inside = pair < PAIRS
        there = known & inside[None, :]
        cos_at = angles.cos + (position * shape.cos_stride)[:, None] + pair[None, :]
        sin_at = angles.sin + (position * shape.sin_stride)[:, None] + pair[None, :]
        cos = tl.load(cos_at, there, other=float("nan")).to(tl.float32)
        sin = tl.load(sin_at, there, other=float("nan")).to(tl.float32)
        # the columns of both numbers of these pairs, or of the first ones
        columns = 2 * start + tl.arange(0, 2 * TILE) if INTERLEAVED else pair
        loaded = columns < (ROTATED if INTERLEAVED else PAIRS)
        x_at = src.ptr + src.offsets[:, None] + columns[None, :]
        x = tl.load(x_at, exists[:, None] & loaded[None, :], other=0.0)
        if INTERLEAVED:
            first, second = tl.split(tl.reshape(x, [x.shape[0], TILE, 2]))
        else:
            first = x
            second = tl.load(x_at + PAIRS, exists[:, None] & loaded[None, :], other=0.0)
        a = first.to(tl.float32)
        b = second.to(tl.float32)
        first = (a * cos - b * sin).to(x.dtype)
        second = (b * cos + a * sin).to(x.dtype)
        if INTERLEAVED:
            x = tl.reshape(tl.join(first, second), [x.shape[0], 2 * TILE])
            _store(to, columns, loaded, x, scale, head, exists, live, CONVERTS_FP8)
        else:
            _store(to, columns, loaded, first, scale, head, exists, live, CONVERTS_FP8)
            _store(to, columns + PAIRS, loaded, second, scale, head, exists, live, CONVERTS_FP8)


@triton.jit
def _write_rows(
    to, src, scale, head, token, exists, live, angles, shape,
    HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    CONVERTS_FP8: tl.constexpr,
):  # fmt: skip
    """Write rows of HEAD_DIM numbers, of which the first ROTATED are rotated."""
    if ROTATED > 0:
        _write_rotated(
            to, src, scale, head, token, exists, live, angles, shape,
            ROTATED, INTERLEAVED, CONVERTS_FP8,
        )  # fmt: skip
    if ROTATED < HEAD_DIM:
        TILE_D: tl.constexpr = triton.next_power_of_2(min(HEAD_DIM - ROTATED, 256))
        for d_start in tl.static_range(ROTATED, HEAD_DIM, TILE_D):
            offs_d = d_start + tl.arange(0, TILE_D)
            inside = offs_d < HEAD_DIM
            x_at = src.ptr + src.offsets[:, None] + offs_d[None, :]
            x = tl.load(x_at, exists[:, None] & inside[None, :], other=0.0)
            _store(to, offs_d, inside, x, scale, head, exists, live, CONVERTS_FP8)


@triton.jit
def _slot_offsets(page, head, slot, strides):
    """Offsets of slots of pages."""
    return page * strides.batch + head * strides.head + slot * strides.token


@triton.jit(
    do_not_specialize=["num_rows", "heads", "q_rows", "q_heads", "pages", "page_size"]
)  # fmt: skip
def _append_slots_kernel(
    k_cache_ptr,
    v_cache_ptr,
    k_ptr,
    v_ptr,
    q_ptr,
    q_out_ptr,
    slots_ptr,
    k_scale_ptr,
    v_scale_ptr,
    angles,
    shape,
    strides,
    q_strides,
    scale_strides,
    num_rows,
    heads,
    q_rows,
    q_heads,
    pages,
    page_size,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    CONVERTS_FP8: tl.constexpr,
):
    """Append TILE_ROWS of `num_rows` rows of K and, unless it is None, of V; or rotate queries.

    Programs after those that append rotate TILE_ROWS of `q_rows` rows each, unless Q is None.
    """
    programs = tl.cdiv(num_rows, TILE_ROWS)
    program = tl.program_id(0)
    if program < programs:
        row = program * TILE_ROWS + tl.arange(0, TILE_ROWS)
        exists = row < num_rows
        head = (row % heads).to(tl.int64)
        token = (row // heads).to(tl.int64)
        slot = tl.load(slots_ptr + token, mask=exists, other=-1).to(tl.int64)
        live = exists & (slot >= 0) & (slot < tl.cast(pages, tl.int64) * page_size)
        page = slot // page_size
        slot = slot % page_size
        k_to = Rows(k_cache_ptr, _slot_offsets(page, head, slot, strides.k_cache))
        v_to = Rows(v_cache_ptr, _slot_offsets(page, head, slot, strides.v_cache))
        k_from = Rows(k_ptr, token * strides.k.token + head * strides.k.head)
        v_from = Rows(v_ptr, token * strides.v.token + head * strides.v.head)
        k_scale = HeadScale(k_scale_ptr, scale_strides[0])
        v_scale = HeadScale(v_scale_ptr, scale_strides[1])
        _write_rows(
            k_to, k_from, k_scale, head, token, exists, live, angles, shape,
            HEAD_DIM, ROTATED, INTERLEAVED, CONVERTS_FP8,
        )  # fmt: skip
        if v_cache_ptr is not None:
            _write_rows(
                v_to, v_from, v_scale, head, token, exists, live, angles, shape,
                HEAD_DIM_V, 0, INTERLEAVED, CONVERTS_FP8,
            )  # fmt: skip
    elif q_ptr is not None:
        row = (program - programs) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        exists = row < q_rows
        head = (row % q_heads).to(tl.int64)
        token = (row // q_heads).to(tl.int64)
        q_to = Rows(q_out_ptr, row.to(tl.int64) * HEAD_DIM)
        q_from = Rows(q_ptr, token * q_strides.token + head * q_strides.head)
        _write_rows(
            q_to, q_from, HeadScale(None, 0), head, token, exists, exists, angles, shape,
            HEAD_DIM, ROTATED, INTERLEAVED, False,
        )  # fmt: skip


def append(call: SlotsCall) -> None:
    """Write into the caches of a validated call, and into `q_out`."""
    launch_append_slots(
        call,
        converts_fp8=call.problem.arch.sm >= MIN_SM_CONVERTS_FP8,
        with_values=not keys_hold_values(call),
    )


def launch_append_slots(
    call: SlotsCall, *, converts_fp8: bool = False, with_values: bool = True
) -> None:
    """Write into the caches of a call, and into `q_out`, which is contiguous.

    Parameters
    ----------
    call : caches of the dtype of k, or float8_e4m3fn; k and v in fp16, bf16 or fp32
    converts_fp8 : whether the GPU has an instruction for it (sm_89 on); the bits are the same
    with_values : whether values are written; those of a latent cache are part of its keys
    """
    k_cache, v_cache, k, v, q = call.k_cache, call.v_cache, call.k, call.v, call.q
    tokens, heads, head_dim = k.shape
    q_heads = 0 if q is None else q.shape[1]
    rotated = 0 if call.cos is None else 2 * call.cos.shape[1]
    tile_rows = _tile_rows(head_dim, v.shape[-1], rotated)
    rows, q_rows = tokens * heads, tokens * q_heads
    assert max(rows, q_rows) <= INT32_MAX - tile_rows, (rows, q_rows)
    programs = cdiv(rows, tile_rows) + cdiv(q_rows, tile_rows)
    if programs == 0:
        return
    args = (
        stored_as_bytes(k_cache),
        stored_as_bytes(v_cache) if with_values else None,
        k,
        v if with_values else None,
        q,
        call.q_out,
        call.slot_mapping,
        call.k_scale,
        call.v_scale,
        Rotation(call.cos, call.sin, call.positions),
        TableShape(
            0 if call.cos is None else call.cos.shape[0],
            0 if call.cos is None else call.cos.stride(0),
            0 if call.sin is None else call.sin.stride(0),
        ),
        AppendStrides(
            cache_strides(k_cache, (0, 2, 1)),
            cache_strides(v_cache, (0, 2, 1)),
            _packed_strides(k),
            _packed_strides(v),
        ),
        Strides(0, 0, 0) if q is None else _packed_strides(q),
        tuple(
            0 if x is None or x.numel() == 1 else x.stride(0) for x in (call.k_scale, call.v_scale)
        ),
        rows,
        heads,
        q_rows,
        q_heads,
        *k_cache.shape[:2],
        head_dim,
        v.shape[-1],
        rotated,
        call.interleaved,
        tile_rows,
        converts_fp8 and k_cache.dtype == torch.float8_e4m3fn,
    )
    with on_device_of(k):
        launch(_append_slots_kernel, programs, args, num_warps=4)


def _tile_rows(head_dim: int, head_dim_v: int, rotated: int) -> int:
    # with twice the rows, the eight pairs of a thread are 16 bytes in each half of a row
    return tile_rows_of(head_dim, head_dim_v) * (2 if rotated else 1)


def _packed_strides(x: torch.Tensor) -> Strides:
    """Strides of [T, H, D]."""
    return Strides(0, *(x.stride(d) if x.shape[d] > 1 else 0 for d in (1, 0)))
