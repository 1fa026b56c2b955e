"""Random calls of every public function against a second oracle.

`python -m blackwell_sparsek.testing.fuzz --calls 2500 --jobs 8` draws calls from seeds, with
awkward sizes, strides and offsets, NaN in outputs before they are written and in inputs that
nothing may read, and compares the results with `naive` under the error budget. Each call is made
twice and must have the same bits. A failure prints the kind and seed of the call, and
`--corpus FILE` keeps them: the tests repeat every line of `tests/testing/fuzz_corpus.txt`.
`--repeat "attention 17"` makes one call again.
"""

import argparse
import json
import pathlib
import queue
import random
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from . import fuzz_attention, fuzz_products, fuzz_serving, fuzz_sparse
from .fuzz_draw import Draw
from .interpreter import interpreter_checks
from .interpreter_speed import quick_interpreter

KINDS: dict[str, Callable[[Draw], None]] = {
    **fuzz_attention.KINDS,
    **fuzz_serving.KINDS,
    **fuzz_sparse.KINDS,
    **fuzz_products.KINDS,
}
# How often each kind is drawn; the others once.
WEIGHTS = {"attention": 5, "attention_decode": 4, "attention_varlen": 2, "ragged": 3, "matmul": 5}


class Outcome(NamedTuple):
    """One call: what was drawn, what was wrong ("" if nothing), who refused it before `auto`."""

    kind: str
    seed: int
    told: str
    problem: str
    refused: int


def run_one(kind: str, seed: int, device: torch.device) -> Outcome:
    """Draw a call, make it, compare it."""
    draw = Draw(kind, seed, device)
    problem = ""
    try:
        # both do nothing where kernels are compiled
        with interpreter_checks(), quick_interpreter():
            KINDS[kind](draw)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{pathlib.Path(where.filename).name}:{where.lineno}"
        problem = f"{type(error).__name__} at {place}: {str(error).strip()[:600]}"
    return Outcome(kind, seed, str(draw), problem, len(draw.refused))


