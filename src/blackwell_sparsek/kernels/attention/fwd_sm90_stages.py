"""Stages of K and V that the warps of a consumer wait for and free, and the turns of consumers.

Gluon's barriers are those of a whole warp group, which stops twice a tile for them. Here each warp
waits and arrives for itself. `ARRAY` says at which barriers: full K, free K, full V, free V. They
lie behind the tiles, `barrier_room` in each array (held by `test_attention_sm90_barriers.py`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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
    """Address of the barriers of K and V."""
    return shared_address(CFG.tile_bytes)


@gluon.jit
def free_stage(rings, stage, ARRAY: gl.constexpr, CFG: gl.constexpr):
    """Tell the producer that this warp has read a stage."""
    asm: gl.constexpr = _arriving(CFG.barrier_at(ARRAY))
    address = rings[2] + stage * 8
    gl.inline_asm_elementwise(asm, "=r,r,~{memory}", [address], gl.int32, False, 1)


@gluon.jit
def await_stage(rings, stage, phase, ARRAY: gl.constexpr, CFG: gl.constexpr):
    """Wait for the copies into a stage, each warp for itself."""
    asm: gl.constexpr = _waiting(CFG.barrier_at(ARRAY))
    address = rings[2] + stage * 8
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
