"""What a warp group of the Hopper backward does with one tile of queries.

Tiles are [keys, queries] here: s^T, p^T, ds^T. `CFG.TILE_M` queries meet a warp group's 64 keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...device.backprop import probabilities, score_gradients
from ...device.masks import bit_visible, column_bounds, exists, q_range, within_bounds
from ..sm90 import GROUP_ROWS
from .bwd_sm90_work import read_info

ROWS = gl.constexpr(GROUP_ROWS)


@gluon.jit
def zero_of(step):
    """0, which the compiler does not know: it would keep addresses that contain only constants in
    registers all along, and spill them. They are cheap to compute again."""
    return step >> 31


@gluon.jit
def start_products(rows, tiles, step, CFG: gl.constexpr):
    """Start the products of 64 keys or values with the queries or output gradients of a step."""
    tile_m: gl.constexpr = CFG.TILE_M
    layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_M)
    nothing = gl.zeros([ROWS, tile_m], gl.float32, layout)
    columns = tiles.index(step % CFG.STAGES).permute((1, 0))
    return warpgroup_mma(rows, columns, nothing, use_acc=False, is_async=True)


@gluon.jit
def numbers_of_queries(numbers, step, CFG: gl.constexpr):
    """lse or delta, which came with a tile, as [1, queries]."""
    layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_M)
    return numbers.index(step % CFG.STAGES).load(gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def _visible(shared, step, kv_index, CFG: gl.constexpr):
    """Which of 64 keys each query of a step sees."""
    lists, info, lengths, band = shared[0][0], shared[3], shared[5], shared[7]
    tile_m: gl.constexpr = CFG.TILE_M
    two_units: gl.constexpr = CFG.parts == 2
    layout: gl.constexpr = CFG.accumulator_layout(CFG.TILE_M)
    offs_m = gl.arange(0, tile_m, gl.SliceLayout(0, layout))
    q_index = read_info(info, step, 1, 4) + offs_m
    if two_units:
        q_index = gl.where(offs_m < ROWS, q_index, read_info(info, step, 2, 4) - ROWS + offs_m)
    # bounds of keys take two registers, where those of queries take two for each
    first, last = column_bounds(kv_index, lengths[0], lengths[1], band[0], band[1])
    last = gl.where(exists(kv_index, lengths[1]), last, -1)
    visible = within_bounds(q_index[None, :], first[:, None], last[:, None])
    if lists is not None:
        words: gl.constexpr = (CFG.BLOCK_KV + 31) // 32
        bits_id = read_info(info, step, 3, 4) + (offs_m - offs_m)
        if two_units:
            bits_id = gl.where(offs_m < ROWS, bits_id, read_info(info, step, 4, 4))
        kv_in_block = kv_index % CFG.BLOCK_KV
        row = (bits_id.to(gl.int64) * CFG.UNIT + q_index % CFG.UNIT) * words
        place = lists[4] + row[None, :] + (kv_in_block // 32)[:, None]
        has_bits = (kv_in_block >= 0)[:, None] & (bits_id >= 0)[None, :]
        word = gl.load(place, has_bits, other=-1)
        visible = visible & bit_visible(word, kv_in_block[:, None])
    return visible


@gluon.jit
def sees_nothing(step, kv_tile, shared, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Whether no query of a step sees a key of a warp group, by the band alone."""
    info, lengths, band = shared[3], shared[5], shared[7]
    first = kv_tile * CFG.tile_n + GROUP * ROWS
    lo, hi = q_range(first, first + ROWS, lengths[0], lengths[1], band[0], band[1])
    q_row = read_info(info, step, 1, 4)
    return (q_row + CFG.TILE_M <= lo) | (q_row >= hi)


@gluon.jit
def hide(p, step, kv_index, shared, CFG: gl.constexpr):
    """p^T without the keys that a query does not see, whatever the exponential gave there."""
    return gl.where(_visible(shared, step, kv_index, CFG), p, 0.0)


@gluon.jit
def score_step(
    s_started, dp_started, step, masked, kv_index, score, shared,
    EARLY: gl.constexpr, CFG: gl.constexpr,
):  # fmt: skip
    """p^T and ds^T of a step whose products were started.

    EARLY: registers are left for the numbers of queries to come while products are under way.
    """
    lse_smem, delta_smem = shared[2][2], shared[2][3]
    if EARLY:
        lse_log2 = numbers_of_queries(lse_smem, step, CFG)
    s = warpgroup_mma_wait(1, deps=(s_started,))
    if not EARLY:
        lse_log2 = numbers_of_queries(lse_smem, step, CFG)
    p, capped = probabilities(s, None, lse_log2, score)
    if masked:
        p = hide(p, step, kv_index, shared, CFG)
    if EARLY:
        delta = numbers_of_queries(delta_smem, step, CFG)
    dp = warpgroup_mma_wait(0, deps=(dp_started,))
    if not EARLY:
        delta = numbers_of_queries(delta_smem, step, CFG)
    return p, score_gradients(p, capped, dp, delta, score)


@gluon.jit
def ds_place(ds_ring, step, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Where a warp group's ds^T of a step lies, and the barrier that says it is there."""
    smem, ready = ds_ring
    buffer = step % CFG.DS_STAGES
    tile = smem.index(buffer * CFG.CONSUMERS + GROUP)
    return tile, ready.index(buffer)


@gluon.jit
def hand_over(x, smem, filled):
    """Give a tile to whoever reads it from shared memory asynchronously."""
    smem.store(x)
    fence_async_shared()
    mbarrier.arrive(filled, count=1)
