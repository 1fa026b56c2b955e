"""Block-sparse products against torch: `python -m blackwell_sparsek.bench.matmul`.

Every result is checked against fp64 on sampled rows before it is timed. Times are medians of
interleaved rounds from cold caches; in CUDA graphs, narrow products rotate through copies of the
weight that together outgrow the L2 cache. The exit status is 1 when a check of ours fails.
"""

import argparse
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .clocks import ClockLog
from .environment import describe_environment, source_commit
from .matmul_peers import DENSE, OURS, PEERS, STORED
from .matmul_suites import SUITES
from .measure import EAGER, measure, ratios
from .progress import Progress
from .registry import Case
from .tables import matmul_tables

SCHEMA = 1
SPARSE_PEERS = [name for name, peer in PEERS.items() if peer.is_sparse_peer]


def run(
    suite: str,
    cases: Iterable[Case],
    device: torch.device,
    seconds: float,
    path: str | None = None,
    commit: str | None = None,
) -> dict[str, Any]:
    """Measure all cases; with `path`, the results so far are there after each of them."""
    cases = list(cases)
    progress = Progress(len(cases))
    started = time.monotonic()
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "suite": f"matmul_{suite}",
        "commit": commit or source_commit(),
        "environment": describe_environment(device),
        "cases": [],
    }
    with ClockLog(device) as clocks, torch.no_grad():
        for index, case in enumerate(cases):

            def stage(text: str, index: int = index, name: str = case.name) -> None:
                progress.stage(index, f"{name}: {text}")

            result = measure(case, PEERS, device, seconds=seconds, clocks=clocks, stage=stage)
            result["ratios"] = ratios(result, OURS, DENSE, SPARSE_PEERS)
            document["cases"].append(result)
            document["elapsed_s"] = time.monotonic() - started
            if suite == "crossover":
                document["crossover"] = crossings(document["cases"])
            if path:
                pathlib.Path(path).write_text(json.dumps(document, indent=1) + "\n")
    progress.close()
    return document


def crossings(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each block shape, the density at which stored blocks and the dense product meet."""
    curves: dict[tuple[int, ...], list[tuple[float, float]]] = {}
    for case in cases:
        medians = {
            name: entry["times"][EAGER]["quantiles_s"]["p50"]
            for name, entry in case["peers"].items()
            if "times" in entry
        }
        if STORED in medians and DENSE in medians:
            curve = curves.setdefault(tuple(case["problem"]["block"]), [])
            curve.append((case["problem"]["density"], medians[DENSE] / medians[STORED]))
    return [
        {"block": list(block), "density": meeting_point(curve), "speedups": sorted(curve)}
        for block, curve in curves.items()
    ]


def meeting_point(curve: Sequence[tuple[float, float]]) -> float | None:
    """Where a falling speedup passes 1, between (density, speedup) points; None if it does not.

    Examples
    --------
    >>> meeting_point([(0.2, 2.0), (0.4, 0.5)])
    0.2667
    """
    points = sorted(curve)
    for (left, high), (right, low) in itertools.pairwise(points):
        if high >= 1 > low:
            # time grows with density: interpolate its inverse, the ratio of times
            share = (1 - 1 / high) / (1 / low - 1 / high)
            return round(left + share * (right - left), 4)
    return None


def failures(document: dict[str, Any]) -> list[str]:
    """What went wrong on our side; why other peers have no times stands below the tables."""
    found = []
    for case in document["cases"]:
        if "error" in case:
            found.append(f"{case['name']}: {case['error']}")
        for name, entry in case["peers"].items():
            reason = entry.get("failed", entry.get("n/a"))
            if name in (OURS, STORED) and reason is not None:
                found.append(f"{case['name']}: {name}: {reason}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: run one suite, print its tables, write the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m blackwell_sparsek.bench.matmul", description=__doc__
    )
    parser.add_argument("--suite", choices=SUITES, default="founding")
    parser.add_argument("--json", metavar="OUT", help="also write everything measured to OUT")
    parser.add_argument(
        "--seconds", type=float, default=0.3, metavar="N", help="timing of each case (default 0.3)"
    )
    parser.add_argument("--commit", help="what to note where this is no git checkout")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        print("No GPU: small sizes, for a look at the tool.", file=sys.stderr)
    cases = SUITES[args.suite](tiny=device.type == "cpu")
    document = run(args.suite, cases, device, args.seconds, args.json, args.commit)
    print(matmul_tables(document))
    problems = failures(document)
    if problems:
        print("\n".join(["", *(f"FAILED {problem}" for problem in problems)]))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
