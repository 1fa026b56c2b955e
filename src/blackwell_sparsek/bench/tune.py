"""Search for the best tile of a kernel on this GPU: correct first, then fastest."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..formats.attention_spec import AttnSpec, empty_lse, empty_out
from ..formats.band import band_of
from ..kernels.attention.config import AttnFwdConfig
from ..tuning.attention import attn_fwd_config
from ..tuning.problem_attention import AttnProblem
from ..tuning.tuned import Tile, key_of
from .measure import told
from .problems.attention import Attention, AttentionInputs
from .timing import time_interleaved

# A tile must be this much faster than the built-in one to be written down.
WORTH = 1.02
PROBLEMS = (
    Attention(1, 16, 8192, 128, causal=True),
    Attention(1, 32, 8192, 64, causal=True),
    Attention(1, 16, 8192, 128, block=(128, 128), density=0.25),
    Attention(1, 16, 8192, 128, block=(64, 64), density=0.25),
)


def candidates(built_in: Tile, block_q: int | None) -> Iterator[Tile]:
    """Tiles around the built-in one, itself first; none taller than a mask's query block."""
    yield built_in
    for m in (64, 128):
        for n in (32, 64, 128):
            for warps in (4, 8):
                for stages in (2, 3, 4):
                    tile = (m, n, warps, stages)
                    if tile != built_in and (block_q is None or m <= block_q):
                        yield tile


def tune_attention(
    problem: Attention,
    device: torch.device,
    say: Callable[[str], None],
    time_all: Callable[..., Any] = time_interleaved,
) -> tuple[str, Tile] | None:
    """The key and the best tile of a problem, or None where the built-in one is best."""
    from ..kernels.attention.fwd import launch_attn_fwd

    inputs = problem.build(device)
    facts, built_in, spec = _attention_facts(inputs)
    block_q = problem.block[0] if problem.block else None
    runs = {}
    for tile in candidates(built_in, block_q):

        def run(tile: Tile = tile) -> torch.Tensor:
            out, lse = empty_out(inputs.q, inputs.v.shape[-1]), empty_lse(inputs.q)
            config = AttnFwdConfig(*tile, facts[-1])
            launch_attn_fwd(out, lse, inputs.q, inputs.k, inputs.v, spec, config)
            return out

        try:
            inputs.check()(run())
        except Exception as error:  # shared memory, registers, a wrong result: no candidate
            say(f"{problem.title}: {tile}: {told(error)}")
            continue
        runs[tile] = run
    if built_in not in runs:
        return None
    # a first look at all, then a fair race of the best four with the built-in one
    first = time_all({str(t): r for t, r in runs.items()}, device, budget_s=0.5, rounds=(3, 10))
    best = sorted(runs, key=lambda tile: first[str(tile)].median)[:4]
    final = {tile: runs[tile] for tile in dict.fromkeys([built_in, *best])}
    times = time_all({str(t): r for t, r in final.items()}, device, budget_s=1.0, rounds=(9, 50))
    winner = min(final, key=lambda tile: times[str(tile)].median)
    gain = times[str(built_in)].median / times[str(winner)].median
    say(f"{problem.title}: best {winner}, {gain:.3f}x the built-in {built_in}")
    return (key_of(facts), winner) if gain >= WORTH else None


def _attention_facts(inputs: AttentionInputs) -> tuple[tuple[Any, ...], Tile, AttnSpec]:
    """What the choice of a tile depends on, the built-in tile, and the options of a launch."""
    p = inputs.problem
    spec = AttnSpec(
        p.head_dim**-0.5,
        band_of("bsk tune", p.causal, p.window),
        inputs.mask,
        max_q=p.length,
        max_k=p.length,
    )
    problem = AttnProblem.of(inputs.q, inputs.k, inputs.v, spec)
    config = attn_fwd_config(problem, "ieee")
    block_q = p.block[0] if p.block else None
    facts = (problem.arch.sm, problem.dtype.itemsize, p.head_dim, block_q, "ieee")
    return facts, (config.tile_m, config.tile_n, config.num_warps, config.num_stages), spec
