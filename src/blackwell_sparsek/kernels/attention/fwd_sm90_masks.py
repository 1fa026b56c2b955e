"""Masking the scores of a KV tile in the Hopper forward."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.gluon.column_bits import keep_columns
from ...device.masks import bit_visible, within_bounds
from ...device.visits import bits_of_tile, keys_of_tile, masked_unit, tile_ordinal
from .fwd_sm90_work import dense_tile


@gluon.jit
def mask_band(s, kv_start, bounds):
    """Scores of neighbouring keys from `kv_start` on, -inf outside of the band."""
    first, last, every_first, every_last = bounds
    width: gl.constexpr = s.shape[1]
    # what cuts the queries of other consumers may leave these alone
    if (kv_start + (width - 1) > every_last) | (kv_start < every_first):
        s = keep_columns(s, first - kv_start, last - kv_start)
    return s


@gluon.jit
def visible_keys(visit, kv_tile, q_index, q_start, bounds, CFG: gl.constexpr):
    """Which keys of a tile of mask blocks each query sees."""
    lists, plan, num_masked, kv_len = visit
    tile_n: gl.constexpr = CFG.TILE_N
    unit_size: gl.constexpr = CFG.UNIT
    columns: gl.constexpr = gl.SliceLayout(0, CFG.accumulator_layout(CFG.TILE_N))
    offs_n = gl.arange(0, tile_n, columns)
    ordinal, kv_in_unit = tile_ordinal(kv_tile, offs_n, tile_n, unit_size)
    unit = masked_unit(plan, ordinal)
    kv_pos = keys_of_tile(lists, unit, ordinal, num_masked, kv_in_unit, kv_len, tile_n, unit_size)
    visible = within_bounds(kv_pos[None, :], bounds[0][:, None], bounds[1][:, None])
    q_in_block = q_index - q_start // lists[5] * lists[5]
    words = bits_of_tile(
        lists, unit, ordinal, num_masked, q_in_block, kv_in_unit, tile_n, unit_size
    )
    return visible & bit_visible(words, kv_in_unit[None, :])


@gluon.jit
def mask_scores(s, visit, kv_tile, q_index, q_start, bounds, CFG: gl.constexpr):
    """Scores of a tile that needs mask code, -inf where a query does not see a key."""
    if visit[0] is None:
        s = mask_band(s, dense_tile(visit[1], kv_tile) * CFG.TILE_N, bounds)
    else:
        visible = visible_keys(visit, kv_tile, q_index, q_start, bounds, CFG)
        s = gl.where(visible, s, -float("inf"))
    return s
