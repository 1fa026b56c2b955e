"""Results files as Markdown, and the pages that show them: `bsk report --write`.

README.md and docs/results/index.md have figures between two markers; docs/results/<suite>.md is
generated as a whole. All of it comes from benchmarks/results, and a test compares them.
"""

import pathlib
import posixpath
from typing import Any

from . import results
from .headlines import headlines
from .peer_tables import MODE_HEADS, heading, notes, number, peer_tables, table, times_faster
from .report.figures import Figure, figures_of
from .report.page import colours_of
from .report.problems import is_sweep, product_of
from .report.standalone import standalone
from .summary import summary
from .sweep_table import sweep_table

BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"
RESULTS = pathlib.Path("benchmarks/results")
# The order of suites: README.md shows a few cases of them, docs/results/ a page for each.
SUITES = (
    "matmul_founding",
    "matmul_decode",
    "matmul_crossover",
    "matmul_square",
    "matmul_llama",
    "matmul_layers",
    "attention_dense",
    "attention_window",
    "attention_small",
    "attention_varlen",
    "block_sparse",
    "mask_building",
    "backward",
    "training",
    "decode",
    "llama_prefill",
    "llama_decode",
    "host",
    "first_call",
)
SUMMARY = pathlib.Path("README.md")
INDEX = pathlib.Path("docs/results/index.md")
# Pages with a generated section; `suite_pages` are generated as a whole.
PAGES = (SUMMARY, INDEX)
# Suites whose plots the summary shows.
PLOTTED = ("matmul_founding", "attention_dense")
PLOTS = pathlib.Path("docs/plots")


CASE_HEADS = {mode: f"case, {MODE_HEADS[mode]}" for mode in ("eager", "graph", "sustained")}
CASE_HEADS["graph"] = "case, in a CUDA graph, cold weights"


def suite_tables(document: dict[str, Any]) -> str:
    """What a results file says."""
    is_matmul = document["suite"].startswith("matmul_")
    return matmul_tables(document) if is_matmul else peer_tables(document)


def matmul_tables(document: dict[str, Any]) -> str:
    """What a results file of products says: ours against the dense product and the best peer."""
    parts = [heading(document)]
    cases = document["cases"]
    swept = is_sweep(case["problem"] for case in cases)
    for mode in CASE_HEADS:
        timed = [(case, row) for case in cases if (row := _row(case, mode)) is not None]
        if swept and timed:
            parts.append(sweep_table([case for case, _ in timed], mode, MODE_HEADS[mode]))
        # what has no place in a sweep still has a row
        rows = [row for case, row in timed if not swept or product_of(case["problem"]) is None]
        if rows:
            parts.append(_times_table(mode, rows))
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
    documents = committed(folder)
    if page == SUMMARY:
        shown = [document for document in documents if document["suite"] in PLOTTED]
        parts = [headlines(documents), *(link for d in shown for link in _links(d, page))]
        return "\n\n".join(part for part in parts if part)
    names = [document["suite"] for document in documents]
    pages = " · ".join(f"[{name.replace('_', ' ')}]({name}.md)" for name in names)
    return "\n\n".join(part for part in (pages, summary(documents)) if part)


def suite_pages(folder: pathlib.Path) -> dict[str, str]:
    """The page of every suite, by the name of its file from the root of the repository."""
    pages = {}
    for document in committed(folder):
        page = INDEX.with_name(f"{document['suite']}.md")
        title = f"# {document['suite'].replace('_', ' ').capitalize()}"
        source = f"Generated from `{(RESULTS / document['suite']).as_posix()}.json`; do not edit."
        heading, *tables = suite_tables(document).split("\n\n")
        parts = [title, source, heading, *_links(document, page), *tables]
        pages[page.as_posix()] = "\n\n".join(parts) + "\n"
    return pages


def committed(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The results files of the suites that pages show, in their order."""
    paths = [folder / f"{suite}.json" for suite in SUITES]
    return [results.read(path) for path in paths if path.exists()]


def _links(document: dict[str, Any], page: pathlib.Path) -> list[str]:
    start = page.parent.as_posix()
    return [
        f"![{plot.caption}]({posixpath.relpath(name, start)})" for name, plot in headline(document)
    ]


def with_section(text: str, section: str) -> str:
    """`text` with `section` between its markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"the page needs the lines {BEGIN!r} and {END!r}, once each")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    inside = f"\n\n{section}\n\n" if section else "\n"
    return f"{before}{BEGIN}{inside}{END}{after}"


def headline(document: dict[str, Any]) -> list[tuple[str, Figure]]:
    """The picture that says most about a suite, with its file from the root of the repository."""
    figures = figures_of(document, colours_of(document))
    # products are about the dense product, attention about the other kernels
    if document["suite"].startswith("matmul_"):
        figures.sort(key=lambda figure: "faster than" not in figure.caption)
    return [((PLOTS / f"{document['suite']}.svg").as_posix(), figure) for figure in figures[:1]]


def plot_files(folder: pathlib.Path) -> dict[str, str]:
    """Every plot that the pages show, by the name of its file."""
    documents = committed(folder)
    found = (plot for document in documents for plot in headline(document))
    return {name: standalone(figure) for name, figure in found}


def write_pages(root: pathlib.Path) -> None:
    """Put the figures of the committed results into the pages of a repository."""
    for name, content in (plot_files(root / RESULTS) | suite_pages(root / RESULTS)).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    for page in PAGES:
        target = root / page
        section = section_of(page, root / RESULTS)
        target.write_text(with_section(target.read_text(), section))
