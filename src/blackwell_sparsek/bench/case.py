"""Cases and peers: what is measured, and who takes part.

A case builds its inputs on a device; a peer turns them into a `Contender`, or says why it cannot.
Nothing here knows what is computed: matrix products, attention and anything later share it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .timing import Run

# eager: single calls between pauses; graph: inside a CUDA graph, where launches cost nothing;
# sustained: back-to-back calls, at the power limit; host: time on the host until a call returns;
# reported: `run` measures itself and returns seconds, as what needs a fresh process must.
EAGER, GRAPH, SUSTAINED, HOST, REPORTED = MODES = "eager", "graph", "sustained", "host", "reported"


def _yes(*_: Any) -> str | None:
    return None


class Contender(NamedTuple):
    """One peer on one case, ready to be checked and timed."""

    run: Run
    check: Callable[[Any], None]
    """Raises AssertionError when a result of `run` is wrong."""
    flops: float = 0.0
    """Executed work of one run; 0 where it is not counted."""
    replicas: tuple[Run, ...] = ()
    """The same work on other memory, more than caches hold; empty where one run outgrows them."""
    notes: dict[str, Any] | None = None
    """What belongs in the results beside times, such as the implementation that ran."""
    moved_bytes: float = 0.0
    """Bytes that one run must read and write; 0 where memory is not what bounds it."""


@dataclass(frozen=True)
class Peer:
    """Someone who computes cases. `prepare` may raise; the reason then stands in the results."""

    name: str
    label: str
    prepare: Callable[[Any], Contender]
    available: Callable[[], str | None] = _yes
    """Why it cannot be used on this machine, or None."""
    supports: Callable[[Any], str | None] = _yes
    """Why it does not take part on these inputs, or None."""
    rival: bool = False
    """Whether it is someone else's computation of the same work, to be compared with ours."""


@dataclass(frozen=True)
class Case:
    """One problem, as it stands in the results, and how to build its inputs."""

    name: str
    problem: dict[str, Any]
    build: Callable[[torch.device], Any]
    peers: tuple[str, ...]
    """In the order of their turns; those that may take the process down with them come last."""
    dense_flops: float = 0.0
    """Work of the same problem without sparsity; 0 where work is not counted."""
    modes: tuple[str, ...] = (EAGER,)


@dataclass(frozen=True)
class Suite:
    """Cases that are measured and shown together; `cases(tiny)` for a GPU, or to run anywhere."""

    name: str
    about: str
    cases: Callable[[bool], Any]
    peers: dict[str, Peer]
    ours: str = "bsk"
    dense: str = ""
    """The peer that does the same without sparsity."""
    unit: str = "tflops"
    """What tables show of a time: tflops, us, ms or us_per_head."""
    gpu_only: bool = False
    finish: Callable[[dict[str, Any]], None] = lambda document: None
    """Adds to the document what follows from all cases together."""
