"""Cases and peers: what is measured, and which libraries are compared.

A case builds its inputs on a device; a peer turns them into a `Contender`, or says why it cannot.
Nothing here depends on what is computed: matrix products, attention and anything later share it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .arguments import MODES
from .timing import Run

EAGER, GRAPH, SUSTAINED, HOST, REPORTED = MODES


def _yes(*_: Any) -> str | None:
    return None


class Contender(NamedTuple):
    """One peer on one case, ready to be checked and timed."""

    run: Run
    check: Callable[[Any], None]
    """Raises AssertionError when a result of `run` is wrong."""
    flops: float = 0.0
    """FLOPs that one run executes; 0 if they are not counted."""
    replicas: tuple[Run, ...] = ()
    """The same work on copies that outgrow the caches; empty if one run outgrows them alone."""
    notes: dict[str, Any] | None = None
    """Recorded in the results beside the times, such as the implementation that ran."""
    moved_bytes: float = 0.0
    """Bytes that one run must read and write; 0 if it is not memory-bound."""


@dataclass(frozen=True)
class Peer:
    """A library that computes cases. If `prepare` raises, the results record the reason."""

    name: str
    label: str
    prepare: Callable[[Any], Contender]
    available: Callable[[], str | None] = _yes
    """The reason why the peer cannot be used on this machine, or None."""
    supports: Callable[[Any], str | None] = _yes
    """The reason why the peer does not run on these inputs, or None."""
    rival: bool = False
    """Whether it is another library doing the same work, to be compared with ours."""


@dataclass(frozen=True)
class Case:
    """One problem, as the results record it, and how to build its inputs."""

    name: str
    problem: dict[str, Any]
    build: Callable[[torch.device], Any]
    peers: tuple[str, ...]
    """In the order in which they run; peers that may crash the process come last."""
    dense_flops: float = 0.0
    """FLOPs of the same problem without sparsity; 0 if they are not counted."""
    modes: tuple[str, ...] = (EAGER,)


@dataclass(frozen=True)
class Suite:
    """Cases that are measured and shown together; `cases(tiny)` yields small ones for a CPU."""

    name: str
    about: str
    cases: Callable[[bool], Any]
    peers: dict[str, Peer]
    ours: str = "bsk"
    dense: str = ""
    """The peer that solves the same problem without sparsity."""
    unit: str = "tflops"
    """The unit in which tables show times: tflops, us, ms or us_per_head."""
    gpu_only: bool = False
    finish: Callable[[dict[str, Any]], None] = lambda document: None
    """Adds to the document the results that need all cases, such as crossovers."""
