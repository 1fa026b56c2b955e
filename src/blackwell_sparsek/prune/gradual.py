"""Pruning during training: a schedule drops more and more blocks, and optimizers are updated."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from ..core.checks import check_choice, message
from ..core.errors import InvalidInput, InvalidType
from ..core.messages import quoted
from ..nn.bsr_linear import BSRLinear
from ..sparse.scores import NORMS, block_norms, check_sparsity, keep_best, kept_count

# More than anyone counts to, and few enough for a schedule to compute with.
MOST_STEPS = 2**63 - 1
# Of the values of a layer: [nnz_blocks, bh, bw].
BLOCK_DIMS = 3


def shrink_(
    layer: BSRLinear,
    sparsity: float,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    norm: str = "l2",
    per_row: bool = False,
) -> None:
    """Drop the weakest of the existing blocks of `layer`, in place.

    Parameters
    ----------
    layer : BSRLinear
        Its `values` become a new, smaller Parameter: call this before wrapping the model in
        FSDP or DDP, and outside of CUDA graphs. A compiled model compiles again.
    sparsity : float in [0, 1]
        Fraction of all blocks of the layer, not only of the existing ones, that do not exist
        afterwards. At least the current sparsity, as dropped blocks do not come back.
    optimizer : torch.optim.Optimizer, optional
        One that holds `layer.values`. The new Parameter replaces the old one in its group and keeps
        the state of each remaining block (momenta, second moments, step counts), so that training
        continues as if the dropped blocks had never existed. Without it, create a new optimizer.
        Optimizers with other copies of their parameters, such as LBFGS or
        ZeroRedundancyOptimizer, would go on training the old one and are refused.
    norm, per_row : as in `block_magnitude`

    Raises
    ------
    InvalidInput
        If the sparsity is below the current one, the layer is in fp8, its values have hooks, or the
        optimizer does not hold it or cannot follow; nothing is changed then.

    Examples
    --------
    >>> import torch
    >>> from blackwell_sparsek.nn import BSRLinear
    >>> from blackwell_sparsek.prune import shrink_
    >>> layer = BSRLinear(64, 64, (16, 16))
    >>> optimizer = torch.optim.AdamW(layer.parameters())
    >>> shrink_(layer, 0.75, optimizer=optimizer)
    >>> layer.nnz_blocks, optimizer.param_groups[0]["params"][0] is layer.values
    (4, True)
    """
    op = "shrink_"
    if not isinstance(layer, BSRLinear):
        got = type(layer).__name__
        raise InvalidType(message(op, "layer", "has a wrong type", "BSRLinear", got))
    if layer.descale is not None:
        problem, expected = "is in fp8, which is for inference", "a layer before to_fp8()"
        raise InvalidInput(message(op, "layer", problem, expected, layer.values.dtype))
    check_choice(op, "norm", norm, tuple(NORMS))
    count = kept_count(check_sparsity(op, sparsity), layer.blocks)
    if count > layer.nnz_blocks:
        expected = f"at least the present sparsity, {1 - layer.density:.4g}"
        problem = "is less than the layer has, and dropped blocks do not come back"
        raise InvalidInput(message(op, "sparsity", problem, expected, sparsity))
    old = layer.values
    if optimizer is not None:
        _check_optimizer(op, optimizer)
        _group_of(op, optimizer, old)
        _check_follows(op, optimizer, old)
    if count == layer.nnz_blocks:
        return
    pattern = layer.pattern
    at = (pattern.row_indices().long(), pattern.indices.long())
    stored = block_norms(old.detach(), norm)
    # Norms are not negative, so blocks that do not exist rank below all that do.
    scores = stored.new_full((pattern.rows_b, pattern.cols_b), -1.0).index_put(at, stored)
    entries = keep_best(op, scores, sparsity, per_row)[at]
    new = layer.keep_blocks_(entries)
    if optimizer is not None:
        _replace_parameter(optimizer, old, new, entries)


def _check_optimizer(op: str, optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        expected, got = "torch.optim.Optimizer", type(optimizer).__name__
        raise InvalidType(message(op, "optimizer", "has a wrong type", expected, got))


def _group_of(op: str, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> int:
    for i, group in enumerate(optimizer.param_groups):
        if any(p is parameter for p in group["params"]):
            return i
    expected = "an optimizer that holds the values of the layer"
    problem = "does not hold the layer"
    raise InvalidInput(message(op, "optimizer", problem, expected, type(optimizer).__name__))


def _check_follows(op: str, optimizer: torch.optim.Optimizer, values: torch.Tensor) -> None:
    """Refuse an optimizer that would not train a replacement of `values`, or not continue there."""
    if name := _other_holder(optimizer, values, optimizer.param_groups):
        problem = f"also holds the layer in {name!r}, and would go on training what it replaces"
        expected = "one that has its parameters in its groups only, or a new one after pruning"
        got = type(optimizer).__name__
        raise InvalidInput(message(op, "optimizer", problem, expected, got))
    for name, x in optimizer.state.get(values, {}).items():
        if not (_is_shared(x) or _is_per_block(x, values)):
            problem = f"has a state {name!r} that cannot be split into blocks"
            got = str(list(x.shape)) if isinstance(x, torch.Tensor) else type(x).__name__
            expected = f"state for each block, as [{values.shape[0]}, ...], or a new optimizer"
            raise InvalidInput(message(op, "optimizer", problem, expected, got))


def _other_holder(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, groups: list[dict[str, Any]]
) -> str | None:
    """The attribute in which an optimizer holds `parameter` besides in `groups`, or None."""
    own = {id(groups), id(optimizer.state)}
    for name, x in vars(optimizer).items():
        # wrappers of an optimizer, as of accelerate, share its groups
        if isinstance(x, torch.optim.Optimizer):
            if x is not optimizer and (inner := _other_holder(x, parameter, groups)):
                return f"{name}.{inner}"
        elif id(x) not in own and _contains(x, parameter):
            return name
    return None


def _contains(x: Any, tensor: torch.Tensor) -> bool:
    """Whether nested containers hold `tensor`."""
    if isinstance(x, Mapping):
        return any(_contains(y, tensor) for pair in x.items() for y in pair)
    if isinstance(x, list | tuple | set | frozenset):
        return any(_contains(y, tensor) for y in x)
    return x is tensor


def _replace_parameter(
    optimizer: torch.optim.Optimizer,
    old: torch.Tensor,
    new: nn.Parameter,
    entries: torch.Tensor,
) -> None:
    """Replace `old` by `new`; per-block state keeps only `entries`."""
    for group in optimizer.param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]
    if old not in optimizer.state:
        return
    state = optimizer.state.pop(old)
    optimizer.state[new] = {
        name: x[entries.to(x.device)] if _is_per_block(x, old) else x for name, x in state.items()
    }


def _is_per_block(x: object, values: torch.Tensor) -> bool:
    """Whether an item of state has an entry for each block, as momenta and factors of them do."""
    if not isinstance(x, torch.Tensor) or x.dim() == 0 or x.shape[0] != values.shape[0]:
        return False
    # factored moments keep some of the dimensions of a block
    dims = iter(values.shape[1:])
    return all(size in dims for size in x.shape[1:] if size != 1)


def _is_shared(x: object) -> bool:
    """Whether an item of state belongs to all blocks alike, as step counts do."""
    if isinstance(x, torch.Tensor):
        return x.numel() == 1 or (x.dim() == BLOCK_DIMS and x.shape[0] == 1)
    return not isinstance(x, Mapping | list | tuple)


class GradualPruner:
    """Raise the sparsity of the block-sparse layers of a model while it trains.

    Call `step()` after each optimizer step. Each layer gets the sparsity of the schedule; a
    layer that is already sparser stays as it is.

    Parameters
    ----------
    model : torch.nn.Module
        Its `BSRLinear` layers are pruned (`sparsify_(model, block_shape, 0.0)` makes them from
        dense ones without dropping anything).
    schedule : callable, step -> sparsity
        Such as `CubicSchedule`.
    optimizer : torch.optim.Optimizer, optional
        As in `shrink_`.
    every : int
        Prune only at every `every`-th step: each change allocates new parameters and makes a
        compiled model compile again.
    norm, per_row : as in `block_magnitude`

    Raises
    ------
    InvalidInput
        If `every`, `norm` or the schedule is wrong, or a loaded state is malformed; in a step that
        prunes, if the model has no `BSRLinear`, or several that share their values.

    Examples
    --------
    >>> import torch
    >>> from blackwell_sparsek.nn import BSRLinear
    >>> from blackwell_sparsek.prune import CubicSchedule, GradualPruner
    >>> model = torch.nn.Sequential(BSRLinear(64, 64, (16, 16)))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> pruner = GradualPruner(model, CubicSchedule(0.5, end=4), optimizer=optimizer)
    >>> blocks = []
    >>> for _ in range(5):
    ...     model(torch.randn(2, 64)).square().sum().backward()
    ...     optimizer.step()
    ...     _ = pruner.step()
    ...     blocks.append(model[0].nnz_blocks)
    >>> blocks
    [11, 9, 8, 8, 8]
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: Callable[[int], float],
        *,
        optimizer: torch.optim.Optimizer | None = None,
        every: int = 1,
        norm: str = "l2",
        per_row: bool = False,
    ):
        op = "GradualPruner"
        if not isinstance(model, nn.Module):
            expected, got = "torch.nn.Module", type(model).__name__
            raise InvalidType(message(op, "model", "has a wrong type", expected, got))
        if optimizer is not None:
            _check_optimizer(op, optimizer)
        if not isinstance(every, int) or every < 1:
            expected = "an integer of 1 or more"
            raise InvalidInput(message(op, "every", "is out of range", expected, every))
        if not callable(schedule):
            expected, got = "a function of the step, such as CubicSchedule", type(schedule).__name__
            raise InvalidType(message(op, "schedule", "cannot be called", expected, got))
        check_choice(op, "norm", norm, tuple(NORMS))
        self.model = model
        self.schedule = schedule
        self.optimizer = optimizer
        self.every = every
        self.norm = norm
        self.per_row = per_row
        self.steps: int = 0

    def step(self) -> float:
        """Count a step, prune if it is due, and return the sparsity that the schedule asks for."""
        self.steps += 1
        sparsity = self.schedule(self.steps)
        if self.steps % self.every == 0:
            self._prune_to(check_sparsity("GradualPruner", sparsity))
        return sparsity

    def _prune_to(self, sparsity: float) -> None:
        layers = [layer for layer in self.model.modules() if isinstance(layer, BSRLinear)]
        if not layers:
            expected = "BSRLinear layers, such as sparsify_(model, block_shape, 0.0) makes"
            got = type(self.model).__name__
            raise InvalidInput(message("GradualPruner", "model", "has no layers", expected, got))
        if len({id(layer.values) for layer in layers}) < len(layers):
            problem = "has layers that share their values, which pruning would separate"
            expected = "one BSRLinear in several places"
            got = "several with the same values"
            raise InvalidInput(message("GradualPruner", "model", problem, expected, got))
        for layer in layers:
            if kept_count(sparsity, layer.blocks) < layer.nnz_blocks:
                shrink_(
                    layer,
                    sparsity,
                    optimizer=self.optimizer,
                    norm=self.norm,
                    per_row=self.per_row,
                )

    def state_dict(self) -> dict[str, int]:
        """Return the state to save with the model and the optimizer: the number of steps."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from `state_dict()`."""
        op = "GradualPruner.load_state_dict"
        expected = "what state_dict() returned, a dict with the count of steps"
        if not isinstance(state, dict) or "steps" not in state:
            got = quoted(list(state)) if isinstance(state, dict) else type(state).__name__
            raise InvalidInput(message(op, "state", "has no steps", expected, got))
        steps = state["steps"]
        if not isinstance(steps, int) or isinstance(steps, bool):
            kind = type(steps).__name__
            raise InvalidType(message(op, "steps", "is not an int", expected, kind))
        if not 0 <= steps <= MOST_STEPS:
            expected = f"a count from 0 to {MOST_STEPS}"
            raise InvalidInput(message(op, "steps", "is out of range", expected, steps))
        self.steps = steps


