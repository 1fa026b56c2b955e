"""The choice of an operator's implementation, with the reason against each of the others.

Every operator owns one `Dispatcher`. An implementation registers a `supports` predicate (None, or
the reason why not) and a `run` function. `auto` takes the first, in the order of registration, that
supports the problem and has no reason to be passed over; an explicit name never falls back.
`explain` and a call go through the implementations in the same way.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

import torch

from ..core.checks import check_choice
from ..core.compat import why_no_launcher
from ..core.env import IMPLS, default_impl
from ..core.errors import Unsupported
from ..core.torch_state import explaining, is_explaining
from .model_report import ModelReport, report


class Candidate(NamedTuple):
    """One implementation of one operator."""

    name: str
    supports: Callable[[Any], str | None]
    run: Callable[..., Any] | str
    auto_passes: Callable[[Any], str | None]


def every_problem(problem: Any) -> str | None:
    """No reason against any problem: for implementations without limits."""
    return None


def only_asked(problem: Any) -> str | None:
    """Why `auto` passes over an implementation that serves to check the others."""
    return "only runs when asked for"


def interpreted_only(problem: Any) -> str | None:
    """Why `auto` passes over Triton's kernels where they would be interpreted, or None."""
    return "would be interpreted: only runs when asked for" if problem.arch.interpreted else None