def drawn_kinds(seed: int, only: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Kinds and seeds without end, from a first seed."""
    kinds = [kind for kind in KINDS if not only or kind in only]
    weights = [WEIGHTS.get(kind, 1) for kind in kinds]
    while True:
        yield random.Random(f"kind {seed}").choices(kinds, weights)[0], seed
        seed += 1


def read_corpus(path: pathlib.Path) -> list[tuple[str, int]]:
    """The calls of a corpus: a kind and a seed in each line, `#` begins a comment."""
    lines = (line.partition("#")[0].split() for line in path.read_text().splitlines())
    found = []
    for words in lines:
        if words:
            if len(words) != 2 or words[0] not in KINDS or not words[1].isdigit():
                raise ValueError(f"{path}: expected a kind of {list(KINDS)} and a seed: {words}")
            found.append((words[0], int(words[1])))
    return found


def keep_in_corpus(path: pathlib.Path, outcome: Outcome) -> None:
    """Add a failing call, unless it is there."""
    known = read_corpus(path) if path.exists() else []
    if (outcome.kind, outcome.seed) not in known:
        reason = outcome.problem.splitlines()[0][:120]
        with path.open("a") as file:
            file.write(f"{outcome.kind} {outcome.seed}  # {reason}\n")


# Status of a process whose device refuses everything since a call went wrong.
DEVICE_LOST = 3


def _child(args: argparse.Namespace) -> int:
    """Make this process's share of the calls; print outcomes as JSON lines."""
    # the calls are small: more threads only wait for each other
    torch.set_num_threads(1)
    device = torch.device(args.device)
    until = time.perf_counter() + args.seconds
    share = -(-args.calls // args.jobs)
    calls = drawn_kinds(args.seed, args.only)
    for n, (kind, seed) in enumerate(calls):
        if n // args.jobs >= share or time.perf_counter() >= until:
            break
        if n % args.jobs == args.job and n // args.jobs >= args.made:
            outcome = run_one(kind, seed, device)
            print(json.dumps(outcome._asdict()), flush=True)
            if outcome.problem and _is_lost(device):
                return DEVICE_LOST
    return 0


def _is_lost(device: torch.device) -> bool:
    """Whether the device refuses everything in this process."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def _start(args: argparse.Namespace, job: int, made: int, seconds: float) -> Any:
    """A process that goes on after the `made` calls of a job."""
    command = [sys.executable, "-m", "blackwell_sparsek.testing.fuzz", "--job", str(job)]
    for name in ("calls", "seed", "jobs", "device"):
        command += [f"--{name}", str(getattr(args, name))]
    command += ["--made", str(made), "--seconds", str(seconds)]
    return subprocess.Popen([*command, *args.only], stdout=subprocess.PIPE, text=True)


def _run_job(
    args: argparse.Namespace, job: int, until: float, lines: "queue.SimpleQueue[Outcome | int]"
) -> None:
    """Pass on the outcomes of a job, then its status.

    Another process goes on after a call that loses the device, so that it costs no other call.
    """
    made, status = 0, DEVICE_LOST
    while status == DEVICE_LOST:
        child = _start(args, job, made, until - time.perf_counter())
        for line in child.stdout:
            made += 1
            lines.put(Outcome(**json.loads(line)))
        status = child.wait()
    lines.put(status)


def _parent(args: argparse.Namespace) -> int:
    print(
        f"seeds from {args.seed} on, {args.calls} calls or {args.seconds:g} s, "
        f"{args.jobs} processes, on {args.device}",
        flush=True,
    )
    started = shown = time.perf_counter()
    lines: queue.SimpleQueue[Outcome | int] = queue.SimpleQueue()
    for job in range(args.jobs):
        job_args = (args, job, started + args.seconds, lines)
        threading.Thread(target=_run_job, args=job_args, daemon=True).start()
    counts: Counter[str] = Counter()
    failures: list[Outcome] = []
    statuses: list[int] = []
    refused = 0
    while len(statuses) < args.jobs:
        outcome = lines.get()
        if isinstance(outcome, int):
            statuses.append(outcome)
            continue
        counts[outcome.kind] += 1
        refused += outcome.refused
        if outcome.problem:
            failures.append(outcome)
            print(f"FAILED  {outcome.told}\n    {outcome.problem}", flush=True)
            if args.corpus is not None:
                keep_in_corpus(args.corpus, outcome)
        now = time.perf_counter()
        if now - shown > 10:
            shown, made = now, sum(counts.values())
            rate = made / (now - started)
            print(f"{now - started:6.0f} s  {made:>7,} calls  {rate:.1f} calls/s", flush=True)
    table = ", ".join(f"{kind} {counts[kind]}" for kind in KINDS if counts[kind])
    print(f"{sum(counts.values())} calls ({table}); {refused} refused by a named implementation")
    print(f"{len(failures)} failures")
    for outcome in failures:
        print(f'    --repeat "{outcome.kind} {outcome.seed}"')
    if any(statuses):
        print(f"processes ended with status {statuses}")
    return int(bool(failures) or any(statuses) or not counts)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 1 when a call was wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m blackwell_sparsek.testing.fuzz", description=__doc__
    )
    parser.add_argument("only", nargs="*", help=f"only these kinds: {', '.join(KINDS)}")
    parser.add_argument("--calls", type=int, default=2500)
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after this time")
    parser.add_argument("--seed", type=int, default=None, help="the first seed; else from the time")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--corpus", type=pathlib.Path, help="add failing seeds to this file")
    parser.add_argument("--repeat", metavar="'KIND SEED'", help="make one call again")
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--made", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if unknown := [kind for kind in args.only if kind not in KINDS]:
        parser.error(f"{unknown[0]!r} is not a kind; expected one of {', '.join(KINDS)}")
    if args.repeat:
        kind, seed = args.repeat.split()
        outcome = run_one(kind, int(seed), torch.device(args.device))
        print(f"{outcome.told}\n    {outcome.problem or 'ok'}")
        return int(bool(outcome.problem))
    if args.job is not None:
        return _child(args)
    if args.seed is None:
        args.seed = int(time.time()) % 10**8
    return _parent(args)


if __name__ == "__main__":
    sys.exit(main())
