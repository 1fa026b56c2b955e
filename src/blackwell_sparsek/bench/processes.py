"""Child processes of `bsk bench`: one that runs suites, many that compile in advance.

A suite runs in a child process, so that a peer that crashes it is recorded and the others still
run. Before anything is timed, many processes run one case of each kind once, to compile its
kernels.
"""

import itertools
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..core.env import environment_for_compiler
from ..core.progress import Progress
from . import results
from .case import REPORTED, Case, Peer, Suite
from .measure import time_limit, told
from .run import release

# Exit status of a worker whose GPU context a peer has broken.
LOST = 70
_MOST_STARTS = 16


def run_worker(command: Callable[[int, bool], list[str]], paths: Sequence[pathlib.Path]) -> int:
    """Run workers until one exits normally; return its exit status.

    A worker makes the results in `paths`, in order. Beside them are the cases measured so far
    (`results.partial`) and a note of the case and the peer that are running. When it dies, that
    peer is marked as crashed and another worker continues. `command(first, again)` starts at
    `paths[first]`; with `again`, it keeps the cases that were measured.
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
    if not any(path.exists() or results.partial(path).exists() for path in paths):
        raise RuntimeError(f"the benchmark process ended with status {status} and left no results")
    return status


def _wait(worker: subprocess.Popen[bytes]) -> int:
    """The exit status of a worker; SIGTERM and SIGINT go to it, so that it can save its results."""

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
    """Mark the running peer as crashed; the index of its file, None if unknown or crashed before.

    While peers are timed in turns, the one at fault is unknown, so the whole case is given up.
    """
    for index, path in enumerate(paths):
        running = results.running(path, forget=True)
        if running is not None and results.partial(path).exists():
            return index if _blamed(path, how, *running) else None
    return None


def _blamed(path: pathlib.Path, how: str, case: str, peer: str) -> bool:
    saved = results.partial(path)
    document = results.read(saved)
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
    results.write(document, saved)
    return known


# Sizes hardly change which kernels are compiled; the timed run compiles the few that differ.
_SIZES = {"batch", "heads", "kv_heads", "length", "lengths", "weight", "density", "kept"}
_NARROW = 64
# With one compiler running on each core, each takes more than twice as long.
_LONGEST_S = 60.0
# Prebuilt libraries, kernels that are not cached, and kernels that another case compiles anyway.
_NOT_COMPILED = {"dense", "dense_packed_k", "cusparse_csr", "mm", "fa2", "fa3", "cudnn_blocks"}
_NOT_COMPILED |= {"bsk_dense", "bsk_padded", "bsk_attention", "torch_varlen"}
# Kernels that take any size: one case of a kind compiles them.
_ANY_SIZE = {"fa4", "flashinfer", "torch_bsr", "torch_bsr_tuned"}
# The slowest to compile start first, so that they do not delay the end.
_LONGEST = ("fa4", "flex", "flashinfer", "torch_bsr_tuned")


class Task(NamedTuple):
    """One peer on one case."""

    case: Case
    peer: Peer


def tasks_of(suites: Iterable[tuple[Suite, Sequence[Case]]]) -> list[Task]:
    """The first and the last case of each kind, for every peer that compiles something."""
    chosen: dict[tuple[str, str, str], list[Task]] = {}
    for suite, cases in suites:
        for case in cases:
            # these cases start fresh processes, which compile for themselves
            for name in () if case.modes == (REPORTED,) else case.peers:
                if name not in _NOT_COMPILED and not name.startswith("sdpa"):
                    found = chosen.setdefault((suite.name, _kind(case), name), [])
                    if not found or name not in _ANY_SIZE:
                        found[1:] = [Task(case, suite.peers[name])]
    # by the time the last case of a kind runs, most of its kernels are compiled
    tasks = [task for group in chosen.values() for task in group[:1]]
    tasks += [task for group in chosen.values() for task in group[1:]]
    return sorted(tasks, key=lambda task: task.peer.name not in _LONGEST)


def _kind(case: Case) -> str:
    problem = case.problem
    group = problem.get("heads", 1) // problem.get("kv_heads", problem.get("heads", 1))
    same = sorted((name, value) for name, value in problem.items() if name not in _SIZES)
    wide = [pair for pair in same if pair[0] == "n" and pair[1] > _NARROW]
    return f"{[pair for pair in same if pair not in wide]} {group}"


def serve(tasks: Sequence[Task], device: torch.device) -> None:
    """Read task numbers from stdin, run each task and answer with a line on stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    with torch.no_grad():
        for line in sys.stdin:
            print(_once(tasks[int(line)], device), file=answers, flush=True)
            release(device)  # other processes need the memory


def _once(task: Task, device: torch.device) -> str:
    started = time.monotonic()
    try:
        if task.peer.available() is not None:
            return "n/a"
        inputs = task.case.build(device)
        if task.peer.supports(inputs) is not None:
            return "n/a"
        with time_limit(_LONGEST_S):
            task.peer.prepare(inputs).run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:  # the timed run records it in the results
        return told(error)
    return f"{time.monotonic() - started:.1f} s"


def prepare(command: list[str], tasks: Sequence[Task], jobs: int, limit_s: float) -> None:
    """Hand the tasks to `jobs` processes of `command`, each of which calls `serve`."""
    waiting = iter(range(len(tasks)))
    progress = Progress("bsk bench --prepare", len(tasks))
    shown = itertools.count()
    size = max(1, min(jobs, len(tasks)))
    crew = [
        _Worker(command, tasks, waiting, lambda t: progress.done(next(shown), t))
        for _ in range(size)
    ]
    threads = [threading.Thread(target=worker.work, daemon=True) for worker in crew]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, started + limit_s - time.monotonic()))
    for worker in crew:
        worker.stop()
    done = sum(worker.done for worker in crew)
    seconds = time.monotonic() - started
    print(f"Compiled {done} of {len(tasks)} in {seconds:.0f} s.", file=sys.stderr, flush=True)


class _Worker:
    """A process that runs tasks one by one; if it dies, a new process replaces it."""

    def __init__(
        self,
        command: list[str],
        tasks: Sequence[Task],
        waiting: Iterator[int],
        say: Callable[[str], None],
    ):
        self.command, self.tasks, self.waiting, self.say = command, tasks, waiting, say
        self.done, self.stopped = 0, False
        self.process = self._start()

    def _start(self) -> "subprocess.Popen[str]":
        # one compile thread per process, because there are many processes
        environment = environment_for_compiler() | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
        options: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen(self.command, env=environment, **options)

    def work(self) -> None:
        for index in self.waiting:
            answer = self._ask(index)
            if self.stopped:
                return
            case, peer = self.tasks[index]
            self.say(f"compiled {case.name}, {peer.name}: {answer}")
            self.done += 1
        if self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait()

    def _ask(self, index: int) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(f"{index}\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline().strip()
        except OSError:
            answer = ""
        if not answer and not self.stopped:
            self.process = self._start()
        return answer or "the process died"

    def stop(self) -> None:
        self.stopped = True
        self.process.kill()
        self.process.wait()
