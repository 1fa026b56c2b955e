# mypy: ignore-errors
"""When each column of a block mask visits its query blocks, so that ordered dq sums wait little.

With ordered accumulation (`backward`), a KV tile waits at a block of queries until all tiles with
lower ranks have added to it. Here columns are placed in time, one after the other in the order in
which they are taken: a fixed number runs at once, each takes one time step for a tile of queries,
and it visits a block only when no other column is there then; of the free blocks, the one that
others want most. Where the L2 does not hold all queries, columns follow a front that moves through
parts of them in the time that a column takes. Ranks are in the order of these times, and columns
that run one after the other here do so in one program (`dq_order`).
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from ...launch.launcher import launch, on_device_of
from ...masks.block_mask import BlockMask

if TYPE_CHECKING:
    from .dq_order import Groups

# Bits of the times around a visit, from the one before on, at which no other column may be there.
AROUND = tl.constexpr(0b010)
# Times in a row at which a column waits for a free block before it takes one that is not.
PATIENCE = tl.constexpr(3)
# Times that are read at once, and after which others are read.
REACH, STEPS = tl.constexpr(32), tl.constexpr(16)
# Columns that run at once: a multiprocessor each.
LANES = tl.constexpr(256)
# Visits of a column that are put in order; longer ones stay as they are.
MAX_VISITS = 256
# Keys of blocks that are not free, and of those that were visited.
BUSY = tl.constexpr(2**20)
GONE = tl.constexpr(2**21)
# What is added to times of visits that come after others: see `GroupRow.later`.
LATER = tl.constexpr(2**30)


class HeadColumn(NamedTuple):
    """One query head of a column: its (batch, head), and the bounds of its list."""

    batch_head: Any
    begin: Any
    split: Any
    """Where full blocks begin."""
    end: Any


@triton.jit
def _ones(x):
    """How many bits of uint32 are set."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return ((x + (x >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def _times_taken(taken_ptr, time, words, live):
    """Bit i: whether a column is there at `time - 1 + i`, uint32."""
    word = (time - 1) // 32
    low = tl.load(taken_ptr + word, live & (word < words), other=0).to(tl.uint32, bitcast=True)
    high = tl.load(taken_ptr + word + 1, live & (word + 1 < words), other=0)
    both = low.to(tl.uint64) | (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32)
    return (both >> ((time - 1) % 32).to(tl.uint64)).to(tl.uint32)


@triton.jit
def _take(taken_ptr, when, words, live):
    """Note that a column is there."""
    place = taken_ptr + when // 32
    live &= when // 32 < words
    bit = tl.full(when.shape, 1, tl.uint32) << (when % 32).to(tl.uint32)
    tl.store(place, tl.load(place, live, other=0) | bit.to(tl.int32, bitcast=True), live)
    # the next column may have to read what other threads wrote
    tl.debug_barrier()


@triton.jit
def _two_smallest(a, b, c, d):
    """The two smallest of a < b and c < d."""
    return tl.minimum(a, c), tl.minimum(tl.maximum(a, c), tl.minimum(b, d))


