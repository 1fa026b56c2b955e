"""A page that compares Triton releases: results of runs that took turns between them.

`benchmarks/releases.sh` makes a run. The results of release X lie in
`benchmarks/results/releases/RUN/triton-X`, and are compared with those of the oldest release of
that run. Only times of this library count, of cases that both have.
"""

import pathlib
import statistics
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from .. import results
from .tables import MODE_HEADS, table

PAGE = pathlib.Path("docs/results/releases.md")
_RUNS, _PREFIX = "releases", "triton-"
# Of the release compared with; below it a case is named.
GOAL = 0.98


class Measured(NamedTuple):
    """A case of a suite in one mode."""

    suite: str
    mode: str
    case: str


class Ratio(NamedTuple):
    """Time with the oldest release over time with another one; above 1 that one is faster."""

    ratio: float
    case: str


def releases_page(folder: pathlib.Path) -> dict[pathlib.Path, str]:
    """The page, keyed by its path; nothing without results of two releases."""
    parts: list[str] = []
    for run in sorted(folder.glob(f"{_RUNS}/*")):
        parts += _parts(run)
    if not parts:
        return {}
    begin = [
        "# Triton releases",
        f"Generated from `benchmarks/results/{_RUNS}`, which `benchmarks/releases.sh` measures; "
        "do not edit.",
        "Each ratio is the time of a case with the older release divided by its time with the "
        "newer one, from alternating runs; above 1, the newer one is faster. "
        f"Cases below {GOAL} are listed.",
    ]
    return {PAGE: "\n\n".join(begin + parts) + "\n"}


def _parts(run: pathlib.Path) -> Iterator[str]:
    """Sections about the releases of one run, each compared with the oldest."""
    folders = sorted(run.glob(f"{_PREFIX}*"), key=_version)
    for other in folders[1:]:
        oldest, name = (path.name.removeprefix(_PREFIX) for path in (folders[0], other))
        yield f"## {name} and {oldest}"
        environment = _environment(other)
        yield f"{environment['device_name']}, torch {environment['versions']['torch']}, {run.name}."
        yield "\n".join(_lines(_times(folders[0]), _times(other)))


def _version(path: pathlib.Path) -> tuple[int, ...]:
    return tuple(int(part) for part in path.name.removeprefix(_PREFIX).split("."))


def _environment(folder: pathlib.Path) -> Any:
    return results.read(min(folder.glob("*.json")))["environment"]


def _times(folder: pathlib.Path) -> dict[Measured, float]:
    """Median seconds of this library for everything in a folder."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        document = results.read(path)
        for case in document["cases"]:
            for mode, figures in case["peers"].get("bsk", {}).get("times", {}).items():
                key = Measured(document["suite"], mode, case["name"])
                found[key] = figures["quantiles_s"]["p50"]
    return found


def _lines(oldest: dict[Measured, float], times: dict[Measured, float]) -> Iterator[str]:
    ratios: dict[tuple[str, str], list[Ratio]] = defaultdict(list)
    for key in oldest.keys() & times.keys():
        ratios[key.suite, key.mode].append(Ratio(oldest[key] / times[key], key.case))
    rows = []
    for (suite, mode), found in sorted(ratios.items()):
        least, median = min(found), statistics.median(x.ratio for x in found)
        name = f"{suite.replace('_', ' ')}, {MODE_HEADS[mode]}"
        slower = sum(x.ratio < GOAL for x in found)
        rows.append([name, *map(str, (len(found), f"{median:.2f}", f"{least.ratio:.2f}", slower))])
    yield table(["suite", "cases", "median", "lowest", f"below {GOAL}"], rows)
    named = sorted(
        (x, suite) for (suite, _), found in ratios.items() for x in found if x.ratio < GOAL
    )
    if named:
        yield ""
    for x, suite in named:
        yield f"- {x.ratio:.2f} {suite.replace('_', ' ')}: {x.case}"
