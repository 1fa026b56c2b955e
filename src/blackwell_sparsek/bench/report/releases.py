"""A page that compares Triton releases: results of one run that took turns between them.

The results of release X lie in `benchmarks/results/triton-X`, and are compared with those of the
oldest release there. Only times of this library count, of cases that both have.
"""

import pathlib
import statistics
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from .. import results
from .tables import MODE_HEADS, table

PAGE = pathlib.Path("docs/results/releases.md")
_PREFIX = "triton-"
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
    folders = sorted(folder.glob(f"{_PREFIX}*"), key=_version)
    if len(folders) < 2:
        return {}
    oldest, *others = (_times(path) for path in folders)
    first, *names = (path.name.removeprefix(_PREFIX) for path in folders)
    environment = _environment(folders[0])
    parts = [
        "# Triton releases",
        f"Generated from `benchmarks/results/{_PREFIX}*`; do not edit.",
        f"{environment['device_name']}, torch {environment['versions']['torch']}. Each ratio is "
        f"the time of a case with Triton {first} divided by its time with another release, "
        f"from alternating runs; above 1, the other release is faster. "
        f"Cases below {GOAL} are listed.",
    ]
    for name, times in zip(names, others, strict=True):
        parts += [f"## {name}", "\n".join(_lines(oldest, times))]
    return {PAGE: "\n\n".join(parts) + "\n"}


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
