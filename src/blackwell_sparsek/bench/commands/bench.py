"""`bsk bench`: run suites against every installed peer."""

import argparse
import fnmatch
import pathlib
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from ...core.errors import InvalidInput
from .. import processes as prepare
from .. import processes as supervise
from .. import results
from ..arguments import MODES, did_you_mean
from ..case import Case, Peer, Suite
from ..measure import ContextLost
from ..outside import with_outside_peers
from ..report.markdown import suite_tables
from ..run import failures, run_suite
from ..suites import GROUPS, SUITES
from . import device_of

_QUICK_S = 45.0
_PREPARE_S = 240.0
# Peers whose first call compiles for too long for `--quick`.
_SLOW_TO_START = {"flex", "fa4", "flashinfer", "cudnn_blocks", "torch_bsr_tuned", "cusparse_csr"}


def run(args: argparse.Namespace) -> int:
    """Run the suites in order; 1 when an implementation of ours failed, 2 for unknown suites."""
    if args.list:
        print(_listing())
        return 0
    unknown = [name for name in args.suites if name not in SUITES and name not in GROUPS]
    if unknown and len(unknown) < len(args.suites):
        # measure the known suites all the same, so that a long run is not lost to a typo
        for name in unknown:
            print(_unknown(name), file=sys.stderr)
        args.suites = [name for name in args.suites if name not in unknown]
        return run(args) or 2
    names = chosen_suites(args.suites, args.quick)
    device = device_of("bsk bench", args.device)
    _check_cases(names, args, device)
    if device.type == "cpu":
        print("No GPU: running small sizes, which only show how the tool works.", file=sys.stderr)
    if args.prepare is not None:
        return _prepared(args, names, device)
    left = args.time_left if args.time_left is not None or not args.quick else _QUICK_S
    until = None if left is None else time.monotonic() + left
    if device.type == "cuda" and not args.worker:
        return _supervised(args, names, until)
    return _run_here(args, names, device, until)


def _suites() -> dict[str, Suite]:
    return with_outside_peers(SUITES)


def _run_here(
    args: argparse.Namespace, names: list[str], device: torch.device, until: float | None
) -> int:
    problems: list[str] = []
    for name in names:
        suite = _suites()[name]
        if suite.gpu_only and device.type != "cuda":
            problems.append(f"{name}: needs a CUDA GPU")
            continue
        if not _cases(suite, args, device):
            continue
        if until is not None and time.monotonic() > until:
            print(f"{name}: left out for lack of time", file=sys.stderr)
            continue
        path = args.out / f"{name}.json"
        try:
            resumed = args.resume and name == names[0]
            document = _measured(suite, args, device, path, until, resumed)
        except ContextLost as error:
            print(f"{name}: the GPU is lost to this process: {error}", file=sys.stderr)
            return supervise.LOST
        print(suite_tables(document), end="\n\n", flush=True)
        interrupted = document.get("interrupted", False)
        if not interrupted:
            print(f"Wrote {path}.", file=sys.stderr)
        problems += [f"{name}: {problem}" for problem in failures(document)]
        if interrupted:
            print(_what_is_kept(document, path), file=sys.stderr)
            return 130
    if problems:
        print("\n".join(f"FAILED {problem}" for problem in problems))
    return int(bool(problems))


def _what_is_kept(document: dict[str, Any], path: pathlib.Path) -> str:
    """What an interrupted run has left of its results."""
    if not document["cases"]:
        return "Interrupted: nothing was measured, and nothing is changed."
    saved = results.partial(path)
    if not saved.exists():
        return f"Interrupted: what was measured so far is kept in {path}."
    return (
        f"Interrupted: {path} still has the results of an earlier run; what was measured so far "
        f"is kept in {saved}."
    )


def _supervised(args: argparse.Namespace, names: list[str], until: float | None) -> int:
    """Run the suites in a child process, and start another one when a peer crashes it."""
    paths = [args.out / f"{name}.json" for name in names]

    def command(first: int, again: bool) -> list[str]:
        more = ["--resume"] if again else []
        return _worker_command(args, names[first:], until) + more

    status = supervise.run_worker(command, paths)
    return 1 if status < 0 or status == supervise.LOST else status


def _prepared(args: argparse.Namespace, names: list[str], device: torch.device) -> int:
    suites = [_suites()[name] for name in names]
    chosen = ((suite, _cases(suite, args, device)) for suite in suites)
    tasks = prepare.tasks_of(chosen)
    if args.worker:
        prepare.serve(tasks, device)
        return 0
    command = [*_worker_command(args, names, None), "--prepare", "1"]
    limit_s = _PREPARE_S if args.time_left is None else args.time_left
    prepare.prepare(command, tasks, args.prepare, limit_s)
    return 0


