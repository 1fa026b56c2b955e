# mypy: ignore-errors
"""The order in which programs of the Hopper kernel take softmaxes of prompts: longest first.

Equal ranges of units (`plan.py`) balance programs as well as units tell the time, and split a
softmax at each border. Where every softmax is short against what a program has to do, programs
claim whole ones from a counter instead, as they get free. The *order* lists query tiles, each for
all KV heads:

    tiles of prompts from the longest to the shortest, so that all programs end together;
    light ones, which are decoding steps, from the longest too, evenly between the tiles of the
    first half of the others: they wait for memory while prompts use the tensor cores, and the
    second half, which takes about a quarter of the time, is left to balance programs.

A tile finds its place by comparing itself with every other one: each of a number of programs ranks
RANKED tiles, and none waits for another. Behind room for all query tiles, the order ends with the
number of those that it lists, or -1 if equal ranges are to be used.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ..calls.ragged import RaggedCall
from ..launch.launcher import cdiv, launch
from .plan import (
    KernelRecords,
    RaggedSizes,
    RaggedWorkspace,
    store_ends,
    work_of_tiles,
)

# Query tiles that a program ranks, and those that it compares them with at a time.
RANKED = tl.constexpr(32)
SCAN = tl.constexpr(256)
# Softmaxes are left whole if each program has this many times the work of the longest one.
LEAST_SOFTMAXES = 4


@triton.jit
def _place(ahead, light, num_heavy, num_light):
    """Place in the order of a tile with `ahead` longer tiles of its kind.

    The l-th light tile comes before the heavy one with number `l * num_heavy // (2 * num_light)`.
    """
    nth = tl.cast(ahead, tl.int64)
    heavy_before = nth * num_heavy // tl.maximum(2 * num_light, 1)
    light_before = ((nth + 1) * (2 * num_light) + num_heavy - 1) // tl.maximum(num_heavy, 1)
    return tl.where(light, nth + heavy_before, nth + tl.minimum(light_before, num_light))


@triton.jit(
    do_not_specialize=[
        "batch", "tokens_q", "tokens_k", "num_slabs", "slots", "capacity", "num_blocks", "left",
        "right", "num_tiles", "search_steps", "programs", "least_softmaxes",
    ]
)  # fmt: skip
def _order_kernel(
    workspace,
    tables,
    heads,
    batch,
    tokens_q,
    tokens_k,
    num_slabs,
    slots,
    capacity,
    num_blocks,
    left,
    right,
    chunk,
    num_tiles,
    search_steps,
    programs,
    least_softmaxes,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    LIGHT_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rank RANKED query tiles; the first program fills the rest of the workspace.

    Softmaxes are claimed if a program has `least_softmaxes` times the longest to do, and there are
    prompts; in any case if that is 0.
    """
    if PDL:
        gdc_launch_dependents()
    sizes = RaggedSizes(
        batch, tokens_q, tokens_k, num_slabs, slots, capacity, num_blocks, left, right, chunk
    )
    own = tl.program_id(0) * RANKED + tl.arange(0, RANKED)
    mine = work_of_tiles(
        own, tables, sizes, heads.group, num_tiles, search_steps, None, TILE_M, TILE_N, TOP_LEFT,
        LIGHT_ROWS,
    )  # fmt: skip
    ahead = tl.zeros([RANKED], tl.int32)
    num_heavy = 0
    num_light = 0
    total = 0
    longest = 0
    for start in range(0, num_tiles, SCAN):
        q_tile = start + tl.arange(0, SCAN)
        work = work_of_tiles(
            q_tile, tables, sizes, heads.group, num_tiles, search_steps, None, TILE_M, TILE_N,
            TOP_LEFT, LIGHT_ROWS,
        )  # fmt: skip
        if tl.program_id(0) == 0:
            store_ends(workspace, q_tile, work, total, num_tiles)
        total += tl.sum(work.units, 0)
        longest = tl.maximum(longest, tl.max(work.units, 0))
        num_heavy += tl.sum(((work.units > 0) & ~work.light).to(tl.int32), 0)
        num_light += tl.sum(((work.units > 0) & work.light).to(tl.int32), 0)
        others, owns = work.units[None, :], mine.units[:, None]
        first = (others > owns) | ((others == owns) & (q_tile[None, :] < own[:, None]))
        first = first & (work.light[None, :] == mine.light[:, None])
        ahead += tl.sum((first & (others > 0)).to(tl.int32), 1)
    place = _place(ahead, mine.light, num_heavy, num_light)
    tl.store(workspace.order + place, own, mine.units > 0)
    if tl.program_id(0) == 0:
        all_units = tl.cast(total, tl.int64) * heads.kv
        short = tl.cast(longest, tl.int64) * programs * least_softmaxes <= all_units
        claimed = short & ((num_heavy > 0) | (least_softmaxes == 0))
        tl.store(workspace.order + num_tiles, tl.where(claimed, num_heavy + num_light, -1))


def launch_order(
    call: RaggedCall,
    records: KernelRecords,
    workspace: RaggedWorkspace,
    programs: int,
    tile: tuple[int, int],
    light_rows: int,
    pdl: bool = False,
) -> None:
    """Fill `ends`, `owners` and `order` for `programs` programs and tiles `tile`."""
    num_tiles, steps = workspace.ends.numel(), call.batch.bit_length()
    args = (workspace, records.tables, records.layout.tensors.heads, *records.sizes, num_tiles)
    least = 0 if call.batch_invariant else LEAST_SOFTMAXES
    constants = (*tile, call.top_left, light_rows, pdl)
    grid = cdiv(num_tiles, RANKED.value)
    launch(_order_kernel, grid, (*args, steps, programs, least, *constants), num_warps=4)
