"""Attention over chosen keys: problem, peers, suite.

Geometries are those of released models. Every query has a list of its own; lists of neighbouring
queries share most entries in practice, and none in the worst case.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from ... import explain, sparse_attention
from ...masks.key_selection import KeySelection
from ...testing.tolerance import assert_within_budget
from ..case import Case, Contender, Peer, Suite
from .attention import dtype_of
from .attention_peers import OURS
from .chosen_peers import CHOSEN_PEERS

SDPA = "sdpa"
# Queries whose results are compared with fp64.
_CHECKED = 6


@dataclass(frozen=True)
class Chosen:
    """`entries` entries of `granularity` keys for each query and KV head; causal.

    An entry of a list stays for `kept` queries, so neighbours share 1 - 1 / kept of their lists.
    `latent` are the columns of the keys that are the values; without it, values are tensors of
    their own. Queries are those of the last tokens, all of them unless `queries` says how many.
    """

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    entries: int
    granularity: int
    length: int
    kept: int = 10
    backward: bool = False
    dtype: torch.dtype = torch.bfloat16
    latent: int = 0
    queries: int = 0

    @property
    def title(self) -> str:
        """A name for tables."""
        queries = f" {_thousands(self.queries)} of" if self.queries else ""
        lists = "independent lists" if self.kept == 1 else f"{100 - 100 // self.kept} % shared"
        what = ", forward and backward" if self.backward else ""
        return f"{self.name}{queries} S{_thousands(self.length)}, {lists}{what}"

    @property
    def first(self) -> int:
        """Position of the first query."""
        return self.length - (self.queries or self.length)

    def describe(self) -> dict[str, Any]:
        """The problem as the results record it."""
        return {
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "length": self.length,
            "entries": self.entries,
            "granularity": self.granularity,
            "kept": self.kept,
            "backward": self.backward,
            "latent": self.latent,
            "queries": self.queries or self.length,
            "dtype": str(self.dtype).split(".")[-1],
        }

    def flops(self, pairs: float) -> float:
        """FLOPs for so many pairs of a query head's query and a key."""
        columns = self.head_dim + (self.latent or self.head_dim)
        return 2.0 * pairs * columns * (3.5 if self.backward else 1.0)

    @property
    def dense_pairs(self) -> float:
        """Pairs of a query head's query and a key that it sees, chosen or not."""
        hidden = self.first * (self.first + 1)
        return self.heads * (self.length * (self.length + 1) - hidden) / 2

    @property
    def dense_flops(self) -> float:
        """FLOPs of causal attention to every key."""
        return self.flops(self.dense_pairs)

    def build(self, device: torch.device) -> "ChosenInputs":
        """Random values and lists, the same at each call."""
        generator = torch.Generator(device).manual_seed(0)

        def values(heads: int, tokens: int) -> torch.Tensor:
            shape = (1, heads, tokens, self.head_dim)
            made = torch.randn(shape, generator=generator, device=device, dtype=self.dtype)
            return made.requires_grad_(self.backward)

        queries = self.length - self.first
        q, k = values(self.heads, queries), values(self.kv_heads, self.length)
        v = k[..., : self.latent] if self.latent else values(self.kv_heads, self.length)
        dout = values(self.heads, queries)[..., : v.shape[-1]].detach()
        return ChosenInputs(self, q, k, v, dout, self._lists(generator, device))

    def _lists(self, generator: torch.Generator, device: torch.device) -> KeySelection:
        """As many entries as a query can have, drawn from those it sees, its own among them."""
        token = torch.arange(self.first, self.length, device=device)
        place = torch.arange(self.entries, device=device)
        # places of a list change at different queries, so that a list never changes as a whole
        period = (token[:, None] + place) // self.kept
        first = (period * self.kept - place).clamp(min=0)
        period = period - period.min()
        shape = (self.kv_heads, int(period.max()) + 1, self.entries)
        drawn = torch.rand(shape, generator=generator, device=device)
        at = period.expand(self.kv_heads, -1, -1)
        visible = first // self.granularity + 1
        ids = (drawn.gather(1, at) * visible).long()
        ids[..., 0] = token // self.granularity
        ids = ids.sort(-1).values
        twice = torch.zeros_like(ids, dtype=torch.bool)
        twice[..., 1:] = ids[..., 1:] == ids[..., :-1]
        ids = _fill(ids.masked_fill(twice, -1), token[:, None] // self.granularity + 1)[None]
        return KeySelection.from_indices(ids, granularity=self.granularity, kv_len=self.length)


def _fill(ids: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Replace -1 in lists [Hkv, T, K] by the lowest entries that a list does not have.

    Some peers take it for granted that a query which sees K entries has K.
    """
    width, none = 2 * ids.shape[-1], torch.iinfo(ids.dtype).max
    low = torch.arange(width, device=ids.device)
    place = ids.where((ids >= 0) & (ids < width), width)
    has = torch.zeros(*ids.shape[:-1], width + 1, dtype=torch.bool, device=ids.device)
    free = ~has.scatter_(-1, place, True)[..., :width] & (low < visible)
    missing = (ids < 0).sum(-1, keepdim=True)
    more = low.where(free & (free.cumsum(-1) <= missing), none)
    filled = torch.cat([ids.where(ids >= 0, none), more], -1).sort(-1).values
    return filled[..., : ids.shape[-1]].masked_fill(filled[..., : ids.shape[-1]] == none, -1)


def _thousands(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


@dataclass(frozen=True)
class ChosenInputs:
    """q, k and v, the gradient of the output, and the lists."""

    problem: Chosen
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    chosen: KeySelection

    def pairs(self) -> float:
        """Pairs of a query and a chosen key, hidden ones included, over all query heads."""
        group = self.problem.heads // self.problem.kv_heads
        return float(self.chosen.counts.sum()) * self.problem.granularity * group

    def check(self, result: Any, everything: bool = False) -> None:
        """Compare output and dq of some queries of the last head with fp64."""
        out, dq = result
        tokens = torch.linspace(0, self.q.shape[2] - 1, _CHECKED).long().tolist()
        (exact, exact_dq), (plain, plain_dq) = (
            map(torch.stack, zip(*(self._row(t, everything, dtype) for t in tokens), strict=True))
            for dtype in (torch.float64, self.q.dtype)
        )
        assert_within_budget(out[0, -1, tokens], exact, plain, what="output")
        if self.problem.backward:
            # the backward recomputes probabilities from a rounded lse
            assert_within_budget(
                dq[0, -1, tokens], exact_dq, plain_dq, factor=3.0, roundings=4.0, what="dq"
            )

    def _row(
        self, token: int, everything: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and dq of one query of the last head."""
        size = self.problem.granularity
        keys = torch.arange(self.problem.first + token + 1, device=self.q.device)
        if not everything:
            count = int(self.chosen.counts[0, -1, token])
            keys = keys[torch.isin(keys // size, self.chosen.ids[0, -1, token, :count])]
        q, dout = (x[0, -1, token].detach().to(dtype) for x in (self.q, self.dout))
        k, v = (x[0, -1, keys].detach().to(dtype) for x in (self.k, self.v))
        scale = self.problem.head_dim**-0.5
        p = torch.softmax(k @ q * scale, 0)
        out = p @ v
        change = p * (v @ dout - out @ dout)
        return out, change @ k * scale


def _contender(inputs: ChosenInputs, call: Any, pairs: float, **others: Any) -> Contender:
    """Time a forward pass, or a forward and a backward pass."""
    problem = inputs.problem
    leaves = (inputs.q, inputs.k, inputs.v)

    def run() -> tuple[torch.Tensor, torch.Tensor | None]:
        if not problem.backward:
            return call(*leaves), None
        with torch.enable_grad():
            out = call(*leaves)
            dq, _, _ = torch.autograd.grad(out, leaves, inputs.dout)
        return out.detach(), dq

    check = others.pop("check", inputs.check)
    return Contender(run, check, problem.flops(pairs), **others)


def _ours(inputs: ChosenInputs) -> Contender:
    decision = explain(sparse_attention, inputs.q, inputs.k, inputs.v, inputs.chosen)
    notes = {"implementation": decision.chosen, "why_not": decision.reasons}

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return sparse_attention(q, k, v, inputs.chosen)

    return _contender(inputs, call, inputs.pairs(), notes=notes)


def _dense(inputs: ChosenInputs) -> Contender:
    problem = inputs.problem

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        grouped = problem.heads != problem.kv_heads
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    whole = problem.dense_pairs
    return _contender(inputs, call, whole, check=lambda result: inputs.check(result, True))


def _why_not_dense(inputs: ChosenInputs) -> str | None:
    return "no fused kernel for latent heads" if inputs.problem.latent else None


PEERS = {
    OURS: Peer(OURS, "blackwell_sparsek, impl auto", _ours),
    SDPA: Peer(SDPA, "SDPA, every key", _dense, supports=_why_not_dense),
    **CHOSEN_PEERS,
}
MSA = Chosen("MSA 64:4 D128, 16 blocks of 128", 64, 4, 128, 16, 128, 32768)
NSA = Chosen("NSA 64:4 D128, 16 blocks of 64", 64, 4, 128, 16, 64, 65536)
QSA = Chosen("QSA 24:2 D256, 512 entries of 4", 24, 2, 256, 512, 4, 32768)
DSA = Chosen(
    "DSA 128:1 D576/512, 2048 keys", 128, 1, 576, 2048, 1, 131072, latent=512, queries=8192
)


def sparse_attention_suite(tiny: bool = False) -> Iterator[Case]:
    """Attention over the keys that each query selects, compared with dense attention."""
    if tiny:
        small = Chosen("4:2 D16, 3 blocks of 16", 4, 2, 16, 3, 16, 96, dtype=dtype_of(tiny))
        yield _case(replace(small, granularity=4, name="4:2 D16, 3 entries of 4"))
        yield _case(replace(small, kept=1))
        yield _case(replace(small, backward=True))
        yield _case(
            replace(small, name="4:1 D24/16, 5 keys", kv_heads=1, head_dim=24, latent=16,
                    entries=5, granularity=1, queries=40)
        )  # fmt: skip
        return
    for problem in (MSA, replace(MSA, length=131072), replace(MSA, kept=1), QSA, NSA):
        yield _case(problem)
    yield _case(replace(NSA, backward=True))
    for heads in (128, 64, 16, 8):
        yield _case(replace(DSA, name=DSA.name.replace("128:1", f"{heads}:1"), heads=heads))


def _case(problem: Chosen) -> Case:
    return Case(problem.title, problem.describe(), problem.build, tuple(PEERS), problem.dense_flops)


SUITES = [
    Suite(
        "sparse_attention",
        sparse_attention_suite.__doc__ or "",
        sparse_attention_suite,
        PEERS,
        OURS,
        SDPA,
        unit="ms",
    )
]
