"""Runs compute-sanitizer over one call of every kernel and its replayed launch.

`python -m blackwell_sparsek.testing.sanitize` needs a GPU and compute-sanitizer of the CUDA
toolkit. The calls are those of `fixed_calls`: the first that launches a kernel stands for it. Each
is made three times in a process of its own, so that the recorded launches are replayed, without
torch's caching of memory, so that memcheck knows the bounds of every tensor. Prints a table of
kernels by tools, and 1 is the status if a tool reports anything. `--logs DIR` keeps what they say.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from ..core.env import environment_for_sanitizer
from .fixed_calls import FixedCall, fixed_calls, supported
from .soak import noted_kernels

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
REPEATS = 3
# Where toolkits are installed, if the command is not on the path.
TOOLKITS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")


class Verdict(NamedTuple):
    """What one tool said of one call: a few words for the table, and whether that is bad."""

    text: str
    bad: bool


def sanitizer() -> str | None:
    """The path of compute-sanitizer, or None."""
    command = "compute-sanitizer"
    return shutil.which(command) or shutil.which(command, path=os.pathsep.join(TOOLKITS))


def calls_by_kernel(device: torch.device, contains: str = "") -> dict[str, FixedCall]:
    """For each kernel the first call that launches it."""
    found: dict[str, FixedCall] = {}
    for call in fixed_calls(device):
        if contains in call.name:
            with noted_kernels() as kernels:
                if supported(call, device) is not None:
                    continue
            for kernel in sorted(kernels):
                found.setdefault(kernel, call)
    return found


def make_call(name: str, device: torch.device) -> None:
    """Make one call several times, as the sanitized process does."""
    call = next(call for call in fixed_calls(device) if call.name == name)
    run = call.make(device)
    for _ in range(REPEATS):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def judged(tool: str, status: int, output: str) -> Verdict:
    """The verdict of a tool from what it printed."""
    if found := re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed", output):
        count = int(found[1])
        return Verdict("ok" if count == 0 else f"{count} hazards", count > 0)
    if found := re.search(r"ERROR SUMMARY: (\d+) errors?", output):
        count = int(found[1])
        if count == 0 and status != 0:
            return Verdict(f"the call failed ({status})", True)
        return Verdict("ok" if count == 0 else f"{count} errors", count > 0)
    if "not supported" in output.lower():
        return Verdict("not supported", False)
    return Verdict(f"no summary ({status})", True)


def run_tool(
    tool: str, name: str, command: str, timeout: float, logs: pathlib.Path | None
) -> Verdict:
    """Run one call under one tool."""
    child = [sys.executable, "-m", "blackwell_sparsek.testing.sanitize", "--one", name]
    try:
        done = subprocess.run(
            [command, "--tool", tool, "--error-exitcode", "9", *child],
            env=environment_for_sanitizer(), capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip
        output, verdict = done.stdout + done.stderr, None
    except subprocess.TimeoutExpired as error:
        output, verdict = str(error.stdout or b""), Verdict(f"over {timeout:g} s", True)
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / f"{re.sub('[^A-Za-z0-9.-]+', '-', name)}.{tool}.txt").write_text(output)
    return verdict or judged(tool, done.returncode, output)


def table(kernels: dict[str, str], verdicts: dict[tuple[str, str], Verdict]) -> str:
    """Kernels by tools; `kernels` names the call of each, `verdicts` is by call and tool."""
    tools = [tool for tool in TOOLS if any(key[1] == tool for key in verdicts)]
    rows = [["kernel", *tools, "call"]]
    for kernel, call in sorted(kernels.items()):
        rows.append([kernel, *(verdicts[call, tool].text for tool in tools), call])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def sanitize(
    kernels: dict[str, str], tools: Sequence[str], run: Callable[[str, str], Verdict], jobs: int
) -> dict[tuple[str, str], Verdict]:
    """The verdict of each tool on each call; `run` takes a tool and a call."""
    pairs = [(call, tool) for call in dict.fromkeys(kernels.values()) for tool in tools]

    def one(pair: tuple[str, str]) -> Verdict:
        verdict = run(pair[1], pair[0])
        print(f"{pair[1]}  {pair[0]}  {verdict.text}", file=sys.stderr, flush=True)
        return verdict

    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(pairs, pool.map(one, pairs), strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 1 when a tool reports something, 2 when nothing can be run."""
    parser = argparse.ArgumentParser(
        prog="python -m blackwell_sparsek.testing.sanitize", description=__doc__
    )
    parser.add_argument("filter", nargs="?", default="", help="only calls whose name contains this")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="all unless given")
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each process")
    parser.add_argument("--logs", type=pathlib.Path, help="keep the output of the tools here")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.one is not None:
        make_call(args.one, device)
        return 0
    command = sanitizer()
    if device.type != "cuda" or command is None:
        missing = "a CUDA GPU" if device.type != "cuda" else "compute-sanitizer (CUDA toolkit)"
        print(f"cannot run: needs {missing}", file=sys.stderr)
        return 2
    found = calls_by_kernel(device, args.filter)
    if not found:
        print(f"no call that launches a kernel matches {args.filter!r}", file=sys.stderr)
        return 2
    kernels = {kernel: call.name for kernel, call in found.items()}

    def run(tool: str, name: str) -> Verdict:
        return run_tool(tool, name, command, args.timeout, args.logs)

    verdicts: dict[Any, Verdict] = sanitize(kernels, args.tool or TOOLS, run, args.jobs)
    print(table(kernels, verdicts))
    return int(any(verdict.bad for verdict in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
