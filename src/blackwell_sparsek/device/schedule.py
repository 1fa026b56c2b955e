"""Which piece of work a program does. Grids have one axis: the others end at 65,535."""

import triton
import triton.language as tl


@triton.jit
def place_in_sections(program, num_planes, num_tiles, section):
    """Plane (batch and head) and query tile of a program.

    Planes run in sections of `section` neighbours. Within a section the tiles go from the last,
    which is the heaviest under a causal band, to the first, and for each tile through all planes
    of the section: what runs together shares KV heads, and the KV of a section stays in L2.
    """
    first_plane = program // (section * num_tiles) * section
    in_section = program - first_plane * num_tiles
    width = tl.minimum(section, num_planes - first_plane)
    return first_plane + in_section % width, num_tiles - 1 - in_section // width
