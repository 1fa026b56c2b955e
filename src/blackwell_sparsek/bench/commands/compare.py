"""`bsk compare`: what became slower between two runs."""

import argparse
import pathlib
from typing import Any

from ..compare import compare, pairs_of, read_both


def add_to(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "compare",
        help="say what became slower between two runs",
        description="The exit status is 1 when a case of ours became slower beyond the noise of "
        "both runs, or does not run any more, and when there is nothing to compare.",
    )
    parser.add_argument("old", type=pathlib.Path, help="a results file, or a folder of them")
    parser.add_argument("new", type=pathlib.Path, help="a results file, or a folder of them")
    parser.add_argument("--force", action="store_true", help="even if the machines differ")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the changes; 1 when something became slower."""
    worse = 0
    for old, new in pairs_of(args.old, args.new):
        found = compare(*read_both(old, new), force=args.force)
        for note in found.notes:
            print(f"note: {note}")
        if abs(found.drift - 1) > 0.02:
            print(f"note: other peers took {found.drift:.3f}x the time: the machine changed")
        for change in found.of("faster"):
            print(f"faster  {change}")
        for change in found.of("slower"):
            print(f"SLOWER  {change}")
        for change in found.of("gone"):
            print(f"GONE    {change}")
        worse += len(found.of("slower")) + len(found.of("gone"))
        if not found.changes:
            worse += 1
            print(f"NOTHING {new}: no time of ours that {old} has as well")
        same = len(found.of("same"))
        print(f"{new}: {len(found.changes)} times compared, {same} within the noise")
    return int(worse > 0)
