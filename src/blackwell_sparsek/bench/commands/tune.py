"""`bsk tune`: search for the fastest tile of a kernel on this GPU among those that are correct."""

import argparse
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from ...attention.triton.tuning import AttnFwdConfig, attn_fwd_config
from ...calls.attention import AttentionCall, AttnSpec, empty_lse, empty_out
from ...calls.matmul import MatmulCall, PatternTensors
from ...core.errors import Unsupported
from ...core.progress import Progress
from ...dispatch.tuned import Tile, file_name, key_of, write_tiles
from ...masks.band import band_of
from ...matmul.triton.tuning import spmm_config, spmm_config_of, spmm_facts
from ..measure import told
from ..suites.attention_problem import Attention, AttentionInputs
from ..suites.matmul import Product
from ..timing import time_interleaved

# A tile must be this much faster than the built-in one to be recorded.
WORTH = 1.02
PROBLEMS = (
    Attention(1, 16, 8192, 128, causal=True),
    Attention(1, 32, 8192, 64, causal=True),
    Attention(1, 16, 8192, 128, block=(128, 128), density=0.25),
    Attention(1, 16, 8192, 128, block=(64, 64), density=0.25),
)
PRODUCTS = tuple(Product(4096, 4096, 4096, (side, side), 0.25) for side in (128, 64, 32, 16))
Say = Callable[[str], None]


def candidates(built_in: Tile, block_q: int | None) -> Iterator[Tile]:
    """The built-in tile, then its neighbours; none is taller than a mask's query block."""
    yield built_in
    for m in (64, 128):
        for n in (32, 64, 128):
            for warps in (4, 8):
                for stages in (2, 3, 4):
                    tile = (m, n, warps, stages)
                    if tile != built_in and (block_q is None or m <= block_q):
                        yield tile


def product_candidates(built_in: Tile) -> Iterator[Tile]:
    """Columns, steps, warps and stages of a product, the built-in ones first."""
    yield built_in
    for n, k, warps, stages in itertools.product((64, 128, 256), (32, 64), (4, 8), (3, 4, 5)):
        if (n, k, warps, stages) != built_in:
            yield n, k, warps, stages


def tune_attention(
    problem: Attention,
    device: torch.device,
    say: Say,
    time_all: Callable[..., Any] = time_interleaved,
) -> tuple[str, Tile] | None:
    """The key and the best tile of a problem, or None if the built-in one is best."""
    from ...attention.triton.forward import launch_attn_fwd

    inputs = problem.build(device)
    facts, built_in, call = _attention_facts(inputs)

    def run(tile: Tile) -> torch.Tensor:
        out, lse = empty_out(inputs.q, inputs.v.shape[-1]), empty_lse(inputs.q)
        config = AttnFwdConfig(*tile, facts[-1])
        launch_attn_fwd(call, out, lse, config)
        return out

    tiles = candidates(built_in, problem.block[0] if problem.block else None)
    winner = _fastest(_title(problem), tiles, run, inputs.check(), device, say, time_all)
    return None if winner is None else (key_of(facts), winner)


def tune_product(
    product: Product,
    device: torch.device,
    say: Say,
    time_all: Callable[..., Any] = time_interleaved,
) -> tuple[str, Tile] | None:
    """The key and the best tile of a product, or None if the built-in one is best."""
    from ...matmul.plan import spmm_plan
    from ...matmul.rows import rows_product
    from ...matmul.triton.spmm import launch_spmm

    inputs = product.build(device)
    sparse = inputs.sparse
    pattern = PatternTensors(*sparse.pattern.tensors())
    call = MatmulCall(sparse.storage, pattern, sparse.pattern.shape, False, inputs.x, False)
    made = rows_product(call)
    built_in = spmm_config(made.problem, "ieee")
    first = (built_in.tile_n, built_in.tile_k, built_in.num_warps, built_in.num_stages)

    def run(tile: Tile) -> torch.Tensor:
        config = spmm_config_of(made.problem, "ieee", tile)
        rows = made.rows
        plan = spmm_plan(rows.indptr, rows.blocks.shape[0], rows.cols_b, config.chunk)
        (views,) = made.parts
        launch_spmm(views, rows, None, None, plan, config)
        return made.out

    tiles = product_candidates(first)
    winner = _fastest(_title(product), tiles, run, inputs.check(), device, say, time_all)
    return None if winner is None else (key_of(spmm_facts(made.problem, "ieee")), winner)


