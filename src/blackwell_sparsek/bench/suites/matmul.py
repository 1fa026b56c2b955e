"""Products with block-sparse matrices: problem, peers and suites.

`tiny` suites run anywhere, for tests and a first look.
"""

import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from ... import BSRMatrix, explain, matmul
from ...testing.tolerance import assert_within_budget
from ..case import EAGER, GRAPH, SUSTAINED, Case, Contender, Peer, Suite
from ..timing import time_interleaved

# Replicas of a narrow product read at least this much before they reuse memory.
_CACHES_BYTES = 160 * 2**20
_MOST_REPLICAS = 16
_CHECKED_ROWS, _CHECKED_COLUMNS = 256, 64


@dataclass(frozen=True)
class Product:
    """`W @ x` [M, N] with a weight [M, K]; with `linear`, `x @ W.T` [N, M], as in a layer."""

    rows: int
    inner: int
    n: int
    block: tuple[int, int]
    density: float
    dtype: torch.dtype = torch.float16
    linear: bool = False

    @property
    def dense_flops(self) -> float:
        """FLOPs without sparsity."""
        return 2.0 * self.rows * self.inner * self.n

    def describe(self) -> dict[str, Any]:
        """The product as the results record it."""
        return {
            "order": "x @ W.T" if self.linear else "W @ x",
            "weight": [self.rows, self.inner],
            "n": self.n,
            "block": list(self.block),
            "density": self.density,
            "dtype": str(self.dtype).split(".")[-1],
            "pattern": "random, exact density",
        }

    def build(self, device: torch.device, *, replicated: bool = False) -> "ProductInputs":
        """Random values and a random pattern of exactly this density, the same at each call."""
        generator = torch.Generator(device).manual_seed(0)
        grid = (self.rows // self.block[0], self.inner // self.block[1])
        blocks = grid[0] * grid[1]
        keep = torch.zeros(blocks, dtype=torch.bool, device=device)
        order = torch.randperm(blocks, generator=generator, device=device)
        keep[order[: round(self.density * blocks)]] = True
        keep = keep.view(grid)
        options: Any = {"generator": generator, "device": device, "dtype": self.dtype}
        dense = torch.randn(self.rows, self.inner, **options)
        by_blocks = dense.view(grid[0], self.block[0], grid[1], self.block[1])
        by_blocks.mul_(keep[:, None, :, None])
        x = torch.randn(*((self.n, self.inner) if self.linear else (self.inner, self.n)), **options)
        return ProductInputs(self, dense, BSRMatrix.from_mask(dense, keep), x, replicated)


@dataclass(frozen=True)
class ProductInputs:
    """The tensors of a `Product`."""

    product: Product
    dense: torch.Tensor
    sparse: BSRMatrix
    x: torch.Tensor
    replicated: bool

    @property
    def stored(self) -> int:
        """The number of elements in the stored blocks."""
        return self.sparse.storage.numel()

    def replicas(self, weight: torch.Tensor) -> list[torch.Tensor]:
        """`weight` and copies that outgrow the caches; empty for a wide product."""
        if not self.replicated:
            return []
        size = max(weight.numel() * weight.element_size(), 1)
        count = max(2, min(_MOST_REPLICAS, -(-_CACHES_BYTES // size)))
        return [weight, *(weight.clone() for _ in range(count - 1))]

    def check(
        self, weight: torch.Tensor | None = None, x: torch.Tensor | None = None
    ) -> Callable[[torch.Tensor], None]:
        """Compare with fp64 on sampled rows and columns of the result."""
        weight = self.dense if weight is None else weight
        x = self.x if x is None else x
        x = x.mT if self.product.linear else x
        rows = _sample(weight.shape[0], _CHECKED_ROWS, weight.device)
        columns = _sample(x.shape[1], _CHECKED_COLUMNS, weight.device)

        def compare(out: torch.Tensor) -> None:
            out = out.mT if self.product.linear else out
            some_rows, some_columns = weight[rows], x[:, columns]
            exact = some_rows.double() @ some_columns.double()
            plain = plain_product(some_rows, some_columns, exact)
            assert_within_budget(out[rows][:, columns], exact, plain, what="sampled rows")

        return compare


def _sample(size: int, count: int, device: torch.device) -> torch.Tensor:
    """Up to `count` evenly spaced indices from first to last."""
    return torch.linspace(0, size - 1, min(size, count), device=device).round().long()


def plain_product(a: torch.Tensor, b: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The less exact of two plain products: in one call, and column by column.

    Libraries split the long sums of a large product, which makes fp32 sums more exact than the
    sums of the same terms in a smaller product.
    """
    products = [a @ b, torch.stack([a @ column for column in b.unbind(1)], 1)]
    return max(products, key=lambda product: (product.double() - exact).abs().max().item())


OURS, STORED = "bsk", "bsk_stored"
DENSE, PACKED = "dense", "dense_packed_k"
TORCH, TUNED, CUSPARSE = "torch_bsr", "torch_bsr_tuned", "cusparse_csr"

# Time limit of the search for torch's best parameters; the best found by then is used.
_SEARCH_S = 4.0


def _ours(inputs: ProductInputs, impl: str = "auto") -> Contender:
    linear, sparse, x = inputs.product.linear, inputs.sparse, inputs.x

    def product(w: BSRMatrix) -> torch.Tensor:
        return matmul(x, w.T, impl=impl) if linear else matmul(w, x, impl=impl)

    decision = explain(product, sparse)
    elements = inputs.dense.numel() if decision.chosen == "dense" else inputs.stored
    return Contender(
        lambda: product(sparse),
        inputs.check(),
        2.0 * elements * inputs.product.n,
        tuple(
            partial(product, BSRMatrix._from_parts(sparse.pattern, s))
            for s in inputs.replicas(sparse.storage)
        ),
        {"implementation": decision.chosen, "why_not": decision.reasons},
    )


def _stored(inputs: ProductInputs) -> Contender:
    """The first implementation that works on stored blocks, even if `auto` takes another."""
    sparse, x = inputs.sparse, inputs.x
    for impl in ("sm90", "triton") if x.is_cuda else ():
        pair = (x, sparse.T) if inputs.product.linear else (sparse, x)
        if explain(matmul, *pair, impl=impl).chosen == impl:
            return _ours(inputs, impl)
    return _ours(inputs, "eager")


def _dense(inputs: ProductInputs) -> Contender:
    return _dense_product(inputs, inputs.dense, inputs.x)


def _packed(inputs: ProductInputs) -> Contender:
    """A dense product with the same FLOPs: the time of the stored blocks without gaps."""
    width = round(inputs.product.inner * inputs.sparse.density)
    # cuBLAS has slower kernels for rows that are not aligned to 16 bytes
    width = round(width / 64) * 64 if width >= 64 else width
    weight = inputs.dense.new_empty(inputs.product.rows, width).normal_()
    x = inputs.x[:, :width] if inputs.product.linear else inputs.x[:width]
    return _dense_product(inputs, weight, x.contiguous())


def _dense_product(inputs: ProductInputs, weight: torch.Tensor, x: torch.Tensor) -> Contender:
    def product(w: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, w.mT) if inputs.product.linear else torch.matmul(w, x)

    return Contender(
        lambda: product(weight),
        inputs.check(weight, x),
        2.0 * weight.numel() * inputs.product.n,
        tuple(partial(product, w) for w in inputs.replicas(weight)),
    )


def _torch_bsr(inputs: ProductInputs) -> Contender:
    bsr = _quietly(inputs.sparse.to_torch)
    flops = 2.0 * inputs.stored * inputs.product.n
    return Contender(lambda: _quietly(lambda: bsr @ inputs.x), inputs.check(), flops)


def _torch_bsr_tuned(inputs: ProductInputs) -> Contender:
    """torch's kernel with the best of a few parameters; `bsr @ x` has no table for most GPUs."""
    from torch.sparse._triton_ops import bsr_dense_addmm

    bsr, x = _quietly(inputs.sparse.to_torch), inputs.x
    out = x.new_empty(inputs.product.rows, inputs.product.n)

    def product(meta: dict[str, int]) -> torch.Tensor:
        result: torch.Tensor = bsr_dense_addmm(out, bsr, x, beta=0, meta=meta, out=out)
        return result

    best, meta = _fastest(product, _torch_metas(inputs.product.n), x.device)
    if best is None:
        raise RuntimeError("none of the parameters runs")
    flops = 2.0 * inputs.stored * inputs.product.n
    return Contender(lambda: product(meta), inputs.check(), flops, notes={"meta": meta})


def _torch_metas(n: int) -> list[dict[str, int]]:
    """Parameters, the likely best first: panels of 128 or 256 columns, three to five stages."""
    shapes = [
        (128, 3, 4),
        (256, 3, 8),
        (128, 4, 8),
        (64, 4, 4),
        (256, 4, 4),
        (64, 5, 4),
        (32, 4, 2),
    ]
    return [
        {"SPLIT_N": n // width, "num_stages": stages, "num_warps": warps, "GROUP_SIZE_ROW": 4}
        for width, stages, warps in shapes
        if n % width == 0
    ]


def _fastest(
    product: Callable[[dict[str, int]], torch.Tensor],
    metas: list[dict[str, int]],
    device: torch.device,
) -> tuple[float | None, dict[str, int]]:
    deadline = time.monotonic() + _SEARCH_S
    best, chosen = None, {}
    for meta in metas:
        if time.monotonic() > deadline and best is not None:
            break
        try:
            run = partial(product, meta)
            times = time_interleaved({"it": run}, device, budget_s=0.02, rounds=(3, 9))
        except Exception:  # such as too much shared memory: other parameters may work
            continue
        if best is None or times["it"].median < best:
            best, chosen = times["it"].median, meta
    return best, chosen


def _cusparse(inputs: ProductInputs) -> Contender:
    csr = _quietly(inputs.dense.to_sparse_csr)
    flops = 2.0 * inputs.stored * inputs.product.n
    return Contender(lambda: csr @ inputs.x, inputs.check(), flops)


def _quietly(make: Callable[[], Any]) -> Any:
    """Run without torch's repeated warnings about beta state and missing tables."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def _as_layer(inputs: ProductInputs) -> str | None:
    return "only measured as W @ x" if inputs.product.linear else None


def _square_blocks(inputs: ProductInputs) -> str | None:
    height, width = inputs.product.block
    if (reason := _as_layer(inputs)) is not None or height != width:
        return reason or "takes square blocks only"
    has_mkl: Callable[[], bool] = torch.backends.mkl.is_available
    return None if inputs.x.is_cuda or has_mkl() else "needs a torch with MKL on a CPU"


def _needs_gpu(inputs: ProductInputs) -> str | None:
    return _as_layer(inputs) or (None if inputs.x.is_cuda else "needs a CUDA GPU")


PEERS = {
    peer.name: peer
    for peer in (
        Peer(OURS, "blackwell_sparsek, impl auto", _ours),
        Peer(STORED, "blackwell_sparsek, stored blocks", _stored),
        Peer(DENSE, "torch.matmul (cuBLAS on a GPU)", _dense),
        Peer(PACKED, "torch.matmul with K = density * K: a ceiling", _packed),
        Peer(
            TORCH,
            "torch.sparse_bsr @ dense",
            _torch_bsr,
            supports=_square_blocks,
            rival=True,
        ),
        Peer(
            TUNED,
            "torch bsr_dense_addmm, tuned",
            _torch_bsr_tuned,
            supports=_needs_gpu,
            rival=True,
        ),
        Peer(
            CUSPARSE,
            "torch CSR @ dense (cuSPARSE)",
            _cusparse,
            supports=_needs_gpu,
            rival=True,
        ),
    )
}


# In CUDA graphs, narrow products rotate through copies of the weight that together outgrow the L2.

BLOCKS = ((128, 128), (128, 64), (128, 32), (128, 16), (64, 64), (32, 32), (16, 16))
# (features out, features in); gate and up are fused into one weight, as are q, k and v
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
# single calls, and sustained calls at the limits of clocks and power
BOTH = (EAGER, SUSTAINED)

_Any = TypeVar("_Any")


def _dtype(tiny: bool) -> torch.dtype:
    """fp32 on a CPU, where torch multiplies float16 too slowly for a comparison."""
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
    # the largest comes last, because its dense product alone takes 95 ms
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
    """All problems at the density of the founding table, then each at the other densities."""
    first = [(problem, FOUNDING_DENSITY) for problem in problems]
    return first + [(problem, density) for problem in problems for density in OTHER_DENSITIES]


def llama(tiny: bool = False) -> Iterator[Case]:
    """The layers of Llama 3 8B and 70B, x @ W.T, for 1 to 8192 tokens, 78 % sparse."""
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
    # narrow products are bound by launches and memory, so CUDA graphs are timed too
    modes = (EAGER, GRAPH) if n <= NARROW else (EAGER,)
    return _case(product, f"{name}, {n} tokens", modes=modes)


def crossover(tiny: bool = False) -> Iterator[Case]:
    """Block-sparse against dense products by density, to find the crossover."""
    size = 512 if tiny else 8192
    for block in BLOCKS:
        for density in (0.1, 0.3, 0.5, 0.7, 0.9):
            product = _cube(size, block, density, tiny)
            yield _case(product, f"{size}^3", (STORED, OURS, DENSE))


def crossings(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each block shape, the density at which the dense product becomes faster."""
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
    """The density at which a falling speedup crosses 1, interpolated between points, or None.

    Examples
    --------
    >>> meeting_point([(0.2, 2.0), (0.4, 0.5)])
    0.2667
    """
    points = sorted(curve)
    for (left, high), (right, low) in itertools.pairwise(points):
        if high >= 1 > low:
            # time grows with density, so interpolate the ratio of times, the inverse speedup
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
