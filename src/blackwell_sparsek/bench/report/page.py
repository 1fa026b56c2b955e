"""A report as one HTML page, with plots, sortable tables, style and script inline."""

import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from .charts import GUTTER, NARROW, element, escaped, text
from .figures import Figure, amount, figures_of
from .tables import MODE_HEADS, absent, implementation, number, times_faster

CSS = """
:root {
  color-scheme: light dark;
  --page: #fbfbfa; --card: #fff; --ink: #1b1f24; --soft: #5c6570; --line: #e3e5e8; --grid: #eceef0;
  --accent: #c2410c; --accent-soft: #fff1e9; --good: #15803d; --bad: #b42318;
  --c0: #d9480f; --c1: #2f6fb5; --c2: #3f9a74; --c3: #8a63c9; --c4: #b8890b; --c5: #38a3b8;
  --c6: #c2578f; --c7: #7d8590; --c8: #6b8e23; --c9: #9c6644; --c10: #4b5fc0; --c11: #b0b7bf;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171a; --card: #1b1f23; --ink: #e8eaed; --soft: #9aa4af; --line: #2e343a;
    --grid: #262b30; --accent: #ff8a4c; --accent-soft: #33231a; --good: #57c785; --bad: #ff8a80;
    --c0: #ff8a4c; --c1: #6aa9ec; --c2: #5fc79d; --c3: #b394f0; --c4: #e0b640; --c5: #62cfe3;
    --c6: #ec86b8; --c7: #98a2ad; --c8: #a4c659; --c9: #cf9b78; --c10: #8f9ff2; --c11: #68717a;
  }
}
* { box-sizing: border-box }
html { scroll-behavior: smooth }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif }
main, header > div { max-width: 1080px; margin: 0 auto; padding: 0 24px }
header { border-bottom: 1px solid var(--line); background: var(--card); padding: 32px 0 18px }
h1 { margin: 0 0 4px; font-size: 28px; letter-spacing: -.02em; line-height: 1.2 }
h2 { margin: 52px 0 2px; font-size: 21px; letter-spacing: -.01em; scroll-margin-top: 16px }
p { margin: 6px 0 }
.soft, figcaption, footer { color: var(--soft) }
nav { display: flex; flex-wrap: wrap; gap: 8px; margin-top: 18px }
nav a { color: var(--ink); text-decoration: none; border: 1px solid var(--line);
  border-radius: 999px; padding: 3px 12px; font-size: 13px }
nav a:hover, nav a:focus-visible { border-color: var(--accent); color: var(--accent) }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 14px;
  margin: 26px 0 0 }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 14px 16px }
.card b { display: block; font-size: 24px; letter-spacing: -.02em; line-height: 1.25;
  font-variant-numeric: tabular-nums }
.card span { color: var(--soft); font-size: 13px }
figure { margin: 18px 0 0; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; padding: 16px 18px 12px }
figcaption { font-size: 13px; margin-bottom: 10px }
.pictures { flex-wrap: wrap; gap: 8px 24px }
.pictures svg { flex: 1 1 440px; max-width: 100%; height: auto; display: block }
.wide { display: flex } .narrow { display: none } .narrow svg { flex: 0 1 460px }
@media (max-width: 760px) { .wide { display: none } .narrow { display: flex } }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; margin: 0 0 10px;
  padding: 0; list-style: none }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px;
  margin-right: 6px; vertical-align: -1px }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--ink) }
svg .tick, svg .label { fill: var(--soft); font-size: 11px }
svg .value { fill: var(--soft); font-size: 10.5px; font-variant-numeric: tabular-nums }
svg .title { font-weight: 600 }
svg .grid { stroke: var(--grid) }
svg .level { stroke: var(--soft); stroke-dasharray: 5 4 }
svg .whisker { stroke: var(--ink); stroke-width: 1.2; opacity: .55 }
svg .roof { fill: none; stroke: var(--soft); stroke-width: 2 }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round }
svg .line.c0 { stroke-width: 3 }
svg .mark { stroke: var(--card); stroke-width: 1.5 }
.scroll { overflow-x: auto; margin-top: 18px; border: 1px solid var(--line); border-radius: 10px;
  background: var(--card) }
table { border-collapse: collapse; width: 100%; font-size: 13px;
  font-variant-numeric: tabular-nums }
caption { text-align: left; padding: 10px 14px 4px; color: var(--soft) }
th, td { padding: 6px 12px; text-align: right; white-space: nowrap;
  border-top: 1px solid var(--line) }
thead th { border-top: 0; color: var(--soft); font-weight: 600; background: var(--card) }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
  background: var(--card) }
tbody tr:hover td { background: var(--accent-soft) }
td.ours { color: var(--accent); font-weight: 600 }
td.win { color: var(--good) } td.loss { color: var(--bad) }
td.none, td.even { color: var(--soft) }
th[aria-sort] { cursor: pointer; user-select: none }
th[aria-sort=ascending]::after { content: " ▲" } th[aria-sort=descending]::after { content: " ▼" }
details { margin-top: 14px; font-size: 13px }
summary { cursor: pointer; color: var(--soft) }
details ul { margin: 6px 0; padding-left: 20px } details li { overflow-wrap: anywhere }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 18px; margin: 8px 0 }
dt { color: var(--soft) } dd { margin: 0; overflow-wrap: anywhere }
.warning { border-left: 3px solid var(--bad); padding-left: 12px }
footer { margin: 56px 0 40px; font-size: 13px }
@media (max-width: 600px) { main, header > div { padding: 0 14px } h1 { font-size: 23px } }
@media print { nav { display: none } figure, .scroll { break-inside: avoid } }
"""
CSS += "".join(
    f"svg .fill.c{i}, svg .mark.c{i} {{ fill: var(--c{i}) }}\n"
    f"svg .line.c{i} {{ stroke: var(--c{i}) }}\n"
    f".swatch.c{i} {{ background: var(--c{i}) }}\n"
    for i in range(12)
)

SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  table.querySelectorAll("thead th").forEach((head, column) => {
    head.setAttribute("aria-sort", "none");
    head.tabIndex = 0;
    const sort = () => {
      const up = head.getAttribute("aria-sort") === "descending";
      table.querySelectorAll("thead th").forEach(h => h.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = row => row.cells[column].dataset.value;
      const order = (a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
        const [m, n] = [Number(x), Number(y)];
        const less = Number.isNaN(m) || Number.isNaN(n) ? x.localeCompare(y) : m - n;
        return up ? less : -less;
      };
      const body = table.tBodies[0];
      [...body.rows].sort(order).forEach(row => body.append(row));
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", event => { if (event.key === "Enter") sort(); });
  });
}
"""


# The times of a suite as a sortable table.


def results_table(document: dict[str, Any], mode: str, words: str) -> str:
    """A row for each case and a column for each peer, in one mode; empty if none was timed."""
    cases = [c for c in document["cases"] if any(_figures(c, p, mode) for p in c["peers"])]
    if not cases:
        return ""
    peers = dict.fromkeys(p for c in cases for p in c["peers"] if _figures(c, p, mode))
    with_work = any("executed_tflops" in (_figures(c, "bsk", mode) or {}) for c in cases)
    keys = [
        key for key in ("over_dense", "over_best_peer") if any(_ratio(c, mode, key) for c in cases)
    ]
    shown = (with_work, keys)
    names = {"over_dense": "speedup over dense", "over_best_peer": "speedup over best peer"}
    ran = any("implementation" in c["peers"].get("bsk", {}) for c in cases)
    scale, unit = (1e3, "ms") if document.get("unit") == "ms" else (1e6, "µs")
    head = ["case", *(["implementation"] if ran else []), *(f"{peer} {unit}" for peer in peers)]
    head += ["bsk TFLOP/s"] if with_work else []
    head += [names[key] for key in keys]
    cells = "".join(element("th", escaped(name), scope="col") for name in head)
    rows = "".join(
        element("tr", "".join([*_first_cells(c, ran), *_cells(c, mode, peers, scale, *shown)]))
        for c in cases
    )
    table = element(
        "table",
        element("caption", escaped(f"Medians, {words}"))
        + element("thead", element("tr", cells))
        + element("tbody", rows),
        class_="sortable",
    )
    return element("div", table, class_="scroll")


def _figures(case: dict[str, Any], peer: str, mode: str) -> dict[str, Any] | None:
    found: dict[str, Any] | None = case["peers"].get(peer, {}).get("times", {}).get(mode)
    return found


def _ratio(case: dict[str, Any], mode: str, key: str) -> float | None:
    return amount(case.get("ratios", {}).get(mode, {}), key)


def _first_cells(case: dict[str, Any], ran: bool) -> list[str]:
    mark = " ~" if "unsteady" in case else ""
    cells = [_cell(f"{case['name']}{mark}", case["name"])]
    what = implementation(case["peers"].get("bsk", {}), "–")
    return [*cells, _cell(what, what)] if ran else cells


def _cells(
    case: dict[str, Any],
    mode: str,
    peers: Iterable[str],
    scale: float,
    with_work: bool,
    keys: list[str],
) -> list[str]:
    cells = []
    for peer in peers:
        figures = _figures(case, peer, mode)
        if figures is None:
            cells.append(_cell(_why(case, peer), None, "none"))
        else:
            time = figures["quantiles_s"]["p50"] * scale
            cells.append(_cell(number(time), time, "ours" if peer == "bsk" else None))
    if with_work:
        work = (_figures(case, "bsk", mode) or {}).get("executed_tflops")
        cells.append(_cell("–" if work is None else number(work), work))
    for key in keys:
        ratio = _ratio(case, mode, key)
        kind = "none" if ratio is None else verdict(ratio)
        cells.append(_cell("–" if ratio is None else times_faster(ratio), ratio, kind))
    return cells


def verdict(ratio: float) -> str:
    """Whether a speed-up, as it is printed, is a "win", a "loss" or "even".

    Examples
    --------
    >>> [verdict(ratio) for ratio in (1.2, 1.004, 0.996, 0.99)]
    ['win', 'even', 'even', 'loss']
    """
    printed = round(ratio, 2)
    return "even" if printed == 1 else "win" if printed > 1 else "loss"


def _why(case: dict[str, Any], peer: str) -> str:
    """One word for the cell; the full reasons are below the table."""
    entry = case["peers"].get(peer, {})
    return next((word for word in ("failed", "crashed") if word in entry), "n/a")


def _cell(content: str, value: object, kind: str | None = None) -> str:
    return element("td", escaped(content), class_=kind, data_value=value)


_COLOURS = 12
_USUAL = {"bsk": 0, "sdpa_cudnn": 1, "fa4": 2, "fa3": 3, "flex": 4, "flashinfer": 5}
_USUAL |= {"sdpa_flash": 6, "dense": 7, "sdpa_dense": 7, "fa2": 8, "cudnn_blocks": 10}

# These time imports, compilers and launches, so they must not be mixed with device times.
_OF_THE_HOST = ("host", "reported")


def page(documents: list[dict[str, Any]]) -> str:
    """The whole page, self-contained."""
    title = "blackwell_sparsek benchmarks"
    devices = ", ".join(dict.fromkeys(d["environment"]["device_name"] for d in documents))
    sections = "".join(
        _section(document, f"suite-{index}") for index, document in enumerate(documents)
    )
    links = "".join(
        element("a", escaped(_title(d)), href=f"#suite-{i}") for i, d in enumerate(documents)
    )
    head = element("h1", escaped(title)) + element("p", escaped(devices), class_="soft")
    note = (
        "Times are medians of interleaved rounds. Each result was checked against fp64 before it "
        "was timed. TFLOP/s count executed work."
    )
    return (
        "<!DOCTYPE html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # forbid loading anything, whatever a results file contains
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
        f"<title>{escaped(title)}</title><style>{CSS}</style></head><body>"
        f"<header><div>{head}{element('nav', links)}</div></header>"
        f"<main>{_cards(documents)}{sections}{element('footer', escaped(note))}</main>"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def colours_of(document: dict[str, Any]) -> dict[str, int]:
    """A colour for each peer; peers of many suites have the same colour in all of them."""
    names = dict.fromkeys(name for case in document["cases"] for name in case["peers"])
    found = {name: _USUAL[name] for name in names if name in _USUAL}
    free = [i for i in range(_COLOURS) if i not in found.values()]
    for name in names:
        if name not in found:
            found[name] = free.pop(0) if free else _COLOURS - 1
    return found


def _title(document: dict[str, Any]) -> str:
    return str(document["suite"]).replace("_", " ")


def _cards(documents: list[dict[str, Any]]) -> str:
    cases = [case for document in documents for case in document["cases"]]
    by_case = [
        [
            ratio["over_best_peer"]
            for mode, ratio in case.get("ratios", {}).items()
            if mode not in _OF_THE_HOST and ratio.get("over_best_peer", 0) > 0
        ]
        for case in cases
    ]
    ratios = [ratio for found in by_case for ratio in found]
    compared = sum(map(bool, by_case))
    suites = f"{len(documents)} suites" if len(documents) != 1 else "1 suite"
    what = f"cases in {suites}: one set of sizes and options each"
    cards, reading = [(f"{len(cases)}", what)], ""
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        counted = Counter(map(verdict, ratios))
        cards.append((f"{mean:.2f}x", "mean speedup over the best peer (geometric, device time)"))
        rest = f"{counted['even']} equal within 1%, {counted['loss']} slower"
        cards.append((f"{counted['win']} of {len(ratios)}", f"comparisons faster; {rest}"))
        reading = (
            f"In {compared} of the {len(cases)} cases another library computes the same result; "
            "the others are compared with the dense computation, or not at all. A case counts once "
            f"for each timing mode, which gives {len(ratios)} comparisons. Host times and first "
            "calls are not included."
        )
    fastest = [
        entry["times"][mode]["executed_tflops"]
        for case in cases
        for mode in MODE_HEADS
        for name, entry in case["peers"].items()
        if name == "bsk" and "executed_tflops" in entry.get("times", {}).get(mode, {})
    ]
    if fastest and max(fastest) >= 1:
        cards.append((f"{max(fastest):.0f}", "highest TFLOP/s"))
    content = (
        element("div", element("b", escaped(a)) + element("span", escaped(b)), class_="card")
        for a, b in cards
    )
    note = element("p", escaped(reading), class_="soft") if reading else ""
    return element("div", "".join(content), class_="cards") + note


def _section(document: dict[str, Any], anchor: str) -> str:
    parts = [element("h2", escaped(_title(document)), id=anchor)]
    parts.append(element("p", escaped(_provenance(document)), class_="soft"))
    for mark, words in (
        ("interrupted", "The run was interrupted; some cases are missing."),
        ("left_out", "Some cases were skipped for lack of time."),
    ):
        if document.get(mark):
            parts.append(element("p", words, class_="warning"))
    colours = colours_of(document)
    drawn = figures_of(document, colours), figures_of(document, colours, NARROW)
    parts += map(_figure, *drawn)
    for mode, words in MODE_HEADS.items():
        parts.append(results_table(document, mode, words))
    parts.append(_details("Peers without times, and why", absent(document["cases"])))
    doubtful = [f"{c['name']}: {c['unsteady']}" for c in document["cases"] if "unsteady" in c]
    parts.append(_details("Unsteady times", doubtful))
    parts.append(_environment(document))
    return element("section", "".join(parts))


def _provenance(document: dict[str, Any]) -> str:
    environment = document["environment"]
    versions = environment.get("versions", {})
    parts = [environment["device_name"]]
    parts += [f"{name} {versions[name]}" for name in ("torch", "triton") if name in versions]
    parts += [f"commit {str(document['commit'])[:10]}"] if document.get("commit") else []
    return " · ".join(parts)


def _figure(figure: Figure, narrow: Figure) -> str:
    """A figure drawn twice: a phone shows the narrow pictures, at a size that can be read."""
    names = "".join(
        element("li", f'<i class="swatch c{colour}"></i>{escaped(name)}')
        for name, colour in figure.legend.items()
    )
    return element(
        "figure",
        element("figcaption", escaped(figure.caption))
        + element("ul", names, class_="legend")
        + element("div", "".join(figure.pictures), class_="pictures wide")
        + element("div", "".join(narrow.pictures), class_="pictures narrow"),
    )


def _details(title: str, lines: list[str]) -> str:
    if not lines:
        return ""
    items = "".join(element("li", escaped(line.removeprefix("- "))) for line in lines)
    return element("details", element("summary", escaped(title)) + element("ul", items))


def _environment(document: dict[str, Any]) -> str:
    flat = _flattened(document["environment"])
    rows = "".join(element("dt", escaped(k)) + element("dd", escaped(v) or "–") for k, v in flat)
    return element("details", element("summary", "Environment") + element("dl", rows))


def _flattened(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested objects as flat (name, value) pairs."""
    if not isinstance(value, dict):
        return [(prefix, str(value))]
    found = []
    for key, inner in value.items():
        found += _flattened(inner, f"{prefix}.{key}" if prefix else str(key))
    return found


# A figure as a standalone SVG file for Markdown pages, with legend and colours inside.

_LEGEND, _EDGE = 26.0, 12.0
# What a column of text is wide on a desk; a phone shows it at more than half of that.
STANDALONE = 640.0


def standalone(figure: Figure) -> str:
    """The plots of a figure in rows below its legend; follows light and dark themes."""
    legend, y = _legend(figure)
    parts, x, row = [legend], _EDGE, 0.0
    for picture in figure.pictures:
        width, height = _size(picture)
        if x + width > STANDALONE + _EDGE + 1 and x > _EDGE:
            x, y, row = _EDGE, y + row, 0.0
        placed = f'<svg x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}"'
        parts.append(picture.replace("<svg", placed, 1))
        x, row = x + width + GUTTER, max(row, height)
    whole, total = STANDALONE + 2 * _EDGE, y + row + _EDGE
    back = element("rect", width=whole, height=total, rx=10, class_="back")
    style = element("style", _style())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole:.0f} {total:.0f}" '
        f'width="{whole:.0f}" role="img" aria-label="{escaped(figure.caption)}">'
        f"{style}{back}{''.join(parts)}</svg>\n"
    )


def _size(picture: str) -> tuple[float, float]:
    found = re.search(r'viewBox="0 0 (\d+) (\d+)"', picture)
    assert found is not None  # `picture` writes the size
    width, height = found.groups()
    return float(width), float(height)


def _legend(figure: Figure) -> tuple[str, float]:
    """The names and colours in as many lines as they need, and where they end."""
    parts, x, y = [], _EDGE + 6, 12.0
    for name, colour in figure.legend.items():
        # an estimate of the text width is enough, because names are short
        taken = 17 + 7.2 * len(name) + 18
        if x + taken > STANDALONE + _EDGE and x > _EDGE + 6:
            x, y = _EDGE + 6, y + 20
        parts.append(element("rect", x=x, y=y, width=11, height=11, rx=3, class_=f"fill c{colour}"))
        parts.append(text(x + 17, y + 10, name))
        x += taken
    return "".join(parts), y + _LEGEND


def _style() -> str:
    """The part of the page's style that plots need: colours in both themes, and rules for SVG."""
    themes = CSS[: CSS.index("* {")]
    rules = [line for line in CSS.splitlines() if line.startswith("svg ")]
    return themes + "\n".join([*rules, ".back { fill: var(--card) }"])
