# mypy: ignore-errors
"""Which work tile a program takes, and where its tokens lie.

Grids use one axis, because the others are limited to 65,535. A *raster group* is a set of
neighbouring (batch, head) pairs whose tiles run together, so that their keys stay in L2.
"""

import triton
import triton.language as tl

from .records import BatchHead, Span

# Bytes of KV of the heads that run together. The smallest L2 that matters has 40 MB (A100), and
# queries and outputs pass through it too.
RASTER_GROUP_BYTES = tl.constexpr(16 * 2**20)


@triton.jit
def raster_group_size(kv_len, group_size, KV_BYTES: tl.constexpr):
    """How many heads run together: whole groups that share a KV head of KV_BYTES per token."""
    kv_heads = (RASTER_GROUP_BYTES // KV_BYTES) // tl.maximum(kv_len, 1)
    return tl.maximum(kv_heads, 1) * group_size


@triton.jit
def raster_group_of(batch_head, num_batch_heads, group):
    """Which raster group of `group` neighbours a (batch, head) belongs to.

    The last group also takes the remainder, which is too small for a group: if the tiles of a few
    heads ran alone at the end, most SMs would idle while the longest of them finish.
    """
    return tl.minimum(batch_head // group, tl.maximum(num_batch_heads // group, 1) - 1)


@triton.jit
def raster_place(program, num_batch_heads, num_tiles, group):
    """(batch, head) index and query tile of a program.

    Heads run in raster groups of `group` neighbours, see `raster_group_of`. Within a group the
    tiles go from the last, which is the heaviest under a causal band, to the first, and each tile
    goes through all heads of the group: programs that run together share KV heads, and the KV of a
    group stays in L2.
    """
    group = tl.minimum(group, num_batch_heads)
    first = raster_group_of(program // num_tiles, num_batch_heads, group) * group
    in_group = program - first * num_tiles
    is_last = first + 2 * group > num_batch_heads
    width = tl.where(is_last, num_batch_heads - first, group)
    return first + in_group % width, num_tiles - 1 - in_group // width


@triton.jit
def first_slot(cu_seqlens_ptr, sequence, TILE_M: tl.constexpr):
    """First slot of a sequence. Slots number the query tiles of a head over all sequences.

    A sequence gets at least as many slots as it has tiles, so that its first slot depends on its
    own offset alone; its last slot may hold no queries.
    """
    token = tl.load(cu_seqlens_ptr + sequence) - tl.load(cu_seqlens_ptr)
    return token // TILE_M + sequence


@triton.jit
def count_packed_tiles(cu_seqlens_ptr, num_sequences, heads, TILE_M: tl.constexpr):
    """How many work tiles packed sequences have, including those without queries."""
    return first_slot(cu_seqlens_ptr, num_sequences, TILE_M) * heads


@triton.jit
def sequence_of_tile(
    cu_seqlens_ptr, work_index, sequence, num_sequences, heads, offs_scan, TILE_M: tl.constexpr
):
    """The sequence that a work tile belongs to, searched from `sequence` on.

    `sequence` is that of an earlier tile, or 0. `offs_scan` is any range 0..n: the offsets of
    sequences are read n at a time.
    """
    slot = work_index // heads
    origin = tl.load(cu_seqlens_ptr)
    begun = offs_scan.shape[0] + sequence - sequence
    # each round stops at the last sequence that begins by this slot; if all n do, another follows
    while begun == offs_scan.shape[0]:
        index = sequence + offs_scan
        live = index < num_sequences
        token = tl.load(cu_seqlens_ptr + index, mask=live, other=0) - origin
        begun = tl.sum((live & (token // TILE_M + index <= slot)).to(tl.int32), 0)
        sequence += begun - 1
    return sequence


@triton.jit
def place_in_sequence(cu_seqlens_ptr, work_index, sequence, heads, group, TILE_M: tl.constexpr):
    """Head and query tile of a work tile of this sequence, in raster groups of heads.

    The tiles that come first in a group may begin past the last query.
    """
    first = first_slot(cu_seqlens_ptr, sequence, TILE_M)
    slots = first_slot(cu_seqlens_ptr, sequence + 1, TILE_M) - first
    return raster_place(work_index - first * heads, heads, slots, group)


# Dense tensors are [B, H, S, D]; packed ones, [T, H, D], are the same with batch stride 0 and a
# first token per sequence. Offsets are int64: element counts and strides may exceed 2^31.


@triton.jit
def batch_and_heads(batch_head, q_heads, group_size):
    """The `BatchHead` of a (batch, query head) index."""
    q_head = batch_head % q_heads
    return BatchHead(batch_head // q_heads, q_head, q_head // group_size)


@triton.jit
def token_span(cu_seqlens_ptr, batch, dense_length):
    """The `Span` of a sequence; without `cu_seqlens` every sequence has `dense_length` tokens."""
    if cu_seqlens_ptr is not None:
        start = tl.load(cu_seqlens_ptr + batch)
        length = tl.load(cu_seqlens_ptr + batch + 1) - start
    else:
        start = 0
        length = dense_length
    return Span(start, length)


@triton.jit
def head_offset(batch, head, start, strides):
    """Offset of token `start` of a (batch, head); `strides` are of batch, head and token."""
    batch_stride, head_stride, token_stride = strides
    return (
        tl.cast(batch, tl.int64) * batch_stride
        + tl.cast(head, tl.int64) * head_stride
        + tl.cast(start, tl.int64) * token_stride
    )


@triton.jit
def lse_offset(batch, head, start, num_heads, head_stride, cu_seqlens_ptr):
    """Offset of token `start` of a (batch, head) in a contiguous lse: [B, H, S], packed [H, T]."""
    index = tl.cast(head, tl.int64)
    if cu_seqlens_ptr is None:
        index += tl.cast(batch, tl.int64) * num_heads
    return index * head_stride + start


# Equal shares: `total` tiles are numbered in order, and program p takes the p-th of `programs`
# contiguous ranges whose sizes differ by at most one. Tiles belong to sequences of different
# lengths; a program finds the sequence of its first tile by a scan, so lengths stay on the GPU and
# programs need no list.


@triton.jit
def share_of(program, total, programs):
    """First tile of a program's range, and its end."""
    each = total // programs
    more = total - each * programs
    begin = program * each + tl.minimum(program, more)
    return begin, begin + each + tl.where(program < more, 1, 0)


@triton.jit
def owner_of(tile, total, programs):
    """The program whose range holds `tile`."""
    each = total // programs
    more = total - each * programs
    # the first `more` ranges are one tile longer
    longer = more * (each + 1)
    early = tile < longer
    size = each + tl.where(early, 1, 0)
    # only one division: divisions are slow, and nothing can start before they are done
    rest = tl.where(early, tile, tile - longer) // tl.maximum(size, 1)
    return rest + tl.where(early, 0, more)