def _title(problem: Attention | Product) -> str:
    if isinstance(problem, Attention):
        return problem.title
    block = f"{problem.block[0]}x{problem.block[1]}"
    return f"{problem.rows}^3, blocks {block} at {problem.density:.0%}"


def _fastest(
    title: str,
    tiles: Iterable[Tile],
    run: Callable[[Tile], torch.Tensor],
    check: Callable[[torch.Tensor], None],
    device: torch.device,
    say: Say,
    time_all: Callable[..., Any],
) -> Tile | None:
    """The fastest tile with a correct result, or None if the first is as good."""
    built_in, runs = None, {}
    for tile in tiles:
        built_in = built_in or tile
        try:
            check(run(tile))
        except Exception as error:  # too much shared memory, too many registers, a wrong result
            say(f"{title}: {tile}: {told(error)}")
            continue
        runs[tile] = partial(run, tile)
    if built_in is None or built_in not in runs:
        return None
    # a short timing of all, then a longer one of the best four and the built-in tile
    first = time_all({str(t): r for t, r in runs.items()}, device, budget_s=0.5, rounds=(3, 10))
    best = sorted(runs, key=lambda tile: first[str(tile)].median)[:4]
    final = {tile: runs[tile] for tile in dict.fromkeys([built_in, *best])}
    times = time_all({str(t): r for t, r in final.items()}, device, budget_s=1.0, rounds=(9, 50))
    winner = min(final, key=lambda tile: times[str(tile)].median)
    gain = times[str(built_in)].median / times[str(winner)].median
    say(f"{title}: best {winner}, {gain:.3f}x the built-in {built_in}")
    return winner if gain >= WORTH else None


def _attention_facts(inputs: AttentionInputs) -> tuple[tuple[Any, ...], Tile, AttentionCall]:
    """The facts that select a tile, the built-in tile, and the call to launch."""
    p = inputs.problem
    spec = AttnSpec(
        p.head_dim**-0.5,
        band_of("bsk tune", p.causal, p.window),
        inputs.mask,
        max_q=p.length,
        max_k=p.length,
    )
    call = AttentionCall(inputs.q, inputs.k, inputs.v, spec)
    problem = call.problem
    config = attn_fwd_config(problem, "ieee")
    block_q = p.block[0] if p.block else None
    facts = (problem.arch.sm, problem.dtype.itemsize, p.head_dim, block_q, "ieee")
    return facts, (config.tile_m, config.tile_n, config.num_warps, config.num_stages), call


def run(args: argparse.Namespace) -> int:
    """Search all problems and record the tiles that beat the built-in ones."""
    if not torch.cuda.is_available():
        raise Unsupported("bsk tune: needs a CUDA GPU; there is none here")
    # a folder that cannot be written to is known now, and not after the search
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / ".probe").touch()
    (args.out / ".probe").unlink()
    found = {}
    total = len(PROBLEMS) + len(PRODUCTS)
    with torch.no_grad(), Progress("bsk tune", total) as progress:
        problems: list[Attention | Product] = [*PROBLEMS, *PRODUCTS]
        for index, problem in enumerate(problems):
            kernel = "attn_fwd" if isinstance(problem, Attention) else "bsr_spmm"
            progress.stage(index, f"{kernel}: building the candidates of {_title(problem)}")
            say = partial(progress.done, index)
            if isinstance(problem, Attention):
                better = tune_attention(problem, torch.device("cuda"), say)
            else:
                better = tune_product(problem, torch.device("cuda"), say)
            if better is not None:
                found[kernel, better[0]] = better[1]
    if not found:
        print("The built-in tiles are the fastest: nothing written.")
        return 0
    name = torch.cuda.get_device_name()
    path = args.out / file_name(name)
    write_tiles(path, name, found)
    print(f"Wrote {len(found)} tiles to {path}; BSK_CONFIG_DIR={args.out} makes use of them.")
    return 0