@dataclass(frozen=True)
class Decision:
    """The implementation that was chosen for a problem, and the reason against each of the others.

    `note` says why the chosen one takes longer than it could, or is None.
    """

    op: str
    asked: str
    chosen: str | None
    problem: Any
    reasons: dict[str, str] = field(default_factory=dict)
    note: str | None = None

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.chosen or 'nothing'} (impl={self.asked!r})"]
        lines.append(f"  problem: {self.problem}")
        lines += [] if self.note is None else [f"  note: {self.note}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join(lines)


class Explained(Exception):
    """Carries the decision of an operator out of a call that must not compute."""

    def __init__(self, decision: Decision):
        super().__init__(str(decision))
        self.decision = decision


class Dispatcher:
    """The implementations of one operator."""

    def __init__(self, op: str):
        self.op = op
        self.candidates: dict[str, Candidate] = {}

    def register(
        self,
        name: str,
        supports: Callable[[Any], str | None],
        run: Callable[..., Any] | str,
        *,
        auto_passes: Callable[[Any], str | None] = every_problem,
    ) -> None:
        """Add an implementation; `auto` asks them in the order of these calls.

        `run` is a function of the call, or "package.module:function" where the module must not be
        imported before it is needed, such as one with kernels. `auto_passes` says why `auto` passes
        over the implementation for a problem that it supports, or None.
        """
        self.candidates[name] = Candidate(name, supports, run, auto_passes)

    def run(self, impl: str, call: Any) -> Any:
        """Run the chosen implementation of `call`, or raise `Unsupported` with the reasons."""
        return self._function(impl, call.problem)(call)

    def decide(self, impl: str, problem: Any) -> Decision:
        """Choose an implementation for `problem`, with the reason against each of the others."""
        check_choice(self.op, "impl", impl, IMPLS)
        asked = default_impl() if impl == "auto" else impl
        reasons = {
            name: f"{self.op} has no {name} implementation"
            for name in IMPLS[1:]
            if name not in self.candidates
        }
        chosen = None
        for candidate, reason in self._verdicts(asked, problem):
            if reason is None:
                chosen = candidate.name
            else:
                reasons[candidate.name] = reason
        return Decision(self.op, asked, chosen, problem, reasons, _slow_launches(chosen, problem))

    def choose(self, impl: str, problem: Any) -> Candidate | None:
        """The implementation that `decide` chooses, without asking those after it."""
        asked = default_impl() if impl == "auto" else impl
        for candidate, reason in self._verdicts(asked, problem):
            if reason is None:
                return candidate
        return None

    def own_or_auto(self, impl: str) -> str:
        """`impl`, or `auto` where this operator has no such implementation."""
        return impl if impl in self.candidates else "auto"

    def _verdicts(self, asked: str, problem: Any) -> Iterator[tuple[Candidate, str | None]]:
        """Each implementation and why it does not run; None for the one that does."""
        chosen = None
        for candidate in self.candidates.values():
            reason = candidate.supports(problem)
            if reason is None and asked == "auto":
                reason = candidate.auto_passes(problem)
            elif reason is None and asked != candidate.name:
                reason = f"impl={asked!r} was asked for"
            if reason is None and chosen is not None:
                reason = f"{chosen} comes first"
            elif reason is None:
                chosen = candidate.name
            yield candidate, reason

    def _function(self, impl: str, problem: Any) -> Callable[..., Any]:
        """The chosen implementation; one that was registered by name is imported at first use."""
        candidate = None if is_explaining() else self.choose(impl, problem)
        if candidate is None:
            decision = self.decide(impl, problem)
            if is_explaining():
                raise Explained(decision)
            raise Unsupported(f"{self.op}: {_why_nothing_runs(decision)}")
        run = candidate.run
        if isinstance(run, str):
            module, _, name = run.partition(":")
            if module.startswith("blackwell_sparsek."):
                # the package has another name where the Hugging Face hub imports it
                module = __name__.partition(".")[0] + module.removeprefix("blackwell_sparsek")
            run = getattr(importlib.import_module(module), name)
            self.candidates[candidate.name] = candidate._replace(run=run)
        return run


def how_launched() -> str:
    """Who launches compiled kernels with this Triton, and why, if it is not the CUDA driver."""
    reason = why_no_launcher()
    if reason is None:
        return "by the CUDA driver"
    return f"by Triton's front end, about 300 us of host time a call instead of 20 to 30: {reason}"


def _slow_launches(chosen: str | None, problem: Any) -> str | None:
    """A note if kernels of the chosen implementation are launched by Triton's front end."""
    launches = chosen in ("sm90", "triton") and why_no_launcher() is not None
    return f"launched {how_launched()}" if launches and not problem.arch.interpreted else None


def _why_nothing_runs(decision: Decision) -> str:
    why = "; ".join(f"{name}: {reason}" for name, reason in decision.reasons.items())
    if decision.asked != "auto":
        why = decision.reasons[decision.asked]
    return f"impl={decision.asked!r} cannot run this: {why}"


# a module is callable too; without arguments it is the model that is meant
@overload
def explain(fn: torch.nn.Module) -> ModelReport: ...  # type: ignore[overload-overlap]
@overload
def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Decision: ...
def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Decision | ModelReport:
    """Show which implementation `fn(*args, **kwargs)` would run and why, without running it.

    For a model alone, without arguments, show which of its layers are sparse, what fraction of
    their blocks is stored, what would run for one token and for 4096, and which attention they use,
    if it comes from `bsk.integrations.huggingface.register` or from `bsk.nn`. `bsk.sparsity_report`
    counts blocks, parameters and bytes of every layer.

    Parameters
    ----------
    fn : a public function of this package, such as `bsk.matmul` or `bsk.attention`; or a module
    *args, **kwargs : what it would be called with; they are validated as in a real call

    Returns
    -------
    Decision
        `.chosen`, `.reasons` (one per implementation that was not chosen), `.problem`, `.note`
        (None, or why the chosen one takes longer than it could); prints as a short table.
    ModelReport
        For a model alone: `.layers`, `.dense_layers`, `.attention`, `.choosing`; prints as a table.

    Raises
    ------
    InvalidInput
        If the call itself would be refused.
    Unsupported
        If `fn` is no function of this package.

    Examples
    --------
    >>> import torch, blackwell_sparsek as bsk
    >>> q = torch.randn(1, 2, 16, 8)
    >>> bsk.explain(bsk.attention, q, q, q, causal=True).chosen
    'eager'
    >>> print(bsk.explain(torch.nn.Sequential(bsk.nn.BSRLinear(64, 64, 16, sparsity=0.5))))
    0  64 x 64 in 16 x 16  8/16 blocks  density 0.500  1 token: eager  4096 tokens: eager
    1 block-sparse layer, density 0.500; 0 dense linear layers
    """
    if isinstance(fn, torch.nn.Module) and not args and not kwargs:
        return report(fn, explain)
    with explaining():
        try:
            fn(*args, **kwargs)
        except Explained as stop:
            return stop.decision
    raise Unsupported(f"explain: {getattr(fn, '__name__', fn)!r} reached no bsk operator")
