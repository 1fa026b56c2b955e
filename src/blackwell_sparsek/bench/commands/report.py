"""`bsk report`: show results files as one HTML page, or as Markdown."""

import argparse
import sys

from ...core.errors import InvalidInput
from .. import results
from ..report.markdown import suite_tables
from ..report.page import page
from ..report.tables import printable


def run(args: argparse.Namespace) -> int:
    """Make a page of all readable files; 1 when one could not be read."""
    if not args.files:
        raise InvalidInput("bsk report: no results files given; `bsk bench` makes them")
    documents, unreadable = [], 0
    for path in args.files:
        try:
            documents.append(results.read(path))
        except InvalidInput as error:
            unreadable += 1
            print(printable(f"bsk report: {error}"), file=sys.stderr)
    if not documents:
        raise InvalidInput("bsk report: none of the files can be read")
    if args.markdown:
        print("\n\n".join(map(suite_tables, documents)))
    else:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(page(documents), encoding="utf-8")
        print(
            f"Wrote {args.out}: {len(documents)} suite{'s' * (len(documents) != 1)}.",
            file=sys.stderr,
        )
    return int(unreadable > 0)
