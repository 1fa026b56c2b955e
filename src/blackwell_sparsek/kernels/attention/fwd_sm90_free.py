"""Stages of a ring that a consumer of the Hopper forward waits for and frees.

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
