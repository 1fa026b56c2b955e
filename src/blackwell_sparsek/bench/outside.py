"""Peers of other packages, which their entry points add to the suites of `bsk bench`.

An entry point of the group `GROUP` names a function without arguments that returns a dict from the
name of a suite to the `Peer` that joins it. docs/guides/benchmarking.md has the recipe.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..core.errors import InvalidInput
from .case import Case, Peer, Suite
from .measure import told

GROUP = "blackwell_sparsek.bench_peers"


def with_outside_peers(
    suites: Mapping[str, Suite], entries: Iterable[EntryPoint] | None = None
) -> dict[str, Suite]:
    """The suites with the peers of all installed packages, or of `entries`.

    A package whose entry point cannot be used is refused rather than left out: a comparison from
    which a peer is missing would pass for a complete one.
    """
    found = dict(suites)
    for entry in entry_points(group=GROUP) if entries is None else entries:
        for name, peer in _peers_of(entry, suites):
            if peer.name in found[name].peers:
                raise InvalidInput(f"{_who(entry)}: the suite {name} has a peer {peer.name!r}")
            found[name] = _joined(found[name], peer)
    return found


def _who(entry: EntryPoint) -> str:
    package = f" of {entry.dist.name}" if entry.dist is not None else ""
    return f"bsk bench: entry point {entry.name!r}{package} ({entry.value})"


def _peers_of(entry: EntryPoint, suites: Mapping[str, Suite]) -> Iterator[tuple[str, Peer]]:
    try:
        given: Any = entry.load()()
    except Exception as error:  # anything may go wrong in the code of others
        raise InvalidInput(
            f"{_who(entry)} fails: {told(error)}; fix or uninstall its package"
        ) from error
    if not isinstance(given, Mapping):
        raise InvalidInput(
            f"{_who(entry)}: expected a dict from suites to peers, got {type(given).__name__}"
        )
    for name, peer in given.items():
        if name not in suites:
            raise InvalidInput(
                f"{_who(entry)}: unknown suite {name!r}; choose from {', '.join(suites)}"
            )
        if not isinstance(peer, Peer):
            raise InvalidInput(
                f"{_who(entry)}: expected a Peer for {name}, got {type(peer).__name__}"
            )
        yield name, peer


def _joined(suite: Suite, peer: Peer) -> Suite:
    peers = suite.peers | {peer.name: peer}
    return replace(suite, peers=peers, cases=partial(_cases_with, suite, peer.name))


def _cases_with(suite: Suite, name: str, tiny: bool) -> list[Case]:
    # last, because a peer that crashes the process must not take the others with it
    return [replace(case, peers=(*case.peers, name)) for case in suite.cases(tiny)]
