"""Results files as Markdown: `python -m blackwell_sparsek.bench.tables --write`.

Figures in README.md and docs/results.md are between two markers and come from the files in
benchmarks/results; a test holds them to that.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from . import results
from .peer_tables import MODE_HEADS, heading, notes, number, peer_tables, table, times_faster

BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"
RESULTS = pathlib.Path("benchmarks/results")
# What each page shows: README.md what a reader wants first, the other page everything.
PAGES = {
    pathlib.Path("README.md"): ("matmul_founding", "matmul_crossover"),
    pathlib.Path("docs/results.md"): (
        "matmul_founding",
        "matmul_decode",
        "matmul_crossover",
        "matmul_square",
        "matmul_llama",
    ),
}


CASE_HEADS = {mode: f"case, {MODE_HEADS[mode]}" for mode in ("eager", "graph", "sustained")}
CASE_HEADS["graph"] = "case, in a CUDA graph, cold weights"


def suite_tables(document: dict[str, Any]) -> str:
    """What a results file says."""
    is_matmul = document["suite"].startswith("matmul_")
    return matmul_tables(document) if is_matmul else peer_tables(document)


def matmul_tables(document: dict[str, Any]) -> str:
    """What a results file of products says: ours against the dense product and the best peer."""
    parts = [heading(document)]
    for mode in CASE_HEADS:
        rows = [_row(case, mode) for case in document["cases"]]
        if any(row is not None for row in rows):
            parts.append(_times_table(mode, [row for row in rows if row is not None]))
    if document.get("crossover"):
        parts.append(_crossover_table(document["crossover"]))
    parts += notes(document)
    return "\n\n".join(parts)


def _row(case: dict[str, Any], mode: str) -> list[str] | None:
    """One case, or None where nobody has times in this mode."""
    peers = case["peers"]
    times = {name: entry["times"][mode] for name, entry in peers.items() if _has(entry, mode)}
    if not times:
        return None

    def ms(name: str) -> str:
        return number(times[name]["quantiles_s"]["p50"] * 1e3) if name in times else "n/a"

    ours = times.get("bsk", {})
    ratio = case.get("ratios", {}).get(mode, {})
    best = ratio.get("best_peer")
    return [
        case["name"],
        str(peers.get("bsk", {}).get("implementation", "n/a")),
        ms("bsk"),
        ms("dense"),
        times_faster(ratio.get("over_dense")),
        f"{ms(best)} ({best})" if best else "n/a",
        times_faster(ratio.get("over_best_peer")),
        *(
            number(ours[work]) if work in ours else "n/a"
            for work in ("executed_tflops", "dense_equivalent_tflops")
        ),
    ]


def _times_table(mode: str, rows: list[list[str]]) -> str:
    head = [
        CASE_HEADS[mode],
        "ran",
        "bsk ms",
        "dense ms",
        "faster than dense",
        "best sparse peer ms",
        "faster than it",
        "executed TFLOP/s",
        "dense-equivalent TFLOP/s",
    ]
    # columns in which nothing was measured say nothing
    kept = [i for i in range(len(head)) if i < 3 or any(row[i] != "n/a" for row in rows)]
    return table([head[i] for i in kept], [[row[i] for i in kept] for row in rows])


def _crossover_table(crossover: list[dict[str, Any]]) -> str:
    rows = []
    for entry in crossover:
        densities = [density for density, _ in entry["speedups"]]
        beyond = f"above {max(densities):.0%}"
        if all(speedup < 1 for _, speedup in entry["speedups"]):
            beyond = f"below {min(densities):.0%}"
        density = beyond if entry["density"] is None else f"{entry['density']:.0%}"
        curve = ", ".join(f"{speedup:.2f}x at {d:.0%}" for d, speedup in entry["speedups"])
        rows.append(["x".join(map(str, entry["block"])), density, curve])
    return table(["block", "stored blocks win below", "against dense"], rows)


def _has(entry: dict[str, Any], mode: str) -> bool:
    return mode in entry.get("times", {})


def section_of(page: pathlib.Path, folder: pathlib.Path) -> str:
    """What belongs between the markers of a page, given the committed results; may be empty."""
    parts = []
    for suite in PAGES[page]:
        path = folder / f"{suite}.json"
        if path.exists():
            parts.append(suite_tables(results.read(path)))
    return "\n\n".join(parts)


def with_section(text: str, section: str) -> str:
    """`text` with `section` between its markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"the page needs the lines {BEGIN!r} and {END!r}, once each")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    inside = f"\n\n{section}\n\n" if section else "\n"
    return f"{before}{BEGIN}{inside}{END}{after}"


def write_pages(root: pathlib.Path) -> None:
    """Put the figures of the committed results into the pages of a repository."""
    for page in PAGES:
        target = root / page
        section = section_of(page, root / RESULTS)
        target.write_text(with_section(target.read_text(), section))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: print tables of the given files, or write those of the pages."""
    parser = argparse.ArgumentParser(
        prog="python -m blackwell_sparsek.bench.tables", description=__doc__
    )
    parser.add_argument("files", nargs="*", type=pathlib.Path, help="results files to print")
    parser.add_argument("--write", action="store_true", help="rewrite the figures of the pages")
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path("."), help="repository")
    args = parser.parse_args(argv)
    for path in args.files:
        print(suite_tables(results.read(path)), end="\n\n")
    if args.write:
        write_pages(args.root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
