"""Block-sparse products against torch; `tiny` ones run anywhere, for tests and a first look.

In CUDA graphs, narrow products rotate through copies of the weight that together outgrow the L2
cache.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from ..case import EAGER, GRAPH, SUSTAINED, Case, Suite
from ..peers.matmul import CUSPARSE, DENSE, OURS, PACKED, PEERS, STORED, TORCH, TUNED
from ..problems.product import Product

BLOCKS = ((128, 128), (128, 64), (128, 32), (128, 16), (64, 64), (32, 32), (16, 16))
# (features out, features in); gate and up, and q, k and v, are one weight each
LLAMA = {
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate_up": (28672, 4096),
    "8B down": (4096, 14336),
    "70B qkv": (10240, 8192),
    "70B o": (8192, 8192),
    "70B gate_up": (57344, 8192),
    "70B down": (8192, 28672),
}
NARROW = 64
FOUNDING_DENSITY = 0.22
OTHER_DENSITIES = (0.5, 0.3, 0.1, 0.05)
# single calls, and calls at the limits of clocks and power
BOTH = (EAGER, SUSTAINED)

_Any = TypeVar("_Any")


def _dtype(tiny: bool) -> torch.dtype:
    """Torch multiplies float16 on a CPU so slowly that nothing could be compared with it."""
    return torch.float32 if tiny else torch.float16


def _cube(size: int, block: tuple[int, int], density: float, tiny: bool) -> Product:
    return Product(size, size, size, block, density, _dtype(tiny))


def _case(
    product: Product,
    name: str,
    peers: tuple[str, ...] = (OURS, DENSE),
    modes: tuple[str, ...] = (EAGER,),
) -> Case:
    sparsity = f"{1 - product.density:.0%} sparse"
    block = f"{product.block[0]}x{product.block[1]}"
    return Case(
        f"{name}, blocks {block}, {sparsity}",
        product.describe(),
        partial(product.build, replicated=GRAPH in modes),
        peers,
        product.dense_flops,
        modes,
    )


def founding(tiny: bool = False) -> Iterator[Case]:
    """8192 x 8192 x 8192 in float16, 78 % sparse, random: every block shape and every peer."""
    size = 256 if tiny else 8192
    peers = (OURS, DENSE, PACKED, TORCH, TUNED)
    for block in BLOCKS:
        more = (CUSPARSE,) if block == (128, 128) else ()
        product = _cube(size, block, FOUNDING_DENSITY, tiny)
        yield _case(product, f"{size}^3", (*peers, *more), BOTH)
    full = _cube(size, (128, 128), 1.0, tiny)
    yield _case(full, f"{size}^3", (OURS, STORED, DENSE), BOTH)


def square(tiny: bool = False) -> Iterator[Case]:
    """Square products of 4096 to 32768: every block shape at five densities."""
    sizes = (512,) if tiny else (4096, 8192, 16384, 32768)
    # the largest last: its dense product alone takes 95 ms
    for size, density in _founding_first(sizes):
        for block in BLOCKS:
            yield _case(_cube(size, block, density, tiny), f"{size}^3")


def layers(tiny: bool = False) -> Iterator[Case]:
    """Two layers of Llama 3, x @ W.T, for 16 and 1024 tokens: every block shape, five densities."""
    some = [(name, n) for name in ("8B gate_up", "70B down") for n in (16, 1024)]
    for (name, n), density in _founding_first(some):
        for block in BLOCKS:
            yield _layer(name, n, block, density, tiny)


def _founding_first(problems: Sequence[_Any]) -> list[tuple[_Any, float]]:
    """All problems at the density of the founding table, then one by one at the others."""
    first = [(problem, FOUNDING_DENSITY) for problem in problems]
    return first + [(problem, density) for problem in problems for density in OTHER_DENSITIES]


def llama(tiny: bool = False) -> Iterator[Case]:
    """The layers of Llama 3 8B and 70B, x @ W.T, for 1 to 8192 tokens at 78 %."""
    yield from _layers(LLAMA, (1, 16, 128, 1024, 8192), ((128, 128), (64, 64)), tiny)


def decode(tiny: bool = False) -> Iterator[Case]:
    """The layers of Llama 3 8B for few tokens, eager and in CUDA graphs."""
    names = [name for name in LLAMA if name.startswith("8B")]
    yield from _layers(names, (1, 4, 16, 64), ((128, 128), (64, 64)), tiny)


def _layers(
    names: Iterable[str], tokens: tuple[int, ...], blocks: tuple[tuple[int, int], ...], tiny: bool
) -> Iterator[Case]:
    for name, n, block in itertools.product(names, tokens, blocks):
        yield _layer(name, n, block, FOUNDING_DENSITY, tiny)


def _layer(name: str, n: int, block: tuple[int, int], density: float, tiny: bool) -> Case:
    shrink = 16 if tiny else 1
    rows, inner = (size // shrink for size in LLAMA[name])
    product = Product(rows, inner, n, block, density, _dtype(tiny), linear=True)
    # narrow products are bound by launches and memory
    modes = (EAGER, GRAPH) if n <= NARROW else (EAGER,)
    return _case(product, f"{name}, {n} tokens", modes=modes)


def crossover(tiny: bool = False) -> Iterator[Case]:
    """Stored blocks against the dense product over the density, to find where they meet."""
    size = 512 if tiny else 8192
    for block in BLOCKS:
        for density in (0.1, 0.3, 0.5, 0.7, 0.9):
            product = _cube(size, block, density, tiny)
            yield _case(product, f"{size}^3", (STORED, OURS, DENSE))


def crossings(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each block shape, the density at which stored blocks and the dense product meet."""
    curves: dict[tuple[int, ...], list[tuple[float, float]]] = {}
    for case in cases:
        medians = {
            name: entry["times"][EAGER]["quantiles_s"]["p50"]
            for name, entry in case["peers"].items()
            if "times" in entry
        }
        if STORED in medians and DENSE in medians:
            curve = curves.setdefault(tuple(case["problem"]["block"]), [])
            curve.append((case["problem"]["density"], medians[DENSE] / medians[STORED]))
    return [
        {"block": list(block), "density": meeting_point(curve), "speedups": sorted(curve)}
        for block, curve in curves.items()
    ]


def meeting_point(curve: Sequence[tuple[float, float]]) -> float | None:
    """Where a falling speedup passes 1, between (density, speedup) points; None if it does not.

    Examples
    --------
    >>> meeting_point([(0.2, 2.0), (0.4, 0.5)])
    0.2667
    """
    points = sorted(curve)
    for (left, high), (right, low) in itertools.pairwise(points):
        if high >= 1 > low:
            # time grows with density: interpolate its inverse, the ratio of times
            share = (1 - 1 / high) / (1 / low - 1 / high)
            return round(left + share * (right - left), 4)
    return None


def _add_crossings(document: dict[str, Any]) -> None:
    document["crossover"] = crossings(document["cases"])


def _suite(
    cases: Callable[[bool], Iterator[Case]],
    finish: Callable[[dict[str, Any]], None] = lambda document: None,
) -> Suite:
    about = (cases.__doc__ or "").splitlines()[0]
    return Suite(f"matmul_{cases.__name__}", about, cases, PEERS, OURS, DENSE, finish=finish)


SUITES = [
    *map(_suite, (founding, square, llama, layers, decode)),
    _suite(crossover, _add_crossings),
]
