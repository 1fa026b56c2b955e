# mypy: ignore-errors
"""Preprocess and postprocess kernels around the Hopper backward: terms of queries, rounding sums.

Preprocess: lse in base 2, delta (as in `triton.delta`), and zeroed sums or semaphores for dq, in
workspaces whose rows are padded to whole tiles. Padding has lse +inf, like queries that see
nothing: their probabilities are 0. Postprocess: dq = scale * sums, in the dtype and layout of q.
With semaphores (ordered accumulation), the first KV tile stores its sum instead of adding it, so
sums are not zeroed; a query block that no KV tile added to has no sum, and dq is 0 there. Where
work tiles share the query heads of a KV head, dk and dv have sums too.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...device.backprop import shift_of_rows
from ...device.records import Strides
from ...device.schedule import first_slot, head_offset, sequence_of_tile, token_span
from ...device.tiles import store_rows
from ...launch.launcher import launch
from ..operands import token_strides
from ..triton.delta import Outputs, delta_of_rows
from .config import ROW_PADDING, slice_width

# Rows of a program, which share a pair of semaphores.
ROW_TILE = 64
# Sums of dk and dv that are zeroed at a time. Heads have whole tiles of 128 rows and 64 columns.
ZEROED = 2048
_ZEROED = tl.constexpr(ZEROED)


class KeySums(NamedTuple):
    """Sums of dk and dv, fp32 [B * Hkv * splits, rows, tile of D | Dv], rows padded as keys are.

    Splits are 1 if the work tiles of a KV head add to the same sums, which then must be zeroed.
    """

    k: torch.Tensor
    v: torch.Tensor


@triton.jit
def _from_the_end():
    """The tile of a program: the last ones first.

    The backward begins with the first (batch, head), which then is in the L2, and ends with the
    last.
    """
    return tl.num_programs(0) - 1 - tl.program_id(0)


@triton.jit
def _sequence_of_rows(cu_seqlens_ptr, row, num_sequences, PADDING: tl.constexpr):
    """The `Span` of the packed sequence that has this row of a workspace, and its row there.

    Each sequence begins at a multiple of PADDING rows, see `schedule.first_slot`.
    """
    offs = tl.arange(0, 128)
    sequence = sequence_of_tile(
        cu_seqlens_ptr, row // PADDING, row * 0, num_sequences, 1, offs, PADDING
    )
    span = token_span(cu_seqlens_ptr, sequence, 0)
    return span, row - first_slot(cu_seqlens_ptr, sequence, PADDING) * PADDING


@triton.jit
def _zero_share(ptr, chunks, SIZE: tl.constexpr):
    """Zero this program's share of the chunks."""
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        place = tl.cast(chunk, tl.int64) * SIZE + tl.arange(0, SIZE)
        tl.store(ptr + place, tl.zeros([SIZE], tl.float32))


