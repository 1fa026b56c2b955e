"""When each column of a block mask visits its query blocks, so that few wait for turns.

Where dq is added up in order (`bwd_sm90`), a tile of keys waits at a block of queries until all
whose turns come before have been there. Here columns are placed in time, one after the other in
the order in which they are taken: so many run at once, each takes one unit of time for a tile of
queries, and it takes a block only when nobody is there then, shortly before or shortly after; of
those the one that others want most. Turns are in the order of these times.

A column may so wait for one that is taken later, but for no more than run at once with it in the
plan: when all programs of a launch run, one of them can always go on (`formats.block_turns`).
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from ...core.compile_cases import CompileCase, compile_cases
from ...core.launch import launch, on_device_of
from ...formats.block_mask import BlockMask
from ...formats.block_turns import Groups

# Bits of times around a visit in which nobody else may be there: one before and one after. Longer
# than an addition takes, since programs are not as punctual as this plan.
AROUND = tl.constexpr(0b111)
# Times in a row at which a column waits for a block to be free before it takes one that is not.
PATIENCE = tl.constexpr(3)
# Columns that run at once: a multiprocessor each.
LANES = tl.constexpr(256)
# Visits of a column that are put in order; longer ones stay as they are.
MAX_VISITS = 1024
# Keys of blocks that are not free, and of those that were visited.
BUSY = tl.constexpr(2**20)
GONE = tl.constexpr(2**21)
# Rows whose times come first: see `Groups`.
LATER = tl.constexpr(2**30)


@triton.jit
def _ones(x):
    """How many bits of uint64 are set."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def _times_taken(taken_ptr, time, words, live):
    """Bit i: whether somebody is there at `time - 1 + i`, for 64 times."""
    word = (time - 1) // 32
    shift = ((time - 1) % 32).to(tl.uint64)
    a = tl.load(taken_ptr + word, live & (word < words), other=0).to(tl.uint32, bitcast=True)
    b = tl.load(taken_ptr + word + 1, live & (word + 1 < words), other=0)
    c = tl.load(taken_ptr + word + 2, live & (word + 2 < words), other=0)
    b, c = b.to(tl.uint32, bitcast=True), c.to(tl.uint32, bitcast=True)
    low = a.to(tl.uint64) | (b.to(tl.uint64) << 32)
    # in two steps: a shift by 64 would be none
    return (low >> shift) | ((c.to(tl.uint64) << 1) << (63 - shift))


@triton.jit
def _take(taken_ptr, when, words, live):
    """Note that somebody is there."""
    place = taken_ptr + when // 32
    live &= when // 32 < words
    bit = (tl.full(when.shape, 1, tl.uint32) << (when % 32).to(tl.uint32)).to(tl.int32, bitcast=True)
    tl.store(place, tl.load(place, live, other=0) | bit, live)
    # the next column may have to read what other threads wrote
    tl.debug_barrier()


