"""Consumer warp groups that take turns: one issues its products while the others compute.

Each group has a named barrier, on which it waits for its turn and the group before it says that it
had its own. Gluon takes the first few of the sixteen for itself; these are the
eighth and later ones.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _named(instruction, group):
    # 256 threads: those of the group that waits and of the one that arrives
    return f"{instruction} {8 + group}, 256; mov.b32 $0, $1;"


@gluon.jit
def wait_for_turn(GROUP: gl.constexpr):
    """Wait until the group before has had its turn."""
    asm: gl.constexpr = _named("bar.sync", GROUP)
    gl.inline_asm_elementwise(asm, "=r,r,~{memory}", [0], gl.int32, False, 1)


@gluon.jit
def pass_turn(GROUP: gl.constexpr):
    """Let group `GROUP` have its turn."""
    asm: gl.constexpr = _named("bar.arrive", GROUP)
    gl.inline_asm_elementwise(asm, "=r,r,~{memory}", [0], gl.int32, False, 1)
