"""Cases and peers: what is measured, and who takes part.

A case builds its inputs on a device; a peer turns them into a `Contender`, or says why it cannot.
Nothing here knows what is computed: matrix products, attention and anything later share it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .timing import Run


class Contender(NamedTuple):
    """One peer on one case, ready to be checked and timed."""

    run: Run
    check: Callable[[torch.Tensor], None]
    """Raises AssertionError when a result of `run` is wrong."""
    flops: float
    """Executed work of one run."""
    replicas: tuple[Run, ...] = ()
    """The same work on other memory, more than caches hold; empty where one run outgrows them."""
    notes: dict[str, Any] | None = None
    """What belongs in the results beside times, such as the implementation that ran."""


@dataclass(frozen=True)
class Peer:
    """Someone who computes cases. `prepare` may raise; the reason then stands in the results."""

    name: str
    label: str
    prepare: Callable[[Any], Contender]
    why_not: Callable[[Any], str | None] = lambda inputs: None
    """Why it does not take part on these inputs, or None."""
    is_sparse_peer: bool = False
    """Whether it is someone else's computation of the stored blocks alone."""


@dataclass(frozen=True)
class Case:
    """One problem, as it stands in the results, and how to build its inputs."""

    name: str
    problem: dict[str, Any]
    build: Callable[[torch.device], Any]
    peers: tuple[str, ...]
    dense_flops: float
    """Work of the same problem without sparsity."""
    narrow: bool = False
    """Also timed inside a CUDA graph, where launches cost nothing."""
