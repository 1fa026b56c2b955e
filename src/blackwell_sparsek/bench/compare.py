"""Two runs of a suite, case by case: what became slower beyond the noise of both."""

import pathlib
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..core.errors import InvalidInput
from . import results
from .peer_tables import names_of_some

# Below this, nobody can tell a change from another day.
SMALLEST_CHANGE = 0.03
# Other peers in fewer than this many places say nothing about the machine.
_ENOUGH = 3


@dataclass(frozen=True)
class Change:
    """One case in one mode; `ratio` is new time over old, `noise` what both runs spread by."""

    suite: str
    case: str
    peer: str
    mode: str
    ratio: float
    noise: float
    verdict: str

    def __str__(self) -> str:
        change = f"{self.ratio - 1:+.1%} (noise {self.noise:.1%})" if self.ratio else self.verdict
        return f"{self.suite}: {self.case}: {self.peer}, {self.mode}: {change}"


@dataclass(frozen=True)
class Comparison:
    """All changes of ours, and how far everybody else moved."""

    changes: list[Change]
    drift: float
    notes: list[str]

    def of(self, verdict: str) -> list[Change]:
        """The changes with this verdict: slower, faster, same or gone."""
        return [change for change in self.changes if change.verdict == verdict]


def pairs_of(old: pathlib.Path, new: pathlib.Path) -> list[tuple[pathlib.Path, pathlib.Path]]:
    """Two files, or the files of the same name in two folders."""
    for path in (old, new):
        if not path.exists():
            raise InvalidInput(f"bsk compare: {path}: there is no such file or folder")
    if old.is_dir() != new.is_dir():
        raise InvalidInput(f"bsk compare: {old} and {new} must be two files or two folders")
    if not old.is_dir():
        return [(old, new)]
    names = [path.name for path in sorted(new.glob("*.json")) if (old / path.name).exists()]
    if not names:
        raise InvalidInput(f"bsk compare: {old} and {new} have no results file in common")
    return [(old / name, new / name) for name in names]


def compare(old: dict[str, Any], new: dict[str, Any], *, force: bool = False) -> Comparison:
    """What changed between two documents of the same suite on the same machine.

    A case is slower when its median grew by more than the spread between the quartiles of both
    runs, and by 3 % at the least, after everything that other peers grew by in the same runs: they
    did not change, so the machine did. `force` compares different machines as well.
    """
    if old["suite"] != new["suite"]:
        raise InvalidInput(f"bsk compare: suites differ: {old['suite']} and {new['suite']}")
    notes = []
    for what in ("device_name", "arch"):
        a, b = (document["environment"].get(what) for document in (old, new))
        if a != b:
            text = f"{what} differs: {a} and {b}"
            if not force:
                raise InvalidInput(f"bsk compare: {text}; --force compares them all the same")
            notes.append(text)
    versions = (document["environment"].get("versions", {}) for document in (old, new))
    before, after = versions
    for name in sorted(before.keys() & after.keys()):
        if before[name] != after[name]:
            notes.append(f"{name} {before[name]} -> {after[name]}")

    names = {case["name"] for case in new["cases"]}
    if missing := [case["name"] for case in old["cases"] if case["name"] not in names]:
        notes.append(f"not measured again: {names_of_some(missing)}")
    moved = [b / a for peer, a, b in _medians(old, new) if not _is_ours(peer)]
    drift = statistics.median(moved) if len(moved) >= _ENOUGH else 1.0
    return Comparison(list(_changes(old, new, max(drift, 1.0))), drift, notes)


def _is_ours(peer: str) -> bool:
    return peer.split("_")[0] == "bsk"


def _medians(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
    for _, peer, _, a, b in _timed(old, new):
        yield peer, a["p50"], b["p50"]


def _timed(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """(case, peer, mode, old quantiles, new quantiles) of what both have timed."""
    later = {case["name"]: case for case in new["cases"]}
    for case in old["cases"]:
        for peer, entry in case["peers"].items():
            found = later.get(case["name"], {"peers": {}})["peers"].get(peer, {})
            for mode, figures in entry.get("times", {}).items():
                if mode in found.get("times", {}):
                    after = found["times"][mode]["quantiles_s"]
                    yield case["name"], peer, mode, figures["quantiles_s"], after


def _changes(old: dict[str, Any], new: dict[str, Any], drift: float) -> Iterator[Change]:
    suite = new["suite"]
    for case, peer, mode, a, b in _timed(old, new):
        if _is_ours(peer):
            ratio, noise = b["p50"] / a["p50"] / drift, _spread(a) + _spread(b)
            yield Change(suite, case, peer, mode, ratio, noise, _verdict(ratio, noise))
    earlier = {case["name"]: case for case in old["cases"]}
    for case in new["cases"]:
        for peer, entry in earlier.get(case["name"], {"peers": {}})["peers"].items():
            for mode in entry.get("times", {}) if _is_ours(peer) else ():
                yield from _gone(suite, case, peer, mode)


def _verdict(ratio: float, noise: float) -> str:
    limit = 1 + max(SMALLEST_CHANGE, noise)
    if ratio > limit:
        return "slower"
    return "faster" if ratio < 1 / limit else "same"


def _gone(suite: str, case: dict[str, Any], peer: str, mode: str) -> Iterator[Change]:
    """What ran before and does not any more, with the reason; what was not asked for has none."""
    entry = case["peers"].get(peer, {})
    if mode not in entry.get("times", {}):
        words = ("failed", "crashed", "n/a", f"no {mode}")
        reasons = [entry[word] for word in words if word in entry]
        reasons += [case[word] for word in ("error", f"no {mode}") if word in case]
        if reasons:
            name = f"{case['name']}: no times any more: {reasons[0]}"
            yield Change(suite, name, peer, mode, 0, 0, "gone")


def _spread(quantiles: dict[str, float]) -> float:
    """Half the distance of the quartiles, as a share of the median."""
    low, high = quantiles.get("p25", quantiles["p50"]), quantiles.get("p75", quantiles["p50"])
    return (high - low) / 2 / quantiles["p50"]


def read_both(old: pathlib.Path, new: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both documents."""
    return results.read(old), results.read(new)
