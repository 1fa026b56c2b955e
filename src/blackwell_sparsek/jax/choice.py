"""What runs for a call, and why the kernels do not; `explain`."""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax

from ..core.errors import InvalidInput
from ..core.messages import message

# The way out: memory can be shared, so the kernels are reachable through torch.
WHY_NOT_TRITON = (
    "kernels are launched by the torch functions of this package only; outside jit, tensors made "
    "by torch.from_dlpack(array) reach them without a copy"
)
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


def note_choice(op: str, problem: str) -> None:
    """Answer `explain`, if that is who calls; `problem` describes the checked call."""
    if _explaining.get():
        raise _Explained(Decision(op, "jnp", problem, {"triton": WHY_NOT_TRITON}))


def platform_of(x: jax.Array) -> str:
    """Where an array lies, "cpu" or "gpu"; a traced one counts as on JAX's default backend."""
    if isinstance(x, jax.core.Tracer):
        return jax.default_backend()
    return next(iter(x.devices())).platform


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Decision:
    """Which implementation `fn(*args, **kwargs)` would run, and why not the kernels.

    Parameters
    ----------
    fn : a function of `blackwell_sparsek.jax`, or one that calls one; only the first is explained
    args, kwargs : its arguments; they are checked, and nothing is computed

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
        fn(*args, **kwargs)
    except _Explained as found:
        return found.decision
    finally:
        _explaining.reset(token)
    name = getattr(fn, "__name__", repr(fn))
    expected = "a function that calls attention, attention_decode, matmul or sddmm of this package"
    raise InvalidInput(message("explain", "fn", "chose no implementation", expected, name))
