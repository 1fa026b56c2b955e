# mypy: ignore-errors
"""The link between a producer warp and its consumer warp groups: tiles, barriers, a work channel.

A persistent kernel claims *work tiles* until none is left. The producer publishes the numbers that
describe a work tile, and the consumers take them; a channel of depth two lets the producer run one
work tile ahead. `slot` counts the work tiles of this program.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..masks import within_bounds
from .records import PackedPlace, Ring, StagePlace, WorkChannel

WORK_DEPTH = gl.constexpr(2)


@gluon.jit
def tile_memory(dtype: gl.constexpr, count: gl.constexpr, rows: gl.constexpr, width: gl.constexpr):
    """Allocate `count` shared-memory tiles of `rows` rows, swizzled as WGMMA reads them."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, width], dtype)
    return gl.allocate_shared_memory(dtype, [count, rows, width], layout)


@gluon.jit
def tiles(desc, count: gl.constexpr, rows: gl.constexpr):
    """Allocate `count` shared-memory tiles of `rows` rows, as wide as the tiles of a descriptor."""
    width: gl.constexpr = desc.block_type.shape[len(desc.block_type.shape) - 1]
    return tile_memory(desc.dtype, count, rows, width)


@gluon.jit
def ring_memory(desc, count: gl.constexpr):
    """Shared memory for `count` copies through a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [count] + desc.block_type.shape, desc.layout)  # noqa: RUF005


@gluon.jit
def halves(x):
    """Split [M, N] into its left and right half."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr, room: gl.constexpr = 0):
    """Allocate `count` barriers of `arrivals` arrivals each, in an array of at least `room`."""
    words: gl.constexpr = room if room > count else count
    bars = gl.allocate_shared_memory(gl.int64, [words, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit
def ring(smem, stages: gl.constexpr, arrivals: gl.constexpr, room: gl.constexpr = 0):
    """A `Ring` of `stages`, each emptied by `arrivals` arrivals; `room` is that of `barriers`."""
    return Ring(smem, barriers(stages, 1, room), barriers(stages, arrivals, room))


@gluon.jit
def work_channel(fields: gl.constexpr, consumers: gl.constexpr):
    """A `WorkChannel` for work tiles of `fields` int32 each."""
    numbers = gl.allocate_shared_memory(
        gl.int32, [WORK_DEPTH * fields, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    return WorkChannel(numbers, barriers(WORK_DEPTH, 1), barriers(WORK_DEPTH, consumers))


@gluon.jit
def claim(counter_ptr, programs, total):
    """Claim the next of `total` work tiles; each of the `programs` gets its first without a claim.

    Every program claims once for each tile that it has, so the last of all claims has a known
    number, and the program that made it resets the counter. The atomic is relaxed because only the
    number is handed over: an ordered one would wait for all memory accesses of the warp and
    invalidate its L1. The reset is a plain store: it follows the last claim in the order of this
    one address, and claims of a later launch come after this launch has ended, or after `gdc_wait`.
    """
    asked_before = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    return next_claimed(counter_ptr, asked_before, programs, total)


@gluon.jit
def next_claimed(counter_ptr, asked_before, programs, total):
    """The work tile of a claim that found `asked_before` in the counter; see `claim`."""
    if asked_before == total - 1:
        gl.store(counter_ptr, 0)
    return asked_before + programs


@gluon.jit
def publish(channel, slot, fields, WARPS: gl.constexpr = 1):
    """Publish a work tile, once the consumers have read the one that used this entry before."""
    numbers, filled, free = channel
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    zero = gl.full([1], 0, gl.int32, lane)
    depth = slot % WORK_DEPTH
    mbarrier.wait(free.index(depth), ((slot // WORK_DEPTH) & 1) ^ 1)
    for i in gl.static_range(len(fields)):
        numbers.index(depth * len(fields) + i).store(zero + fields[i])
    mbarrier.arrive(filled.index(depth), count=1)


@gluon.jit
def peek(channel, slot, place: gl.constexpr):
    """Read one of the numbers that `take` will return."""
    numbers, filled, _ = channel
    group: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    depth = slot % WORK_DEPTH
    mbarrier.wait(filled.index(depth), (slot // WORK_DEPTH) & 1)
    count: gl.constexpr = numbers.shape[0] // WORK_DEPTH
    return gl.max(numbers.index(depth * count + place).load(group), 0)


@gluon.jit
def take(channel, slot, WARPS: gl.constexpr = 4):
    """The numbers that were published in this slot; WARPS warps read them."""
    numbers, filled, free = channel
    group: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    count: gl.constexpr = numbers.shape[0] // WORK_DEPTH
    depth = slot % WORK_DEPTH
    mbarrier.wait(filled.index(depth), (slot // WORK_DEPTH) & 1)
    fields = ()
    for i in gl.static_range(count):
        fields = fields + (gl.max(numbers.index(depth * count + i).load(group), 0),)  # noqa: RUF005
    mbarrier.arrive(free.index(depth), count=1)
    return fields


@gluon.jit
def ring_place(step, STAGES: gl.constexpr):
    """The `StagePlace` of a step, by shifts instead of divisions where STAGES allows it."""
    if STAGES == 4:
        place = StagePlace(step & 3, (step >> 2) & 1)
    elif STAGES == 2:
        place = StagePlace(step & 1, (step >> 1) & 1)
    else:
        place = StagePlace(step % STAGES, (step // STAGES) & 1)
    return place


@gluon.jit
def show_copies(CFG: gl.constexpr):
    """Make copies that a barrier has reported visible to WGMMA, which reads by the async proxy.

    TMA writes by that proxy too, so kernels that copy tiles or pages need nothing here. Those that
    gather single keys by cp.async, which writes by the generic proxy, have CFG.GATHERED:
    `sparse_attention/sm90/gathered.py` and `latent.py`.
    """
    if CFG.GATHERED:
        fence_async_shared()


@gluon.jit
def drop_dead_values(tile, kv_start, positions, kv_lo, kv_hi):
    """Zero the values that no query sees: they may be NaN, which a weight of 0 does not hide."""
    keys: gl.constexpr = tile.shape[0]
    dim: gl.constexpr = tile.shape[1]
    wide: gl.constexpr = 32 if dim >= 256 else dim // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // wide, wide], [4, 1], [1, 0])
    if positions is None:
        kv_pos = kv_start + gl.arange(0, keys, gl.SliceLayout(1, layout))
    else:
        kv_pos = positions.load(gl.SliceLayout(1, layout))
    live = within_bounds(kv_pos, kv_lo, kv_hi - 1)
    nothing = gl.zeros([keys, dim], tile.dtype, layout)
    tile.store(gl.where(live[:, None], tile.load(layout), nothing))


# TMA coordinates of tiles, in dense batches and in packed sequences.
#
# Copies must stop at the end of a sequence, since the next one begins there: a NaN among its values
# would spoil products, and stores would overwrite its outputs. TMA stops only at the end of a
# dimension, so packed tensors [T, H, D] are described in five dimensions,
#
#     [back, end, head, row, D]      strides  [2**34 - s, s, head, s, 1]      s from token to token
#
# and row `r` of a sequence of `n` tokens that ends before token `e` is found at `back` 2**30,
# `end` e and `row` 2**30 - n + r. The sequence then ends with the row dimension, which has 2**30.
# Addresses wrap at 2**64, so 2**30 steps of 2**34 - s elements, whose size is a power of two bytes,
# go back by 2**30 * s elements.

ROW_END = gl.constexpr(2**30)
# Larger than any coordinate in the first two dimensions; coordinates are int32.
BEYOND = gl.constexpr(2**31 - 2**16)
WRAP = gl.constexpr(2**34)


@gluon.jit
def tile_place(cu_seqlens_ptr, batch, head, first, length):
    """Coordinates shared by the tiles of a (batch, head) with tokens `first .. first + length`."""
    place = (batch, head)
    if cu_seqlens_ptr is not None:
        place = PackedPlace(first + length, head, ROW_END - length)
    return place


@gluon.jit
def tile_at(place, row, column=0):
    """Coordinates of the tile that begins at `row` and `column` of a (batch, head)."""
    if len(place) == 2:
        batch, head = place
        coordinates = (batch, head, row, column)
    else:
        coordinates = (ROW_END, place.end, place.head, place.first_row + row, column)
    return coordinates
