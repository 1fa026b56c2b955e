"""A model of attention on 64 GPUs: time of one layer's forward and backward by method.

Nothing is run on 64 GPUs. Work and bytes of every rank come from the plan and the mask, exactly as
`bsk.distributed.attention` would split and send them; kernel speeds are those recorded on an H200
(benchmarks/results), and link speeds are the published ones of a node of eight with NVLink and one
400 Gb/s adapter per GPU. Latencies, contention, merges of partial results and the rest of a layer
are left out.

    python benchmarks/context_parallel_model.py            # prints the table
    python benchmarks/context_parallel_model.py --write    # and puts it into docs/distributed.md
"""

import argparse
import json
import pathlib
from typing import NamedTuple

import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.distributed import Band, Shapes, balance
from blackwell_sparsek.distributed.heads import split_heads
from blackwell_sparsek.distributed.schedule import needed_remote, pieces
from blackwell_sparsek.distributed.traffic import fetched_rows
from blackwell_sparsek.distributed.visible import Visible

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "distributed.md"
BEGIN, END = "<!-- model: begin -->", "<!-- model: end -->"

RANKS, NODE = 64, 8
# bytes per second of one GPU in one direction
NVLINK, NETWORK = 450e9, 50e9
LAYER = Shapes(1, 32, 8, 128, 128, torch.bfloat16)
# the backward has five products where the forward has two
BACKWARD_WORK = 2.5
METHODS = ("allgather", "needed", "ring", "ulysses")


class Times(NamedTuple):
    """Seconds of one layer, forward and backward."""

    computing: float
    total: float


def recorded(suite, case):
    """Executed FLOP/s of a recorded case."""
    cases = json.loads((ROOT / "benchmarks" / "results" / f"{suite}.json").read_text())["cases"]
    (found,) = (c for c in cases if c["name"] == case)
    return found["peers"]["bsk"]["times"]["eager"]["executed_tflops"] * 1e12


def speeds(kind):
    """FLOP/s of (forward, backward): with block masks, or of plain causal calls or windows."""
    blocks = "B1 H8 S64k D128 blocks 128x128 at 5%"
    if kind == "blocks":
        return recorded("block_sparse", blocks), recorded("backward", blocks)
    if kind == "window":
        case = "B1 H16 S128k D128 causal window 2048"
        return recorded("attention_window", case), recorded("backward", case)
    case = "B1 H16 S16k D128 causal"
    return recorded("attention_dense", case), recorded("backward", case)


def flops(elements):
    """FLOPs of the forward over (query, key) pairs of all heads."""
    return 4.0 * LAYER.head_dim * LAYER.heads_q * elements


def same_node():
    """Which pairs of ranks share a node: bool [ranks, ranks]."""
    node = torch.arange(RANKS) // NODE
    return node[:, None] == node


def moved(rows):
    """Seconds to move `rows` [to, from] bytes between all ranks at once: the slowest link."""
    near, far = rows * same_node(), rows * ~same_node()
    return max(
        float(part.sum(dim).max()) / speed
        for part, speed in ((near, NVLINK), (far, NETWORK))
        for dim in (0, 1)
    )


def gathered(total, own):
    """Seconds of an all-gather: each node receives what it lacks once, through eight adapters."""
    return max((total - own) / NVLINK, (total - own * NODE) / NODE / NETWORK)


