# mypy: ignore-errors
"""Scalars and barriers of single warps: loops that every warp runs on its own.

Gluon knows scalars only for a whole program, and puts a barrier of all its warps around each use of
an mbarrier. But it compiles a scalar to a plain register of each thread. One that is made here from
the number of a warp differs between warps; indices, loads, branches and loops made from it do so
too. That is sound as long as what is done in such a loop needs no other warp: products of
`mma_v2` whose warps lie along the rows, loads from shared memory, and the barriers below. Nothing
there may exchange data between warps (conversions of layouts, reductions).
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
    """What `x`, an int32 that differs between threads, is in thread `lane` of the warp."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "=r,r,r", [x, lane], gl.int32, False, 1
    )


@gluon.jit
def shared_address(offset):
    """Address of a byte of the program's shared memory, whose first allocation is at 0."""
    return gl.inline_asm_elementwise(
        *("{ .reg .b32 t; mov.b32 t, global_smem; add.u32 $0, t, $1; }", "=r,r"),
        *([offset], gl.int32, True, 1),
    )


@gluon.jit
def wait_at(address, phase):
    """Wait, this warp alone, for a phase of the barrier at `address`."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; "
        "@!p bra.uni again; mov.b32 $0, 0; }",
        *("=r,r,r,~{memory}", [address, phase], gl.int32, False, 1),
    )


@gluon.jit
def arrive_at(address):
    """Arrive once for this warp at the barrier at `address`, after all its threads got here."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %laneid; setp.eq.u32 p, t, 0; bar.warp.sync -1; "
        "@p mbarrier.arrive.shared::cta.b64 _, [$1]; mov.b32 $0, 0; }",
        *("=r,r,~{memory}", [address], gl.int32, False, 1),
    )
