"""In which order each column of a block mask visits its query blocks, so that few wait for turns.

Where dq is added up in order (`bwd_sm90`), a tile of keys waits at a block of queries until all
that come before it have been there. Under a mask without structure, tiles that went through their
blocks from the last to the first would meet at many of them. Here columns are placed in time, one
after the other: so many run at once, each takes one unit of time for a block, and it takes first
what the columns before it are done with first. Whatever comes out, programs wait only for earlier
ones.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from ...core.compile_cases import CompileCase, compile_cases
from ...core.launch import launch, on_device_of
from ...formats.block_mask import BlockMask

# Visits until what a visit adds is there for the next column; more than it takes, since programs
# are not as punctual as this plan.
HOLD = tl.constexpr(3)
# How far back it counts since when a block is free: the oldest come first.
OLDEST = tl.constexpr(1000)
# Columns that run at once: a multiprocessor each.
LANES = tl.constexpr(256)
# Visits of a column that are put in order; longer ones stay as they are.
MAX_VISITS = 1024


@triton.jit
def _larger(a, b):
    """How times of visits that push each other back combine."""
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["columns", "blocks", "heads", "lanes", "ragged"])
def _attn_bwd_visits_kernel(
    visits_ptr,
    free_ptr,
    order_ptr,
    indptr_ptr,
    partial_end_ptr,
    indices_ptr,
    columns,
    blocks,
    heads,
    lanes,
    ragged,
    VISITS: tl.constexpr,
):
    """Plan one plane of `heads` heads of a mask, whose columns come as `order_ptr` says.

    `free_ptr` has for each block of queries the time when it is free, 0 to begin with.
    """
    plane = tl.program_id(0)
    offs = tl.arange(0, VISITS)
    lane = tl.arange(0, LANES)
    idle = tl.where(lane < lanes, 0, 2**30)
    for place in range(columns):
        column = tl.load(order_ptr + plane * columns + place)
        begin_time = tl.min(idle, 0)
        chosen = tl.min(tl.where(idle == begin_time, lane, LANES), 0)
        # one visit for what a piece of work takes besides
        time = begin_time + 1
        for head in range(heads):
            head_plane = plane * heads + head
            row = head_plane * columns + column
            begin = tl.load(partial_end_ptr + row)
            end = tl.load(indptr_ptr + row + 1)
            count = end - begin
            if (count > 0) & (count <= VISITS):
                live = offs < count
                free_of_head = free_ptr + tl.cast(head_plane, tl.int64) * blocks
                block = tl.load(indices_ptr + end - 1 - offs, live, other=0)
                wait = tl.load(free_of_head + block, live, other=0) - time
                # one that is not full of queries has to stay the last of the list: visited first
                wait = tl.where(block == ragged, -OLDEST, tl.maximum(wait, -OLDEST))
                key = tl.where(live, tl.minimum(wait + OLDEST, 2**20) * VISITS + offs, 2**31 - 1)
                key = tl.sort(key)
                # no two visits at the same time
                late = tl.associative_scan(tl.maximum(key // VISITS - OLDEST, 0) - offs, 0, _larger)
                when = time + late + offs
                block = tl.load(indices_ptr + end - 1 - key % VISITS, live, other=0)
                tl.store(visits_ptr + end - 1 - offs, block, live)
                tl.debug_barrier()
                tl.store(free_of_head + block, when + HOLD, live)
                # the next column may have to read what other threads wrote
                tl.debug_barrier()
                time = tl.max(tl.where(live, when + 1, 0), 0)
            else:
                time += count
        idle = tl.where(lane == chosen, time, idle)


def plan_visits(mask: BlockMask, order: torch.Tensor, group_size: int, lanes: int) -> torch.Tensor:
    """Query blocks of the transposed lists of `mask`, full ones in an order with few waits.

    Entries are in reverse, as `bwd_sm90` visits them.

    Parameters
    ----------
    order : int32 [planes, columns]
        Columns of each plane of KV heads in the order to take them; planes are those of the mask,
        `group_size` heads of which share one, or all where it has one head
    lanes : columns of a plane that run at once

    Returns
    -------
    int32 [nnz], partial blocks where they were
    """
    lists, (mb, nb) = mask.transposed, mask.grid
    visits = lists.indices.clone()
    heads = group_size if mask.heads > 1 else 1
    mean = -(-visits.numel() // max(order.numel() * heads, 1))
    width = triton.next_power_of_2(min(max(3 * mean, 16), mb, MAX_VISITS))
    free = torch.zeros(mask.batch * mask.heads * mb, dtype=torch.int32, device=visits.device)
    args = (
        visits,
        free,
        order.to(torch.int32).contiguous(),
        lists.indptr,
        lists.partial_end,
        lists.indices,
        nb,
        mb,
        heads,
        min(max(lanes, 1), LANES.value),
        mask.seq_lengths[0] // mask.block_size[0],
        width,
    )
    with on_device_of(visits):
        launch(_attn_bwd_visits_kernel, order.shape[0], args, num_warps=1 if width <= 128 else 4)
    return visits


@compile_cases
def _cases() -> Iterator[CompileCase]:
    pointers = ("visits", "free", "order", "indptr", "partial_end", "indices")
    for width in (128, MAX_VISITS):
        yield CompileCase(
            f"attn_bwd_visits/{width}",
            _attn_bwd_visits_kernel,
            {
                **{f"{name}_ptr": torch.int32 for name in pointers},
                **{
                    "columns": 512,
                    "blocks": 512,
                    "heads": 4,
                    "lanes": 33,
                    "ragged": 511,
                },
                "VISITS": width,
            },
            archs=(90,),
            num_warps=1 if width <= 128 else 4,
        )