def model(mask, length, method, kind):
    """`Times` of a method; `mask` is a Band or a BlockMask."""
    plan = balance(mask, RANKS, seq_length=length, tile=128)
    band, blocks = (mask, None) if isinstance(mask, Band) else (Band(None, None), mask)
    visible = Visible("model", plan, band, blocks)
    heads = 1 if blocks is None else blocks.heads
    # kept elements of the busiest rank, and of its own keys among them
    elements = max(plan.work) * 256 / heads
    forward, backward = speeds("blocks" if method != "ulysses" else kind)
    spans = split_heads(LAYER.heads_q, LAYER.heads_kv, RANKS)
    q_heads, kv_heads = (torch.tensor([b - a for a, b in part]) for part in spans)
    if method == "ulysses":
        # more ranks than heads leave some without work
        elements = sum(plan.work) * 256 / heads * int(q_heads.max()) / LAYER.heads_q
    times = [flops(elements) / forward, flops(elements) * BACKWARD_WORK / backward]
    computing = sum(times)
    if method == "ulysses":
        # [to, from]: every rank gets its heads of all tokens, and returns their outputs
        item, tokens = LAYER.dtype.itemsize, max(plan.lengths)
        given = q_heads * LAYER.head_dim + kv_heads * (LAYER.head_dim + LAYER.head_dim_v)
        pairs = 1 - torch.eye(RANKS, dtype=torch.float64)
        inputs = pairs * (given * tokens * item)[:, None]
        outputs = (pairs * (q_heads * LAYER.head_dim_v * tokens * item)[:, None]).T
        # gradients go the same ways back
        return Times(computing, computing + 2 * (moved(inputs) + moved(outputs)))
    shard = LAYER.kv_bytes * max(plan.lengths)
    if method == "ring":
        # the slowest hop leaves the node; sums of dk and dv are twice as wide and travel as well
        hop = shard / NETWORK
        steps = [max(t / RANKS, h) for t, h in zip(times, (hop, 3 * hop), strict=True)]
        last = [t / RANKS for t in times]
        return Times(computing, sum(s * (RANKS - 1) for s in steps) + sum(last))
    ratio = LAYER.heads_q // LAYER.heads_kv
    rows = fetched_rows(visible, ratio, everything=method == "allgather")
    copies = visible.heads if visible.heads == 1 else LAYER.heads_kv
    fetch = back = moved(rows.double() * (LAYER.kv_bytes / copies))
    if method == "allgather":
        fetch = gathered(LAYER.kv_bytes * length, shard)
    wanted = needed_remote(visible, ratio, everything=method == "allgather")
    count = len(pieces(plan, visible.block[1], wanted))
    own = own_share(visible, plan)
    # gradients return while the next piece is computed, beside its successor; the last ones after
    total = back / count
    for seconds, returned in zip(times, (0.0, back), strict=True):
        total += fetched_in(count, seconds * own, seconds * (1 - own), fetch, returned)
    return Times(computing, total)


def fetched_in(count, own, far, fetch, back=0.0):
    """Seconds of a pass with `count` fetches, each under way while what came before is computed.

    `own` and `far` are seconds of computing own and fetched keys, `fetch` and `back` of all
    transfers in either direction.
    """
    total = max(own, fetch / count)
    for step in range(count):
        travels = fetch / count if step + 1 < count else 0.0
        travels += back / count if step > 0 else 0.0
        total += max(far / count, travels)
    return total


def own_share(visible, plan):
    """Share of a rank's kept blocks whose keys it owns; the first rank stands for all."""
    entries = visible.of_rank(0)
    own = torch.zeros(-(-plan.seq_length // visible.block[1]), dtype=torch.bool)
    own[plan.blocks(0, visible.block[1])] = True
    return float(own[entries.cols].double().mean())


def random_blocks(length, kept):
    """A causal mask of `kept` blocks of 128 per row on average, anywhere before the query."""
    return bsk.masks.random(
        length, 2 * kept * 128 / length, 128, causal=True,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip


def documents(length):
    """Documents of 1k to 64k tokens, causal inside."""
    generator = torch.Generator().manual_seed(0)
    ends = [0]
    while ends[-1] < length:
        size = int(2 ** (10 + 6 * torch.rand((), generator=generator)))
        ends.append(min(length, ends[-1] + size))
    return bsk.masks.documents(torch.tensor(ends, dtype=torch.int32), 128, causal=True)


def rows(length):
    """The rows of the table for a number of tokens, in Markdown."""
    masks = {
        "causal": (Band(None, 0), "causal"),
        "causal, window 4096": (Band(4095, 0), "window"),
        "documents of 1k to 64k": (documents(length), "blocks"),
        "64 random blocks per row": (random_blocks(length, 64), "blocks"),
    }
    for name, (mask, kind) in masks.items():
        found = {method: model(mask, length, method, kind) for method in METHODS}
        best = min(found, key=lambda method: found[method].total)
        cells = [f"{found[method].total * 1e3:.2f}" for method in METHODS]
        computing = f"{found['needed'].computing * 1e3:.2f}"
        yield f"| {length // 1024}k | {name} | {computing} | {' | '.join(cells)} | {best} |"


LENGTHS = (2**17, 2**19)


def table():
    """The table in Markdown."""
    lines = [
        "| tokens | mask | computing | " + " | ".join(METHODS) + " | best |",
        "|---|---|---|" + "---|" * (len(METHODS) + 1),
    ]
    return "\n".join([*lines, *(row for length in LENGTHS for row in rows(length))])


def main():
    """Print the table, and write it into the page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)}")
    made = table()
    print(made)
    if parser.parse_args().write:
        before, rest = PAGE.read_text().split(BEGIN)
        _, after = rest.split(END)
        PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}")


if __name__ == "__main__":
    main()
