"""Stages of a ring that a consumer of the Hopper forward waits for and frees.

`AT` is 0, or the byte of shared memory at which the barriers lie that a function uses.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...device.gluon.warps import shared_address, wait_at


@gluon.jit
def _arrive(address):
    gl.inline_asm_elementwise(
        "{ .reg .pred p; elect.sync _|p, -1; "
        "@p mbarrier.arrive.shared::cta.b64 _, [$1]; mov.b32 $0, 0; }",
        *("=r,r,~{memory}", [address], gl.int32, False, 1),
    )


@gluon.jit
def free_stage(empty, stage, AT: gl.constexpr):
    """Tell the producer that a stage was read: the whole group, or each warp for itself."""
    if AT == 0:
        mbarrier.arrive(empty.index(stage), count=1)
    else:
        _arrive(shared_address(AT + stage * 8))


@gluon.jit
def await_stage(full, stage, phase, AT: gl.constexpr):
    """Wait for the copies into a stage: as one group, or each warp for itself."""
    if AT == 0:
        mbarrier.wait(full.index(stage), phase)
    else:
        wait_at(shared_address(AT + stage * 8), phase)


# the first named barrier that Triton does not use itself
FIRST_TURN = 9


@gluon.constexpr_function
def _turn(what, group):
    return f"bar.{what} {FIRST_TURN + group}, 256; mov.b32 $0, 0;"


@gluon.jit
def await_turn(GROUP: gl.constexpr, CFG: gl.constexpr):
    """Wait until the consumer before has issued its products."""
    if CFG.TURNS:
        asm: gl.constexpr = _turn("sync", GROUP)
        gl.inline_asm_elementwise(asm, "=r,r,~{memory}", [0], gl.int32, False, 1)


@gluon.jit
def pass_turn(GROUP: gl.constexpr, CFG: gl.constexpr):
    """Let the next consumer issue its products."""
    if CFG.TURNS:
        asm: gl.constexpr = _turn("arrive", (GROUP + 1) % CFG.CONSUMERS)
        gl.inline_asm_elementwise(asm, "=r,r,~{memory}", [0], gl.int32, False, 1)
