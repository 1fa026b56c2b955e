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
def place_in_sections(program, num_planes, num_tiles, section):
    """Plane (batch and head) and query tile of a program.

    Planes run in sections of `section` neighbours. Within a section the tiles go from the last,
    which is the heaviest under a causal band, to the first, and for each tile through all planes
    of the section: what runs together shares KV heads, and the KV of a section stays in L2.
    """
    section = tl.minimum(section, num_planes)
    first_plane = program // (section * num_tiles) * section
    in_section = program - first_plane * num_tiles
    width = tl.minimum(section, num_planes - first_plane)
    return first_plane + in_section % width, num_tiles - 1 - in_section // width
