"""Running a suite: results are saved after every case, and progress is shown on stderr."""

import contextlib
import gc
import pathlib
import signal
import time
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

import torch

from ..core.progress import Progress
from . import results
from .arguments import MODES
from .case import Case, Suite
from .machine import ClockLog, describe_environment, source_commit
from .measure import ContextLost, measure, ratios, told


def run_suite(
    suite: Suite,
    cases: list[Case],
    device: torch.device,
    *,
    seconds: float = 0.3,
    path: pathlib.Path | None = None,
    modes: Collection[str] = MODES,
    commit: str | None = None,
    before: Mapping[str, Any] | None = None,
    until: float | None = None,
) -> dict[str, Any]:
    """Measure all cases; with `path`, save the results so far after each of them.

    They are saved to `results.partial(path)`, which takes the place of `path` when the run is
    complete, so that no run destroys the results of an earlier one. An interrupt ends the run with
    the cases measured so far, marked `interrupted`. `before` is the document of an earlier process
    that crashed: its cases are kept, and the peer that crashed it does not run again. No case
    starts after `until`, a `time.monotonic()`.
    """
    document = _new_document(suite, device, commit) if before is None else dict(before)
    crashed = dict(document.get("crashed", {}))
    done = {case["name"] for case in document["cases"]}
    started = time.monotonic() - document.get("elapsed_s", 0.0)
    progress = Progress(suite.name, len(cases))

    def keep() -> None:
        document["elapsed_s"] = time.monotonic() - started
        suite.finish(document)
        if path:
            results.write(document, results.partial(path))

    keep()
    with ClockLog(device) as clocks, torch.no_grad(), _terminated_as_interrupt(), progress:
        try:
            for index, case in enumerate(cases):
                if case.name in done:
                    continue
                if until is not None and time.monotonic() > until:
                    document["left_out"] = [later.name for later in cases[index:]]
                    break

                def stage(text: str, peer: str, index: int = index, case: Case = case) -> None:
                    if text:
                        progress.stage(index, f"{case.name}: {text}")
                    if path:
                        results.mark_running(path, case.name, peer)

                result = measure(
                    case,
                    suite.peers,
                    device,
                    seconds=seconds,
                    clocks=clocks,
                    stage=stage,
                    modes=modes,
                    crashed=crashed,
                )
                for name, entry in result["peers"].items():
                    if entry.pop("too_slow", False):
                        # do not wait for it again in every later case
                        crashed[name] = f"{entry['crashed']} on {case.name}"
                result["ratios"] = ratios(result, suite)
                document["cases"].append(result)
                progress.done(index, f"{case.name}: {summary(result, suite.ours)}")
                keep()
                release(device)
        except KeyboardInterrupt:
            document["interrupted"] = True
        except ContextLost as error:
            document["lost"] = told(error)
            keep()
            if path:
                raise
        keep()
    if path:
        results.running(path, forget=True)
        results.settle(document, path)
    return document


def _new_document(suite: Suite, device: torch.device, commit: str | None) -> dict[str, Any]:
    return {
        "schema": results.SCHEMA,
        "suite": suite.name,
        "unit": suite.unit,
        "commit": commit or source_commit(),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "environment": describe_environment(device),
        "cases": [],
    }


def failures(document: dict[str, Any]) -> list[str]:
    """Failures of this package; why other peers have no times stands below the tables."""
    found = []
    for case in document["cases"]:
        if "error" in case:
            found.append(f"{case['name']}: {case['error']}")
        for name, entry in case["peers"].items():
            reason = entry.get("failed", entry.get("crashed"))
            if name.startswith("bsk") and reason is not None:
                found.append(f"{case['name']}: {name}: {reason}")
    return found


def release(device: torch.device) -> None:
    """Free the tensors of one case, so that the next has the memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM, which `timeout` and batch systems send, like Ctrl-C."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    try:
        old = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # Python handles signals in the main thread only
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def summary(result: dict[str, Any], ours: str) -> str:
    """The times of one case in one line."""
    if "error" in result:
        return str(result["error"])
    parts = []
    for mode, ratio in result.get("ratios", {}).items():
        figures = result["peers"][ours]["times"][mode]
        text = f"{mode} {_time(figures['quantiles_s']['p50'])}"
        if "executed_tflops" in figures:
            text += f", {_rate(figures['executed_tflops'])}"
        if "over_dense" in ratio:
            text += f", {ratio['over_dense']:.2f}x dense"
        if "best_peer" in ratio:
            text += f", {ratio['over_best_peer']:.2f}x {ratio['best_peer']}"
        parts.append(text)
    for name, entry in result["peers"].items():
        for word in ("failed", "crashed"):
            if word in entry:
                parts.append(f"{name} {word}: {entry[word]}")
        if name == ours and "n/a" in entry:
            parts.append(f"n/a: {entry['n/a']}")
    if "unsteady" in result:
        parts.append(result["unsteady"])
    return "; ".join(parts) or "nothing to time"


def _rate(tflops: float) -> str:
    return f"{tflops:.0f} TFLOP/s" if tflops >= 1 else f"{tflops * 1e3:.3g} GFLOP/s"


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
