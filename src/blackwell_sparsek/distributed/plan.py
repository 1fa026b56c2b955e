"""`Plan`: which rank owns which tiles of a sequence; `balance` makes one by kept work."""

import heapq
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import torch

from ..core.checks import check_tensor, message
from ..core.errors import InvalidInput, InvalidType
from ..core.torch_state import usable_in_training
from ..launch.launcher import cdiv
from ..masks.band import Band
from ..masks.block_mask import BlockMask
from ..masks.check import check_count
from ..masks.packed import check_cu_seqlens, check_cu_seqlens_values
from ..masks.parts import Problem, band_runs

SMALLEST_TILE = 16
"""The smallest side of a mask block; tiles consist of whole blocks."""

DEFAULT_TILE = 128
GOOD_ENOUGH = 1.02
"""An imbalance at which fewer runs of tokens, so less communication, count for more."""

_LONGEST = 2**40
"""Tokens of a sequence; positions and their products with sizes stay within int64."""

_MOST_WORK = 1e200
"""Sums over ranks stay finite."""

_FORMAT = "blackwell_sparsek.distributed.Plan/1"


@dataclass(frozen=True)
class Plan:
    """Which tiles of a sequence each rank owns: plain data, the same on every rank.

    A tile is `tile` tokens from `t * tile` on; the last may be shorter. A rank holds its tiles in
    ascending order, queries, keys and values alike, and may hold none. Made by `balance` or by
    `Plan.contiguous`.

    Parameters
    ----------
    seq_length : int
    tile : int
        A multiple of 16.
    tiles : tuple of tuples of int
        The tiles of each rank, ascending; together each tile exactly once.
    work : tuple of float
        Work of each rank in any unit, as `imbalance` reports it.

    Raises
    ------
    InvalidInput
        If tiles are missing, or owned twice.

    Examples
    --------
    >>> plan = Plan.contiguous(100, 2, tile=16)
    >>> plan.lengths
    (64, 36)
    >>> plan.positions(1)[:3]
    tensor([64, 65, 66])
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    seq_length: int
    tile: int
    tiles: tuple[tuple[int, ...], ...]
    work: tuple[float, ...] = field(default=())

    def __post_init__(self) -> None:
        op = "Plan"
        check_count(op, "seq_length", self.seq_length, at_most=_LONGEST)
        check_count(op, "tile", self.tile, at_least=SMALLEST_TILE, at_most=_LONGEST)
        if self.tile % SMALLEST_TILE:
            expected = f"a multiple of {SMALLEST_TILE}"
            raise InvalidInput(
                message(op, "tile", "does not hold whole blocks", expected, self.tile)
            )
        if not isinstance(self.tiles, (tuple, list)) or not self.tiles:
            got = type(self.tiles).__name__ if not isinstance(self.tiles, (tuple, list)) else "none"
            raise InvalidType(message(op, "tiles", "is malformed", "tiles of each rank", got))
        for rank, owned in enumerate(self.tiles):
            if not isinstance(owned, (tuple, list, range)):
                got = type(owned).__name__
                raise InvalidType(message(op, f"tiles[{rank}]", "is malformed", "ints", got))
            if not all(isinstance(t, int) and not isinstance(t, bool) for t in owned):
                raise InvalidType(message(op, f"tiles[{rank}]", "is malformed", "ints", owned))
            if any(a >= b for a, b in pairwise(owned)):
                raise InvalidInput(
                    message(op, f"tiles[{rank}]", "is not ascending", "distinct tiles", list(owned))
                )
        count = cdiv(self.seq_length, self.tile)
        listed = sorted(t for owned in self.tiles for t in owned)
        # never `count` numbers: a short file may claim a long sequence
        if len(listed) != count or any(t != place for place, t in enumerate(listed)):
            wrong = _first_wrong(listed, count)
            expected = f"each of the {count} tiles once"
            raise InvalidInput(
                message(op, "tiles", "are not a partition", expected, f"tiles at fault {wrong}")
            )
        object.__setattr__(self, "work", _floats(op, "work", self.work, "a number for each rank"))
        if not self.work:
            lengths = tuple(float(self._tokens(owned)) for owned in self.tiles)
            object.__setattr__(self, "work", lengths)
        if len(self.work) != len(self.tiles):
            expected = f"{len(self.tiles)} numbers"
            raise InvalidInput(message(op, "work", "has a wrong length", expected, len(self.work)))
        if any(not 0 <= w <= _MOST_WORK for w in self.work):
            expected = f"numbers from 0 to {_MOST_WORK}"
            raise InvalidInput(message(op, "work", "is out of range", expected, self.work))
        # equality and hashing need tuples, whatever sequences came
        object.__setattr__(self, "tiles", tuple(tuple(owned) for owned in self.tiles))

    @classmethod
    def contiguous(cls, seq_length: int, world_size: int, *, tile: int = SMALLEST_TILE) -> "Plan":
        """Each rank owns one run of tokens, as `torch.chunk` cuts a sequence into tiles.

        Examples
        --------
        >>> Plan.contiguous(40, 2).tiles
        ((0, 1), (2,))
        """
        op = "Plan.contiguous"
        check_count(op, "seq_length", seq_length)
        check_count(op, "world_size", world_size, at_least=1)
        check_count(op, "tile", tile, at_least=SMALLEST_TILE)
        count = cdiv(seq_length, tile)
        each = cdiv(count, world_size)
        bounds = [min(each * rank, count) for rank in range(world_size + 1)]
        return cls(seq_length, tile, tuple(tuple(range(*pair)) for pair in pairwise(bounds)))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.tiles)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # plans are keys in every call, and hashing thousands of tiles takes time
        return hash((self.seq_length, self.tile, self.tiles))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return tuple(self._tokens(owned) for owned in self.tiles)

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank over the mean: 1.0 is even.

        Examples
        --------
        >>> Plan(32, 16, ((0,), (1,)), (1.0, 3.0)).imbalance
        1.5
        """
        total = sum(self.work)
        return max(self.work) * len(self.work) / total if total else 1.0

    def positions(
        self,
        rank: int | None = None,
        *,
        cu_seqlens: torch.Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> torch.Tensor:
        """Positions of the tokens of a rank, int64 [tokens], for rotary embeddings.

        Parameters
        ----------
        rank : int, optional
            By default this process's rank in the default group.
        cu_seqlens : int32 [documents + 1], optional
            Count from the first token of each document.
        device : optional

        Examples
        --------
        >>> plan = Plan(48, 16, ((0, 2), (1,)))
        >>> plan.positions(0)[14:18]
        tensor([14, 15, 32, 33])
        >>> plan.positions(1, cu_seqlens=torch.tensor([0, 20, 48], dtype=torch.int32))[:6]
        tensor([16, 17, 18, 19,  0,  1])
        """
        rank = self._rank("Plan.positions", rank)
        found = _token_index(self, rank)
        if cu_seqlens is not None:
            op = "Plan.positions"
            check_cu_seqlens(op, "cu_seqlens", cu_seqlens)
            offsets = cu_seqlens.cpu()
            check_cu_seqlens_values(op, "cu_seqlens", offsets, self.seq_length)
            starts = offsets.long()
            found = found - starts[torch.searchsorted(starts, found, right=True) - 1]
        return found.to(device or "cpu", copy=True)

    def shard(self, x: torch.Tensor, dim: int = 1, *, rank: int | None = None) -> torch.Tensor:
        """The part of `x` that belongs to a rank, cut along `dim`; differentiable.

        Parameters
        ----------
        x : Tensor with `seq_length` elements along `dim`
        dim : int
            1 for ids [B, S] and hidden states [B, S, E], 2 for q, k, v [B, H, S, D].
        rank : int, optional
            By default this process's rank in the default group.

        Examples
        --------
        >>> Plan.contiguous(32, 2).shard(torch.arange(32)[None], rank=1)[0, :3]
        tensor([16, 17, 18])
        """
        op = "Plan.shard"
        check_tensor(op, "x", x)
        rank = self._rank(op, rank)
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != self.seq_length:
            expected = f"{self.seq_length} elements along dimension {dim}"
            raise InvalidInput(message(op, "x", "has a wrong shape", expected, list(x.shape)))
        return x.index_select(dim, _token_index(self, rank).to(x.device))

    def join(self, shards: Sequence[torch.Tensor], dim: int = 1) -> torch.Tensor:
        """The whole tensor from the shards of all ranks, in this process; see `unshard`.

        Examples
        --------
        >>> plan = Plan(48, 16, ((0, 2), (1,)))
        >>> x = torch.randn(2, 48)
        >>> torch.equal(plan.join([plan.shard(x, rank=0), plan.shard(x, rank=1)]), x)
        True
        """
        op = "Plan.join"
        if len(shards) != self.world_size:
            raise InvalidInput(
                message(op, "shards", "has a wrong length", self.world_size, len(shards))
            )
        for rank, (x, length) in enumerate(zip(shards, self.lengths, strict=True)):
            check_tensor(op, f"shards[{rank}]", x)
            if not -x.dim() <= dim < x.dim() or x.shape[dim] != length:
                expected = f"{length} elements along dimension {dim}"
                raise InvalidInput(
                    message(op, f"shards[{rank}]", "has a wrong shape", expected, list(x.shape))
                )
        whole = torch.cat(list(shards), dim)
        return whole.index_select(dim, self.join_index().to(whole.device))

    def unshard(
        self, x: torch.Tensor, dim: int = 1, *, mesh: Any = None, group: Any = None
    ) -> torch.Tensor:
        """The whole tensor on every rank; a collective, the inverse of `shard`; differentiable.

        The gradient of a rank's part is the sum of what all ranks send back for it.

        Parameters
        ----------
        x : Tensor
            This rank's part, with `lengths[rank]` elements along `dim`.
        dim : int
        mesh : DeviceMesh of one dimension, optional
        group : ProcessGroup, optional
            By default the default group.
        """
        from .collectives import gather_parts
        from .group import members_of

        op = "Plan.unshard"
        check_tensor(op, "x", x)
        members = members_of(op, mesh, group)
        self.check_world(op, members.size)
        length = self.lengths[members.rank]
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != length:
            expected = f"{length} elements along dimension {dim}"
            raise InvalidInput(message(op, "x", "has a wrong shape", expected, list(x.shape)))
        return self.join(gather_parts(x, dim % x.dim(), self.lengths, members), dim)

    def join_index(self) -> torch.Tensor:
        """Where each token is after the shards of all ranks, int64 [seq_length]."""
        order = torch.cat([_token_index(self, rank) for rank in range(self.world_size)])
        return torch.argsort(order)

    def blocks(self, rank: int, block: int) -> torch.Tensor:
        """The blocks of `block` tokens that a rank owns, ascending, int64; they fit its tiles."""
        per_tile = self.tile // block
        tiles = torch.tensor(self.tiles[rank], dtype=torch.int64, device="cpu")
        count = cdiv(self.seq_length, block)
        # the only tile of a sequence may be far longer than it
        found = (
            tiles[:, None] * per_tile + torch.arange(min(per_tile, count), device="cpu")
        ).flatten()
        return found[found < count]

    def check_world(self, op: str, size: int) -> None:
        """Raise unless this plan is for `size` ranks."""
        if size != self.world_size:
            raise InvalidInput(message(op, "plan", "is for another world", self.world_size, size))

    def to_json(self) -> str:
        """This plan as text; `from_json` reads and checks it."""
        state = {"format": _FORMAT, "seq_length": self.seq_length, "tile": self.tile}
        return json.dumps({**state, "tiles": self.tiles, "work": self.work})

    @classmethod
    def from_json(cls, text: str | bytes) -> "Plan":
        """The plan that `to_json` wrote; anything else is refused."""
        op = "Plan.from_json"
        try:
            state = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInput(message(op, "text", "is not JSON", "a saved plan", error)) from None
        names = {"format", "seq_length", "tile", "tiles", "work"}
        if not isinstance(state, dict) or set(state) != names or state["format"] != _FORMAT:
            got = sorted(state) if isinstance(state, dict) else type(state).__name__
            raise InvalidInput(message(op, "text", "is not a plan", f"the keys of {_FORMAT}", got))
        tiles, work = state["tiles"], state["work"]
        if not isinstance(tiles, list) or not all(isinstance(owned, list) for owned in tiles):
            raise InvalidInput(message(op, "tiles", "is malformed", "lists of ints", tiles))
        if not isinstance(work, list) or not all(isinstance(w, (int, float)) for w in work):
            raise InvalidInput(message(op, "work", "is malformed", "numbers", work))
        return cls(state["seq_length"], state["tile"], tuple(map(tuple, tiles)), tuple(work))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write this plan to a file, as JSON."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Read and check a plan that `save` wrote; a missing file is an `OSError`, as usual."""
        with open(path, "rb") as file:
            # bytes: what is not UTF-8 is refused as what is not JSON
            return cls.from_json(file.read())

    def _tokens(self, owned: Iterable[int]) -> int:
        return sum(min(self.tile, self.seq_length - t * self.tile) for t in owned)

    def _rank(self, op: str, rank: int | None) -> int:
        if rank is None:
            if not torch.distributed.is_available() or not torch.distributed.is_initialized():
                expected = "a rank, or torch.distributed.init_process_group() before this call"
                raise InvalidInput(message(op, "rank", "is unknown", expected, None))
            rank = torch.distributed.get_rank()
            self.check_world(op, torch.distributed.get_world_size())
        check_count(op, "rank", rank)
        if rank >= self.world_size:
            raise InvalidInput(
                message(op, "rank", "is out of range", f"0 to {self.world_size - 1}", rank)
            )
        return rank


@lru_cache(maxsize=64)
@usable_in_training
def _token_index(plan: Plan, rank: int) -> torch.Tensor:
    """Positions of the tokens of a rank, int64; not to be written to."""
    starts = torch.tensor(plan.tiles[rank], dtype=torch.int64, device="cpu") * plan.tile
    # the only tile of a sequence may be far longer than it
    found = (
        starts[:, None] + torch.arange(min(plan.tile, plan.seq_length), device="cpu")
    ).flatten()
    return found[found < plan.seq_length]


def _first_wrong(listed: list[int], count: int) -> list[int]:
    """The first tiles that sorted `listed` repeats, lacks, or that are none of `count`."""
    wrong = {a for a, b in pairwise(listed) if a == b}
    wrong |= {t for t in listed if not 0 <= t < count}
    present = {*listed}
    # one of the first len(listed) + 8 is among them, if any is
    wrong |= {t for t in range(min(count, len(listed) + 8)) if t not in present}
    return sorted(wrong)[:8]


def balance(
    mask: BlockMask | Band | Sequence[BlockMask | Band],
    world_size: int,
    *,
    seq_length: int | None = None,
    tile: int | None = None,
    weights: Sequence[float] | None = None,
) -> Plan:
    """Assign the tiles of a sequence to ranks, with the same work and tokens for each.

    Work is the number of kept blocks of the queries of a tile, over batch and heads. Each rank gets
    the same number of tiles, plus or minus one, because the layers between attention cost the same
    for every token. Contiguous runs, zigzag and longest first are tried, with ever shorter runs;
    the first plan with an imbalance of at most 1.02 is taken, else the most even. Longer runs
    fetch fewer keys.

    Waits for the device of a mask.

    Parameters
    ----------
    mask : BlockMask, Band or a sequence of these
        What the layers of a model use; `Band(None, 0)` is causal, `Band(1023, 0)` a causal window
        of 1024. Sq must equal Sk. For documents use `bsk.masks.documents`.
    world_size : int
    seq_length : int, optional
        Needed if there are only bands.
    tile : int, optional
        Tokens that stay together, a multiple of every block side; by default the largest of these,
        or 128 for bands.
    weights : sequence of float, optional
        How often each mask is used, such as the number of layers; by default 1 each.

    Returns
    -------
    Plan

    Raises
    ------
    InvalidInput
        If lengths, tile or weights do not fit the masks.

    Examples
    --------
    >>> plan = balance(Band(None, 0), 4, seq_length=4096)
    >>> plan.imbalance, plan.tiles[0]
    (1.0, (0, 1, 2, 3, 28, 29, 30, 31))
    """
    op = "balance"
    masks = [mask] if isinstance(mask, (BlockMask, Band)) else mask
    if not isinstance(masks, (list, tuple)) or not masks:
        got = type(mask).__name__
        raise InvalidType(message(op, "mask", "is not a mask", "BlockMask, Band or several", got))
    check_count(op, "world_size", world_size, at_least=1)
    length, tile = _sizes(op, masks, seq_length, tile)
    factors = _weights(op, weights, len(masks))
    work = torch.zeros(cdiv(length, tile), dtype=torch.float64, device="cpu")
    for one, factor in zip(masks, factors, strict=True):
        work += factor * tile_work(one, length, tile)
    costs: list[float] = work.tolist()
    best: Plan | None = None
    for owned in _assignments(costs, world_size):
        loads = tuple(sum(costs[t] for t in tiles) for tiles in owned)
        plan = Plan(length, tile, tuple(tuple(sorted(tiles)) for tiles in owned), loads)
        if best is None or plan.imbalance < best.imbalance:
            best = plan
        if plan.imbalance <= GOOD_ENOUGH:
            return plan
    assert best is not None
    return best


def tile_work(mask: BlockMask | Band, seq_length: int, tile: int) -> torch.Tensor:
    """Kept blocks of 16 x 16 elements in each tile of queries, float64 [tiles], on the CPU."""
    tiles = cdiv(seq_length, tile)
    work = torch.zeros(tiles, dtype=torch.float64, device="cpu")
    if isinstance(mask, Band):
        p = Problem((seq_length, seq_length), (SMALLEST_TILE, SMALLEST_TILE))
        runs = band_runs(mask, p)
        counts, block = (runs.end - runs.start).double(), p.block
        q_blocks = torch.arange(p.grid()[0], device="cpu")
    else:
        lists, block = mask.forward, mask.block_size
        counts = (lists.indptr[1:] - lists.indptr[:-1]).cpu().double()
        q_blocks = torch.arange(counts.numel(), device="cpu") % max(mask.grid[0], 1)
    area = (block[0] // SMALLEST_TILE) * (block[1] // SMALLEST_TILE)
    return work.index_add_(0, q_blocks * block[0] // tile, counts * area)


def _sizes(
    op: str, masks: Sequence[Any], seq_length: int | None, tile: int | None
) -> tuple[int, int]:
    sides = [SMALLEST_TILE]
    for one in masks:
        if isinstance(one, Band):
            continue
        if not isinstance(one, BlockMask):
            got = type(one).__name__
            raise InvalidType(message(op, "mask", "is not a mask", "BlockMask or Band", got))
        sq, sk = one.seq_lengths
        if sq != sk or seq_length not in (None, sq):
            expected = "Sq = Sk" if seq_length is None else f"Sq = Sk = {seq_length}"
            raise InvalidInput(message(op, "mask", "has wrong sizes", expected, (sq, sk)))
        seq_length = sq
        sides += one.block_size
    if seq_length is None:
        expected = "the tokens of a sequence, since a band has no length"
        raise InvalidInput(message(op, "seq_length", "is missing", expected, None))
    check_count(op, "seq_length", seq_length)
    if tile is None:
        tile = DEFAULT_TILE if len(sides) == 1 else max(sides)
    check_count(op, "tile", tile, at_least=SMALLEST_TILE)
    if tile % max(sides):
        expected = f"a multiple of {max(sides)}"
        raise InvalidInput(message(op, "tile", "does not hold whole blocks", expected, tile))
    return seq_length, tile


def _weights(op: str, weights: Any, count: int) -> list[float]:
    if weights is None:
        return [1.0] * count
    expected = f"{count} finite numbers >= 0"
    found = [*_floats(op, "weights", weights, expected)]
    if len(found) != count or any(not w >= 0 or w == float("inf") for w in found):
        raise InvalidInput(message(op, "weights", "do not fit", expected, found))
    return found


def _floats(op: str, arg: str, given: Any, expected: str) -> tuple[float, ...]:
    try:
        return tuple(float(x) for x in given)
    except (TypeError, ValueError, OverflowError):
        raise InvalidType(message(op, arg, "is malformed", expected, given)) from None


def _assignments(costs: Sequence[float], ranks: int) -> Iterator[list[list[int]]]:
    """Tiles of each rank in several ways, from few runs of tiles per rank to many."""
    yield _contiguous(costs, ranks)
    yield _zigzag(costs, ranks)
    for runs in (2, 4, 8, 16, 32):
        length, rest = divmod(len(costs), ranks * runs)
        if rest == 0 and length > 1:
            ends = range(0, len(costs) + 1, length)
            work = [sum(costs[start:end]) for start, end in pairwise(ends)]
            owned = _longest_first(work, ranks)
            yield [[t for run in mine for t in range(ends[run], ends[run + 1])] for mine in owned]
    yield _longest_first(costs, ranks)


def _contiguous(costs: Sequence[float], ranks: int) -> list[list[int]]:
    bounds = [len(costs) * rank // ranks for rank in range(ranks + 1)]
    return [list(range(*pair)) for pair in pairwise(bounds)]


def _zigzag(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """A run from the front and the one as far from the back; as many tiles as `_contiguous`."""
    sizes = [len(run) for run in _contiguous(costs, ranks)]
    front, back, owned = 0, len(costs), []
    for size in sizes:
        ahead, behind = front + size - size // 2, back - size // 2
        owned.append([*range(front, ahead), *range(behind, back)])
        front, back = ahead, behind
    return owned


def _longest_first(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """The most expensive tile next, to the rank with the least work that has room."""
    room = len(costs) // ranks
    extra = len(costs) - room * ranks
    owned: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0.0, rank) for rank in range(ranks)]
    for t in sorted(range(len(costs)), key=lambda t: (-costs[t], t)):
        load, rank = heapq.heappop(heap)
        owned[rank].append(t)
        if len(owned[rank]) == room + 1:
            extra -= 1
        if len(owned[rank]) < room + (extra > 0):
            heapq.heappush(heap, (load + costs[t], rank))
        if extra == 0:
            # no rank may have one more now
            heap = [(load, rank) for load, rank in heap if len(owned[rank]) < room]
            heapq.heapify(heap)
    _exchange(costs, owned)
    return owned


def _exchange(costs: Sequence[float], owned: list[list[int]]) -> None:
    """Swap tiles between the busiest rank and others as long as this makes its load smaller."""
    loads = [sum(costs[t] for t in tiles) for tiles in owned]
    for _ in range(8 * len(owned)):
        most = max(range(len(owned)), key=lambda rank: loads[rank])
        by_load = sorted(range(len(owned)), key=lambda rank: loads[rank])
        for least in by_load[: by_load.index(most)]:
            swap = _best_swap(costs, owned[most], owned[least], loads[most] - loads[least])
            if swap is not None:
                a, b = swap
                gain = costs[owned[most][a]] - costs[owned[least][b]]
                owned[most][a], owned[least][b] = owned[least][b], owned[most][a]
                loads[most] -= gain
                loads[least] += gain
                break
        else:
            return


def _best_swap(
    costs: Sequence[float], heavy: list[int], light: list[int], difference: float
) -> tuple[int, int] | None:
    """Entries of the two lists whose exchange brings the loads closest together."""
    if not heavy or not light:
        return None
    a = torch.tensor([costs[t] for t in heavy], dtype=torch.float64, device="cpu")
    b = torch.tensor([costs[t] for t in light], dtype=torch.float64, device="cpu")
    after = (difference - 2 * (a[:, None] - b)).abs()
    at = int(after.argmin())
    if float(after.flatten()[at]) >= difference:
        return None
    return at // len(light), at % len(light)
