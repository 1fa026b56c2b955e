"""The pages of this repository that are written from results; `make pages` writes them.

README.md and docs/results/index.md have a generated section between two markers;
docs/results/<suite>.md is generated as a whole. All of it comes from benchmarks/results, and a test
checks that the pages are up to date. docs/support.md is written along with them. The wheel does not
have this module.
"""

import pathlib
import posixpath
from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any, NamedTuple

from ...core.errors import InvalidInput
from .. import results
from . import support
from .figures import MODE_NAMES, OVER_DENSE, Figure, figures_of
from .markdown import suite_tables
from .page import STANDALONE, colours_of, standalone
from .releases import releases_page
from .tables import number, table, times_faster

# Headlines: the cases that README.md shows.

# suite, case, how it was timed
HEADLINES = (
    ("matmul_founding", "8192^3, blocks 128x128, 78% sparse", "eager"),
    ("matmul_founding", "8192^3, blocks 64x64, 78% sparse", "eager"),
    ("matmul_founding", "8192^3, blocks 16x16, 78% sparse", "eager"),
    ("matmul_decode", "8B gate_up, 16 tokens, blocks 128x128, 78% sparse", "graph"),
    ("bsr_training", "8192^3, blocks 128x128, 78% sparse", "eager"),
    ("attention_dense", "B1 H16 S16k D128 causal", "eager"),
    ("attention_wide", "B1 H16:8 S16k D256 causal", "eager"),
    ("attention_window", "B1 H16 S128k D128 causal window 2048", "eager"),
    ("attention_small", "B1 H8 S512 D64 full float16", "graph"),
    ("block_sparse", "B1 H16 S16k D128 blocks 128x128 at 22%", "eager"),
    ("block_sparse", "B1 H16 S16k D128 blocks 64x64 at 22%", "eager"),
    ("backward", "B1 H8 S64k D128 blocks 64x64 at 5%", "eager"),
    ("decode", "B1 S8k H32:8 D128, contiguous", "graph"),
    ("decode", "B16 S8k H32:8 D128, pages of 64", "graph"),
    ("serving", "32 decodes at 8k + 2 prefills of 4k, H32:8 D128", "graph"),
    ("sparse_attention", "MSA 64:4 D128, 16 blocks of 128 S32k, 90 % shared", "eager"),
    ("sparse_attention", "QSA 24:2 D256, 512 entries of 4 S32k, 90 % shared", "eager"),
    (
        "sparse_attention",
        "NSA 64:4 D128, 16 blocks of 64 S64k, 90 % shared, forward and backward",
        "eager",
    ),
)
HEADLINE_HEAD = (
    "suite: case, timing mode",
    "ours",
    "best peer",
    "speedup over peer",
    "speedup over dense",
)


def headlines(documents: Iterable[dict[str, Any]]) -> str:
    """A row for each headline with results in which nobody is faster."""
    cases = {(d["suite"], case["name"]): case for d in documents for case in d["cases"]}
    rows = [
        row
        for suite, name, mode in HEADLINES
        if (suite, name) in cases
        for row in _headline_row(suite, cases[suite, name], mode)
    ]
    return table(HEADLINE_HEAD, rows) if rows else ""


def _headline_row(suite: str, case: dict[str, Any], mode: str) -> Iterator[list[str]]:
    times = {name: entry.get("times", {}).get(mode) for name, entry in case["peers"].items()}
    if times.get("bsk") is None:
        return
    ratio = case.get("ratios", {}).get(mode, {})
    if any(_loses(ratio[key]) for key in RATIOS if ratio.get(key) is not None):
        return
    best = ratio.get("best_peer")
    yield [
        f"{suite.replace('_', ' ')}: {case['name']}, {MODE_NAMES[mode]}",
        _headline_time(times["bsk"]),
        f"{_headline_time(times[best])} ({best})" if best else "",
        times_faster(ratio["over_best_peer"]) if best else "",
        times_faster(ratio["over_dense"]) if ratio.get("over_dense") is not None else "",
    ]


