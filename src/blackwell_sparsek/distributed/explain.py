"""The report of `bsk.explain` on a call over several ranks."""

from dataclasses import dataclass, field

from ..dispatch.dispatcher import Decision
from .traffic import Traffic


@dataclass(frozen=True)
class MethodDecision(Decision):
    """What `bsk.explain(bsk.distributed.attention, ...)` returns: a method, and what it costs.

    `chosen`, `asked` and `reasons` are about methods, `problem` is the plan in words. `traffic` is
    what each rank sends in the forward and the backward pass, `imbalance` the work of the busiest
    rank over the mean, both under this call's own mask. `local` is the choice of a kernel for the
    first keys that this rank computes; None if it computes none, or if heads are exchanged first.
    """

    traffic: Traffic = field(default_factory=lambda: Traffic((), ()))
    imbalance: float = 1.0
    local: Decision | None = None

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.chosen} (method={self.asked!r})", f"  plan: {self.problem}"]
        lines.append(f"  imbalance: {self.imbalance:.3f}")
        for name, sent in zip(Traffic._fields, self.traffic, strict=True):
            total, most = sum(sent), max(sent)
            lines.append(f"  {name}: {total:,} bytes sent, {most:,} by the busiest rank")
        lines += [f"  not {name}: {reason}" for name, reason in self.reasons.items()]
        if self.local is not None:
            lines += [f"  on this rank {line}" for line in str(self.local).splitlines()[:1]]
        return "\n".join(lines)
