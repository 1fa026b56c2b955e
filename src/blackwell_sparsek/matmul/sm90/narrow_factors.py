# mypy: ignore-errors
"""`narrow.py` for operands in fp8: the warp that loads scales, and sums that apply them.

The factor of a column of x in a step is the scale of the step's block times that of the column's
channels. A consumer that loaded scales itself would wait for memory in every step, even for those
that it needs a step later: a loaded value that is kept for the next step is copied at the end of
this one. So a warp of its own loads the scales of several steps at once, and stores their products
next to the operands: each stage of the ring has rows of factors, and is full once the copies of the
operands have arrived and this warp has stored its rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from ...calls.fp8 import SCALE_CHANNELS
from ...device.gluon.cluster import cluster_barrier
from ...launch.descriptors import GROUP_ROWS
from .narrow_records import (
    BEYOND,
    BLOCKS,
    COL,
    SLOTS_AT,
    TILE_COUNT,
    first_record,
    record_size,
)

_SUMS = gl.constexpr(GROUP_ROWS)
_SCALE_CHANNELS = gl.constexpr(SCALE_CHANNELS)


@gluon.jit
def factor_memory(rows: gl.constexpr, columns: gl.constexpr):
    """Shared memory for `rows` rows of factors."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.float32, [rows, columns], layout)


@gluon.jit
def _batch_blocks(slots_ptr, width, first, blocks, CFG: gl.constexpr):
    """Of each block of the steps from `first` on: its row in the values, and its row of x.

    Past the last block, a row of x that does not exist.
    """
    steps: gl.constexpr = CFG.factor_steps
    stage_blocks: gl.constexpr = CFG.STAGE_BLOCKS
    found = ()
    for i in gl.static_range(steps):
        for b in gl.static_range(stage_blocks):
            slot = (first + i) // CFG.k_steps * CFG.STAGE_BLOCKS + b
            live = slot < blocks
            a_row = gl.load(slots_ptr + slot, mask=live, other=0)
            x_row = gl.load(slots_ptr + width + slot, mask=live, other=BEYOND)
            found = found + ((a_row, x_row),)  # noqa: RUF005
    return found


