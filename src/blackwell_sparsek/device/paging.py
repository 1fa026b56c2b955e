# mypy: ignore-errors
"""Where the keys of a tile lie in a cache: contiguous or in pages, all of them or chosen blocks.

A cache is contiguous, [B, Hkv, S, D], or [pages, page_size, Hkv, D] with a table of pages for each
sequence. A tile holds TILE_N of the *visited* keys: all keys of a sequence in order, or those of
the blocks in a list, in the list's order. Each key has a position and a place `(slab, row)`: a page
and the token in it, or a batch and a position.

Tables and lists come from the user and may hold any value. A number out of range makes its keys
*wrong*: they are not read, and the kernel that uses the tile makes the result NaN.
"""

import triton
import triton.language as tl

from .masks import within_bounds
from .records import CacheTile, ClampedTile


@triton.jit
def visited_tiles(kv_lo, kv_hi, num_blocks, TILE_N: tl.constexpr, BLOCK_KV: tl.constexpr):
    """First tile and number of tiles, at least one, that hold the visited keys of a sequence.

    Without lists (BLOCK_KV None) these are the keys `[kv_lo, kv_hi)`. Scalars or vectors.
    """
    if BLOCK_KV is None:
        first = kv_lo // TILE_N
        count = (kv_hi + TILE_N - 1) // TILE_N - first
    else:
        first = kv_lo - kv_lo
        count = first + (num_blocks * BLOCK_KV + TILE_N - 1) // TILE_N
    # a sequence without keys also has a result, which some program must write
    return first, tl.maximum(count, 1)


