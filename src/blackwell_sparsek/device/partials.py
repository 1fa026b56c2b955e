# mypy: ignore-errors
"""Split KV: several programs compute parts of one softmax; the last to finish combines them.

A program writes its part to a private slot and increments a counter. The last program to arrive
reads all parts in program order, so the result does not depend on which program that is. It also
resets the counter to zero for the next launch.

A program shares at most two softmaxes with others: it may begin in the middle of one (slot 2p) and
end in the middle of another (slot 2p + 1). A softmax, and with it its counter, is therefore
identified by the program that begins it.
"""

import triton
import triton.language as tl

from .softmax import init_state, rescale_to, safe_shift

# Parts read at a time: enough loads in flight to hide the latency of the L2.
PARTS = tl.constexpr(16)
# Columns of a part that a thread reads at once.
VECTOR = tl.constexpr(4)
# Rows merged at a time, as many as query heads often share a KV head.
MERGED_ROWS = tl.constexpr(4)


@triton.jit
def part_slot(program, first_program):
    """Slot of a program's part of the softmax that `first_program` begins."""
    return 2 * program + tl.where(program == first_program, 1, 0)


@triton.jit
def store_part(acc_ptr, state_ptr, slot, m_log2, row_sum, acc, num_rows):
    """Write the state and the accumulators [TILE_M, columns] of a part, for `num_rows` rows."""
    TILE_M: tl.constexpr = acc.shape[0]
    TILE_DV: tl.constexpr = acc.shape[1]
    rows = tl.arange(0, TILE_M)
    live = rows < num_rows
    state_ptr += slot * (2 * TILE_M)
    tl.store(state_ptr + rows, m_log2, live)
    tl.store(state_ptr + TILE_M + rows, row_sum, live)
    offsets = rows[:, None] * TILE_DV + tl.arange(0, TILE_DV)[None, :]
    tl.store(acc_ptr + tl.cast(slot, tl.int64) * (TILE_M * TILE_DV) + offsets, acc, live[:, None])


@triton.jit
def is_last(counter_ptr, num_parts):
    """Increment the counter after this program's stores; whether all other programs came before.

    Memory order: one thread increments. The barrier puts the plain stores of all threads before
    its release. Increments are read-modify-writes, so each continues the release of those before
    it, and the last one acquires them all. Triton hands the result to the other threads through
    shared memory and a barrier, which puts their loads after the acquire.

    The reset comes after every increment of this launch, because this program's is the last. A
    later launch increments after this one has ended, or after `gdc_wait` if it started early.
    """
    tl.debug_barrier()
    before = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
    last = before == num_parts - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit
def merged_places(first_row, TILE_DV: tl.constexpr, ROWS: tl.constexpr = MERGED_ROWS):
    """Rows [vectors] and columns [vectors, VECTOR] of ROWS rows, cut into vectors."""
    VECTORS: tl.constexpr = TILE_DV // VECTOR
    vectors = tl.arange(0, ROWS * VECTORS)
    columns = (vectors % VECTORS * VECTOR)[:, None] + tl.arange(0, VECTOR)[None, :]
    return first_row + vectors // VECTORS, columns


@triton.jit
def merge_parts(
    acc_ptr,
    state_ptr,
    first_program,
    num_parts,
    first_row,
    num_rows,
    TILE_M: tl.constexpr,
    TILE_DV: tl.constexpr,
    ROWS: tl.constexpr = MERGED_ROWS,
    GROUPS: tl.constexpr = 1,
):
    """State and accumulators of the rows from `first_row` on, placed as by `merged_places`.

    A thread holds the same columns of all parts, so that no thread waits for another. Parts are
    separate tensors, because Triton may spread a dimension over threads (3.9 does). With GROUPS,
    each group of threads has every GROUPS-th part, and groups exchange sums at the end.
    """
    rows, columns = merged_places(first_row, TILE_DV, GROUPS * ROWS)
    first_part = 0
    if GROUPS > 1:
        first_part = (rows - first_row) // ROWS
        rows -= first_part * ROWS
    m_log2, row_sum = init_state(rows)
    acc = tl.zeros(columns.shape, tl.float32)
    inside = rows[:, None] * TILE_DV + columns
    for first in range(0, num_parts, PARTS * GROUPS):
        m_parts = ()
        sum_parts = ()
        parts = ()
        # issue all loads before the first result is used
        for i in tl.static_range(PARTS):
            number = first + i * GROUPS + first_part
            slot = part_slot(first_program + number, first_program)
            live = (number < num_parts) & (rows < num_rows)
            state = state_ptr + slot * (2 * TILE_M) + rows
            # bypass the L1, which does not see what other SMs write
            m_part = tl.load(state, live, other=-float("inf"), cache_modifier=".cg")
            sum_part = tl.load(state + TILE_M, live, other=0.0, cache_modifier=".cg")
            part_ptr = acc_ptr + tl.cast(slot, tl.int64) * (TILE_M * TILE_DV)
            if GROUPS > 1:
                part_ptr = part_ptr[:, None]
            part = tl.load(part_ptr + inside, live[:, None], other=0.0, cache_modifier=".cg")
            m_parts = m_parts + (m_part,)  # noqa: RUF005
            sum_parts = sum_parts + (sum_part,)  # noqa: RUF005
            parts = parts + (part,)  # noqa: RUF005
        m_new = m_log2
        for i in tl.static_range(PARTS):
            m_new = tl.maximum(m_new, m_parts[i])
        shift = safe_shift(m_new)
        rescale = rescale_to(m_log2, shift)
        m_log2 = m_new
        row_sum *= rescale
        acc *= rescale[:, None]
        for i in tl.static_range(PARTS):
            factor = rescale_to(m_parts[i], shift)
            row_sum += sum_parts[i] * factor
            acc += parts[i] * factor[:, None]
    if GROUPS > 1:
        VECTORS: tl.constexpr = ROWS * TILE_DV // VECTOR
        m_groups = tl.reshape(m_log2, (GROUPS, VECTORS))
        m_log2 = tl.max(m_groups, 0)
        factors = rescale_to(m_groups, safe_shift(m_log2)[None, :])
        row_sum = tl.sum(tl.reshape(row_sum, (GROUPS, VECTORS)) * factors, 0)
        acc = tl.sum(tl.reshape(acc, (GROUPS, VECTORS, VECTOR)) * factors[:, :, None], 0)
    return m_log2, row_sum, acc
