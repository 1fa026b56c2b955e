"""`bsk compare`: what became slower between two runs."""

import argparse
import pathlib
import sys
from typing import Any

from ...core.errors import InvalidInput
from ..compare import Comparison, compare, pairs_of, read_both


def add_to(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "compare",
        help="say what became slower between two runs",
        description="The exit status is 1 when a case of ours became slower beyond the noise of "
        "both runs, or does not run any more, and when there is nothing to compare; 2 when some "
        "files cannot be compared.",
    )
    parser.add_argument("old", type=pathlib.Path, help="a results file, or a folder of them")
    parser.add_argument("new", type=pathlib.Path, help="a results file, or a folder of them")
    parser.add_argument("--force", action="store_true", help="even if the machines differ")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the changes; 1 when something became slower, 2 when something cannot be compared."""
    worse = unknown = 0
    for old, new in pairs_of(args.old, args.new):
        try:
            found = compare(*read_both(old, new), force=args.force)
        except InvalidInput as error:  # the other files of a folder can still be compared
            text = str(error)
            print(text if text.startswith("bsk ") else f"bsk compare: {text}", file=sys.stderr)
            unknown += 1
            continue
        worse += _told(found, old, new)
    return 2 if unknown else int(worse > 0)


def _told(found: Comparison, old: pathlib.Path, new: pathlib.Path) -> int:
    """Print what changed; how much of it is for the worse."""
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
    if not found.changes:
        print(f"NOTHING {new}: no time of ours that {old} has as well")
    same = len(found.of("same"))
    print(f"{new}: {len(found.changes)} times compared, {same} within the noise")
    return len(found.of("slower")) + len(found.of("gone")) + (not found.changes)
