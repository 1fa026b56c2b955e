"""Suites in a process of their own: a peer that takes it down is noted, and the rest goes on."""

import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from . import results

# Exit status of a worker whose GPU context a peer has broken.
LOST = 70
_MOST_STARTS = 16


def run_worker(command: Callable[[int, bool], list[str]], paths: Sequence[pathlib.Path]) -> int:
    """Run a worker until it ends by itself; the status it ended with.

    The worker keeps results in `paths`, one after the other, and notes beside them the case and
    the peer at work. When it dies, that peer is marked there as crashed and another worker goes on.
    `command(first, again)` begins with `paths[first]`; `again`, with the cases it has already.
    """
    for path in paths:
        results.running(path, forget=True)
    status, first, again = 0, 0, False
    for _ in range(_MOST_STARTS):
        status = _wait(subprocess.Popen(command(first, again)))
        if status != LOST and status >= 0:
            return status
        how = "broke the GPU context" if status == LOST else f"died of {_signal_name(-status)}"
        if (ended := _blame(paths, how)) is None:
            break
        first, again = ended, True
    if not any(path.exists() for path in paths):
        raise RuntimeError(f"the benchmark process ended with status {status} and left no results")
    return status


def _wait(worker: subprocess.Popen[bytes]) -> int:
    """The status of a worker; it gets the signals that end us, and time to keep its results."""

    def forward(number: int, frame: Any) -> None:
        worker.send_signal(number)

    old = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return worker.wait()
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _blame(paths: Sequence[pathlib.Path], how: str) -> int | None:
    """Mark what was at work as crashed; None where that is unknown, or was tried before.

    While peers are timed in turns nobody can tell which of them it was: the case is given up.
    """
    for index, path in enumerate(paths):
        running = results.running(path, forget=True)
        if running is not None and path.exists():
            return index if _blamed(path, how, *running) else None
    return None


def _blamed(path: pathlib.Path, how: str, case: str, peer: str) -> bool:
    document = results.read(path)
    reason = document.pop("lost", None)
    told = f"{how} ({reason})" if reason else how
    known = bool(case) and peer not in document.get("crashed", {})
    if known and peer:
        document.setdefault("crashed", {})[peer] = f"{told} on {case}"
        print(f"{peer} {told} on {case}: going on without it", file=sys.stderr, flush=True)
    elif known:
        error = f"the process {told} while peers were timed"
        document["cases"].append({"name": case, "problem": {}, "peers": {}, "error": error})
        print(f"{case}: {error}: going on with the next", file=sys.stderr, flush=True)
    results.write(document, path)
    return known
