"""Equal shares of a line of work: every program takes one stretch of it.

`total` pieces lie in a row; program p takes the p-th of `programs` stretches whose sizes differ by
one at the most. Pieces belong to sequences of different lengths, which the first stretch that a
program meets is found in by a scan: lengths stay on the GPU and programs need no list.
"""

import triton
import triton.language as tl


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