@gluon.jit
def _batch_factors(scales, batch_blocks, first, col, n_cols, CFG: gl.constexpr):
    """Of each block of the steps from `first` on: its scale times those of the columns.

    0 for columns and channels that do not exist: a block may end beyond x.
    """
    columns: gl.constexpr = CFG.x_rows
    cols = col + gl.arange(0, columns, gl.BlockedLayout([1], [32], [1], [0]))
    loaded = ()
    for i in gl.static_range(len(batch_blocks)):
        a_row, x_row = batch_blocks[i]
        step = first + i // CFG.STAGE_BLOCKS
        group = (x_row + step % CFG.k_steps * CFG.TILE_K) // _SCALE_CHANNELS
        offsets = cols.to(gl.int64) * scales.col_stride + group.to(gl.int64) * scales.group_stride
        exists = group < scales.groups
        of_x = gl.load(scales.x_ptr + offsets, mask=(cols < n_cols) & exists, other=0.0)
        of_block = gl.load(scales.block_ptr + a_row // CFG.BLOCK_H, mask=exists, other=0.0)
        loaded = loaded + ((of_block, of_x),)  # noqa: RUF005
    found = ()
    for i in gl.static_range(len(loaded)):
        of_block, of_x = loaded[i]
        found = found + (of_x * of_block,)  # noqa: RUF005
    return found


@gluon.jit
def _store_factors(factors, ring, step, products, STAGES: gl.constexpr):
    """Store the rows of a step, once the consumers have released its stage."""
    stage = step % STAGES
    mbarrier.wait(ring.empty.index(stage), ((step // STAGES) & 1) ^ 1)
    for i in gl.static_range(len(products)):
        factors.index(stage * len(products) + i).store(products[i])
    mbarrier.arrive(ring.full.index(stage), count=1)


@gluon.jit
def _load_all(scales, schedule, ring, factors, n_cols, CFG: gl.constexpr):
    """The factors of all tiles of this program."""
    width = schedule.width
    batch_steps: gl.constexpr = CFG.factor_steps
    stage_blocks: gl.constexpr = CFG.STAGE_BLOCKS
    record_ptr = first_record(schedule)
    tile_count = gl.load(record_ptr + TILE_COUNT)
    blocks = gl.load(record_ptr + BLOCKS)
    col = gl.load(record_ptr + COL)
    batch_blocks = _batch_blocks(record_ptr + SLOTS_AT, width, 0, blocks, CFG)
    # previous kernels may write scales until they have ended; the schedule never changes
    gdc_wait()
    begin = 0
    for tile in range(tile_count):
        slots_ptr = record_ptr + SLOTS_AT
        record_ptr += record_size(schedule)
        more = tile + 1 < tile_count
        next_blocks = gl.load(record_ptr + BLOCKS, mask=more, other=0)
        next_col = gl.load(record_ptr + COL, mask=more, other=0)
        end = begin + gl.cdiv(blocks, CFG.STAGE_BLOCKS) * CFG.k_steps
        for start in range(begin, end, batch_steps):
            first = start - begin
            found = _batch_factors(scales, batch_blocks, first, col, n_cols, CFG)
            batch_blocks = _batch_blocks(slots_ptr, width, first + batch_steps, blocks, CFG)
            for i in gl.static_range(batch_steps):
                if start + i < end:
                    of_step = ()
                    for b in gl.static_range(stage_blocks):
                        of_step = of_step + (found[i * stage_blocks + b],)  # noqa: RUF005
                    _store_factors(factors, ring, start + i, of_step, CFG.STAGES)
        batch_blocks = _batch_blocks(record_ptr + SLOTS_AT, width, 0, next_blocks, CFG)
        begin = end
        blocks = next_blocks
        col = next_col


@gluon.jit
def load_factors(scales, schedule, ring, factors, n_cols, CFG: gl.constexpr):
    """Store the factors of all steps: the role of one warp, idle where operands have no scales."""
    if CFG.SPLIT_K > 1:
        cluster_barrier()
    if CFG.SCALED:
        _load_all(scales, schedule, ring, factors, n_cols, CFG)


@gluon.jit
def _start_product(ring, place, CFG: gl.constexpr):
    """Start the product of a block of the ring."""
    layout: gl.constexpr = CFG.accumulator_layout()
    sums_width: gl.constexpr = CFG.sums_width
    nothing = gl.zeros([_SUMS, sums_width], gl.float32, layout)
    a = ring.a.index(place)
    x = ring.x.index(place)
    if CFG.swapped:
        part = warpgroup_mma(x, a.permute((1, 0)), nothing, use_acc=False, is_async=True)
    else:
        part = warpgroup_mma(a, x.permute((1, 0)), nothing, use_acc=False, is_async=True)
    return part


@gluon.jit
def _factors_of(factors, place, CFG: gl.constexpr):
    """The factors of a block of the ring, along the rows or columns of its product."""
    along: gl.constexpr = gl.SliceLayout(1 if CFG.swapped else 0, CFG.accumulator_layout())
    of_columns = factors.index(place).load(along)
    return of_columns[:, None] if CFG.swapped else of_columns[None, :]


@gluon.jit
def _add_scaled(acc, ring, stage, factors, CFG: gl.constexpr):
    """acc + the products of the blocks of a stage times their factors, two of them at a time."""
    stage_blocks: gl.constexpr = CFG.STAGE_BLOCKS
    for b in gl.static_range(0, stage_blocks, 2):
        place = stage * CFG.STAGE_BLOCKS + b
        of_first = _factors_of(factors, place, CFG)
        first = _start_product(ring, place, CFG)
        if b + 1 < CFG.STAGE_BLOCKS:
            of_second = _factors_of(factors, place + 1, CFG)
            second = _start_product(ring, place + 1, CFG)
            acc += warpgroup_mma_wait(1, deps=(first,)) * of_first
            acc += warpgroup_mma_wait(0, deps=(second,)) * of_second
        else:
            acc += warpgroup_mma_wait(0, deps=(first,)) * of_first
    return acc


@gluon.jit
def sum_scaled(acc, ring, factors, begin, end, CFG: gl.constexpr):
    """The sums of a tile of operands in fp8."""
    for step in range(begin, end):
        stage = step % CFG.STAGES
        mbarrier.wait(ring.full.index(stage), (step // CFG.STAGES) & 1)
        acc = _add_scaled(acc, ring, stage, factors, CFG)
        # always true: Triton 3.6 and 3.7 take a bound that only loops read for the first tile's
        mbarrier.arrive(ring.empty.index(stage), count=1, pred=step < end)
    return acc
