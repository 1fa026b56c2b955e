"""All results in one table: how ours stands in each suite, and in which case it stands worst."""

from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any

from .peer_tables import table, times_faster

MODES = {
    "eager": "single calls",
    "graph": "CUDA graph",
    "sustained": "sustained",
    "host": "host time",
    "reported": "fresh process",
}
HEAD = (
    "suite, timed how",
    "cases",
    "against the best peer: worst, median, best",
    "worst where",
    "against dense: worst, median, best",
)


def summary(documents: Iterable[dict[str, Any]]) -> str:
    """One row for each suite and way of timing in which there was something to compare with."""
    rows = [row for document in documents for row in _rows(document)]
    return table(HEAD, rows) if rows else ""


def _rows(document: dict[str, Any]) -> Iterator[list[str]]:
    for mode, words in MODES.items():
        ratios = [
            (case["name"], case.get("ratios", {}).get(mode, {})) for case in document["cases"]
        ]
        rivals = [
            (r["over_best_peer"], name, r["best_peer"]) for name, r in ratios if "best_peer" in r
        ]
        dense = [r["over_dense"] for _, r in ratios if r.get("over_dense") is not None]
        if not rivals and not dense:
            continue
        where = "{1} ({2})".format(*min(rivals)) if rivals else ""
        yield [
            f"{document['suite'].replace('_', ' ')}, {words}",
            str(max(len(rivals), len(dense))),
            _span([ratio for ratio, _, _ in rivals]),
            where,
            _span(dense),
        ]


def _span(ratios: list[float]) -> str:
    if not ratios:
        return ""
    return ", ".join(map(times_faster, (min(ratios), median(ratios), max(ratios))))
