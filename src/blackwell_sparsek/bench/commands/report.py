"""`bsk report`: show results files as one HTML page, or as Markdown."""

import argparse
import pathlib
import sys
from typing import Any

from ...core.errors import InvalidInput
from .. import results
from ..report import markdown as tables
from ..report.page import page


def add_to(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "report", help="make one HTML page of results files, or Markdown tables"
    )
    parser.add_argument("files", nargs="*", type=pathlib.Path, help="results files")
    parser.add_argument(
        "-o",
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("report.html"),
        help="the page (default report.html)",
    )
    parser.add_argument("--markdown", action="store_true", help="print tables instead")
    parser.add_argument(
        "--write",
        action="store_true",
        help="rewrite docs/support.md, and figures of README.md and docs/results/ from "
        "benchmarks/results",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make a page of all readable files; 1 when one could not be read."""
    if args.write:
        tables.write_pages(pathlib.Path("."))
        return 0
    if not args.files:
        raise InvalidInput("bsk report: no results files given; `bsk bench` makes them")
    documents, unreadable = [], 0
    for path in args.files:
        try:
            documents.append(results.read(path))
        except InvalidInput as error:
            unreadable += 1
            print(f"bsk report: {error}", file=sys.stderr)
    if not documents:
        raise InvalidInput("bsk report: none of the files can be read")
    if args.markdown:
        print("\n\n".join(map(tables.suite_tables, documents)))
    else:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(page(documents), encoding="utf-8")
        print(f"Wrote {args.out}: {len(documents)} suites.", file=sys.stderr)
    return int(unreadable > 0)