@dataclass(frozen=True)
class CubicSchedule:
    """Sparsity that rises fast at first and slowly at the end (Zhu and Gupta, 2017).

    `final + (initial - final) * (1 - t)**3`, where t goes from 0 at step `begin` to 1 at step
    `end`; `initial` before and `final` after. Early on, many blocks can be dropped without harm;
    later, the model needs time to recover between drops.

    Parameters
    ----------
    final : float in [0, 1]
        Sparsity from step `end` on.
    end : int
        Later than `begin`.
    begin : int
    initial : float in [0, 1], at most `final`

    Raises
    ------
    InvalidInput
        If `initial` exceeds `final`, or `begin` is not before `end`.

    Examples
    --------
    >>> from blackwell_sparsek.prune import CubicSchedule
    >>> schedule = CubicSchedule(final=0.8, end=100)
    >>> [round(schedule(step), 3) for step in (0, 25, 50, 100, 200)]
    [0.0, 0.463, 0.7, 0.8, 0.8]
    """

    final: float
    end: int
    begin: int = 0
    initial: float = 0.0

    def __post_init__(self) -> None:
        op = "CubicSchedule"
        check_sparsity(f"{op}.final", self.final)
        check_sparsity(f"{op}.initial", self.initial)
        if self.initial > self.final:
            expected = f"at most final = {self.final}"
            raise InvalidInput(message(op, "initial", "is too large", expected, self.initial))
        if self.begin >= self.end:
            expected = f"a step before end = {self.end}"
            raise InvalidInput(message(op, "begin", "is too late", expected, self.begin))

    def __call__(self, step: int) -> float:
        """Sparsity at `step`."""
        if step <= self.begin:
            return self.initial
        if step >= self.end:
            return self.final
        progress = (step - self.begin) / (self.end - self.begin)
        return self.final + (self.initial - self.final) * (1 - progress) ** 3
