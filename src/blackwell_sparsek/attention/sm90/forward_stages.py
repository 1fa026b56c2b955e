# mypy: ignore-errors
"""Stages of K and V as consumers of the Hopper forward use them: barriers, and products of slices.

If a head dim is not a power of two or is above 128, a tile lies in shared memory as slices of
columns: scores are summed over the slices of q and k, and each slice of v has its own accumulator.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ...launch.descriptors import GROUP_ROWS

ROWS = gl.constexpr(GROUP_ROWS)
# Weights may grow to 2**SLACK before sums and accumulators are rescaled, which therefore seldom
# happens. Floating point keeps their precision, and fp16 can hold them.
SLACK = gl.constexpr(8)
# The arrays of barriers of the rings, in the order in which they follow the tiles in memory.
FULL_K = gl.constexpr(0)
EMPTY_K = gl.constexpr(1)
FULL_V = gl.constexpr(2)
EMPTY_V = gl.constexpr(3)
# The first named barrier that Triton does not use itself.
FIRST_NAMED_BARRIER = 9


class KvStages(NamedTuple):
    """Stages of K and V as a consumer reads them: the tiles, and the address of their barriers."""

    k: Any
    v: Any
    barriers: Any


# Barriers. Gluon synchronizes the whole warp group at each wait and arrival, twice per tile. Here
# each warp waits and arrives for itself. The barriers lie behind the tiles, each array in
# `barrier_room` words; `tests/attention/sm90/test_barriers.py` checks that.


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
def free_stage(stages, stage, ARRAY: gl.constexpr, CFG: gl.constexpr):
    """Tell the producer that this warp has read a stage."""
    asm: gl.constexpr = _arriving(CFG.barrier_at(ARRAY))
    address = stages.barriers + stage * 8
    gl.inline_asm_elementwise(asm, "=r,r,~{memory}", [address], gl.int32, False, 1)


@gluon.jit
def await_stage(stages, stage, phase, ARRAY: gl.constexpr, CFG: gl.constexpr):
    """Wait for the copies into a stage; each warp waits for itself."""
    asm: gl.constexpr = _waiting(CFG.barrier_at(ARRAY))
    address = stages.barriers + stage * 8
    gl.inline_asm_elementwise(asm, "=r,r,r,~{memory}", [address, phase], gl.int32, False, 1)


@gluon.constexpr_function
def _named_barrier(what, group):
    return f"bar.{what} {FIRST_NAMED_BARRIER + group}, 256; mov.b32 $0, 0;"


@gluon.jit
def ping_pong_wait(GROUP: gl.constexpr, CFG: gl.constexpr):
    """Wait until the previous consumer has issued its products."""
    if CFG.PING_PONG:
        asm: gl.constexpr = _named_barrier("sync", GROUP)
        gl.inline_asm_elementwise(asm, "=r,r,~{memory}", [0], gl.int32, False, 1)


@gluon.jit
def ping_pong_pass(GROUP: gl.constexpr, CFG: gl.constexpr):
    """Let the next consumer issue its products."""
    if CFG.PING_PONG:
        asm: gl.constexpr = _named_barrier("arrive", (GROUP + 1) % CFG.CONSUMERS)
        gl.inline_asm_elementwise(asm, "=r,r,~{memory}", [0], gl.int32, False, 1)


# Products of slices. `warpgroup_mma_wait` counts each as a group of its own.


@gluon.jit
def query_slices(q_ring, tile, CFG: gl.constexpr):
    """The slices of a consumer's tile of queries."""
    slices: gl.constexpr = CFG.d_slices
    q = ()
    for i in gl.static_range(slices):
        q = q + (q_ring.tiles.index(tile * slices + i),)  # noqa: RUF005
    return q


@gluon.jit
def kv_slices(tiles, stage, SLICES: gl.constexpr, KEYS: gl.constexpr, START: gl.constexpr):
    """The slices of a stage of keys or values; only KEYS rows of them, from START on."""
    rows: gl.constexpr = tiles.shape[1]
    slices = ()
    for i in gl.static_range(SLICES):
        tile = tiles.index(stage * SLICES + i)
        if rows > KEYS:
            tile = tile.slice(START, KEYS, dim=0)
        slices = slices + (tile,)  # noqa: RUF005
    return slices


@gluon.jit
def start_scores(q, k, nothing):
    """Start the scores of the keys `k`; `nothing` has their shape and is not read."""
    scores = nothing
    for i in gl.static_range(len(q)):
        scores = warpgroup_mma(q[i], k[i].permute((1, 0)), scores, use_acc=i > 0, is_async=True)
    return scores


@gluon.jit
def start_outputs(p, v, acc):
    """Start adding the product of the weights `p` and the values `v` to `acc`."""
    products = ()
    for i in gl.static_range(len(v)):
        products = products + (warpgroup_mma(p, v[i], acc[i], is_async=True),)  # noqa: RUF005
    return products


@gluon.jit
def await_outputs(products):
    """The accumulators, once all products have completed."""
    acc = warpgroup_mma_wait(0, deps=products)
    if len(products) == 1:
        acc = (acc,)
    return acc


@gluon.jit
def scale_slices(acc, factor):
    """Accumulators times `factor` [64, 1]."""
    scaled = ()
    for i in gl.static_range(len(acc)):
        scaled = scaled + (acc[i] * factor,)  # noqa: RUF005
    return scaled


@gluon.jit
def zero_outputs(CFG: gl.constexpr):
    """Accumulators of the outputs, one for each slice."""
    width: gl.constexpr = CFG.SLICE_DV
    slices: gl.constexpr = CFG.dv_slices
    acc = ()
    for _ in gl.static_range(slices):
        zeros = gl.zeros([ROWS, width], gl.float32, CFG.accumulator_layout(CFG.SLICE_DV))
        acc = acc + (zeros,)  # noqa: RUF005
    return acc
