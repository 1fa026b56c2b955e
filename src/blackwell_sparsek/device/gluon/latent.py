# mypy: ignore-errors
"""Tiles of latent keys on Hopper, whose first columns are also their values.

Two consumers have half of the columns of the values each. The halves of a stage have barriers of
their own, so that one is copied while the other is still in use. Decoding over a latent cache
(`decode/sm90_latent_tiles.py`) and attention to chosen latent keys
(`sparse_attention/sm90/latent.py`) share this part of their arithmetic; CFG is a
`decode.tuning.LatentConfig`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from .cluster import arrive_at_all
from .pipeline import show_copies
from .warps import shared_address


@gluon.jit
def await_part(ring, step, PART: gl.constexpr, CFG: gl.constexpr):
    """Wait for a part of the columns of a tile."""
    index = step % CFG.STAGES * CFG.parts + PART
    mbarrier.wait(ring.full.index(index), (step // CFG.STAGES) & 1)


@gluon.jit
def await_half(ring, step, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Wait for this consumer's half of the values of a tile whose scores the other one has."""
    await_part(ring, step, GROUP, CFG)
    show_copies(CFG)


@gluon.jit
def release(ring, step, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Release the half of a tile's columns whose values this consumer has multiplied.

    Scores read all columns, but a consumer that has the weights of a tile knows that its scores are
    done. PAIRED: both producers copy to this stage, so each warp arrives at both. What was written
    to the stage (cleared values, weights) was fenced and passed on before these arrivals.
    """
    index = step % CFG.STAGES * CFG.parts + GROUP
    if CFG.PAIRED:
        arrive_at_all(shared_address(CFG.bars_offset + 8 * (CFG.first_empty + index)), step >= 0, 2)
    else:
        mbarrier.arrive(ring.empty.index(CFG.first_empty + index), count=1)


@gluon.jit
def rescaled(acc, factor, CFG: gl.constexpr):
    """Accumulators times a factor of each row, which is in the layout of scores."""
    rows: gl.constexpr = gl.SliceLayout(1, CFG.accumulator_layout())
    return acc * gl.convert_layout(factor, rows)[:, None]


@gluon.jit
def add_own(p, ring, step, acc, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Start adding the values of a tile with weights that this consumer has in registers."""
    half: gl.constexpr = CFG.half
    operand: gl.constexpr = gl.DotOperandLayout(0, CFG.accumulator_layout(), 2)
    values = ring.v.index(step % CFG.STAGES).slice(GROUP * half, half, dim=1)
    weights = gl.convert_layout(p.to(values.dtype), operand)
    return warpgroup_mma(weights, values, acc, is_async=True)


@gluon.jit
def add_other(weights, ring, step, acc, GROUP: gl.constexpr, CFG: gl.constexpr):
    """Start adding the values of a tile with weights of the other consumer, in shared memory."""
    half: gl.constexpr = CFG.half
    values = ring.v.index(step % CFG.STAGES).slice(GROUP * half, half, dim=1)
    return warpgroup_mma(weights, values, acc, is_async=True)