def _headline_time(figures: dict[str, Any]) -> str:
    seconds = figures["quantiles_s"]["p50"]
    time = f"{number(seconds * 1e3)} ms" if seconds >= 1e-4 else f"{number(seconds * 1e6)} us"
    # decoding and products of few tokens are memory-bound: their TFLOP/s mean nothing
    work = figures.get("executed_tflops", 0)
    return f"{time}, {number(work)} TFLOP/s" if work >= 100 else time


# Losses: every suite in which somebody is faster, by its worst case.

RATIOS = ("over_best_peer", "over_dense")
LOSS_HEAD = ("suite: worst case, timing mode", "slower cases", "ours", "fastest", "our speedup")


def _loses(ratio: float) -> bool:
    """Whether the ratio is below 1 as it is printed."""
    return round(ratio, 2) < 1


def losses(documents: Iterable[dict[str, Any]]) -> str:
    """A row for each suite with a case in which a peer, or the dense computation, is faster."""
    rows = [row for document in documents for row in _loss_row(document)]
    return table(LOSS_HEAD, rows) if rows else ""


class _Compared(NamedTuple):
    """A case beside something that computes the same; `min` finds the lowest ratio."""

    ratio: float
    case: str
    mode: str
    ours: str
    other: str


def _loss_row(document: dict[str, Any]) -> Iterator[list[str]]:
    lowest: dict[str, _Compared] = {}
    for case in document["cases"]:
        for mode, ratio in case.get("ratios", {}).items():
            for key in RATIOS:
                if ratio.get(key) is not None:
                    compared = _compared(case, mode, ratio, key)
                    lowest[case["name"]] = min(compared, lowest.get(case["name"], compared))
    lost = [compared for compared in lowest.values() if _loses(compared.ratio)]
    if lost:
        worst = min(lost)
        yield [
            f"{document['suite'].replace('_', ' ')}: {worst.case}, {MODE_NAMES[worst.mode]}",
            f"{len(lost)} of {len(lowest)}",
            worst.ours,
            worst.other,
            times_faster(worst.ratio),
        ]


def _compared(case: dict[str, Any], mode: str, ratio: dict[str, Any], key: str) -> _Compared:
    peers = case["peers"]
    times = {
        name: peer["times"][mode] for name, peer in peers.items() if mode in peer.get("times", {})
    }
    seconds = {name: figures["quantiles_s"]["p50"] for name, figures in times.items()}
    other = ratio.get("best_peer")
    if key == "over_dense":
        # results do not name the dense one: it is the peer with this ratio
        gap = {peer: abs(s / seconds["bsk"] - ratio[key]) for peer, s in seconds.items()}
        other = min(gap, key=lambda peer: gap[peer])
    ours, theirs = _headline_time(times["bsk"]), _headline_time(times[other])
    return _Compared(ratio[key], case["name"], mode, ours, f"{theirs} ({other})")


# The summary: the ratios of each suite, and its worst case.

SUMMARY_HEAD = (
    "suite, timing mode",
    "cases",
    "speedup over best peer: worst, median, best",
    "worst case",
    "speedup over dense: worst, median, best",
)


def summary(documents: Iterable[dict[str, Any]]) -> str:
    """One row for each suite and mode with a speedup over a peer."""
    rows = [row for document in documents for row in _summary_rows(document)]
    return table(SUMMARY_HEAD, rows) if rows else ""


def _summary_rows(document: dict[str, Any]) -> Iterator[list[str]]:
    for mode, words in MODE_NAMES.items():
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


BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"
RESULTS = pathlib.Path("benchmarks/results")
# The suites in order: README.md shows a few of their cases, docs/results/ a page for each.
SUITES = (
    "matmul_founding",
    "matmul_decode",
    "matmul_crossover",
    "matmul_square",
    "matmul_llama",
    "matmul_layers",
    "bsr_training",
    "attention_dense",
    "attention_wide",
    "attention_window",
    "attention_small",
    "attention_varlen",
    "block_sparse",
    "mask_building",
    "backward",
    "backward_wide",
    "backward_small",
    "training",
    "decode",
    "mla",
    "serving",
    "append",
    "fp8_attention",
    "fp8_matmul",
    "fp8_quantize",
    "sparse_attention",
    "selection",
    "sparsek",
    "gated_attention",
    "distributed",
    "jax",
    "llama_prefill",
    "llama_decode",
    "host",
    "new_sizes",
    "first_call",
)
SUMMARY = pathlib.Path("README.md")
INDEX = pathlib.Path("docs/results/index.md")
# Pages with a generated section; `suite_pages` are generated as a whole.
PAGES = (SUMMARY, INDEX)
# Suites whose plots the summary shows.
PLOTTED = ("matmul_founding", "attention_dense")
PLOTS = pathlib.Path("docs/plots")


def section_of(page: pathlib.Path, folder: pathlib.Path) -> str:
    """The generated section of a page, from the committed results; may be empty."""
    documents = committed(folder)
    if page == SUMMARY:
        shown = [document for document in documents if document["suite"] in PLOTTED]
        won, lost = headlines(documents), losses(documents)
        parts = [
            won and f"### Where it wins\n\n{won}",
            lost and f"### Where it loses\n\n{lost}",
            *(link for document in shown for link in _links(document, page)),
        ]
        return "\n\n".join(part for part in parts if part)
    names = [document["suite"] for document in documents]
    pages = " · ".join(f"[{name.replace('_', ' ')}]({name}.md)" for name in names)
    return "\n\n".join(part for part in (pages, summary(documents)) if part)


def suite_pages(folder: pathlib.Path) -> dict[str, str]:
    """The page of every suite, keyed by its path from the root of the repository."""
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
    """The results files of the suites in `SUITES`, in that order."""
    paths = {suite: folder / f"{suite}.json" for suite in SUITES}
    found = {suite: results.read(path) for suite, path in paths.items() if path.exists()}
    for suite, document in found.items():
        # pages and plots are written under this name
        if document["suite"] != suite:
            got = document["suite"]
            raise InvalidInput(
                f"{paths[suite]}: is of another suite; expected {suite!r}, got {got!r}"
            )
    return list(found.values())


def _links(document: dict[str, Any], page: pathlib.Path) -> list[str]:
    start = page.parent.as_posix()
    return [
        f"![{plot.caption}]({posixpath.relpath(name, start)})" for name, plot in headline(document)
    ]


def with_section(text: str, section: str) -> str:
    """`text` with `section` between its markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise InvalidInput(f"the page needs the lines {BEGIN!r} and {END!r}, once each")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    inside = f"\n\n{section}\n\n" if section else "\n"
    return f"{before}{BEGIN}{inside}{END}{after}"


def headline(document: dict[str, Any]) -> list[tuple[str, Figure]]:
    """The main plot of a suite, with its path from the root of the repository."""
    figures = figures_of(document, colours_of(document), STANDALONE)
    # compare products with the dense product, and attention with other kernels
    if document["suite"].startswith("matmul_"):
        figures.sort(key=lambda figure: not figure.caption.startswith(OVER_DENSE))
    return [((PLOTS / f"{document['suite']}.svg").as_posix(), figure) for figure in figures[:1]]


def plot_files(folder: pathlib.Path) -> dict[str, str]:
    """Every plot in the pages, keyed by its path."""
    documents = committed(folder)
    found = (plot for document in documents for plot in headline(document))
    return {name: standalone(figure) for name, figure in found}


def write_pages(root: pathlib.Path) -> None:
    """Write the committed results into the pages of a repository."""
    folder = root / RESULTS
    pages = {support.PAGE: support.support_page(folder)} | releases_page(folder)
    files = plot_files(folder) | suite_pages(folder) | pages
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    for page in PAGES:
        target = root / page
        section = section_of(page, root / RESULTS)
        target.write_text(with_section(target.read_text(), section))


if __name__ == "__main__":
    write_pages(pathlib.Path("."))
