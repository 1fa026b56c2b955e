"""Stages of a ring that a consumer of the Hopper forward waits for and frees.

`ARRAY` says which barriers: full K, free K, full V, free V; `base` is where the first lie.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...device.gluon.warps import shared_address


@gluon.constexpr_function
def _arriving(offset):
    return (
        "{ .reg .pred p; elect.sync _|p, -1; "
        f"@p mbarrier.arrive.shared::cta.b64 _, [$1+{offset}]; mov.b32 $0, 0; }}"
    )


@gluon.constexpr_function
def _waiting(offset):
    return (
        "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, "
        f"[$1+{offset}], $2; @!p bra.uni again; mov.b32 $0, 0; }}"
    )


@gluon.jit
def barrier_base(CFG: gl.constexpr):
    """Address of the barriers of K and V, 0 if nobody needs it."""
    base = 0
    if CFG.WARPS:
        base = shared_address(CFG.barrier_at(0))
    return base


@gluon.jit
def free_stage(empty, stage, base, ARRAY: gl.constexpr, CFG: gl.constexpr):
    """Tell the producer that a stage was read: the whole group, or each warp for itself."""
    if not CFG.WARPS:
        mbarrier.arrive(empty.index(stage), count=1)
    else:
        asm: gl.constexpr = _arriving(CFG.barrier_at(ARRAY) - CFG.barrier_at(0))
        address = base + stage * 8
        gl.inline_asm_elementwise(asm, "=r,r,~{memory}", [address], gl.int32, False, 1)


@gluon.jit
def await_stage(full, stage, phase, base, ARRAY: gl.constexpr, CFG: gl.constexpr):
    """Wait for the copies into a stage: as one group, or each warp for itself."""
    if not CFG.WARPS:
        mbarrier.wait(full.index(stage), phase)
    else:
        asm: gl.constexpr = _waiting(CFG.barrier_at(ARRAY) - CFG.barrier_at(0))
        address = base + stage * 8
        gl.inline_asm_elementwise(asm, "=r,r,r,~{memory}", [address, phase], gl.int32, False, 1)


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
