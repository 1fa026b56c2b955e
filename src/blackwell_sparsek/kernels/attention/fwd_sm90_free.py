"""Small steps of a consumer of the Hopper forward: stages of a ring, keeping work above a wait.

`AT` is 0, or the byte of shared memory at which the barriers lie that a function uses.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...device.gluon.warps import arrive_at, shared_address, wait_at


@gluon.jit
def free_stage(empty, stage, AT: gl.constexpr):
    """Tell the producer that a stage was read: the whole group, or each warp for itself."""
    if AT == 0:
        mbarrier.arrive(empty.index(stage), count=1)
    else:
        arrive_at(shared_address(AT + stage * 8))


@gluon.jit
def await_stage(full, stage, phase, AT: gl.constexpr):
    """Wait for the copies into a stage: as one group, or each warp for itself."""
    if AT == 0:
        mbarrier.wait(full.index(stage), phase)
    else:
        wait_at(shared_address(AT + stage * 8), phase)


@gluon.jit
def pin_above(sums):
    """Keep what makes `sums`, which are never negative, above the next wait."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; setp.lt.f32 p, $1, 0f00000000; mov.b32 t, 0; "
        "@p st.shared.f32 [t], $1; mov.b32 $0, t; }",
        *("=r,f,~{memory}", [sums], gl.int32, False, 1),
    )


@gluon.jit
def not_earlier(x):
    """`x`, which ptxas cannot know before this point: each thread asks itself for it."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 lane; mov.u32 lane, %laneid; shfl.sync.idx.b32 $0, $1, lane, 31, -1; }",
        *("=f,f,~{memory}", [x], gl.float32, False, 1),
    )
