# mypy: ignore-errors
"""Scalars and barriers of single warps, for loops that every warp runs independently.

In Gluon a scalar is the same for the whole program, and each use of an mbarrier is surrounded by a
barrier of all warps. But a scalar compiles to a plain register of each thread. One that is derived
here from the warp number differs between warps, and so do the indices, loads, branches and loops
that depend on it. That is sound as long as such a loop needs no other warp: it may contain products
of `mma_v2` whose warps lie along the rows, loads from shared memory, and the barriers below, but
nothing that exchanges data between warps (layout conversions, reductions).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def warp_number():
    """Number of the warp in the program."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 $0, t, 5; }", "=r,r", [0], gl.int32, True, 1
    )


@gluon.jit
def lane_number():
    """Number of the thread in its warp: a scalar that differs between threads."""
    return gl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r,r", [0], gl.int32, True, 1)


@gluon.jit
def from_lane(x, lane):
    """The value in thread `lane` of the warp of `x`, an int32 that differs between threads."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "=r,r,r", [x, lane], gl.int32, False, 1
    )


@gluon.jit
def shared_address(offset):
    """Address of a byte of the program's shared memory; its first allocation is at offset 0."""
    return gl.inline_asm_elementwise(
        *("{ .reg .b32 t; mov.b32 t, global_smem; add.u32 $0, t, $1; }", "=r,r"),
        *([offset], gl.int32, True, 1),
    )


@gluon.jit
def wait_at(address, phase):
    """Make this warp alone wait for a phase of the barrier at `address`."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; "
        "@!p bra.uni again; mov.b32 $0, 0; }",
        *("=r,r,r,~{memory}", [address, phase], gl.int32, False, 1),
    )


@gluon.jit
def arrive_at(address):
    """Arrive once for this warp at the barrier at `address`, after all its threads get here."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %laneid; setp.eq.u32 p, t, 0; bar.warp.sync -1; "
        "@p mbarrier.arrive.shared::cta.b64 _, [$1]; mov.b32 $0, 0; }",
        *("=r,r,~{memory}", [address], gl.int32, False, 1),
    )
