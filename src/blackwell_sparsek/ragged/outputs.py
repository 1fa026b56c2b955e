# mypy: ignore-errors
"""Rows of packed queries: where they lie, and how their softmax ends and is stored."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.softmax import add_sink, finalise


class Results(NamedTuple):
    """Where results go."""

    out: Any
    lse: Any


@triton.jit
def row_places(rows, num_rows, kv_head, group, first_query, strides):
    """Query in the sequence, head, and offset of rows; rows past the last count as the last."""
    rows = tl.minimum(rows, num_rows - 1)
    query = rows // group
    head = kv_head * group + rows % group
    token = tl.cast(first_query + query, tl.int64)
    return query, head, tl.cast(head, tl.int64) * strides.head + token * strides.token


@triton.jit
def end_rows(scoring, scales, tile, kv_head, head, m_log2, row_sum, acc, rows):
    """End the softmax of rows [R] of query heads `head`; return outputs and lse."""
    if scoring.sinks is not None:
        m_log2, row_sum, rescale = add_sink(m_log2, row_sum, tl.load(scoring.sinks + head))
        acc *= rescale[:, None]
    row_sum = tl.where(tile.kv_len < 0, float("nan"), row_sum)
    inverse, lse = finalise(m_log2, row_sum)
    if scoring.v_scale is not None:
        inverse *= tl.load(scoring.v_scale + kv_head * scales.v)
    out = acc * inverse[:, None]
    if tile.used_rows < tile.num_rows:
        # a sink is no result of a query that is not used
        unused = (rows >= tile.used_rows) & (tile.kv_len >= 0)
        out = tl.where(unused[:, None], 0.0, out)
        lse = tl.where(unused, -float("inf"), lse)
    return out, lse


@triton.jit
def store_outputs(results, out, offset, columns, live, HEAD_DIM_V: tl.constexpr):
    """Store the outputs of rows that are live."""
    tl.store(
        results.out + offset[:, None] + columns,
        out.to(results.out.dtype.element_ty),
        live[:, None] & (columns < HEAD_DIM_V),
    )


@triton.jit
def store_lse(results, lse, tile, query, head, tokens_q, live):
    """Store the lse of rows that are live."""
    place = tl.cast(head, tl.int64) * tokens_q + tile.first_query + query
    tl.store(results.lse + place, lse, live)


@triton.jit
def write_rows(
    results, scoring, tensors, tile, kv_head, m_log2, row_sum, acc, rows, columns, end_row,
    tokens_q, HEAD_DIM_V: tl.constexpr,
):  # fmt: skip
    """End the softmax of rows [R] and store outputs and lse; acc and columns are [R, C].

    Rows from `end_row` on are not stored. A row may occur more than once, with other columns.
    """
    query, head, offset = row_places(
        rows, end_row, kv_head, tensors.heads.group, tile.first_query, tensors.out
    )
    out, lse = end_rows(scoring, tensors.scales, tile, kv_head, head, m_log2, row_sum, acc, rows)
    live = rows < end_row
    store_outputs(results, out, offset, columns, live, HEAD_DIM_V)
    store_lse(results, lse, tile, query, head, tokens_q, live)
