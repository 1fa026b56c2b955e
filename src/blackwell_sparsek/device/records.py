"""Named records that kernels pass around: fields instead of numbered entries of tuples.

They are plain `NamedTuple`s. A kernel constructs them, carries them through loops, returns them,
and passes them to functions and warp roles; they compile to the same code as a plain tuple of
their fields. Records that only warp-specialized kernels need are in `gluon.records`.
"""

from typing import Any, NamedTuple


class Lengths(NamedTuple):
    """Tokens of a sequence: queries and keys."""

    q: Any
    kv: Any


class Heads(NamedTuple):
    """Query heads, and how many of them share a KV head."""

    q: Any
    group_size: Any


class Band(NamedTuple):
    """Keys before and after its own position that a query sees; 2**30 is unbounded."""

    left: Any
    right: Any


class Range(NamedTuple):
    """Tokens `[lo, hi)`; empty where lo >= hi."""

    lo: Any
    hi: Any


class RowBounds(NamedTuple):
    """First and last key (both inclusive) that each query sees; last < first if none."""

    first: Any
    last: Any


class Score(NamedTuple):
    """Factor from scores to base-2 exponents, and the factor inside a softcap's tanh, or None."""

    factor: Any
    inverse_cap: Any


class Alibi(NamedTuple):
    """Positions of the rows of a tile, and the slopes of their heads in base-2 units."""

    q_pos: Any
    slope_log2: Any


class Slopes(NamedTuple):
    """ALiBi slopes [batch, head] and their stride between batches, 0 if they broadcast."""

    # not `values`: Triton's tuples have an attribute of that name
    start: Any
    batch_step: Any


class Bias(NamedTuple):
    """A bias [batch, head, query, key] and its strides, 0 where it broadcasts."""

    start: Any
    batch_step: Any
    head_step: Any
    q_step: Any
    kv_step: Any


class Added(NamedTuple):
    """The slope and the bias that a (batch, head) adds to its scores; each may be None."""

    slope: Any
    bias: Any
    """Pointer to its first element."""
    q_step: Any
    kv_step: Any
    lengths: Any
    """`Lengths` of the sequence."""


class GradientScore(NamedTuple):
    """As `Score`, with the scale that is applied to the final gradients of queries and keys."""

    factor: Any
    inverse_cap: Any
    scale: Any


class CuSeqlens(NamedTuple):
    """Offsets of packed sequences among the tokens of queries and of keys; None when dense."""

    q: Any
    kv: Any


class Span(NamedTuple):
    """First token of a sequence, and how many it has."""

    first: Any
    length: Any


class BatchHead(NamedTuple):
    """A batch, a query head, and the KV head that it reads."""

    batch: Any
    q_head: Any
    kv_head: Any


class Strides(NamedTuple):
    """Strides in elements: between batches (or pages), heads and tokens."""

    batch: Any
    head: Any
    token: Any


class MaskLists(NamedTuple):
    """Block lists of a mask, by rows of query blocks; transposed, by rows of key blocks."""

    indptr: Any
    """Row r owns the entries `indptr[r] .. indptr[r + 1]`."""
    partial_end: Any
    """The entries before `partial_end[r]` are partial blocks, the others full ones."""
    indices: Any
    """Block of each entry, ascending within the partial and within the full ones of a row."""
    bits_id: Any
    """Block of the bit pool that holds the visible elements of an entry, -1 for full blocks."""
    bits: Any
    """The bit pool, whose blocks are [queries, words of 32 keys]."""
    row_tokens: Any
    """Tokens that a row of the lists covers: the height of a block, or its width if transposed."""


class Mask(NamedTuple):
    """Block lists, None without a mask, and their rows between batches and between heads."""

    lists: Any
    batch_step: Any
    head_step: Any


class VisitPlan(NamedTuple):
    """Blocks that a tile visits (see `visits`); `[full_begin, full_end)` need no mask code."""

    partial_begin: Any
    partial_end: Any
    edge_begin: Any
    full_begin: Any
    full_end: Any
    edge_end: Any


class QueryTile(NamedTuple):
    """The tile of queries that a program owns, and its first query."""

    place: Any
    """`BatchHead` of the tile."""
    q_span: Any
    """`Span` of the queries of its sequence."""
    kv_span: Any
    """`Span` of the keys."""
    q_start: Any
    """May lie past the last query of the sequence."""


class KeyTile(NamedTuple):
    """Positions of the tokens of a tile with mask code, and the elements that are visible."""

    position: Any
    visible: Any


class CacheTables(NamedTuple):
    """Page table and block lists of a cache, each may be None, and the rows of one sequence."""

    pages: Any
    blocks: Any
    page_row: Any
    """Offset of this sequence's row in `pages`."""
    block_row: Any
    """Offset of this sequence's and head's row in `blocks`."""


class CacheView(NamedTuple):
    """The part of a cache that belongs to one sequence and head, and its keys `[kv_lo, kv_hi)`."""

    tables: Any
    batch: Any
    num_pages: Any
    num_blocks: Any
    capacity: Any
    kv_lo: Any
    kv_hi: Any


class CacheTile(NamedTuple):
    """Keys of a tile: position, slab (page or batch), row in it, whether live, whether wrong."""

    position: Any
    slab: Any
    row: Any
    live: Any
    wrong: Any


class ClampedTile(NamedTuple):
    """As `CacheTile`, with rows that are readable everywhere; `listed` keys are in a block."""

    position: Any
    slab: Any
    row: Any
    readable: Any
    listed: Any
    wrong: Any


class SoftmaxState(NamedTuple):
    """State of an online softmax for each row: maximum of base-2 exponents, sum of weights."""

    m_log2: Any
    row_sum: Any
