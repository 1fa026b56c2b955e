"""A first comparison with PyTorch on this machine: `python -m blackwell_sparsek.bench.quickstart`.

Every result is checked against fp64 before its time is taken; a failing check is shown and makes
the exit status 1.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..core.errors import BskError
from .commands.options import device_of
from .environment import describe_environment
from .progress import Progress
from .quickstart_cases import OURS, Case, cases
from .timing import time_interleaved

SCHEMA = 1


def run(
    builders: Iterable[Callable[[], Case]], device: torch.device, budget_s: float
) -> list[dict[str, Any]]:
    """Check and time each case; a case that fails has an `error` instead of times."""
    builders = list(builders)
    progress = Progress(len(builders))
    results = []
    for index, builder in enumerate(builders):
        progress.stage(index, "preparing")
        case = builder()
        result: dict[str, Any] = {"name": case.name, "problem": case.problem, "peer": case.peer}
        results.append(result)
        with torch.no_grad():
            decision = case.explain()
            result["implementation"] = decision.chosen
            result["why_not"] = dict(decision.reasons)
            progress.stage(index, f"{case.name}: checking against fp64")
            try:
                case.check()
            except Exception as error:  # shown in the table; the other cases still run
                result["error"] = f"{type(error).__name__}: {error}"
                continue
            progress.stage(index, f"{case.name}: timing")
            times = time_interleaved(
                case.contenders,
                device,
                budget_s=budget_s,
                rounds=(3, 50),
                progress=progress.rounds(index, case.name),
            )
        result["seconds"] = {
            name: {"quantiles": timing.quantiles(), "samples": timing.seconds}
            for name, timing in times.items()
        }
        result["speedup"] = times["peer"].median / times[OURS].median
    progress.close()
    return results


def report(results: Sequence[dict[str, Any]], environment: dict[str, Any]) -> str:
    """Lay out what ran, the table, and why this implementation."""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    lines = [
        f"device    {environment['device_name']} ({environment['arch']}), "
        f"{environment['threads']} threads, {environment['system']}",
        f"versions  {versions}, python {environment['python']}",
        "",
        *_table(results),
        "",
    ]
    chosen = {r["implementation"] for r in results}
    for name in sorted(chosen, key=str):
        lines += _why(name, [r for r in results if r["implementation"] == name])
    failed = [r for r in results if "error" in r]
    if failed:
        lines += ["", *(f"FAILED {r['name']}: {r['error']}" for r in failed)]
    else:
        lines.append("All results agree with fp64 within twice the error of plain PyTorch.")
    lines.append("Times are medians of interleaved runs; the spread is in the JSON file.")
    load, cores = environment["load"], environment["cpu_count"]
    if load > cores / 2:
        lines.append(
            f"Other processes keep this machine busy (load {load:.1f} on {cores} cores at the "
            f"start): run again when it is quiet before believing these times."
        )
    return "\n".join(lines)


def _table(results: Sequence[dict[str, Any]]) -> list[str]:
    rows = [["", "shapes", "dtype", "kept", "bsk ms", "peer ms", "speedup", "ran", "peer"]]
    for r in results:
        problem = r["problem"]
        cells = ["check failed", "-", "-"]
        if "seconds" in r:
            ours, peer = (r["seconds"][c]["quantiles"]["p50"] * 1e3 for c in (OURS, "peer"))
            cells = [f"{ours:.2f}", f"{peer:.2f}", f"{r['speedup']:.2f}x"]
        kept = f"{problem['kept']:.1%}"
        head = [r["name"], problem["shapes"], problem["dtype"], kept]
        rows.append([*head, *cells, str(r["implementation"]), r["peer"]])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    numbers = (3, 4, 5, 6)
    return [
        "  ".join(
            cell.rjust(width) if i in numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _why(name: str | None, results: Sequence[dict[str, Any]]) -> list[str]:
    what = {"eager": "plain PyTorch, work proportional to the kept blocks"}.get(str(name), "")
    lines = [f"Ran the {name} implementation" + (f" ({what})." if what else ".")]
    # a reason that is not that of every case stands with the cases it is of
    cases: dict[tuple[str, str], list[str]] = {}
    for r in results:
        for pair in r["why_not"].items():
            if pair[0] != "reference":
                cases.setdefault(pair, []).append(r["name"])
    for (other, why), names in cases.items():
        of = "" if len(names) == len(results) else f" ({', '.join(names)})"
        lines.append(f"  not {other}: {why}{of}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: run, print the report, write the JSON; 1 when a check fails."""
    parser = argparse.ArgumentParser(
        prog="python -m blackwell_sparsek.bench.quickstart", description=__doc__
    )
    parser.add_argument("--json", metavar="FILE", help="also write everything measured to FILE")
    parser.add_argument("--quick", action="store_true", help="smaller, for a first look")
    parser.add_argument("--device", help="cpu or cuda; the GPU if there is one")
    args = parser.parse_args(argv)
    try:
        device = device_of("quickstart", args.device)
        if args.json:
            open(args.json, "a").close()  # before minutes are spent on what cannot be kept
    except (BskError, OSError) as error:
        print(error, file=sys.stderr)
        return 2

    started = time.monotonic()
    environment = describe_environment(device)
    results = run(cases(device, args.quick), device, budget_s=0.5 if args.quick else 3.0)
    failed = any("error" in result for result in results)
    print(report(results, environment))
    if args.json:
        document = {
            "schema": SCHEMA,
            "environment": environment,
            "quick": args.quick,
            "passed": not failed,
            "elapsed_s": time.monotonic() - started,
            "cases": results,
        }
        with open(args.json, "w") as file:
            json.dump(document, file, indent=1)
        print(f"Wrote {args.json}.")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
