# mypy: ignore-errors
"""Combine the parts of softmaxes that many programs share, in a separate launch.

The last program of a softmax could combine its parts (`device/partials.py`), but many parts of many
rows keep it busy for long while all others are idle: 66 parts of 64 rows and 512 columns are 9 MB,
which one SM reads in 80 us. Here every row has its own program.

The previous kernel has written, for each softmax, a record of which programs computed its parts.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ..attention.operands import token_strides
from ..calls.decode import DecodeCall
from ..device.partials import MERGED_ROWS, PARTS, VECTOR, merge_parts, merged_places
from ..device.records import Strides
from ..launch.launcher import cdiv, launch
from .triton import (
    DecodeHeads,
    DecodeResults,
    DecodeWorkspace,
    HeadTile,
    scale_stride,
    write_rows,
)

# Number of programs from which each takes several rows.
MANY_PROGRAMS = 8 * 132
# Warps that run at once on all SMs of an H200, with the registers that sixteen parts take.
MANY_WARPS = 16 * 132
MOST_GROUPS = 8


class SoftmaxRecord(NamedTuple):
    """Which programs computed the parts of a softmax, and what it belongs to. All int32."""

    first_program: Any
    parts: Any
    sequence: Any
    head_tile: Any
    kv_len: Any


RECORD_FIELDS = tl.constexpr(len(SoftmaxRecord._fields))


class CombinedScoring(NamedTuple):
    """Applied at the end of a softmax: sinks, and the scales of an fp8 cache."""

    sinks: Any
    v_scale: Any


class ValueScaleStride(NamedTuple):
    """Stride between heads of the scales of values; 0 if all heads share one."""

    v: Any


class CombinedLayout(NamedTuple):
    """Strides of the output and of scales, and the numbers of heads."""

    out: Strides
    scales: ValueScaleStride
    heads: DecodeHeads


@triton.jit(do_not_specialize=["programs", "q_len", "chunks"])
def _attn_decode_combine_kernel(
    results,
    scoring,
    records_ptr,
    partials_ptr,
    layout,
    programs,
    q_len,
    chunks,  # of ROWS rows
    TILE_M: tl.constexpr,
    TILE_DV: tl.constexpr,
    SLICES: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program for each chunk of a softmax and slice of TILE_DV columns, stored separately."""
    if PDL:
        gdc_wait()
    piece = tl.program_id(0) % SLICES
    chunk = tl.program_id(0) // SLICES
    record = records_ptr + chunk // chunks * RECORD_FIELDS
    first_program = tl.load(record)
    parts = tl.load(record + 1)
    sequence = tl.load(record + 2)
    head_tile = tl.load(record + 3)
    kv_len = tl.load(record + 4)
    row = chunk % chunks * ROWS
    num_rows = q_len * layout.heads.group
    q_tiles = tl.cdiv(num_rows, TILE_M)
    kv_head = head_tile // q_tiles
    first_row = (head_tile - kv_head * q_tiles) * TILE_M
    tile_rows = tl.minimum(num_rows - first_row, TILE_M)
    # a softmax of one part has been written by its program
    if (parts > 1) & (row < tile_rows):
        column = piece * TILE_DV
        slots = tl.cast(2 * programs, tl.int64) * TILE_M
        acc_ptr = partials_ptr + piece * (slots * (TILE_DV + 2))
        m_log2, row_sum, acc = merge_parts(
            acc_ptr, acc_ptr + slots * TILE_DV, first_program, parts, row, tile_rows,
            TILE_M, TILE_DV, ROWS, NUM_GROUPS,
        )  # fmt: skip
        rows, columns = merged_places(first_row + row, TILE_DV, ROWS)
        write_rows(
            DecodeResults(results.out + column, results.lse), scoring, layout,
            HeadTile(sequence, kv_len, kv_head), m_log2, row_sum, acc, rows, columns,
            first_row + tile_rows, q_len, TILE_DV,
        )  # fmt: skip


def _groups(programs: int, warps: int, parts: int) -> int:
    """How many groups of threads of a program share `parts` parts; each reads sixteen at a time.

    Rounds of sixteen follow each other at about 0.7 us, so parts are shared as long as all
    `programs`, of `warps` warps for each group, still run at once.
    """
    groups = 1
    while (
        groups < MOST_GROUPS
        and groups * PARTS.value < parts
        and 2 * groups * programs * warps <= MANY_WARPS
    ):
        groups *= 2
    return groups


def launch_attn_decode_combine(
    out: torch.Tensor,
    lse: torch.Tensor,
    call: DecodeCall,
    workspace: DecodeWorkspace,
    tile: tuple[int, int],
    programs: int,
    *,
    pdl: bool = True,
) -> None:
    """Write the rows of `out` and `lse` that several of the previous `programs` have computed.

    Parameters
    ----------
    out, lse : those of the previous launch
    call : its call
    workspace : records [softmaxes, RECORD_FIELDS], and parts: for each slice of columns,
        accumulators [2 * programs, rows, columns] and states [2 * programs, 2, rows]
    tile : rows, and columns of a slice
    pdl : start early and wait on the device
    """
    _, heads_q, q_len, _ = call.q.shape
    heads = DecodeHeads(call.kv_heads, heads_q // call.kv_heads)
    tile_m, columns = tile
    softmaxes, slices = workspace.records.shape[0], out.shape[-1] // columns
    tile_rows = min(tile_m, heads.group * q_len)
    merged = 1 if softmaxes * tile_rows * slices <= MANY_PROGRAMS else MERGED_ROWS.value
    chunks = cdiv(tile_rows, merged)
    grid = softmaxes * chunks * slices
    warps = cdiv(merged * columns, 32 * VECTOR.value)
    groups = _groups(grid, warps, programs // softmaxes)
    v_scale = call.v_scale
    args = (
        DecodeResults(out, lse),
        CombinedScoring(None if call.sinks is None else call.sinks.contiguous(), v_scale),
        workspace.records,
        workspace.partials,
        CombinedLayout(
            Strides(*token_strides(out)),
            ValueScaleStride(scale_stride(v_scale)),
            heads,
        ),
        programs,
        q_len,
        chunks,
        tile_m,
        columns,
        slices,
        merged,
        groups,
        pdl,
    )
    options = {"num_warps": groups * warps if groups > 1 else min(4, warps)}
    if pdl:
        options["launch_pdl"] = True
    launch(_attn_decode_combine_kernel, grid, args, **options)
