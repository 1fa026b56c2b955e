# mypy: ignore-errors
"""Which piece of work a program does. Grids have one axis: the others end at 65,535."""

import triton
import triton.language as tl

# KV of planes that run together. The smallest L2 that matters has 40 MB (A100), and queries and
# outputs pass through it too.
SECTION_BYTES = tl.constexpr(16 * 2**20)


@triton.jit
def section_planes(kv_len, group_size, KV_BYTES: tl.constexpr):
    """How many planes run side by side: whole groups that share a KV head of KV_BYTES per token."""
    kv_heads = (SECTION_BYTES // KV_BYTES) // tl.maximum(kv_len, 1)
    return tl.maximum(kv_heads, 1) * group_size


@triton.jit
def section_of(plane, num_planes, section):
    """Which section a plane belongs to. The last one takes those that are too few for their own:
    alone at the end, the pieces of few planes would leave most SMs idle behind the longest of them.
    """
    return tl.minimum(plane // section, tl.maximum(num_planes // section, 1) - 1)


@triton.jit
def place_in_sections(program, num_planes, num_tiles, section):
    """Plane (batch and head) and query tile of a program.

    Planes run in sections of `section` neighbours, see `section_of`. Within a section the tiles go
    from the last, which is the heaviest under a causal band, to the first, and for each tile
    through all planes of the section: what runs together shares KV heads, and the KV of a section
    stays in L2.
    """
    section = tl.minimum(section, num_planes)
    first_plane = section_of(program // num_tiles, num_planes, section) * section
    in_section = program - first_plane * num_tiles
    is_last = first_plane + 2 * section > num_planes
    width = tl.where(is_last, num_planes - first_plane, section)
    return first_plane + in_section % width, num_tiles - 1 - in_section // width


@triton.jit
def _first_slot(cu_seqlens_ptr, sequence, TILE_M: tl.constexpr):
    """First slot of a sequence. Slots are the query tiles of a head, through all sequences.

    A sequence has as many as it may have tiles, wherever it begins: its first slot depends on its
    own offset alone, at the price that the last slot may hold no queries.
    """
    token = tl.load(cu_seqlens_ptr + sequence) - tl.load(cu_seqlens_ptr)
    return token // TILE_M + sequence


@triton.jit
def count_packed_pieces(cu_seqlens_ptr, num_sequences, heads, TILE_M: tl.constexpr):
    """How many pieces of work packed sequences have, those without queries included."""
    return _first_slot(cu_seqlens_ptr, num_sequences, TILE_M) * heads


@triton.jit
def sequence_of_piece(
    cu_seqlens_ptr, piece, sequence, num_sequences, heads, offs_scan, TILE_M: tl.constexpr
):
    """The sequence that a piece of work belongs to, looked for from `sequence` on.

    That is the sequence of an earlier piece, or 0. `offs_scan` is any range 0..n: the offsets of
    sequences are read n at a time.
    """
    slot = piece // heads
    origin = tl.load(cu_seqlens_ptr)
    begun = offs_scan.shape[0] + sequence - sequence
    # each round ends at the last sequence that it saw begin, and goes on if it saw no other
    while begun == offs_scan.shape[0]:
        index = sequence + offs_scan
        live = index < num_sequences
        token = tl.load(cu_seqlens_ptr + index, mask=live, other=0) - origin
        begun = tl.sum((live & (token // TILE_M + index <= slot)).to(tl.int32), 0)
        sequence += begun - 1
    return sequence


@triton.jit
def place_in_sequence(cu_seqlens_ptr, piece, sequence, heads, section, TILE_M: tl.constexpr):
    """Head and query tile of a piece of work of this sequence, in sections of heads.

    The first tiles of a section to come may begin past the last query.
    """
    first = _first_slot(cu_seqlens_ptr, sequence, TILE_M)
    slots = _first_slot(cu_seqlens_ptr, sequence + 1, TILE_M) - first
    return place_in_sections(piece - first * heads, heads, slots, section)


# From a plane to its batch, heads and tokens: dense batches and packed sequences alike.
#
# Dense tensors are [B, H, S, D]; packed ones [T, H, D] are the same with batch stride 0 and a first
# token per sequence. Offsets are int64: element counts and strides may pass 2^31.


@triton.jit
def batch_and_heads(plane, q_heads, group_size):
    """Batch, query head and the KV head that it reads."""
    q_head = plane % q_heads
    return plane // q_heads, q_head, q_head // group_size


@triton.jit
def token_span(cu_seqlens_ptr, batch, dense_length):
    """First token and length of a sequence; without `cu_seqlens` all have `dense_length`."""
    if cu_seqlens_ptr is not None:
        start = tl.load(cu_seqlens_ptr + batch)
        length = tl.load(cu_seqlens_ptr + batch + 1) - start
    else:
        start = 0
        length = dense_length
    return start, length


@triton.jit
def plane_offset(batch, head, start, strides):
    """Offset of token `start` of a plane; `strides` begins with batch, head, token."""
    return (
        tl.cast(batch, tl.int64) * strides[0]
        + tl.cast(head, tl.int64) * strides[1]
        + tl.cast(start, tl.int64) * strides[2]
    )


@triton.jit
def lse_offset(batch, head, start, num_heads, head_stride, cu_seqlens_ptr):
    """Offset of token `start` of a plane in a contiguous lse, [B, H, S] or packed [H, T]."""
    plane = tl.cast(head, tl.int64)
    if cu_seqlens_ptr is None:
        plane += tl.cast(batch, tl.int64) * num_heads
    return plane * head_stride + start


# Equal shares of a line of work: every program takes one stretch of it.
#
# `total` pieces lie in a row; program p takes the p-th of `programs` stretches whose sizes differ
# by one at the most. Pieces belong to sequences of different lengths, which the first stretch
# that a program meets is found in by a scan: lengths stay on the GPU and programs need no list.


@triton.jit
def share_of(program, total, programs):
    """First piece of a program's stretch, and the end of it."""
    each = total // programs
    more = total - each * programs
    begin = program * each + tl.minimum(program, more)
    return begin, begin + each + tl.where(program < more, 1, 0)


@triton.jit
def owner_of(piece, total, programs):
    """The program whose stretch holds `piece`."""
    each = total // programs
    more = total - each * programs
    # the first `more` stretches are one piece longer
    longer = more * (each + 1)
    early = piece < longer
    size = each + tl.where(early, 1, 0)
    # one division: they take long, and nothing can begin before they are done
    rest = tl.where(early, piece, piece - longer) // tl.maximum(size, 1)
    return rest + tl.where(early, 0, more)
