"""How sparsity grows during training."""

from dataclasses import dataclass

from ..core.checks import message
from ..core.errors import InvalidInput
from .scores import check_sparsity


@dataclass(frozen=True)
class CubicSchedule:
    """Sparsity that rises fast at first and slowly at the end (Zhu and Gupta, 2017).

    `final + (initial - final) * (1 - t)**3`, where t goes from 0 at step `begin` to 1 at step
    `end`; `initial` before and `final` after. Early on there are many blocks that nobody misses;
    late ones need time to recover in between.

    Parameters
    ----------
    final : float in [0, 1]
        Sparsity from step `end` on.
    end : int
        Later than `begin`.
    begin : int
    initial : float in [0, 1], at most `final`

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
