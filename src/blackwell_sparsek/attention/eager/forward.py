"""Attention in plain PyTorch on any device, with work and memory proportional to what is visible.

Pure bands walk over tiles of queries and take slices of k and v. Block masks walk over the kept
blocks: a step handles the next few blocks of many query blocks at once. Both feed the same softmax
step. Packed sequences run one by one, which requires reading their offsets back to the host.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ...calls.attention import (
    AttentionCall,
    AttnSpec,
    compute_dtype,
    empty_lse,
    empty_out,
    heads_are_inner,
)
from ...masks.band import CAUSAL, EVERYTHING, Band
from ...masks.block_mask import BlockMask
from .operands import (
    BlockRows,
    KeyBlocks,
    KeyColumns,
    Operands,
    StepSizes,
    added_to_blocks,
    block_rows,
    from_query_rows,
    may_be_nonfinite,
    operands,
    step_sizes,
    to_query_rows,
)
from .softmax import bound_of, finish, hide, hide_beyond, start, step
from .visits import BlockStep, Extent, KeyTile, band_visible, block_step, block_visits, key_tiles


def forward(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of a call."""
    call.check_lengths()
    out, lse = attention(call.q, call.k, call.v, call.spec)
    return out if call.out is None else call.out.copy_(out), lse


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttnSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv], or packed."""
    if 0 in q.shape[:-1]:
        return empty_out(q, v.shape[-1]), empty_lse(q)
    guarded = may_be_nonfinite(q, k, v)
    if not spec.is_varlen:
        out, lse = _attend(q, k, v, spec, Extent(q.shape[2], k.shape[2]), guarded)
        if out.dtype == q.dtype and not heads_are_inner(q):
            return out, lse
        return empty_out(q, v.shape[3]).copy_(out), lse
    out, lse = empty_out(q, v.shape[2]), empty_lse(q)
    for extent, q_span, k_span in sequences(spec):
        q_s, k_s, v_s = (as_batch(x, span) for x, span in ((q, q_span), (k, k_span), (v, k_span)))
        out_s, lse_s = _attend(q_s, k_s, v_s, spec, extent, guarded)
        as_batch(out, q_span).copy_(out_s)
        lse[:, q_span].copy_(lse_s[0])
    return out, lse


def sequences(spec: AttnSpec) -> Iterator[tuple[Extent, slice, slice]]:
    """The lengths and spans of packed sequences. Waits for the device once."""
    assert spec.cu_seqlens_q is not None and spec.cu_seqlens_k is not None
    q_ends, k_ends = torch.stack([spec.cu_seqlens_q, spec.cu_seqlens_k]).tolist()
    for i in range(len(q_ends) - 1):
        q_span, k_span = slice(q_ends[i], q_ends[i + 1]), slice(k_ends[i], k_ends[i + 1])
        yield Extent(q_span.stop - q_span.start, k_span.stop - k_span.start, i), q_span, k_span


def as_batch(x: torch.Tensor, span: slice) -> torch.Tensor:
    """One sequence of a packed [T, H, D] tensor as a view [1, H, S, D]."""
    return x[span].transpose(0, 1).unsqueeze(0)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttnSpec,
    extent: Extent,
    guarded: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not guarded and _is_whole(q, k, v, spec, extent):
        return _attend_whole(q, k, v, spec)
    batch, heads_q, sq, _ = q.shape
    dtype = compute_dtype(q.dtype)
    ops = operands(q, k, v, spec, extent, guarded)
    if spec.block_mask is None or q.numel() == 0:
        out = q.new_empty((*ops.q.shape[:3], v.shape[3]), dtype=dtype)
        lse = q.new_empty(ops.q.shape[:3], dtype=dtype)
        begin, end = (0, 0) if guarded else attend_inside(q, k, v, spec, extent, out, lse)
        for rest in ((0, begin), (end, sq)):
            _attend_band(ops, spec, extent, out, lse, rest)
    else:
        out, lse = _attend_blocks(ops, spec, spec.block_mask, extent, k.shape[1])
    return out.view(batch, heads_q, sq, v.shape[3]), lse.view(batch, heads_q, sq)


class BandTile(NamedTuple):
    """A tile of queries `[start, end)` of the KV heads `[first, last)`."""

    first: int
    last: int
    start: int
    end: int


def band_tiles(ops: Operands, sizes: StepSizes, queries: tuple[int, int]) -> Iterator[BandTile]:
    """Cut the queries `[begin, end)` into tiles whose scores fit the step size."""
    n, group = ops.q.shape[:2]
    begin, end = queries
    keys = min(sizes.keys, max(ops.kt.shape[2], 1))
    tile_q = max(1, min(sizes.tile_q, sizes.scores // (group * keys)))
    together = max(1, sizes.scores // (group * tile_q * keys))
    for first in range(0, n, together):
        for q_start in range(begin, end, tile_q):
            q_end = min(q_start + tile_q, end)
            yield BandTile(first, min(first + together, n), q_start, q_end)


class BandEdges:
    """Hides scores outside the band; caches the bounds, since most tiles have the same edges."""

    def __init__(self, spec: AttnSpec, extent: Extent):
        self.band: Band = spec.band
        self.extent: Extent = extent
        self.bounds: dict[tuple[int, int, int], torch.Tensor] = {}

    def hide(self, scores: torch.Tensor, tile: BandTile, keys: KeyTile) -> None:
        """Hide unseen scores [n, G * queries, keys] in place; only the edges are touched."""
        by_head = scores.view(scores.shape[0], -1, tile.end - tile.start, scores.shape[2])
        for lo, hi in keys.edges:
            hide_beyond(
                by_head[..., lo - keys.lo : hi - keys.lo], self._bound(scores, tile, lo, hi)
            )

    def _bound(self, scores: torch.Tensor, tile: BandTile, lo: int, hi: int) -> torch.Tensor:
        key = (lo - tile.start, hi - lo, tile.end - tile.start)
        if key not in self.bounds:
            q_pos = torch.arange(tile.start, tile.end, device=scores.device)[:, None]
            kv_pos = torch.arange(lo, hi, device=scores.device)
            visible = band_visible(self.band, q_pos, kv_pos, self.extent)
            self.bounds[key] = bound_of(visible, scores.dtype)
        return self.bounds[key]


def tile_visible(
    tile: BandTile, keys: KeyTile, spec: AttnSpec, extent: Extent, group: int, device: torch.device
) -> torch.Tensor | None:
    """bool [G * queries, keys], or None when all of it is visible."""
    if not keys.edges:
        return None
    q_pos = torch.arange(tile.start, tile.end, device=device)[:, None]
    kv_pos = torch.arange(keys.lo, keys.hi, device=device)
    return band_visible(spec.band, q_pos, kv_pos, extent).repeat(group, 1)


def _attend_band(
    ops: Operands,
    spec: AttnSpec,
    extent: Extent,
    out: torch.Tensor,
    lse: torch.Tensor,
    rows: tuple[int, int],
) -> None:
    group, dim = ops.q.shape[1], ops.q.shape[3]
    sizes = step_sizes(ops.q.device)
    edges = BandEdges(spec, extent)
    for tile in band_tiles(ops, sizes, rows):
        heads, queries = slice(tile.first, tile.last), slice(tile.start, tile.end)
        n, count = tile.last - tile.first, tile.end - tile.start
        q = ops.q[heads, :, queries].reshape(n, group * count, dim)
        sinks = ops.sinks_log2
        if sinks is not None:
            sinks = sinks[heads, :, None].expand(-1, -1, count).reshape(n, -1, 1)
        state = start(n, group * count, out.shape[3], q, sinks)
        for keys in key_tiles(spec.band, tile.start, tile.end, extent, sizes.keys):
            span = slice(keys.lo, keys.hi)
            scores = ops.scores.finish(torch.bmm(q, ops.kt[heads, :, span]))
            if ops.added is not None:
                scores += ops.added.of_tile(heads, queries, span)
            edges.hide(scores, tile, keys)
            visible = None
            if ops.guarded:
                visible = tile_visible(tile, keys, spec, extent, group, q.device)
            step(state, scores, ops.v[heads, span], visible)
        out_tile, lse_tile = finish(state)
        out[heads, :, queries] = out_tile.view(n, group, count, -1)
        lse[heads, :, queries] = lse_tile.view(n, group, count)


def block_chunks(
    mask: BlockMask, spec: AttnSpec, extent: Extent, layout: BlockRows
) -> Iterator[tuple[torch.Tensor, Iterator[BlockStep]]]:
    """Rows that are processed together, and the steps over their blocks.

    Rows are sorted by their number of blocks, so that those of one chunk end together; reading
    these numbers waits for the device once.
    """
    bq, bk = mask.block_size
    visits = block_visits(mask, spec.band, extent)
    count, order = torch.sort(visits.count[layout.mask_row], descending=True, stable=True)
    counts, cut_counts = torch.stack([count, visits.cut_count[layout.mask_row][order]]).tolist()
    sizes = step_sizes(count.device)
    blocks = max(1, min(sizes.keys // 2 // bk, max(counts, default=1)))
    together = max(1, sizes.scores // (layout.heads * bq * blocks * bk))
    for first in range(0, len(counts), together):
        rows = order[first : first + together]
        most, fewest = counts[first], counts[first + rows.numel() - 1]
        most_cut = max(cut_counts[first : first + rows.numel()])

        def steps(
            rows: torch.Tensor = rows, most: int = most, fewest: int = fewest, cut: int = most_cut
        ) -> Iterator[BlockStep]:
            # blocks that need element masks do not share a step with those that do not
            for begin, end in ((0, cut), (cut, most)):
                for nth in range(begin, end, blocks):
                    taken = min(blocks, end - nth)
                    yield block_step(
                        mask,
                        visits,
                        spec.band,
                        extent,
                        layout.mask_row[rows],
                        nth,
                        taken,
                        cut=nth < cut,
                        ragged=nth + taken > fewest,
                    )

        yield rows, steps()


def stack_heads(visible: torch.Tensor, heads: int) -> torch.Tensor:
    """[rows, bq | 1, keys] for rows that hold `heads` query blocks each."""
    return visible if heads == 1 or visible.shape[1] == 1 else visible.repeat(1, heads, 1)


def _attend_blocks(
    ops: Operands, spec: AttnSpec, mask: BlockMask, extent: Extent, heads_kv: int
) -> tuple[torch.Tensor, torch.Tensor]:
    bq, bk = mask.block_size
    layout = block_rows(ops, mask, extent, heads_kv)
    q_rows = to_query_rows(ops.q, layout, bq)
    k_columns, v_blocks = KeyColumns(ops.kt, bk), KeyBlocks(ops.v, bk)
    count, dim_v = q_rows.shape[1], ops.v.shape[2]
    sinks = sink_rows(ops, layout, bq)
    out = q_rows.new_empty((q_rows.shape[0], count, dim_v))
    lse = q_rows.new_empty((q_rows.shape[0], count))
    for rows, steps in block_chunks(mask, spec, extent, layout):
        q, n = q_rows[rows], rows.numel()
        state = start(n, count, dim_v, q, None if sinks is None else sinks[rows])
        for column, visible in steps:
            block = layout.kv_head[rows, None] * layout.k_blocks + column
            scores = ops.scores.finish(torch.bmm(q, k_columns.gather(block)))
            added = added_to_blocks(ops, layout, rows, column, mask.block_size)
            if added is not None:
                scores += added
            if visible is not None:
                visible = stack_heads(visible, layout.heads)
                hide(scores, visible)
            step(state, scores, v_blocks.gather(block), visible if ops.guarded else None)
        out[rows], lse[rows] = finish(state)
    out = from_query_rows(out, layout, bq, ops.q.shape)
    lse = from_query_rows(lse.unsqueeze(-1), layout, bq, ops.q.shape).squeeze(-1)
    return out.contiguous(), lse.contiguous()


def sink_rows(ops: Operands, layout: BlockRows, block: int) -> torch.Tensor | None:
    """Sinks of the queries of each row, [rows, heads * block, 1]."""
    if ops.sinks_log2 is None:
        return None
    per_query = ops.sinks_log2[:, :, None, None].expand(-1, -1, layout.q_blocks * block, 1)
    return to_query_rows(per_query, layout, block)


# PyTorch's fused attention on a CPU, which takes whole squares and triangles, and masks of tiles.

_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _is_fusible(q: torch.Tensor, v: torch.Tensor, spec: AttnSpec) -> bool:
    """Whether the fused kernel computes these scores, and an lse of full precision."""
    return (
        q.device.type == "cpu"
        # for 16-bit types the fused kernel's exp, and thus lse, has an error of 1e-4
        and q.dtype == torch.float32
        and spec.softcap == 0.0
        and spec.sinks is None
        and not spec.is_biased
        and q.shape[-1] == v.shape[-1]
        and q.numel() > 0
    )


def _is_whole(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttnSpec, extent: Extent
) -> bool:
    """Whether every query sees all keys, or all up to its own in a square."""
    # the fused kernel multiplies scores by the scale after it has hidden some of them with -inf
    is_triangle = spec.band == CAUSAL and extent.sq == extent.sk and spec.scale > 0
    return (
        spec.block_mask is None
        and (spec.band == EVERYTHING or is_triangle)
        and k.numel() > 0
        and _is_fusible(q, v, spec)
    )


def _attend_whole(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttnSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    group, causal = q.shape[1] // k.shape[1], spec.band == CAUSAL
    if group == 1:
        out, lse = _FUSED(q, k, v, 0.0, causal, scale=spec.scale)
        return out.contiguous(), lse.contiguous()
    out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:3], dtype=q.dtype)
    # one query head of every group at a time, so that keys are not repeated in memory
    for nth in range(group):
        heads = slice(nth, None, group)
        out[:, heads], lse[:, heads] = _FUSED(q[:, heads], k, v, 0.0, causal, scale=spec.scale)
    return out, lse


# The interior of a band on a CPU: all tiles of queries in one call of the fused kernel.
#
# Away from the ends of a sequence, every tile of queries sees the same number of keys, shifted by
# the tile. Overlapping views of k and v (no copy) turn these tiles into a batch with a single mask.

TILE_Q = 64
# With fewer tiles, most of the work is in the two ends, which are not done here.
MIN_TILES = 4


def attend_inside(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttnSpec,
    extent: Extent,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[int, int]:
    """Write the rows of `out` and `lse` whose tiles see whole windows; return their range.

    q [B, Hq, Sq, D], k and v [B, Hkv, Sk, D]; out [B * Hkv, G, Sq, D] and lse [B * Hkv, G, Sq] in
    float32. The range is empty if this cannot be used: on other devices, for open bands, softcap,
    sinks or what is added to scores, in dtypes other than float32, and if the head dims of keys and
    values differ.
    """
    first, last = _inside(q, v, spec, extent)
    if first == last:
        return 0, 0
    batch, heads_kv = k.shape[:2]
    group = q.shape[1] // heads_kv
    left, right = spec.band.scalars()
    tiles, keys = last - first, TILE_Q + left + right
    start = first * TILE_Q
    key_start = start + extent.sk - extent.sq - left
    visible = band_visible(
        spec.band,
        torch.arange(TILE_Q)[:, None],
        torch.arange(keys) - left,
        Extent(0, 0),
    )
    # -inf added to a score hides it; the fused kernel takes no other mask without a copy
    mask = torch.zeros((), dtype=q.dtype).masked_fill(~visible, -torch.inf)
    rows = slice(start, last * TILE_Q)
    for b in range(batch):
        for h in range(heads_kv):
            q_tiles = q[b, h * group : (h + 1) * group, rows]
            q_tiles = q_tiles.unfold(1, TILE_Q, TILE_Q).permute(1, 0, 3, 2)
            k_tiles, v_tiles = (_windows(x[b, h], key_start, tiles, keys, group) for x in (k, v))
            tile_out, tile_lse = _FUSED(
                q_tiles, k_tiles, v_tiles, 0.0, False, attn_mask=mask, scale=spec.scale
            )
            batch_head = b * heads_kv + h
            out[batch_head, :, rows] = tile_out.transpose(0, 1).flatten(1, 2)
            lse[batch_head, :, rows] = tile_lse.transpose(0, 1).flatten(1, 2)
    return rows.start, rows.stop


def _inside(q: torch.Tensor, v: torch.Tensor, spec: AttnSpec, extent: Extent) -> tuple[int, int]:
    """First and one past the last tile of queries whose window lies within the keys."""
    band = spec.band
    if None in (band.left, band.right) or not _is_fusible(q, v, spec):
        return 0, 0
    left, right = band.scalars()
    shift = extent.sk - extent.sq
    first = max(0, -((shift - left) // TILE_Q))
    last = min(extent.sq, extent.sk - right - shift) // TILE_Q
    return (first, last) if last - first >= MIN_TILES else (0, 0)


def _windows(x: torch.Tensor, start: int, tiles: int, width: int, group: int) -> torch.Tensor:
    """Overlapping views [tiles, group, width, D] of x [S, D], each shifted by TILE_Q tokens."""
    token, dim = x.stride()
    return x[start:].as_strided(
        (tiles, group, width, x.shape[1]),
        (TILE_Q * token, 0, token, dim),
        x.storage_offset() + start * token,
    )
