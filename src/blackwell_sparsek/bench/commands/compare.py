"""`bsk compare`: compare two runs of a suite, and find the cases slower by more than the noise."""

import argparse
import pathlib
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...core.errors import InvalidInput
from .. import results
from ..report.tables import names_of_some, printable

# Smaller changes cannot be told from day-to-day variation.
SMALLEST_CHANGE = 0.03
# With fewer timings of other peers than this, the drift of the machine cannot be estimated.
_ENOUGH = 3


@dataclass(frozen=True)
class Change:
    """One case in one mode; `ratio` is new time over old, `noise` the spread of both runs."""

    suite: str
    case: str
    peer: str
    mode: str
    ratio: float
    noise: float
    verdict: str

    def __str__(self) -> str:
        change = f"{self.ratio - 1:+.1%} (noise {self.noise:.1%})" if self.ratio else self.verdict
        return printable(f"{self.suite}: {self.case}: {self.peer}, {self.mode}: {change}")


@dataclass(frozen=True)
class Comparison:
    """All changes of ours, and the drift: the median change of the other peers."""

    changes: list[Change]
    drift: float
    notes: list[str]

    def of(self, verdict: str) -> list[Change]:
        """The changes with this verdict: slower, faster, same or gone."""
        return [change for change in self.changes if change.verdict == verdict]


def pairs_of(old: pathlib.Path, new: pathlib.Path) -> list[tuple[pathlib.Path, pathlib.Path]]:
    """The two files, or all files that have the same name in two folders."""
    for path in (old, new):
        if not path.exists():
            raise InvalidInput(f"bsk compare: {path}: no such file or folder")
    if old.is_dir() != new.is_dir():
        raise InvalidInput(f"bsk compare: {old} and {new} must be two files or two folders")
    if not old.is_dir():
        return [(old, new)]
    names = [path.name for path in sorted(new.glob("*.json")) if (old / path.name).exists()]
    if not names:
        raise InvalidInput(f"bsk compare: {old} and {new} have no results file in common")
    return [(old / name, new / name) for name in names]


def compare(old: dict[str, Any], new: dict[str, Any], *, force: bool = False) -> Comparison:
    """Find the changes between two documents of the same suite on the same machine.

    A case is slower when its median grew by more than the quartile spreads of both runs together,
    and by at least 3 %. A slowdown of the other peers is divided out first: their code did not
    change, so the machine did. `force` compares different machines as well.
    """
    if old["suite"] != new["suite"]:
        both = printable(f"{old['suite']} and {new['suite']}")
        raise InvalidInput(f"bsk compare: suites differ: {both}")
    notes = []
    for what in ("device_name", "arch"):
        a, b = (document["environment"].get(what) for document in (old, new))
        if a != b:
            text = printable(f"{what} differs: {a} and {b}")
            if not force:
                raise InvalidInput(f"bsk compare: {text}; --force compares them all the same")
            notes.append(text)
    versions = (document["environment"].get("versions", {}) for document in (old, new))
    before, after = versions
    for name in sorted(before.keys() & after.keys()):
        if before[name] != after[name]:
            notes.append(printable(f"{name} {before[name]} -> {after[name]}"))

    names = {case["name"] for case in new["cases"]}
    if missing := [case["name"] for case in old["cases"] if case["name"] not in names]:
        notes.append(f"not measured again: {names_of_some(missing)}")
    moved = [b / a for peer, a, b in _medians(old, new) if not _is_ours(peer)]
    drift = statistics.median(moved) if len(moved) >= _ENOUGH else 1.0
    return Comparison(list(_changes(old, new, max(drift, 1.0))), drift, notes)


def _is_ours(peer: str) -> bool:
    return peer.split("_")[0] == "bsk"


def _medians(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
    for timed in _timed(old, new):
        yield timed.peer, timed.old["p50"], timed.new["p50"]


class _Timed(NamedTuple):
    """A case, peer and mode that both runs timed, with the quantiles of each."""

    case: str
    peer: str
    mode: str
    old: dict[str, float]
    new: dict[str, float]


def _timed(old: dict[str, Any], new: dict[str, Any]) -> Iterator[_Timed]:
    later = {case["name"]: case for case in new["cases"]}
    for case in old["cases"]:
        for peer, entry in case["peers"].items():
            found = later.get(case["name"], {"peers": {}})["peers"].get(peer, {})
            for mode, figures in entry.get("times", {}).items():
                if mode in found.get("times", {}):
                    after = found["times"][mode]["quantiles_s"]
                    yield _Timed(case["name"], peer, mode, figures["quantiles_s"], after)


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
    """A case that was timed before and now has a reason instead; none if it was not requested."""
    entry = case["peers"].get(peer, {})
    if mode not in entry.get("times", {}):
        words = ("failed", "crashed", "n/a", f"no {mode}")
        reasons = [entry[word] for word in words if word in entry]
        reasons += [case[word] for word in ("error", f"no {mode}") if word in case]
        if reasons:
            name = f"{case['name']}: no times any more: {reasons[0]}"
            yield Change(suite, name, peer, mode, 0, 0, "gone")


def _spread(quantiles: dict[str, float]) -> float:
    """Half the interquartile range, as a share of the median."""
    low, high = quantiles.get("p25", quantiles["p50"]), quantiles.get("p75", quantiles["p50"])
    return (high - low) / 2 / quantiles["p50"]


def read_both(old: pathlib.Path, new: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read both documents."""
    return results.read(old), results.read(new)


def run(args: argparse.Namespace) -> int:
    """Print the changes; 1 when something became slower, 2 when something cannot be compared."""
    worse = unknown = 0
    for old, new in pairs_of(args.old, args.new):
        try:
            found = compare(*read_both(old, new), force=args.force)
        except InvalidInput as error:  # the other files of a folder can still be compared
            text = printable(error)
            print(text if text.startswith("bsk ") else f"bsk compare: {text}", file=sys.stderr)
            unknown += 1
            continue
        worse += _told(found, old, new)
    return 2 if unknown else int(worse > 0)


def _told(found: Comparison, old: pathlib.Path, new: pathlib.Path) -> int:
    """Print the changes; return how many of them are for the worse."""
    for note in found.notes:
        print(f"note: {note}")
    if abs(found.drift - 1) > 0.02:
        print(f"note: other peers took {found.drift:.3f}x the time: the machine changed")
    for change in found.of("faster"):
        print(f"faster  {change}")
    for change in found.of("slower"):
        print(f"SLOWER  {change}")
    for change in found.of("gone"):
        print(f"GONE    {change}")
    if not found.changes:
        print(printable(f"NOTHING {new}: no time of ours that {old} has as well"))
    same = len(found.of("same"))
    print(f"{printable(new)}: {len(found.changes)} times compared, {same} within the noise")
    return len(found.of("slower")) + len(found.of("gone")) + (not found.changes)
