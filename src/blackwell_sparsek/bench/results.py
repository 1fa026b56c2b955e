"""Results files: saved after every case, and validated with clear messages when read.

A run saves to a file beside the results of the last one, and replaces these when it is complete.
Files may come from strangers: whatever `read` returns, reports and comparisons can show.
"""

import json
import os
import pathlib
from itertools import starmap
from typing import Any

from ..core.errors import InvalidInput

SCHEMA = 2
# Objects in objects; readers follow them by recursion.
_MOST_LEVELS = 20
_WORDS = ("label", "n/a", "failed", "crashed")


def write(document: dict[str, Any], path: pathlib.Path) -> None:
    """Replace the file atomically, so that no reader finds half a document, even after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    with beside.open("w", encoding="utf-8") as file:
        file.write(json.dumps(document, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def partial(path: pathlib.Path) -> pathlib.Path:
    """Where a run for the results in `path` saves the cases measured so far."""
    return path.with_name(path.name + ".partial")


def settle(document: dict[str, Any], path: pathlib.Path) -> None:
    """Let the cases measured by a run, which has ended, take the place of earlier results.

    If it was interrupted, earlier results stay, and the cases measured stay beside them.
    """
    saved = partial(path)
    interrupted = document.get("interrupted", False)
    if interrupted and not document["cases"]:
        saved.unlink()
    elif not (interrupted and path.exists()):
        os.replace(saved, path)


def mark_running(path: pathlib.Path, case: str, peer: str) -> None:
    """Note the running case and peer beside the results: they are to blame if the process dies."""
    _beside(path).write_text(json.dumps([case, peer]))


def running(path: pathlib.Path, *, forget: bool = False) -> tuple[str, str] | None:
    """The case and the peer running for the results in `path`; None when these are complete."""
    note = _beside(path)
    if not note.exists():
        return None
    try:
        names = json.loads(note.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):  # the process ended while it wrote the note
        names = None
    if forget:
        note.unlink()
    if isinstance(names, list) and [type(name) for name in names] == [str, str]:
        case, peer = names
        return case, peer
    return "", ""


def _beside(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(path.name + ".running")


def read(path: pathlib.Path) -> dict[str, Any]:
    """Read a results file of `bsk bench`, converting older schemas."""
    too_deep = f"{path}: is not JSON that can be read: nested too deeply"
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise InvalidInput(too_deep) from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise InvalidInput(f"{path}: is not JSON: {error}") from error
    if _levels_exceed(document, _MOST_LEVELS):
        raise InvalidInput(too_deep)
    if (problem := _problem(document)) is not None:
        raise InvalidInput(f"{path}: is not a results file of `bsk bench`: {problem}")
    for case in document["cases"]:
        case.setdefault("problem", {})
        for ratio in case.get("ratios", {}).values():
            if "best_sparse_peer" in ratio:  # schema 1
                ratio["best_peer"] = ratio.pop("best_sparse_peer")
                ratio["over_best_peer"] = ratio.pop("over_best_sparse")
    return document


def _levels_exceed(value: Any, most: int) -> bool:
    """Whether lists and objects are nested more than `most` deep; without recursion."""
    inner = [value]
    for _ in range(most):
        inner = [
            item
            for outer in inner
            if isinstance(outer, (dict, list))
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return any(isinstance(value, (dict, list)) for value in inner)


def _problem(document: Any) -> str | None:
    """The reason why this is not a valid results file, or None."""
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which no page can hold
        return f"it has text that is no Unicode: {error.object[error.start : error.end]!r}"
    if not isinstance(document, dict):
        return f"expected an object, got {type(document).__name__}"
    for field, kind in {"schema": int, "suite": str, "environment": dict, "cases": list}.items():
        if not isinstance(document.get(field), kind) or isinstance(document[field], bool):
            return f"{field!r} is missing or no {kind.__name__}"
    if not 1 <= document["schema"] <= SCHEMA:
        return f"schema {document['schema']} is unknown (1 to {SCHEMA} are)"
    if not isinstance(document["environment"].get("device_name"), str):
        return "the environment has no device_name"
    if not isinstance(document["environment"].get("versions", {}), dict):
        return "the versions of the environment are no object"
    for field, kind in {"unit": str, "left_out": list, "crossover": list}.items():
        if not isinstance(document.get(field, kind()), kind):
            return f"{field!r} is no {kind.__name__}"
    if not isinstance(document.get("commit"), (str, type(None))):
        return "'commit' is no str"
    if not all(map(_is_crossing, document.get("crossover", []))):
        return "'crossover' holds something else than curves"
    for index, case in enumerate(document["cases"]):
        if (problem := _case_problem(case)) is not None:
            return f"case {index}: {problem}"
    return None


def _is_crossing(entry: Any) -> bool:
    block = entry.get("block") if isinstance(entry, dict) else None
    if not isinstance(block, list) or not all(map(_is_time, block)):
        return False
    meets, points = entry.get("density", 0.0), entry.get("speedups")
    if not (meets is None or _is_time(meets)) or not isinstance(points, list) or not points:
        return False
    return all(isinstance(p, list) and len(p) == 2 and all(map(_is_time, p)) for p in points)


def _case_problem(case: Any) -> str | None:
    if not isinstance(case, dict) or not isinstance(case.get("name"), str):
        return "has no name"
    for field in ("peers", "problem", "ratios", "clocks"):
        if not isinstance(case.get(field, {}), dict) or (field == "peers" and field not in case):
            return f"has no {field}"
    for mode, ratio in case.get("ratios", {}).items():
        if not isinstance(ratio, dict) or not all(starmap(_is_ratio, ratio.items())):
            return f"ratios in mode {mode!r} are no numbers"
        for best, over in _BEST.items():
            if (best in ratio) != (over in ratio):
                return f"ratios in mode {mode!r} have only one of {best} and {over}"
            if best in ratio and not _is_timed(case["peers"].get(ratio[best]), mode):
                return f"the best peer in mode {mode!r} has no times there"
    for peer, entry in case["peers"].items():
        times = entry.get("times", {}) if isinstance(entry, dict) else None
        if not isinstance(times, dict):
            return f"peer {peer!r} has no times"
        if any(not isinstance(entry.get(word, ""), str) for word in _WORDS):
            return f"peer {peer!r} has a reason that is no text"
        for mode, figures in times.items():
            quantiles = figures.get("quantiles_s") if isinstance(figures, dict) else None
            if not isinstance(quantiles, dict) or not _is_time(quantiles.get("p50")):
                return f"peer {peer!r} has no median in mode {mode!r}"
            if not all(map(_is_time, quantiles.values())):
                return f"peer {peer!r} has quantiles in mode {mode!r} that are no times"
            work = (pair for pair in figures.items() if pair[0] != "quantiles_s")
            if not all(starmap(_is_ratio, work)):
                return f"peer {peer!r} has figures in mode {mode!r} that are no numbers"
    return None


# The peer that a ratio compares with, and the ratio, in both schemas.
_BEST = {"best_peer": "over_best_peer", "best_sparse_peer": "over_best_sparse"}


def _is_timed(entry: Any, mode: str) -> bool:
    times = entry.get("times") if isinstance(entry, dict) else None
    return isinstance(times, dict) and mode in times


def _is_ratio(name: str, value: Any) -> bool:
    """Whether it is a positive number, or a string if `name` begins with best_."""
    return isinstance(value, str) if name.startswith("best_") else _is_time(value)


def _is_time(value: Any) -> bool:
    """Whether it is a number whose reciprocal and products stay far from overflow."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 1e-12 < value < 1e9
