"""Results files as Markdown: `python -m blackwell_sparsek.bench.tables --write`.

Figures in README.md and docs/results.md are between two markers and come from the files in
benchmarks/results; a test holds them to that.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

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


CASE_HEADS = {
    "eager": "case, single calls between pauses, cold L2",
    "graph": "case, in a CUDA graph, cold weights",
    "sustained": "case, call after call without a pause",
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all but the first column are aligned to the right."""
    lines = [head, ["---", *(["---:"] * (len(head) - 1))], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def matmul_tables(document: dict[str, Any]) -> str:
    """What a results file of `bench.matmul` says."""
    environment = document["environment"]
    versions = environment["versions"]
    where = f"{environment['device_name']}, torch {versions['torch']}"
    where += f", triton {versions['triton']}" if "triton" in versions else ""
    where += f", commit {document['commit'][:10]}" if document.get("commit") else ""
    parts = [f"**{document['suite'].replace('_', ' ')}** ({where})"]
    for mode in CASE_HEADS:
        rows = [_row(case, mode) for case in document["cases"]]
        if any(row is not None for row in rows):
            parts.append(_times_table(mode, [row for row in rows if row is not None]))
    if document.get("crossover"):
        parts.append(_crossover_table(document["crossover"]))
    absent = _absent(document["cases"])
    if absent:
        parts.append("\n".join(absent))
    return "\n\n".join(parts)


def _row(case: dict[str, Any], mode: str) -> list[str] | None:
    """One case, or None where nobody has times in this mode."""
    peers = case["peers"]
    times = {name: entry["times"][mode] for name, entry in peers.items() if _has(entry, mode)}
    if not times:
        return None

    def ms(name: str) -> str:
        return _number(times[name]["quantiles_s"]["p50"] * 1e3) if name in times else "n/a"

    ours = times.get("bsk", {})
    ratio = case.get("ratios", {}).get(mode, {})
    best = ratio.get("best_sparse_peer")
    return [
        case["name"],
        str(peers.get("bsk", {}).get("implementation", "n/a")),
        ms("bsk"),
        ms("dense"),
        _times(ratio.get("over_dense")),
        f"{ms(best)} ({best})" if best else "n/a",
        _times(ratio.get("over_best_sparse")),
        _number(ours["executed_tflops"]) if ours else "n/a",
        _number(ours["dense_equivalent_tflops"]) if ours else "n/a",
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


def _absent(cases: list[dict[str, Any]]) -> list[str]:
    """Why peers have no times, each reason once."""
    found: dict[str, None] = {}
    for case in cases:
        for name, entry in case["peers"].items():
            if "n/a" in entry:
                found[f"- {name}: n/a: {entry['n/a']}"] = None
            if "failed" in entry:
                found[f"- {name}: failed its check ({case['name']}): {entry['failed']}"] = None
    return list(found)


def _number(value: float) -> str:
    """Three digits, and no exponent where there are more."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def _has(entry: dict[str, Any], mode: str) -> bool:
    return mode in entry.get("times", {})


def _times(ratio: float | None) -> str:
    return "n/a" if ratio is None else f"{ratio:.2f}x"


def section_of(page: pathlib.Path, results: pathlib.Path) -> str:
    """What belongs between the markers of a page, given the committed results; may be empty."""
    parts = []
    for suite in PAGES[page]:
        path = results / f"{suite}.json"
        if path.exists():
            parts.append(matmul_tables(json.loads(path.read_text())))
    return "\n\n".join(parts)


def with_section(text: str, section: str) -> str:
    """`text` with `section` between its markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"the page needs the lines {BEGIN!r} and {END!r}, once each")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    inside = f"\n\n{section}\n\n" if section else "\n"
    return f"{before}{BEGIN}{inside}{END}{after}"


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
        print(matmul_tables(json.loads(path.read_text())), end="\n\n")
    for page in PAGES if args.write else ():
        section = section_of(page, args.root / RESULTS)
        target = args.root / page
        target.write_text(with_section(target.read_text(), section))
    return 0


if __name__ == "__main__":
    sys.exit(main())
