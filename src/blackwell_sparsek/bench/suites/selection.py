"""Choosing keys by scores, and SparseK: problems, peers, suites."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ... import explain, select_keys, sparsek
from ...masks.key_selection import KeySelection
from ...reference import sparsek as formula
from ...testing.tolerance import assert_within_budget
from ..case import EAGER, GRAPH, Case, Contender, Peer, Suite
from .attention import dtype_of
from .attention_peers import OURS

TOPK, SORT = "torch_topk", "torch_sort"
# Queries, or rows, whose results are compared with fp64.
_CHECKED = 6
# Queries whose scores the peer holds at a time.
_CHUNK = 1024


@dataclass(frozen=True)
class Index:
    """`heads` index heads, added up in one list with weights and ReLU, or a list each."""

    name: str
    heads: int
    dim: int
    q_len: int
    kv_len: int
    granularity: int
    top_k: int
    weighted: bool
    dtype: torch.dtype = torch.bfloat16

    def describe(self) -> dict[str, Any]:
        """The problem as the results record it."""
        return {
            "heads": self.heads,
            "head_dim": self.dim,
            "q_len": self.q_len,
            "kv_len": self.kv_len,
            "granularity": self.granularity,
            "top_k": self.top_k,
            "weighted": self.weighted,
            "dtype": str(self.dtype).split(".")[-1],
        }

    @property
    def flops(self) -> float:
        """FLOPs of the scores of all keys that queries see."""
        seen = self.q_len * (self.kv_len - self.q_len) + self.q_len * (self.q_len + 1) / 2
        return 2.0 * self.heads * self.dim * seen

    def build(self, device: torch.device) -> "IndexInputs":
        """Random values, the same at each call."""
        generator = torch.Generator(device).manual_seed(0)

        def values(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).to(self.dtype)

        q = values(1, self.heads, self.q_len, self.dim)
        k = values(1, 1 if self.weighted else self.heads, self.kv_len, self.dim)
        weights = values(1, self.heads, self.q_len) if self.weighted else None
        return IndexInputs(self, q, k, weights)


@dataclass(frozen=True)
class IndexInputs:
    """Index queries, index keys, weights of heads."""

    problem: Index
    q: torch.Tensor
    k: torch.Tensor
    weights: torch.Tensor | None

    def options(self) -> dict[str, Any]:
        """Options of `select_keys`."""
        problem = self.problem
        found: dict[str, Any] = {"granularity": problem.granularity, "top_k": problem.top_k}
        if problem.weighted:
            found |= {"weights": self.weights, "activation": "relu"}
        if problem.granularity > 1:
            found["pool"] = "max"
        return found

    def scores(self, own: slice, dtype: torch.dtype) -> torch.Tensor:
        """Scores [lists, queries, entries] of some queries, -inf where nothing is seen."""
        problem = self.problem
        token = torch.arange(own.start, own.stop, device=self.q.device)
        hidden = torch.arange(problem.kv_len, device=self.q.device) > (
            token[:, None] + problem.kv_len - problem.q_len
        )
        lists: list[torch.Tensor] = []
        for h in range(problem.heads):
            k = self.k[0, h % self.k.shape[1]].to(dtype)
            own_scores = self.q[0, h, own].to(dtype) @ k.mT
            if self.weights is not None:
                own_scores = own_scores.relu_().mul_(self.weights[0, h, own, None].to(dtype))
                if lists:
                    lists[0] += own_scores
                    continue
            lists.append(own_scores)
        made = torch.stack(lists).masked_fill_(hidden, -torch.inf)
        fill = -problem.kv_len % problem.granularity
        made = torch.nn.functional.pad(made, (0, fill), value=-torch.inf)
        return made.view(*made.shape[:-1], -1, problem.granularity).amax(-1)

    def check(self, chosen: KeySelection, rounding: torch.dtype) -> None:
        """No entry was passed over whose score is above a chosen one's by more than rounding."""
        problem = self.problem
        for token in torch.linspace(0, problem.q_len - 1, _CHECKED).long().tolist():
            scores = self.scores(slice(token, token + 1), torch.float64)[:, 0]
            for row, ids, count in zip(
                scores, chosen.ids[0, :, token].long(), chosen.counts[0, :, token], strict=True
            ):
                taken = ids[: int(count)]
                assert int(count) == min(problem.top_k, int((row > -torch.inf).sum()))
                assert (taken[1:] > taken[:-1]).all(), f"query {token}: ids do not ascend"
                rest = row.clone()
                rest[taken] = -torch.inf
                size = row[row > -torch.inf].abs().max()
                slack = 4 * problem.heads * torch.finfo(rounding).eps * size
                assert row[taken].min() >= rest.max() - slack, f"query {token}: a score was missed"


def _ours(inputs: IndexInputs) -> Contender:
    options = inputs.options()
    decision = explain(select_keys, inputs.q, inputs.k, **options)
    notes = {"implementation": decision.chosen, "why_not": decision.reasons}
    return Contender(
        lambda: select_keys(inputs.q, inputs.k, **options),
        lambda chosen: inputs.check(chosen, torch.float32),
        inputs.problem.flops,
        notes=notes,
    )