def chosen_suites(asked: list[str], quick: bool) -> list[str]:
    """Expand groups into the names of their suites, each name once.

    Examples
    --------
    >>> chosen_suites(["attention_small", "founding"], quick=False)
    ['attention_small', 'matmul_founding', 'attention_window']
    """
    found: dict[str, None] = {}
    for name in asked or ["quick" if quick else "founding"]:
        if name not in SUITES and name not in GROUPS:
            raise InvalidInput(_unknown(name))
        found |= dict.fromkeys([name] if name in SUITES else GROUPS[name])
    return list(found)


def _unknown(name: str) -> str:
    return f"bsk bench: unknown suite {name!r}; {did_you_mean(name, [*GROUPS, *SUITES])}"


def _measured(
    suite: Suite,
    args: argparse.Namespace,
    device: torch.device,
    path: pathlib.Path,
    until: float | None,
    resumed: bool,
) -> dict[str, Any]:
    return run_suite(
        suite,
        _cases(suite, args, device),
        device,
        seconds=min(args.seconds, 0.05) if args.quick else args.seconds,
        path=path,
        modes=args.mode or MODES,
        commit=args.commit,
        before=results.read(results.partial(path)) if resumed else None,
        until=until,
    )


def _cases(suite: Suite, args: argparse.Namespace, device: torch.device) -> list[Case]:
    cases = [case for case in suite.cases(device.type == "cpu") if _is_asked(case, args.case)]
    if args.quick and cases:
        # the first, the middle and the last case represent a suite best
        cases = [cases[i] for i in sorted({0, len(cases) // 2, len(cases) - 1})]
    return [_with_peers(case, args, suite) for case in cases]


def _check_cases(names: list[str], args: argparse.Namespace, device: torch.device) -> None:
    """Raise before anything is measured or overwritten if no case matches `--case`."""
    if not any(_cases(_suites()[name], args, device) for name in names):
        raise InvalidInput(
            f"bsk bench: no case of {', '.join(names)} has {args.case!r} in its name; "
            "expected part of a name as shown in the tables; * and ? are wildcards"
        )


def _is_asked(case: Case, pattern: str | None) -> bool:
    return pattern is None or fnmatch.fnmatch(case.name, f"*{pattern}*")


def _with_peers(case: Case, args: argparse.Namespace, suite: Suite) -> Case:
    peers = case.peers
    if args.quick:
        peers = tuple(name for name in peers if name not in _SLOW_TO_START)
    if args.peers is not None:
        asked = {name.strip() for name in args.peers.split(",")}
        everybody = {name for one in _suites().values() for name in one.peers}
        if unknown := sorted(asked - everybody):
            hint = did_you_mean(unknown[0], sorted(everybody))
            raise InvalidInput(f"bsk bench: unknown peer {unknown[0]!r}; {hint}")
        peers = tuple(name for name in case.peers if name in asked or name == suite.ours)
    return replace(case, peers=peers)


def _worker_command(args: argparse.Namespace, names: list[str], until: float | None) -> list[str]:
    command = [sys.executable, "-m", "blackwell_sparsek", "bench", *names, "--worker"]
    command += ["--out", str(args.out), "--seconds", str(args.seconds)]
    for option in ("device", "peers", "case", "commit"):
        if (value := getattr(args, option)) is not None:
            command += [f"--{option}", value]
    for mode in args.mode or ():
        command += ["--mode", mode]
    if args.quick:
        command.append("--quick")
    if until is not None:
        command += ["--time-left", f"{max(0.0, until - time.monotonic()):.1f}"]
    return command


def _listing() -> str:
    lines = ["suites"]
    peers: dict[str, Peer] = {}
    for suite in _suites().values():
        for peer in suite.peers.values():
            # the first label is the plain one; later suites add "in fp8" and the like
            peers.setdefault(peer.name, peer)
    width = max(map(len, [*SUITES, *peers]))
    lines += [f"  {name:<{width}}  {suite.about}" for name, suite in SUITES.items()]
    lines.append("groups")
    for name, members in GROUPS.items():
        named = "every suite" if len(members) == len(SUITES) else ", ".join(members)
        lines.append(f"  {name:<{width}}  {named}")
    lines.append("peers")
    for name, peer in peers.items():
        reason = peer.available()
        lines.append(f"  {name:<{width}}  {peer.label}" + (f" -- n/a: {reason}" if reason else ""))
    return "\n".join(lines)