@triton.jit
def _head_column(queue_ptr, indptr_ptr, partial_end_ptr, item, heads, own_lists, columns):
    """The `HeadColumn` that is `item`-th, counting the heads of each column."""
    entry = tl.load(queue_ptr + item // heads)
    batch_head = entry // columns * heads + item % heads
    row = tl.cast(tl.where(own_lists, batch_head, entry // columns), tl.int64) * columns
    row += entry % columns
    begin = tl.load(indptr_ptr + row)
    return HeadColumn(
        batch_head, begin, tl.load(partial_end_ptr + row), tl.load(indptr_ptr + row + 1)
    )


@triton.jit(
    do_not_specialize=[
        "batch_heads", "columns", "blocks", "heads", "step", "ragged", "words", "sweep", "parts",
    ]
)  # fmt: skip
def _attn_bwd_visits_kernel(
    visits_ptr,
    times_ptr,
    lanes_ptr,
    taken_ptr,
    queue_ptr,
    groups_ptr,
    indptr_ptr,
    partial_end_ptr,
    indices_ptr,
    batch_heads,
    columns,
    blocks,
    heads,
    step,
    ragged,
    words,
    sweep,
    parts,
    PACK: tl.constexpr,
    VISITS: tl.constexpr,
):
    """Plan one group of columns. `taken_ptr` has the times of each block of queries, as bits.

    Where `heads` heads share a list, each has visits and times `step` after those of the last one.
    """
    groups_ptr += tl.program_id(0) * 4
    first = tl.load(groups_ptr) * heads
    end_item = tl.load(groups_ptr + 1) * heads
    last = tl.maximum(end_item - 1, 0)
    lanes = tl.load(groups_ptr + 2)
    later = tl.load(groups_ptr + 3)
    taken_ptr += tl.cast(later, tl.int64) * batch_heads * blocks * words
    offs = tl.arange(0, VISITS)
    lane = tl.arange(0, LANES)
    idle = tl.where(lane < lanes, 0, 2**30)
    lists = (queue_ptr, indptr_ptr, partial_end_ptr)
    time = 0
    chosen = 0
    own_lists = step == 0
    head = _head_column(*lists, tl.minimum(first, last), heads, own_lists, columns)
    block = tl.load(indices_ptr + head.end - 1 - offs, offs < head.end - head.split, other=0)
    for item in range(first, end_item):
        if item % heads == 0:
            free_time = tl.min(idle, 0)
            chosen = tl.min(tl.where(idle == free_time, lane, LANES), 0)
            # one visit for what a work tile takes besides
            time = free_time + 1
            tl.store(lanes_ptr + item // heads, chosen)
        # read ahead for the next one
        following = _head_column(*lists, tl.minimum(item + 1, last), heads, own_lists, columns)
        next_block = tl.load(
            indices_ptr + following.end - 1 - offs, offs < following.end - following.split, other=0
        )
        taken_of_head = taken_ptr + tl.cast(head.batch_head, tl.int64) * blocks * words
        own = tl.cast(item % heads, tl.int64) * step
        begin, split, end = head.begin, head.split, head.end
        count = end - split
        if count <= VISITS:
            live = offs < count
            taken_of_block = taken_of_head + block.to(tl.int64) * words
            # one that is not full of queries has to stay the last of the list: visited first, with
            # one that is left over
            cut = tl.sum((live & (block == ragged)).to(tl.int32), 0)
            lead = (count - cut) % PACK + cut
            front = blocks - 1 - tl.cast(time, tl.int64) * blocks // sweep % blocks
            behind = front.to(tl.int32) - block
            behind = tl.where(behind < 0, behind + blocks, behind)
            part = behind * parts // blocks
            place_of = offs
            when = offs - offs
            left = live
            used = 0
            late = 0
            while used < count:
                taken = _times_taken(taken_of_block, time, words, live)
                wanted = _ones(taken >> 3)
                until = time + STEPS
                while (time < until) & (used < count):
                    take = tl.where((used == 0) & (lead > 0), lead, PACK)
                    key = tl.where((taken & AROUND) == 0, 0, BUSY)
                    key += ((part + 1) * REACH - wanted) * VISITS + offs
                    key = tl.where((used == 0) & (offs < cut), -1, key)
                    key = tl.where(left, key, GONE + offs)
                    if PACK == 2:
                        best, worst = tl.reduce((key, key + 2 * GONE), 0, _two_smallest)
                        worst = tl.where(take == 2, worst, best)
                    else:
                        best = tl.min(key, 0)
                        worst = best
                    go = worst < tl.where(late < PATIENCE, BUSY, GONE)
                    is_best = go & (key == best)
                    is_worst = go & (key == worst)
                    place_of = tl.where(is_worst, used + take - 1, place_of)
                    place_of = tl.where(is_best, used, place_of)
                    when = tl.where(is_best | is_worst, time, when)
                    left = left & (is_best == 0) & (is_worst == 0)
                    used += tl.where(go, take, 0)
                    late = tl.where(go, 0, late + 1)
                    time += 1
                    taken = taken >> 1
                    wanted -= ((taken >> 2) & 1).to(tl.int32)
            tl.store(visits_ptr + own + end - 1 - place_of, block, live)
            tl.store(times_ptr + own + end - 1 - place_of, when + later * LATER, live)
            _take(taken_of_block, when, words, live)
        else:
            split = end
        # the others one after the other from the last, whether blocks are free or not
        count = split - begin
        lead = (PACK - count % PACK) % PACK
        for at in range(0, count, VISITS):
            live = at + offs < count
            when = time + (at + offs + lead) // PACK
            place = split - 1 - at - offs
            there = tl.load(indices_ptr + place, live, other=0).to(tl.int64)
            tl.store(times_ptr + own + place, when + later * LATER, live)
            _take(taken_of_head + there * words, when, words, live)
        time += (count + PACK - 1) // PACK
        if item % heads == heads - 1:
            idle = tl.where(lane == chosen, time, idle)
        head = following
        block = next_block


def plan_visits(
    mask: BlockMask, groups: "Groups", group_size: int, pack: int, parts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query blocks of the transposed lists of `mask`, full ones in an order with few waits.

    Entries are in reverse, as `backward` visits them.

    Parameters
    ----------
    groups : what is taken in which order, see `dq_order.column_groups`
    group_size : query heads that share a KV head
    pack : blocks of queries that are visited at a time
    parts : of the queries, which columns go through together

    Returns
    -------
    visits, times : int32 [heads, nnz]
        Partial blocks where they were; no column visits two tiles of queries at one time. Of one
        head, or of all `group_size` that share a list.
    lanes : int32 [columns]
        Which of those that run at once each column of `groups.queue` is.
    """
    lists, (mb, nb) = mask.transposed, mask.grid
    nnz, shared = lists.indices.numel(), mask.heads == 1 and group_size > 1
    visits = lists.indices.repeat(group_size if shared else 1, 1)
    times, lanes = torch.empty_like(visits), torch.empty_like(groups.queue)
    batch_heads = mask.batch * (group_size if shared else mask.heads)
    mean = -(-nnz // max(mask.batch * mask.heads * nb, 1))
    width = triton.next_power_of_2(min(max(7 * mean // 4, 32), MAX_VISITS))
    # times that are known: twice as many as it takes when no column waits, and a long column
    most = 2 * (visits.numel() // max(groups.lanes, 1) + mb * group_size) // pack
    words = -(-min(most, 2**14) // 32) + 2
    taken = torch.zeros(2 * batch_heads * mb * words, dtype=torch.int32, device=visits.device)
    args = (
        visits,
        times,
        lanes,
        taken,
        groups.queue,
        groups.table,
        lists.indptr,
        lists.partial_end,
        lists.indices,
        batch_heads,
        nb,
        mb,
        group_size if mask.heads > 1 or shared else 1,
        # never 0, which stands for lists of their own: a mask may be empty
        max(nnz, 1) if shared else 0,
        mask.seq_lengths[0] // mask.block_size[0],
        words,
        # a column takes so long, as a rule
        mean * (group_size if mask.heads > 1 or shared else 1) // pack + 1,
        parts,
        pack,
        width,
    )
    with on_device_of(visits):
        launch(_attn_bwd_visits_kernel, groups.number, args, num_warps=1)
    return visits, times, lanes
