"""What random calls have in common: choices from a seed, layouts, and running a call twice."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.env import triton_interpreted
from ..core.errors import Unsupported
from .inputs import normal
from .layouts import KINDS, strided_like
from .poison import poisoned_empty
from .tolerance import assert_within_budget

# Whatever makes a kernel compile again comes from this many draws for each kind of call, so that
# thousands of calls compile a few hundred kernels.
STRUCTURES = 24
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 65)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Draw:
    """The choices of one call.

    Parameters
    ----------
    kind, seed : what to draw; the same pair gives the same call on the same kind of device
    device : where its tensors lie
    """

    def __init__(self, kind: str, seed: int, device: torch.device):
        self.kind: str = kind
        self.seed: int = seed
        self.device: torch.device = device
        self.form: random.Random = random.Random(f"{kind} {seed % STRUCTURES}")
        self.rng: random.Random = random.Random(f"{kind} {seed}")
        self.notes: dict[str, Any] = {}
        self.refused: list[str] = []
        self._tensors = 0

    def note(self, **choices: Any) -> None:
        """Keep choices for the description of a failure."""
        self.notes |= choices

    def __str__(self) -> str:
        told = ", ".join(f"{name}={value}" for name, value in self.notes.items())
        return f"{self.kind} {self.seed}: {told}"

    def impl(self, names: Sequence[str] = ("auto", "auto", "triton", "sm90", "eager")) -> str:
        """An implementation; where kernels cannot run, plain PyTorch takes their place."""
        name = self.rng.choice(list(names))
        here = name != "sm90" and (name != "triton" or triton_interpreted())
        if self.device.type != "cuda" and not here:
            name = "auto"
        self.note(impl=name)
        return name

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Random numbers on the device, other ones at each call."""
        self._tensors += 1
        return normal(*shape, seed=self.seed * 64 + self._tensors, dtype=dtype, device=self.device)

    def laid_out(self, x: Tensor) -> Tensor:
        """The same values in a random layout, with NaN between them."""
        return strided_like(x, self.rng.choice(KINDS))

    def twice(self, call: Callable[[str], Any], impl: str) -> Any:
        """The results of `call(impl)`, made in poisoned memory; a second run has the same bits.

        The second run is a replay of the first where launches are recorded. If the named
        implementation refuses the call, `auto` makes it.
        """
        try:
            with poisoned_empty():
                first = call(impl)
        except Unsupported as error:
            assert impl != "auto", f"auto refused: {error}"
            assert str(error), "refused without a reason"
            self.refused.append(f"{impl}: {error}")
            return self.twice(call, "auto")
        with poisoned_empty():
            second = call(impl)
        for i, (a, b) in enumerate(zip(_tensors(first), _tensors(second), strict=True)):
            assert same_bits(a, b), f"result {i} has other bits when the call is repeated"
        return first


def assert_within_twice_the_budget(
    actual: Tensor,
    exact: Tensor,
    same_precision: Tensor,
    *,
    factor: float = 2.0,
    roundings: float = 1.0,
    what: str,
) -> None:
    """Twice the budget of a test, whose inputs are fixed.

    The budget is what plain PyTorch happens to err by. Of thousands of small calls some are lucky
    there and some unlucky here: about 1 in 500 in fp32 is over the plain budget by up to a half.
    """
    assert_within_budget(
        actual, exact, same_precision, factor=2 * factor, roundings=2 * roundings, what=what
    )


def _tensors(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit by bit; NaN equals itself, 0 is not -0."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (x.detach().contiguous().view(sizes[x.element_size()]) for x in (a, b))
    return torch.equal(a, b.to(a.device))
