"""Running a suite: results are kept after every case, whatever ends the run."""

import contextlib
import gc
import pathlib
import signal
import time
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

import torch

from . import results
from .case import MODES, Case, Suite
from .clocks import ClockLog
from .environment import describe_environment, source_commit
from .live import Live
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
    """Measure all cases; with `path`, the results so far are there after each of them.

    An interrupt ends the run with the cases measured by then, marked `interrupted`; before the
    first of them, results of an earlier run stay. `before` is
    the document of an earlier process that ended on the way: its cases are kept, and the peer that
    ended it does not take part again. No case is begun after `until`, a `time.monotonic()`.
    """
    document = _new_document(suite, device, commit) if before is None else dict(before)
    earlier = path.read_bytes() if path is not None and path.exists() else None
    crashed = dict(document.get("crashed", {}))
    done = {case["name"] for case in document["cases"]}
    started = time.monotonic() - document.get("elapsed_s", 0.0)
    progress = Live(suite.name, len(cases))

    def keep() -> None:
        document["elapsed_s"] = time.monotonic() - started
        suite.finish(document)
        if path:
            results.write(document, path)

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
                        # not again in each of the cases that follow
                        crashed[name] = f"{entry['crashed']} on {case.name}"
                result["ratios"] = ratios(result, suite)
                document["cases"].append(result)
                progress.done(index, case.name, result, suite)
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
        if earlier is not None and document.get("interrupted") and not document["cases"]:
            # nothing was measured: what was there says more
            path.write_bytes(earlier)
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


def failures(document: dict[str, Any], ours: str = "bsk") -> list[str]:
    """What went wrong on our side; why other peers have no times stands below the tables."""
    found = []
    for case in document["cases"]:
        if "error" in case:
            found.append(f"{case['name']}: {case['error']}")
        for name, entry in case["peers"].items():
            reason = entry.get("failed", entry.get("crashed"))
            if name.startswith(ours) and reason is not None:
                found.append(f"{case['name']}: {name}: {reason}")
    return found


def release(device: torch.device) -> None:
    """The tensors of one case must not be in the way of the next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """`timeout` and batch systems send SIGTERM: it ends a run as Ctrl-C does."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    try:
        old = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread: nobody sends it signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)
