# mypy: ignore-errors
"""Attention of a few new queries over a cache on Hopper: the arithmetic of `decode.py` by WGMMA.

Shapes and results are those of `decode.py`, and so is the way work is shared: programs take equal
stretches of the KV tiles of all sequences and heads. A producer warp finds the stretch, publishes
its pieces (what it has of one softmax) and keeps rings of K and V tiles full by TMA, across the
ends of pieces. A consumer warp group computes with keys as the rows of its products,

    s^T = K Q^T [TILE_N, ROWS]      o^T = V^T P^T [Dv, ROWS]

so that few queries cost few instructions. K and V are read from where TMA put them, fp8 ones after
they have become fp16 in registers; Q and P are small and written to shared memory by the consumer.

Called as impl "sm90" of `bsk::attn_decode`. Limits: queries in fp16 or bf16, caches too or in fp8
(D and Dv 128, up to 16 rows that share a KV head), D and Dv 64 or 128, pages and listed blocks of a
multiple of 16 tokens, strides and addresses that TMA takes, and those of `decode.py`. Slots past
the lengths are copied and not looked at; a page out of range is not read.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..device.fp8 import turned_back
from ..device.gluon.fp8_operands import column_of_slot, half_range, key_operand, value_operand
from ..device.gluon.partials import columns_of, merge_parts, rows_of, store_part
from ..device.gluon.pipeline import barriers, peek, take, tiles, work_channel
from ..device.masks import kv_range, kv_range_of_all, position, row_bounds, within_bounds
from ..device.partials import MERGED_ROWS, is_last, part_slot
from ..device.scores import cap, fold_sign
from ..device.softmax import add_sink, finalise, init_state, weigh
from .sm90_producer import head_of_plane, produce_tiles

# Queries of the Hopper decode kernel: where they lie, and how they meet the keys of a cache.


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


# What describes a piece: sequence, plane, length, first and end tile; and who else has a part:
# origin, first tile and number of tiles of the plane, tiles of a stretch.
WORK_FIELDS = gl.constexpr(9)


@gluon.jit
def _mask_scores(s, kv_pos, first_row, length, band, q_len, heads):
    """Scores [rows, keys], -inf where a query does not see a key."""
    row = first_row + rows_of(s)
    # rows past the last query see what some position sees; nobody looks at them
    token = row - row
    if q_len > 1:
        token = row // heads[1]
    q_pos = position(token, q_len, length)
    first, last = row_bounds(q_pos, length, band[0], band[1])
    visible = within_bounds(kv_pos[None, :], first[:, None], last[:, None])
    return gl.where(visible, s, -float("inf"))


@gluon.jit
def _drop_dead_values(tile, kv_start, positions, kv_lo, kv_hi):
    """Zero the values past the keys of a sequence: they may be NaN, which weights of 0 keep."""
    keys: gl.constexpr = tile.shape[0]
    dim: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // dim, dim // 8], [4, 1], [1, 0])
    if positions is None:
        kv_pos = kv_start + gl.arange(0, keys, gl.SliceLayout(1, layout))
    else:
        kv_pos = positions.load(gl.SliceLayout(1, layout))
    live = within_bounds(kv_pos, kv_lo, kv_hi - 1)
    nothing = gl.zeros([keys, dim], tile.dtype, layout)
    tile.store(gl.where(live[:, None], tile.load(layout), nothing))


@gluon.jit
def _write(
    results, m_log2, row_sum, acc, first_row, num_rows, sequence, kv_head, kv_len, q_len, heads,
    strides, sinks_ptr, score,
):  # fmt: skip
    """End the softmax of packed rows and store outputs and lse."""
    row = first_row + rows_of(acc)
    live = row < num_rows
    token, head, offset = places_of_rows(row, num_rows, kv_head, heads[1], q_len, strides.out)
    if sinks_ptr is not None:
        m_log2, row_sum, rescale = add_sink(m_log2, row_sum, gl.load(sinks_ptr + head))
        acc = acc * rescale[:, None]
    row_sum = gl.where(kv_len < 0, float("nan"), row_sum)
    inverse, lse = finalise(m_log2, row_sum)
    if score[3] is not None:
        inverse *= gl.load(score[3] + kv_head * score[5])
    out_ptr = results[0] + sequence.to(gl.int64) * strides.out[0]
    gl.store(
        out_ptr + offset[:, None] + columns_of(acc)[None, :],
        (acc * inverse[:, None]).to(out_ptr.dtype.element_ty),
        live[:, None],
    )
    lse_row = (sequence.to(gl.int64) * heads[0] * heads[1] + head) * q_len + token
    gl.store(results[1] + lse_row, lse, live)


@gluon.jit
def _consume(consume, shared, CFG: gl.constexpr):
    """Attend with the queries of each piece."""
    results, q_ptr, sinks_ptr, score, workspace, strides, q_smem, p_smem, of_plane = consume
    ring, notes, work, lengths, heads = shared
    k_smem, v_smem, full, empty = ring
    q_len, left, right = lengths[3], lengths[5], lengths[6]
    tile_n: gl.constexpr = CFG.TILE_N
    tile_dv: gl.constexpr = CFG.TILE_DV
    num: gl.constexpr = CFG.ROWS
    layout: gl.constexpr = CFG.accumulator_layout()
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    group: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    no_scores = gl.zeros([tile_n, num], gl.float32, layout)
    turned = gl.permute(no_scores, (1, 0))
    rows = rows_of(turned)
    offs_n = columns_of(turned)
    num_rows = q_len * heads[1]
    q_tiles = (num_rows + num - 1) // num
    acc_parts = workspace[0]
    state_parts = acc_parts + (2 * gl.num_programs(0)).to(gl.int64) * (num * tile_dv)
    program = gl.program_id(0)
    step = 0
    turn = 0
    if CFG.SINGLE:
        gdc_wait()
        if of_plane > 0:
            # which head it is, is known before the length is
            plane = program // of_plane
            sequence = gl.where(plane < heads[0] * q_tiles, 0, -1)
        else:
            sequence = peek(work, turn, 0)
            plane = peek(work, turn, 1)
        kv_head, first_row, q, k_scale = read_queries(
            q_ptr, sequence, plane, q_tiles, score, q_len, heads, strides, CFG
        )
    sequence, plane, kv_len, kv_tile, kv_end, origin, plane_tile, count, each = take(work, turn)
    while sequence >= 0:
        if not CFG.SINGLE:
            kv_head, first_row, q, k_scale = read_queries(
                q_ptr, sequence, plane, q_tiles, score, q_len, heads, strides, CFG
            )
        factor, inside = put_queries(q_smem, q, k_scale, score, CFG)
        # divisions, while keys are waited for
        begins = origin + plane_tile // each
        ends = origin + (plane_tile + count - 1) // each
        length = gl.maximum(kv_len, 0)
        kv_lo, kv_hi = kv_range(0, q_len, q_len, length, left, right)
        all_lo, all_hi = kv_range_of_all(0, q_len, q_len, length, left, right)
        m_log2, row_sum = init_state(rows)
        sums = turned
        wrong = 0
        acc = gl.zeros([tile_dv, num], gl.float32, layout)
        for tile in range(kv_tile, kv_end):
            stage = step % CFG.STAGES
            phase = (step // CFG.STAGES) & 1
            kv_start = tile * tile_n
            mbarrier.wait(full.index(stage), phase)
            kv_pos = kv_start + offs_n
            positions = None
            cut = (kv_start < kv_lo) | (kv_start + tile_n > kv_hi)
            if CFG.scattered:
                note = gl.max(notes[1].index(stage).load(group), 0)
                wrong = note % 2
                cut = note >= 2
            if CFG.BLOCK_KV is not None:
                positions = notes[0].index(stage)
                kv_pos = positions.load(gl.SliceLayout(0, turned.type.layout))
            k = k_smem.index(stage)
            v = v_smem.index(stage)
            if CFG.WORDS:
                k = key_operand(k, layout)
            q_turned = q_smem.permute((1, 0))
            scores = warpgroup_mma(k, q_turned, no_scores, use_acc=False, is_async=True)
            if CFG.WORDS:
                if cut:
                    _drop_dead_values(v, kv_start, positions, kv_lo, kv_hi)
                # while the tensor cores multiply
                values = value_operand(v, layout)
            s = gl.permute(warpgroup_mma_wait(0, deps=(scores,)), (1, 0))
            if CFG.WORDS and score[1] is not None:
                s = s * inside
            s = cap(s, score[1])
            if CFG.BLOCK_KV is not None or (kv_start < all_lo) | (kv_start + tile_n > all_hi):
                s = _mask_scores(s, kv_pos, first_row, length, (left, right), q_len, heads)
            m_log2, p, rescale = weigh(m_log2, s, factor)
            sums = sums * rescale[:, None] + p
            p_smem.store(p.to(p_smem.dtype))
            acc = acc * gl.convert_layout(rescale, columns)[None, :]
            if not CFG.WORDS:
                if cut:
                    _drop_dead_values(v, kv_start, positions, kv_lo, kv_hi)
                values = v.permute((1, 0))
            fence_async_shared()
            product = warpgroup_mma(values, p_smem.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(product,))
            mbarrier.arrive(empty.index(stage), count=1)
            step += 1

        if CFG.WORDS:
            acc = turned_back(acc)
        out = gl.permute(acc, (1, 0))
        out_rows: gl.constexpr = gl.SliceLayout(1, out.type.layout)
        row_sum = gl.convert_layout(gl.sum(sums, 1), out_rows)
        if CFG.scattered:
            row_sum = gl.where(wrong != 0, float("nan"), row_sum)
        m_out = gl.convert_layout(m_log2, out_rows)
        if begins == ends:
            _write(
                results, m_out, row_sum, out, first_row, num_rows, sequence, kv_head, kv_len,
                q_len, heads, strides, sinks_ptr, score,
            )  # fmt: skip
        else:
            tile_rows = gl.minimum(num_rows - first_row, num)
            slot = part_slot(program, begins)
            store_part(acc_parts, state_parts, slot, m_out, row_sum, out, tile_rows)
            if is_last(workspace[1] + begins, ends - begins + 1):
                for row in range(0, tile_rows, MERGED_ROWS):
                    m_all, sum_all, acc_all = merge_parts(
                        acc_parts, state_parts, begins, ends - begins + 1, row, tile_rows,
                        num, tile_dv,
                    )  # fmt: skip
                    _write(
                        results, m_all, sum_all, acc_all, first_row + row, first_row + tile_rows,
                        sequence, kv_head, kv_len, q_len, heads, strides, sinks_ptr, score,
                    )  # fmt: skip
        turn += 1
        sequence, plane, kv_len, kv_tile, kv_end, origin, plane_tile, count, each = take(work, turn)
        if CFG.SINGLE:  # noqa: SIM102
            if sequence >= 0:
                kv_head, first_row, q, k_scale = read_queries(
                    q_ptr, sequence, plane, q_tiles, score, q_len, heads, strides, CFG
                )


@gluon.jit(
    do_not_specialize=[
        "page_row_stride", "list_batch_stride", "list_head_stride", "batch", "q_len", "capacity",
        "num_pages", "num_blocks", "left", "right", "of_plane",
    ]
)  # fmt: skip
def _attn_decode_sm90_kernel(
    results,
    q_ptr,
    k_desc,
    v_desc,
    seqlens_ptr,
    page_table_ptr,
    list_ptr,
    sinks_ptr,
    score,
    workspace,
    strides,
    page_row_stride,
    list_batch_stride,
    list_head_stride,
    batch,
    q_len,
    capacity,
    num_pages,
    num_blocks,
    left,
    right,
    heads,
    of_plane,
    CFG: gl.constexpr,
):
    """Set up rings and roles; `produce_tiles` and `_consume` do the work.

    results (out, lse), score (scale_log2, inverse_cap, k_scale, v_scale, their strides), workspace
    (parts, counters), heads (KV heads, query heads of each), of_plane: programs for each plane, 0
    if there are more planes.
    """
    first_length = batch
    if CFG.SINGLE:
        # the next kernel may start as soon as there is room for it; it waits where it has to
        gdc_launch_dependents()
    else:
        # the first thing that anything depends on, asked for before anything else
        first_length = gl.load(seqlens_ptr)
    stages: gl.constexpr = CFG.STAGES
    tile_n: gl.constexpr = CFG.TILE_N
    producer_registers: gl.constexpr = CFG.PRODUCER_REGISTERS
    num: gl.constexpr = CFG.ROWS
    tile_d: gl.constexpr = CFG.TILE_D
    dtype: gl.constexpr = gl.float16 if CFG.WORDS else k_desc.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([num, tile_d], dtype)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([num, tile_n], dtype)
    k_smem = tiles(k_desc, stages, tile_n)
    v_smem = tiles(v_desc, stages, tile_n)
    q_smem = gl.allocate_shared_memory(dtype, [num, tile_d], q_layout)
    p_smem = gl.allocate_shared_memory(dtype, [num, tile_n], p_layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    flags = gl.allocate_shared_memory(gl.int32, [stages, 1], plain)
    positions = gl.allocate_shared_memory(gl.int32, [stages, CFG.noted_keys], plain)
    # a barrier costs each launch 60 cycles: keys and values come together
    ring = (k_smem, v_smem, barriers(stages, 1), barriers(stages, 1))
    work = work_channel(WORK_FIELDS, 1)
    fence_async_shared()

    lengths = (seqlens_ptr, first_length, batch, q_len, capacity, left, right, num_blocks)
    tables = (page_table_ptr, list_ptr, num_pages)
    table_strides = (page_row_stride, list_batch_stride, list_head_stride)
    produce = ((k_desc, v_desc), tables, table_strides, of_plane)
    consume = (results, q_ptr, sinks_ptr, score, workspace, strides, q_smem, p_smem, of_plane)
    shared = (ring, (positions, flags), work, lengths, heads)
    # the first role runs in the warps of the launch, the other in a warp of its own
    gl.warp_specialize(
        [(_consume, (consume, shared, CFG)), (produce_tiles, (produce, shared, CFG))],
        [1],
        [producer_registers],
    )