@triton.jit
def _visited_keys(
    tile, offs_n, tables, num_blocks, capacity, TILE_N: tl.constexpr, BLOCK_KV: tl.constexpr
):
    """Positions of a tile's keys, which keys have a valid block, and which have a wrong one.

    Also the position of the first key, which is a scalar if a block holds whole tiles.
    """
    if BLOCK_KV is None:
        start = tile * TILE_N
        kv_pos = start + offs_n
        known = kv_pos >= 0
        wrong = kv_pos < 0
    else:
        WHOLE_TILES: tl.constexpr = BLOCK_KV % TILE_N == 0
        place = tile * TILE_N
        if not WHOLE_TILES:
            place += offs_n
        entry = place // BLOCK_KV
        block = tl.load(tables.blocks + tables.block_row + entry, mask=entry < num_blocks, other=-1)
        inside = (block >= 0) & (block < (capacity + BLOCK_KV - 1) // BLOCK_KV)
        start = tl.where(inside, block, 0) * BLOCK_KV + place % BLOCK_KV
        # Triton 3.6 takes a sum of vectors for a multiple of whatever their first elements are
        # multiples of. Without the 1 it would copy rows that start anywhere as aligned ones.
        kv_pos = start + offs_n if WHOLE_TILES else tl.multiple_of(start, 1)
        known = inside & (kv_pos >= 0)
        wrong = (block != -1) & (known == 0)
    return kv_pos, start, known, wrong


@triton.jit
def cache_tile(
    tile, offs_n, cache, TILE_N: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_KV: tl.constexpr
):
    """The `CacheTile` of TILE_N visited keys of a `CacheView`.

    The visited keys in `[kv_lo, kv_hi)`, which must lie within `capacity`, are live. The slab is a
    scalar if a page holds whole tiles or there are no pages.
    """
    kv_lo, kv_hi = cache.kv_lo, cache.kv_hi
    ONE_PAGE: tl.constexpr = PAGE_SIZE is not None and PAGE_SIZE % TILE_N == 0
    WHOLE_TILES: tl.constexpr = BLOCK_KV is None or BLOCK_KV % TILE_N == 0
    kv_pos, start, known, wrong = _visited_keys(
        tile, offs_n, cache.tables, cache.num_blocks, cache.capacity, TILE_N, BLOCK_KV
    )
    live = known & within_bounds(kv_pos, kv_lo, kv_hi - 1)
    if PAGE_SIZE is None:
        slab = cache.batch
        row = kv_pos
    else:
        page_row = cache.tables.pages + cache.tables.page_row
        if ONE_PAGE and WHOLE_TILES:
            # table entries past the last key, or before the first visible one, may hold anything
            wanted = within_bounds(start, kv_lo - (TILE_N - 1), kv_hi - 1)
            slab = tl.load(page_row + start // PAGE_SIZE, mask=wanted, other=-1)
            row = start % PAGE_SIZE + offs_n
        else:
            slab = tl.load(page_row + kv_pos // PAGE_SIZE, mask=live, other=-1)
            row = kv_pos % PAGE_SIZE
        exists = (slab >= 0) & (slab < cache.num_pages)
        wrong = wrong | (live & (exists == 0))
        live = live & exists
    return CacheTile(kv_pos, slab, row, live, wrong)


@triton.jit
def listed_block(tile, offs_n, cache, TILE_N: tl.constexpr, BLOCK_KV: tl.constexpr):
    """The block that the list names for the keys of a tile: -1 past its end, 0 without lists.

    One number for all keys, unless a tile spans several blocks.
    """
    if BLOCK_KV is None:
        block = tile - tile
    else:
        place = tile * TILE_N
        if BLOCK_KV % TILE_N != 0:
            place += offs_n
        entry = place // BLOCK_KV
        block_row = cache.tables.blocks + cache.tables.block_row
        block = tl.load(block_row + entry, mask=entry < cache.num_blocks, other=-1)
    return block


@triton.jit
def clamped_tile(
    tile, block, offs_n, cache,
    TILE_N: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """As `cache_tile` for a `listed_block`, with a single look-up if one page holds the tile.

    Keys outside `[kv_lo, kv_hi)` get the row of the nearest key inside, which is in the same block:
    what is read there is finite, and a mask by position hides it. So `readable`, `listed` and
    `wrong` are scalars that hold for all keys, unless a tile spans several pages or blocks.
    """
    kv_lo, kv_hi = cache.kv_lo, cache.kv_hi
    PAGES_CUT: tl.constexpr = PAGE_SIZE is not None and PAGE_SIZE % TILE_N != 0
    BLOCKS_CUT: tl.constexpr = BLOCK_KV is not None and BLOCK_KV % TILE_N != 0
    place = tile * TILE_N
    keys = offs_n
    if PAGES_CUT or BLOCKS_CUT:
        place += offs_n
        keys = offs_n - offs_n
    if BLOCK_KV is None:
        start = place
        lo = kv_lo
        hi = kv_hi
        readable = (place >= 0) & (kv_lo < kv_hi)
        listed = place >= 0
        wrong = place < 0
    else:
        listed = (block >= 0) & (block < (cache.capacity + BLOCK_KV - 1) // BLOCK_KV)
        wrong = (block != -1) & (listed == 0)
        begin = tl.where(listed, block, 0) * BLOCK_KV
        start = begin + place % BLOCK_KV
        lo = tl.maximum(kv_lo, begin)
        hi = tl.minimum(kv_hi, begin + BLOCK_KV)
        readable = listed & (lo < hi)
    kv_pos = start + keys
    slab = cache.batch
    row = tl.maximum(tl.minimum(kv_pos, hi - 1), lo)
    if PAGE_SIZE is not None:
        page = tl.maximum(tl.minimum(start, hi - 1), lo) // PAGE_SIZE
        page_row = cache.tables.pages + cache.tables.page_row
        slab = tl.load(page_row + page, mask=readable, other=-1)
        if PAGE_SIZE & (PAGE_SIZE - 1) == 0:
            row &= PAGE_SIZE - 1
        else:
            row -= page * PAGE_SIZE
        exists = (slab >= 0) & (slab < cache.num_pages)
        wrong = wrong | (readable & (exists == 0))
        readable = readable & exists
    return ClampedTile(kv_pos, slab, row, readable, listed, wrong)


@triton.jit
def load_cache_rows(base_ptr, slab, row, strides, live, offs_d, HEAD_DIM: tl.constexpr):
    """Rows [TILE_N, columns] of a cache with strides (slab, head, token); 0 where not live.

    `live` is a vector with a value for each row, or one scalar for all.
    """
    slab_stride, _, token_stride = strides
    offset = tl.cast(slab, tl.int64) * slab_stride + tl.cast(row, tl.int64) * token_stride
    mask = live[:, None] if len(live.shape) == 1 else live
    if offs_d.shape[0] != HEAD_DIM:
        mask = mask & (offs_d < HEAD_DIM)[None, :]
    return tl.load(base_ptr + offset[:, None] + offs_d[None, :], mask=mask, other=0.0)