def _topk(inputs: IndexInputs) -> Contender:
    """Scores of a chunk of queries as a matrix, then `torch.topk` and a sort by number."""
    problem = inputs.problem

    def run() -> KeySelection:
        found = []
        for start in range(0, problem.q_len, _CHUNK):
            own = slice(start, min(start + _CHUNK, problem.q_len))
            scores = inputs.scores(own, inputs.q.dtype)
            best = scores.topk(min(problem.top_k, scores.shape[-1]), -1)
            found.append(torch.where(best.values == -torch.inf, -1, best.indices))
        ids = torch.cat(found, 1)[None]
        return KeySelection.from_indices(
            ids, granularity=problem.granularity, kv_len=problem.kv_len, check=False
        )

    return Contender(run, lambda chosen: inputs.check(chosen, inputs.q.dtype), problem.flops)


INDEX_PEERS = {
    OURS: Peer(OURS, "blackwell_sparsek, impl auto", _ours),
    TOPK: Peer(TOPK, "products of torch, torch.topk", _topk, rival=True),
}


def selection(tiny: bool = False) -> Iterator[Case]:
    """Selecting each query's highest-scoring entries: DSA's indexer, and pooled scores."""
    if tiny:
        yield _index_case(Index("3 weighted heads", 3, 8, 40, 70, 1, 6, True, dtype_of(tiny)))
        yield _index_case(Index("blocks of 16", 2, 8, 40, 70, 16, 2, False, dtype_of(tiny)))
        return
    yield _index_case(Index("DSA 64 x 128, 2048 of 32k keys", 64, 128, 2048, 32768, 1, 2048, True))
    yield _index_case(
        Index("DSA 64 x 128, 2048 of 128k keys", 64, 128, 8192, 131072, 1, 2048, True)
    )
    yield _index_case(
        Index("MSA 4 x 128, 16 blocks of 128, 32k", 4, 128, 32768, 32768, 128, 16, False)
    )


def _index_case(problem: Index) -> Case:
    peers = tuple(INDEX_PEERS)
    return Case(problem.name, problem.describe(), problem.build, peers, problem.flops)


@dataclass(frozen=True)
class Rows:
    """Rows of scores, each with weights that add up to k."""

    rows: int
    size: int
    k: float
    dtype: torch.dtype = torch.float32

    def describe(self) -> dict[str, Any]:
        """The problem as the results record it."""
        dtype = str(self.dtype).split(".")[-1]
        return {"rows": self.rows, "size": self.size, "k": self.k, "dtype": dtype}

    def build(self, device: torch.device) -> "RowInputs":
        """Random values, the same at each call."""
        generator = torch.Generator(device).manual_seed(0)
        z = torch.randn(self.rows, self.size, generator=generator, device=device)
        return RowInputs(self, z.to(self.dtype))


@dataclass(frozen=True)
class RowInputs:
    """Scores [rows, size]."""

    problem: Rows
    z: torch.Tensor

    def check(self, p: torch.Tensor) -> None:
        """Compare some rows with fp64."""
        rows = torch.linspace(0, self.problem.rows - 1, _CHECKED).long().to(self.z.device)
        z = self.z[rows]
        k = torch.tensor(self.problem.k, dtype=torch.float64, device=z.device)
        exact, plain = (
            formula.sparsek(z, k, precision=dtype)[0] for dtype in (torch.float64, torch.float32)
        )
        assert_within_budget(p[rows], exact, plain.to(p.dtype), what="weights")

    def contender(self, run: Any) -> Contender:
        """Reads and writes every element once."""
        return Contender(run, self.check, moved_bytes=2.0 * self.z.numel() * self.z.element_size())


def _our_weights(inputs: RowInputs) -> Contender:
    return inputs.contender(lambda: sparsek(inputs.z, inputs.problem.k))


def _sorted_weights(inputs: RowInputs) -> Contender:
    """Sort the numbers z and z - 1, between which the sum of the weights is linear in tau."""
    z, k = inputs.z, inputs.problem.k

    def run() -> torch.Tensor:
        values, order = torch.cat([z, z - 1], -1).sort(-1, descending=True)
        passed = torch.where(order < z.shape[-1], 1.0, -1.0).cumsum(-1)
        sums = (passed[:, :-1] * (values[:, :-1] - values[:, 1:])).cumsum(-1)
        place = (sums < k).sum(-1, keepdim=True).clamp(max=sums.shape[-1] - 1)
        over = sums.gather(-1, place) - k
        tau = values.gather(-1, place + 1) + over / passed.gather(-1, place)
        return (z - tau).clamp(0, 1)

    return inputs.contender(run)


ROW_PEERS = {
    OURS: Peer(OURS, "blackwell_sparsek, impl auto", _our_weights),
    SORT: Peer(SORT, "a sort of torch", _sorted_weights, rival=True),
}


def sparsek_suite(tiny: bool = False) -> Iterator[Case]:
    """SparseK of the rows of a matrix."""
    sizes = [Rows(6, 40, 4.5)] if tiny else [Rows(4096, 4096, 256.0), Rows(4096, 16384, 512.0)]
    for problem in sizes:
        name = f"{problem.rows} rows of {problem.size}, k = {problem.k:g}"
        peers, modes = tuple(ROW_PEERS), (EAGER, GRAPH)
        yield Case(name, problem.describe(), problem.build, peers, modes=modes)


SUITES = [
    Suite("selection", selection.__doc__ or "", selection, INDEX_PEERS, OURS, unit="ms"),
    Suite("sparsek", sparsek_suite.__doc__ or "", sparsek_suite, ROW_PEERS, OURS, unit="us"),
]