@triton.jit(do_not_specialize=["planes", "columns", "blocks", "heads", "ragged", "words"])
def _attn_bwd_visits_kernel(
    visits_ptr,
    times_ptr,
    taken_ptr,
    queue_ptr,
    groups_ptr,
    indptr_ptr,
    partial_end_ptr,
    indices_ptr,
    planes,
    columns,
    blocks,
    heads,
    ragged,
    words,
    PACK: tl.constexpr,
    VISITS: tl.constexpr,
):
    """Plan one group of columns. `taken_ptr` has the times of each block of queries, as bits."""
    group = tl.program_id(0)
    first = tl.load(groups_ptr + group * 4)
    end_place = tl.load(groups_ptr + group * 4 + 1)
    lanes = tl.load(groups_ptr + group * 4 + 2)
    later = tl.load(groups_ptr + group * 4 + 3)
    taken_ptr += tl.cast(later, tl.int64) * planes * blocks * words
    offs = tl.arange(0, VISITS)
    lane = tl.arange(0, LANES)
    idle = tl.where(lane < lanes, 0, 2**30)
    for place in range(first, end_place):
        entry = tl.load(queue_ptr + place)
        plane = entry // columns
        begin_time = tl.min(idle, 0)
        chosen = tl.min(tl.where(idle == begin_time, lane, LANES), 0)
        # one visit for what a piece of work takes besides
        time = begin_time + 1
        for head in range(heads):
            head_plane = tl.cast(plane * heads + head, tl.int64)
            row = head_plane * columns + entry % columns
            begin = tl.load(indptr_ptr + row)
            split = tl.load(partial_end_ptr + row)
            end = tl.load(indptr_ptr + row + 1)
            taken_of_head = taken_ptr + head_plane * blocks * words
            count = end - split
            if count <= VISITS:
                live = offs < count
                block = tl.load(indices_ptr + end - 1 - offs, live, other=0)
                taken_of_block = taken_of_head + block.to(tl.int64) * words
                # one that is not full of queries has to stay the last of the list: visited first,
                # with one that is left over
                cut = tl.sum((live & (block == ragged)).to(tl.int32), 0)
                lead = (count - cut) % PACK + cut
                place_of = offs
                when = offs - offs
                left = live
                used = 0
                late = 0
                while used < count:
                    taken = _times_taken(taken_of_block, time, words, live)
                    wanted = _ones(taken >> 3)
                    step = 0
                    while (step < 32) & (used < count):
                        take = tl.where((used == 0) & (lead > 0), lead, PACK)
                        free = (taken & AROUND) == 0
                        key = tl.where(free, 0, BUSY) + (64 - wanted) * VISITS + offs
                        key = tl.where((used == 0) & (offs < cut), -1, key)
                        key = tl.where(left, key, GONE + offs)
                        best = tl.min(key, 0)
                        worst = best
                        if PACK == 2:
                            second = tl.min(tl.where(key == best, GONE * 2, key), 0)
                            worst = tl.where(take == 2, second, best)
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
                        step += 1
                        taken = taken >> 1
                        wanted -= ((taken >> 2) & 1).to(tl.int32)
                tl.store(visits_ptr + end - 1 - place_of, block, live)
                tl.store(times_ptr + end - 1 - place_of, when + later * LATER, live)
                _take(taken_of_block, when, words, live)
            else:
                split = end
                count = 0
            # the others one after the other from the last, whoever is there
            count = split - begin
            lead = (PACK - count % PACK) % PACK
            for at in range(0, count, VISITS):
                live = at + offs < count
                when = time + (at + offs + lead) // PACK
                block = tl.load(indices_ptr + split - 1 - at - offs, live, other=0)
                tl.store(times_ptr + split - 1 - at - offs, when + later * LATER, live)
                _take(taken_of_head + block.to(tl.int64) * words, when, words, live)
            time += (count + PACK - 1) // PACK
        idle = tl.where(lane == chosen, time, idle)


def plan_visits(
    mask: BlockMask, groups: Groups, group_size: int, pack: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query blocks of the transposed lists of `mask`, full ones in an order with few waits.

    Entries are in reverse, as `bwd_sm90` visits them.

    Parameters
    ----------
    groups : what is taken in which order, see `formats.block_turns.groups_of_columns`
    group_size : query heads that share a KV head
    pack : blocks of queries that are visited at a time

    Returns
    -------
    visits, times : int32 [nnz]
        Partial blocks where they were; no column visits two tiles of queries at one time.
    """
    lists, (mb, nb) = mask.transposed, mask.grid
    visits, times = lists.indices.clone(), torch.empty_like(lists.indices)
    heads = group_size if mask.heads > 1 else 1
    planes = mask.batch * mask.heads
    mean = -(-visits.numel() // max(planes * nb, 1))
    width = triton.next_power_of_2(min(max(3 * mean, 16), mb, MAX_VISITS))
    # times that are known: twice as many as it takes when nobody waits, and a long column
    most = 2 * (visits.numel() // max(groups.lanes, 1) + mb * heads) // pack
    words = -(-min(most, 2**14) // 32) + 2
    taken = torch.zeros(2 * planes * mb * words, dtype=torch.int32, device=visits.device)
    args = (
        visits,
        times,
        taken,
        groups.queue,
        groups.table,
        lists.indptr,
        lists.partial_end,
        lists.indices,
        planes,
        nb,
        mb,
        heads,
        mask.seq_lengths[0] // mask.block_size[0],
        words,
        pack,
        width,
    )
    with on_device_of(visits):
        warps = 1 if width <= 128 else 4
        launch(_attn_bwd_visits_kernel, groups.count, args, num_warps=warps)
    return visits, times


@compile_cases
def _cases() -> Iterator[CompileCase]:
    pointers = ("visits", "times", "taken", "queue", "groups", "indptr", "partial_end", "indices")
    for pack, width in ((1, 128), (2, MAX_VISITS)):
        yield CompileCase(
            f"attn_bwd_visits/{width}",
            _attn_bwd_visits_kernel,
            {
                **{f"{name}_ptr": torch.int32 for name in pointers},
                **{
                    "planes": 8,
                    "columns": 512,
                    "blocks": 512,
                    "heads": 4,
                    "ragged": 511,
                    "words": 20,
                },
                "PACK": pack,
                "VISITS": width,
            },
            archs=(90,),
            num_warps=1 if width <= 128 else 4,
        )