@triton.jit(do_not_specialize=["q_len", "padded", "heads", "num_sequences", "k_chunks", "v_chunks"])
def _attn_bwd_preprocess_kernel(
    lse_log2_ptr,
    delta_ptr,
    sums_ptr,
    semaphores_ptr,
    k_sums_ptr,
    v_sums_ptr,
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    cu_seqlens_ptr,
    out_strides,
    dout_strides,
    dlse_strides,
    q_len,
    padded,
    heads,
    num_sequences,
    k_chunks,
    v_chunks,
    HEAD_DIM_V: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_D: tl.constexpr,
    SLICE_D: tl.constexpr,
    TILE_DV: tl.constexpr,
    PADDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows [tile * TILE_M, (tile + 1) * TILE_M) of one (batch, head), which has `padded`.

    Of packed sequences, rows of one head; `q_len` is then the number of all queries. PDL: the next
    kernel may start at once; it waits before it reads these rows.
    """
    if PDL:
        gdc_launch_dependents()
    q_tiles = padded // TILE_M
    tile = _from_the_end()
    batch_head = tile // q_tiles
    first_row = tile % q_tiles * TILE_M
    row = tl.cast(batch_head, tl.int64) * padded + first_row + tl.arange(0, TILE_M)
    if cu_seqlens_ptr is not None:
        span, first_row = _sequence_of_rows(cu_seqlens_ptr, first_row, num_sequences, PADDING)
        first = tl.cast(span.first, tl.int64)
        out_ptr += first * out_strides.token
        dout_ptr += first * dout_strides.token
        # rows of a head are counted by the length of its sequence below
        lse_ptr += first + tl.cast(batch_head, tl.int64) * (q_len - span.length)
        if dlse_ptr is not None:
            dlse_ptr += first * dlse_strides.token
        q_len = span.length
    offs_m = first_row + tl.arange(0, TILE_M)
    outputs = Outputs(out_ptr, dout_ptr, lse_ptr, dlse_ptr, out_strides, dout_strides, dlse_strides)
    delta, lse = delta_of_rows(outputs, batch_head, heads, offs_m, q_len, HEAD_DIM_V, TILE_DV)
    tl.store(lse_log2_ptr + row, shift_of_rows(lse))
    tl.store(delta_ptr + row, delta)
    if semaphores_ptr is not None:
        tl.store(semaphores_ptr + tile * 2 + tl.arange(0, 2), 0)
    if sums_ptr is not None:
        for first in tl.static_range(0, TILE_D, SLICE_D):
            place = row[:, None] * TILE_D + first + tl.arange(0, SLICE_D)[None, :]
            tl.store(sums_ptr + place, tl.zeros([TILE_M, SLICE_D], tl.float32))
    if k_sums_ptr is not None:
        _zero_share(k_sums_ptr, k_chunks, _ZEROED)
        _zero_share(v_sums_ptr, v_chunks, _ZEROED)


@triton.jit
def _rows_of_registers(sums, TILE_D: tl.constexpr):
    """[64, TILE_D] of dq from tiles of 64 columns in the order that `in_register_order` gives."""
    # 64 columns, eighth of them, warp, row and column of a thread, half of 16 rows, one of two
    sums = sums.reshape([TILE_D // 64, 8, 4, 8, 4, 2, 2]).permute(2, 5, 3, 0, 1, 4, 6)
    return sums.reshape([64, TILE_D])


@triton.jit(do_not_specialize=["q_len", "padded", "heads", "num_sequences"])
def _attn_bwd_postprocess_kernel(
    dq_ptr,
    sums_ptr,
    semaphores_ptr,
    cu_seqlens_ptr,
    dq_strides,
    q_len,
    padded,
    heads,
    num_sequences,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_D: tl.constexpr,
    SLICE_D: tl.constexpr,
    PADDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows [tile * TILE_M, (tile + 1) * TILE_M) of one (batch, head) of dq, as above.

    PDL: this kernel starts before the sums are complete, and waits for them.
    """
    if PDL:
        gdc_wait()
    q_tiles = padded // TILE_M
    tile = _from_the_end()
    batch_head = tile // q_tiles
    first_row = tile % q_tiles * TILE_M
    if cu_seqlens_ptr is not None:
        span, first_row = _sequence_of_rows(cu_seqlens_ptr, first_row, num_sequences, PADDING)
        dq_ptr += tl.cast(span.first, tl.int64) * dq_strides.token
        q_len = span.length
    offs_m = first_row + tl.arange(0, TILE_M)
    offs_d = tl.arange(0, SLICE_D)
    live = True
    if semaphores_ptr is not None:
        # the semaphores of a query block are those of its first rows
        first = tile % q_tiles * TILE_M // BLOCK_Q * (BLOCK_Q // TILE_M)
        added = tl.load(semaphores_ptr + (tl.cast(batch_head, tl.int64) * q_tiles + first) * 2)
        live = added > 0
    sums_ptr += tl.cast(tile, tl.int64) * (TILE_M * TILE_D)
    offs = tl.arange(0, TILE_M * SLICE_D)
    for first in tl.static_range(0, TILE_D, SLICE_D):
        sums = tl.load(sums_ptr + TILE_M * first + offs, live & (offs >= 0), other=0.0)
        sums = _rows_of_registers(sums, SLICE_D) * scale
        head_ptr = dq_ptr + head_offset(batch_head // heads, batch_head % heads, 0, dq_strides)
        store_rows(head_ptr, offs_m, dq_strides.token, first + offs_d, sums, q_len, HEAD_DIM)


@triton.jit
def _summed_rows(
    sums_ptr, batch_head, tile, padded, splits, TILE_M: tl.constexpr, TILE_D: tl.constexpr
):
    """[TILE_M, TILE_D] of a gradient: the sums of all splits of a (batch, head), in order."""
    head_size = tl.cast(padded, tl.int64) * TILE_D
    sums_ptr += batch_head * splits * head_size + tile * (TILE_M * TILE_D)
    offs = tl.arange(0, TILE_M * TILE_D)
    total = tl.load(sums_ptr + offs)
    for split in range(1, splits):
        total += tl.load(sums_ptr + split * head_size + offs)
    return _rows_of_registers(total, TILE_D)


@triton.jit(do_not_specialize=["kv_len", "padded", "heads", "splits"])
def _attn_bwd_round_keys_kernel(
    dk_ptr,
    dv_ptr,
    k_sums_ptr,
    v_sums_ptr,
    dk_strides,
    dv_strides,
    kv_len,
    padded,
    heads,
    splits,
    scale,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_DV: tl.constexpr,
):
    """Rows [tile * TILE_M, (tile + 1) * TILE_M) of one (batch, KV head) of dk and dv."""
    kv_tiles = padded // TILE_M
    tile = _from_the_end()
    batch_head, tile = tile // kv_tiles, tile % kv_tiles
    batch, head = batch_head // heads, batch_head % heads
    offs_n = tile * TILE_M + tl.arange(0, TILE_M)
    dv = _summed_rows(v_sums_ptr, batch_head, tile, padded, splits, TILE_M, TILE_DV)
    place = dv_ptr + head_offset(batch, head, 0, dv_strides)
    store_rows(place, offs_n, dv_strides.token, tl.arange(0, TILE_DV), dv, kv_len, HEAD_DIM_V)
    dk = _summed_rows(k_sums_ptr, batch_head, tile, padded, splits, TILE_M, TILE_D) * scale
    place = dk_ptr + head_offset(batch, head, 0, dk_strides)
    store_rows(place, offs_n, dk_strides.token, tl.arange(0, TILE_D), dk, kv_len, HEAD_DIM)


def launch_attn_bwd_preprocess(
    lse_log2: torch.Tensor,
    delta: torch.Tensor,
    sums: torch.Tensor | None,
    semaphores: torch.Tensor | None,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    key_sums: KeySums | None = None,
    cu_seqlens: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> None:
    """Fill lse_log2, delta fp32 [B * H, rows]; zero sums fp32 [B * H, rows, D] or semaphores.

    Rows are the queries padded to a multiple of 64; semaphores are int32 [B * H, rows / 64, 2].
    With semaphores, sums stay as they are; without sums there are none. `key_sums` are zeroed. The
    others are as for `launch_attn_delta`. Of packed sequences, with their offsets `cu_seqlens`, a
    head has `schedule.packed_rows`, and B is 1. `pdl`: the next launch may start early.
    """
    k_sums, v_sums = (None, None) if key_sums is None else key_sums
    chunks = (0 if x is None else x.numel() // ZEROED for x in (k_sums, v_sums))
    batch_heads, padded = lse_log2.shape
    tile_d = 64 if sums is None else sums.shape[2]
    args = (
        lse_log2,
        delta,
        sums if semaphores is None else None,
        semaphores,
        k_sums,
        v_sums,
        out,
        dout,
        lse,
        dlse,
        cu_seqlens,
        token_strides(out),
        token_strides(dout),
        Strides(*((0, 0, 0) if dlse is None else (0, *dlse.stride())[-3:])),
        lse.shape[-1],
        padded,
        out.shape[1],
        0 if cu_seqlens is None else cu_seqlens.numel() - 1,
        *chunks,
        out.shape[-1],
        ROW_TILE,
        tile_d,
        slice_width(tile_d),
        triton.next_power_of_2(out.shape[-1]),
        ROW_PADDING,
        pdl,
    )
    launch(_attn_bwd_preprocess_kernel, batch_heads * (padded // ROW_TILE), args, num_warps=4)


def launch_attn_bwd_postprocess(
    dq: torch.Tensor,
    sums: torch.Tensor,
    semaphores: torch.Tensor | None,
    block_q: int,
    scale: float,
    cu_seqlens: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> None:
    """Fill dq [B, H, S, D], any strides, from sums fp32 [B * H, rows, tile of D], rows as above.

    Each [64, 64] of the sums is in the order of `backward.in_register_order`. Where `semaphores`
    are given, those of a block of `block_q` queries are those of its first 64 rows; sums of blocks
    where they are 0 are not read. With `cu_seqlens`, dq is [T, H, D]. `pdl`: start early.
    """
    batch_heads, padded, tile_d = sums.shape
    sequences = 0 if cu_seqlens is None else cu_seqlens.numel() - 1
    sizes = (dq.shape[-2 if cu_seqlens is None else 0], padded, dq.shape[1], sequences)
    constants = (dq.shape[-1], block_q, ROW_TILE, tile_d, slice_width(tile_d), ROW_PADDING, pdl)
    args = (dq, sums, semaphores, cu_seqlens, token_strides(dq), *sizes, scale, *constants)
    options = {"num_warps": 4} | ({"launch_pdl": True} if pdl else {})
    launch(_attn_bwd_postprocess_kernel, batch_heads * (padded // ROW_TILE), args, **options)


def launch_attn_bwd_round_keys(
    dk: torch.Tensor, dv: torch.Tensor, sums: KeySums, scale: float
) -> None:
    """Fill dk and dv [B, Hkv, S, D | Dv], any strides; each [64, 64] of the sums is as above."""
    batch, heads, kv_len, _ = dk.shape
    rows, padded, tile_d = sums.k.shape
    batch_heads = batch * heads
    sizes = (kv_len, padded, heads, rows // batch_heads)
    constants = (dk.shape[3], dv.shape[3], ROW_TILE, tile_d, sums.v.shape[2])
    args = (dk, dv, *sums, token_strides(dk), token_strides(dv), *sizes, scale, *constants)
    launch(_attn_bwd_round_keys_kernel, batch_heads * (padded // ROW_TILE), args, num_warps=4)
