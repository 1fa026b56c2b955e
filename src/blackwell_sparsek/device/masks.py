# mypy: ignore-errors
"""The mask file: which keys a query sees. Nothing else in the package compares positions.

A band `(left, right)` shows the query at position p the keys p - left .. p + right; an open side is
2**30, which is safe to add in int32. Query i of `q_len` sits at p = i + kv_len - q_len, so that the
last query is aligned with the last key. Ranges are half open, in tokens; an empty range has
lo >= hi. Functions take and return scalars or vectors; none of them creates a vector, so Triton and
Gluon kernels share them.
"""

import triton
import triton.language as tl

from .records import Range, RowBounds

# tile classes, by how much of the tile is visible
EMPTY = tl.constexpr(0)
PARTIAL = tl.constexpr(1)
FULL = tl.constexpr(2)


@triton.jit
def position(q_index, q_len, kv_len):
    """Position of a query among the keys; negative for queries before the first key."""
    return q_index + (kv_len - q_len)


@triton.jit
def row_bounds(q_pos, kv_len, left, right):
    """First and last key (both inclusive) that each position sees; last < first if none."""
    return RowBounds(q_pos - left, tl.minimum(q_pos + right, kv_len - 1))


@triton.jit
def column_bounds(kv_pos, q_len, kv_len, left, right):
    """First and last query (both inclusive) that see each key: the adjoint of `row_bounds`."""
    # keys look back at queries through the mirrored band
    return row_bounds(position(kv_pos, kv_len, q_len), q_len, right, left)


@triton.jit
def not_before(kv_pos, first):
    """Whether keys are at or after the lower row bounds."""
    return kv_pos >= first


@triton.jit
def not_after(kv_pos, last):
    """Whether keys are at or before the upper row bounds."""
    return kv_pos <= last


@triton.jit
def within_bounds(kv_pos, first, last):
    """Whether keys lie between the row bounds; two comparisons cover band and length."""
    return not_before(kv_pos, first) & not_after(kv_pos, last)


@triton.jit
def band_visible(q_pos, kv_pos, kv_len, left, right):
    """Whether positions `q_pos` see keys `kv_pos`; the two broadcast."""
    first, last = row_bounds(q_pos, kv_len, left, right)
    return within_bounds(kv_pos, first, last)


@triton.jit
def bits_from(first):
    """The bits `first` to 31 of a word: all of them below 1, none from 32 on."""
    at = tl.minimum(tl.maximum(first, 0), 31)
    return tl.where(first > 31, 0, -1 << at)


@triton.jit
def positions_from(kv_pos, first_pos, kv_len, right):
    """Which of the positions from `first_pos` on are not too early for each key, as bits.

    Bit t is that of first_pos + t. Keys past the length have none.
    """
    return tl.where(exists(kv_pos, kv_len), bits_from(kv_pos - first_pos - right), 0)


@triton.jit
def position_bits(kv_pos, first_pos, kv_len, left, right):
    """Which of the positions from `first_pos` on see each key, as `positions_from`."""
    # an open side is 2**30, and twice that does not fit in int32
    last = tl.minimum(tl.minimum(kv_pos - first_pos, 2**30 - 1) + left, 2**30)
    return positions_from(kv_pos, first_pos, kv_len, right) & ~bits_from(last + 1)


@triton.jit
def exists(index, length):
    """Whether tokens lie within their sequence."""
    return index < length


@triton.jit
def bit_visible(words, kv_in_block):
    """Element predicate of a partial block: bit `kv_in_block % 32` of each word."""
    return ((words >> (kv_in_block % 32)) & 1) != 0


@triton.jit
def kv_range(q_start, q_end, q_len, kv_len, left, right):
    """Keys that at least one existing query of `[q_start, q_end)` sees."""
    first_pos = position(q_start, q_len, kv_len)
    end_pos = position(tl.minimum(q_end, q_len), q_len, kv_len)
    return kv_range_at(first_pos, end_pos, kv_len, left, right)


@triton.jit
def kv_range_at(first_pos, end_pos, kv_len, left, right):
    """Keys that at least one of the positions `[first_pos, end_pos)` sees."""
    lo = tl.maximum(first_pos - left, 0)
    # subtract one before adding: end_pos + right may overflow int32 when both are at their limits
    hi = tl.minimum(tl.maximum(end_pos - 1 + right, -1), kv_len - 1) + 1
    hi = tl.where(first_pos < end_pos, hi, 0)
    return Range(lo, tl.maximum(hi, 0))


@triton.jit
def first_of_chunk(q_pos, chunk):
    """First position of the chunk of a position; -chunk for positions before the first key."""
    return tl.where(q_pos < 0, -chunk, q_pos // chunk * chunk)


@triton.jit
def bounds_in_chunk(bounds, q_pos, chunk):
    """Row bounds cut to the chunk of each position; None leaves them as they are."""
    first, last = bounds
    if chunk is not None:
        start = first_of_chunk(q_pos, chunk)
        first = tl.maximum(first, start)
        last = tl.minimum(last, start + chunk - 1)
    return RowBounds(first, last)


@triton.jit
def range_in_chunks(keys, first_pos, last_pos, chunk):
    """The keys of a range that lie in the chunks of `first_pos` to `last_pos`."""
    lo, hi = keys
    if chunk is not None:
        lo = tl.maximum(lo, first_of_chunk(first_pos, chunk))
        hi = tl.minimum(hi, tl.maximum(first_of_chunk(last_pos, chunk) + chunk, 0))
    return Range(lo, hi)


@triton.jit
def kv_range_of_all(q_start, q_end, q_len, kv_len, left, right):
    """Keys that every existing query of `[q_start, q_end)` sees."""
    first_pos = position(q_start, q_len, kv_len)
    last_pos = position(tl.minimum(q_end, q_len), q_len, kv_len) - 1
    lo = tl.maximum(last_pos - left, 0)
    hi = tl.minimum(tl.maximum(first_pos + right, -1), kv_len - 1) + 1
    hi = tl.where(first_pos <= last_pos, hi, 0)
    return Range(lo, tl.maximum(hi, 0))


@triton.jit
def q_range(kv_start, kv_end, q_len, kv_len, left, right):
    """Queries that see at least one existing key of `[kv_start, kv_end)`: adjoint of `kv_range`."""
    return kv_range(kv_start, kv_end, kv_len, q_len, right, left)


@triton.jit
def q_range_of_all(kv_start, kv_end, q_len, kv_len, left, right):
    """Queries that see every existing key of `[kv_start, kv_end)`."""
    return kv_range_of_all(kv_start, kv_end, kv_len, q_len, right, left)


@triton.jit
def classify_tile(q_start, q_end, kv_start, kv_end, q_len, kv_len, left, right):
    """EMPTY, PARTIAL or FULL, judged by the queries and keys that exist."""
    lo, hi = kv_range(q_start, q_end, q_len, kv_len, left, right)
    all_lo, all_hi = kv_range_of_all(q_start, q_end, q_len, kv_len, left, right)
    kv_end = tl.minimum(kv_end, kv_len)
    seen = tl.maximum(lo, kv_start) < tl.minimum(hi, kv_end)
    whole = (all_lo <= kv_start) & (kv_end <= all_hi)
    return tl.where(seen, tl.where(whole, FULL, PARTIAL), EMPTY)
