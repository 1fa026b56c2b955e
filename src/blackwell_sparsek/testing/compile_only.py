"""Compile every registered kernel without its GPU, and report on the machine code.

`python -m blackwell_sparsek.testing.compile_only --arch sm_90 [filter]` prints registers, shared
memory, spills and, on request, how often an instruction occurs. `--save FILE` keeps a digest of
each kernel's machine code, `--compare FILE` tells which have changed since: moving or renaming code
must change none. Triton cannot compile in a process that interprets kernels, so child processes do
the work, many cases in each.
"""

import argparse
import json
import pathlib
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..core.env import environment_for_compiler
from ..core.errors import InvalidInput
from ..core.progress import Progress
from .compile_cases import ALL_ARCHS

CASES = "blackwell_sparsek.testing.cases"


def compile_kernels(
    archs: Sequence[int] = ALL_ARCHS,
    contains: str = "",
    *,
    counts: Sequence[str] = (),
    package: str = CASES,
    jobs: int = 1,
    part: tuple[int, int] = (0, 1),
    one_of_each: bool = False,
    progress: Callable[[int, int, dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Build compile cases without a GPU.

    Parameters
    ----------
    archs : compute capabilities, 90 for sm_90
    contains : only cases whose name contains this
    counts : instructions to count besides those a case expects: `wgmma` in the PTX, `sass:HGMMA`
        in the machine code
    package : its modules are imported for their compile cases
    jobs : child processes
    part : (i, n), only every n-th case from the i-th on
    one_of_each : only the first case of each kernel that a function under `@compile_cases` yields
    progress : called with (done, total, record) after each build

    Returns
    -------
    list of dict
        `name`, `arch`, `registers`, `shared`, `spill_stores`, `spill_loads` (bytes), `counts`,
        `target`, `digest` (of the machine code), `triton` (its version), `seconds`, and
        `problems`: empty, or why the case fails.
    """
    command = [sys.executable, "-m", "blackwell_sparsek.testing.compile_worker"]
    command += ["--package", package, "--filter", contains, "--shards", str(jobs * part[1])]
    command += ["--arch", *map(str, archs), "--count", *counts]
    if one_of_each:
        command.append("--one-of-each")
    lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    errors: list[str] = []
    shards = range(part[0], jobs * part[1], part[1])
    children = [_start([*command, "--shard", str(shard)]) for shard in shards]
    threads = [threading.Thread(target=_collect, args=(child, lines, errors)) for child in children]
    for thread in threads:
        thread.start()
    try:
        records = _gathered(lines, jobs, progress)
    except BaseException:  # such as an interrupt: do not wait for the rest
        for child in children:
            child.kill()
        raise
    for thread in threads:
        thread.join()
    if errors:
        raise RuntimeError("\n".join(errors))
    return sorted(records, key=lambda r: (r["name"], r["arch"]))


def _gathered(
    lines: "queue.SimpleQueue[dict[str, Any] | None]",
    running: int,
    progress: Callable[[int, int, dict[str, Any]], None] | None,
) -> list[dict[str, Any]]:
    """The records of the children, until all of them have ended."""
    records: list[dict[str, Any]] = []
    total = 0
    while running:
        line = lines.get()
        if line is None:
            running -= 1
        elif "total" in line:
            total += line["total"]
        else:
            records.append(line)
            if progress:
                progress(len(records), total, line)
    return records


def _start(command: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command,
        env=environment_for_compiler(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _collect(child: "subprocess.Popen[str]", lines: Any, errors: list[str]) -> None:
    stderr: list[str] = []
    assert child.stdout and child.stderr
    # a full pipe would block the child, so a thread drains stderr
    drain = threading.Thread(target=stderr.extend, args=(child.stderr,))
    drain.start()
    for line in child.stdout:
        lines.put(json.loads(line))
    drain.join()
    if child.wait() != 0:
        errors.append(f"the compiler process failed ({child.returncode}):\n{''.join(stderr)}")
    lines.put(None)


def table(records: Sequence[dict[str, Any]]) -> str:
    """Format the records in aligned columns, with problems below their row."""
    counted = list(dict.fromkeys(what for r in records for what in r.get("counts", {})))
    head = ["case", "arch", "regs", "shared", "spills", *counted, "s", ""]
    rows = [head]
    for r in records:
        spills = r.get("spill_stores", 0) + r.get("spill_loads", 0)
        numbers = [r.get("registers", "-"), r.get("shared", "-"), spills]
        numbers += [r.get("counts", {}).get(what, "-") for what in counted]
        seconds = f"{r['seconds']:.1f}" if "seconds" in r else "-"
        verdict = "FAILED" if r["problems"] else "ok"
        rows.append([r["name"], f"sm_{r['arch']}", *map(str, numbers), seconds, verdict])
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = []
    for row, record in zip(rows, [None, *records], strict=True):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
        lines += [f"    {problem}" for problem in (record or {}).get("problems", [])]
    return "\n".join(lines)


def changed_code(records: Sequence[dict[str, Any]], before: dict[str, str]) -> list[str]:
    """The cases whose machine code differs from `before`, an earlier result of `digests`."""
    now = digests(records)
    lines = [f"changed: {name}" for name in now if before.get(name, now[name]) != now[name]]
    lines += [f"new: {name}" for name in now if name not in before]
    return lines + [f"gone: {name}" for name in before if name not in now]


def digests(records: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The digest of the machine code, by case and architecture; "" if it does not build."""
    return {f"{r['name']} sm_{r['arch']}": r.get("digest", "") for r in records}


def read_digests(path: pathlib.Path) -> dict[str, str]:
    """What `--save` wrote, checked."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(x, str) for x in found.values()):
        raise InvalidInput(f"{path}: expected the digests that --save writes")
    return found


def _architecture(text: str) -> int:
    digits = text.removeprefix("sm_")
    if not digits.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not an architecture such as sm_90")
    return int(digits)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: build, show progress, print the table; 1 when a case fails."""
    parser = argparse.ArgumentParser(
        prog="python -m blackwell_sparsek.testing.compile_only", description=__doc__
    )
    parser.add_argument("filter", nargs="?", default="", help="only cases whose name contains this")
    parser.add_argument(
        "--arch", type=_architecture, action="append", help="sm_80 ... sm_120; all unless given"
    )
    parser.add_argument("--count", action="append", default=[], help="wgmma, sass:HGMMA, ...")
    parser.add_argument("--jobs", type=int, default=2, help="child processes (default 2)")
    parser.add_argument("--package", default=CASES, help="where to look for compile cases")
    parser.add_argument("--save", type=pathlib.Path, help="write digests of the machine code here")
    parser.add_argument("--compare", type=pathlib.Path, help="1 when code differs from such a file")
    args = parser.parse_args(argv)
    try:
        before = read_digests(args.compare) if args.compare else {}
    except InvalidInput as error:  # now, and not after minutes of compiling
        parser.error(str(error))

    with Progress("") as progress:

        def show(done: int, total: int, record: dict[str, Any]) -> None:
            progress.total = total
            progress.stage(done - 1, f"{record['name']} sm_{record['arch']}")

        records = compile_kernels(
            args.arch or ALL_ARCHS,
            args.filter,
            counts=args.count,
            package=args.package,
            jobs=args.jobs,
            progress=show,
        )
    if not records:
        print(f"no compile case matches {args.filter!r}", file=sys.stderr)
        return 1
    print(table(records))
    if args.save:
        args.save.write_text(json.dumps(digests(records), indent=1) + "\n")
    changed = []
    if args.compare:
        changed = changed_code(records, before)
        print("\n".join(changed) or "the machine code of every case is as it was")
    return int(bool(changed) or any(record["problems"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
