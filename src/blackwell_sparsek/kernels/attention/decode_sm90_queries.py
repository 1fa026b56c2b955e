"""Queries of the Hopper decode kernel: where they lie, and how they meet the keys of a cache."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...device.gluon.fp8_operands import column_of_slot, half_range
from ...device.scores import fold_sign
from .decode_sm90_work import head_of_plane


@gluon.jit
def places_of_rows(rows, num_rows, kv_head, group, q_len, strides):
    """`decode._row_places`, without divisions where there is one query."""
    rows = gl.minimum(rows, num_rows - 1)
    token = rows - rows
    in_group = rows
    if q_len > 1:
        token = rows // group
        in_group = rows - token * group
    head = kv_head * group + in_group
    return token, head, head.to(gl.int64) * strides[1] + token * strides[2]


@gluon.jit
def read_queries(q_ptr, sequence, plane, q_tiles, score, q_len, heads, strides, CFG: gl.constexpr):
    """KV head and first row of a plane, its queries, and the factor of its keys.

    Without a sequence, -1, nothing is read.
    """
    rows: gl.constexpr = CFG.ROWS
    dim: gl.constexpr = CFG.TILE_D
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // dim, dim // 8], [4, 1], [1, 0])
    kv_head = head_of_plane(plane, q_tiles)
    first_row = (plane - kv_head * q_tiles) * rows
    num_rows = q_len * heads[1]
    row = first_row + gl.arange(0, rows, gl.SliceLayout(1, layout))
    offs_d = gl.arange(0, dim, gl.SliceLayout(0, layout))
    if CFG.WORDS:
        offs_d = column_of_slot(offs_d)
    _, _, offset = places_of_rows(row, num_rows, kv_head, heads[1], q_len, strides.q)
    queries = q_ptr + sequence.to(gl.int64) * strides.q[0]
    live = (row < num_rows) & (sequence >= 0)
    q = gl.load(queries + offset[:, None] + offs_d[None, :], live[:, None], other=0.0)
    k_scale = 1.0
    if score[2] is not None:
        k_scale = gl.load(score[2] + kv_head * score[4], sequence >= 0, other=1.0)
    return kv_head, first_row, q, k_scale


@gluon.jit
def put_queries(q_smem, q, k_scale, score, CFG: gl.constexpr):
    """Queries into shared memory; returns the factor of their scores, and that before a softcap."""
    # under a softcap the factor of the softmax is the cap, and that of keys belongs inside
    q, factor = fold_sign(q, score[0] * k_scale if score[1] is None else score[0])
    inside = k_scale
    if CFG.WORDS and q.dtype != gl.float16:
        q, up = half_range(q)
        factor = factor * up if score[1] is None else factor
        inside = inside * up
    q_smem.store(q)
    fence_async_shared()
    return factor, inside
