"""What runs for a call, and why the other implementation does not; `explain`."""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from ..core.errors import InvalidInput, Unsupported
from ..core.messages import message

_explaining: ContextVar[bool] = ContextVar("explaining", default=False)


@dataclass(frozen=True)
class Decision:
    """What was chosen for a call. `reasons` says, for each other name, why it was not."""

    op: str
    chosen: str
    problem: str
    reasons: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.chosen}", f"  problem: {self.problem}"]
        return "\n".join(lines + [f"  not {name}: {why}" for name, why in self.reasons.items()])


class _Explained(Exception):
    """Carries a decision out of a call that must not compute."""

    def __init__(self, decision: Decision):
        super().__init__(str(decision))
        self.decision = decision


class Kernels(NamedTuple):
    """Kernels that may run a call, as an implementation of its own."""

    name: str
    why_not: Callable[[], str | None]
    """Why they cannot run it, or None."""
    passed_over: Callable[[], str | None] = lambda: None
    """Why "auto" does not take them where they could run it, or None."""


def choose(op: str, impl: str, problem: str, *kernels: Kernels) -> str:
    """The name of the first kernels that take a call, "jnp" if none do.

    Or the answer to `explain`, if that is who calls. `problem` describes the checked call. An
    explicit `impl` never falls back.
    """
    impls = ("auto", "jnp", *(x.name for x in kernels))
    if impl not in impls:
        raise InvalidInput(message(op, "impl", "is unknown", f"one of {', '.join(impls)}", impl))
    reasons, chosen = {}, ""
    for name, why_not, passed_over in kernels:
        if chosen:
            reasons[name] = f"comes after {chosen}"
        elif impl not in ("auto", name):
            reasons[name] = "was not asked for"
        elif (reason := why_not() or (passed_over() if impl == "auto" else None)) is None:
            chosen = name
        elif impl == "auto":
            reasons[name] = reason
        else:
            raise Unsupported(f"{op}: impl='{name}' {reason}")
    if chosen:
        reasons["jnp"] = f"comes after {chosen}"
    chosen = chosen or "jnp"
    if _explaining.get():
        raise _Explained(Decision(op, chosen, problem, reasons))
    return chosen


def platform_of(x: jax.Array) -> str:
    """Where an array lies, "cpu" or "gpu"; a traced one counts as on JAX's default backend."""
    if isinstance(x, jax.core.Tracer):
        return jax.default_backend()
    return next(iter(x.devices())).platform


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Decision:
    """Which implementation `fn(*args, **kwargs)` would run, and why not the other.

    Parameters
    ----------
    fn : a function of `blackwell_sparsek.jax`, or one that calls one, jitted or not
        Only the first call is explained; what comes before it is computed, without `jit`.
    args, kwargs : its arguments; they are checked, and nothing else is computed

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from blackwell_sparsek.jax import attention
    >>> x = jnp.zeros((1, 2, 64, 16))
    >>> explain(attention, x, x, x, causal=True).chosen
    'jnp'
    """
    token = _explaining.set(True)
    try:
        # a jitted function that ran before would not come here again
        with jax.disable_jit():
            fn(*args, **kwargs)
    except _Explained as found:
        return found.decision
    finally:
        _explaining.reset(token)
    name = getattr(fn, "__name__", repr(fn))
    expected = "a function that calls attention, attention_decode, matmul or sddmm of this package"
    raise InvalidInput(message("explain", "fn", "chose no implementation", expected, name))
