"""Results files as one HTML page."""

import math
from typing import Any

from ..peer_tables import MODE_HEADS, absent
from .figures import Figure, figures_of
from .html_table import results_table
from .style import CSS, SCRIPT
from .svg import element, escaped

_COLOURS = 12
_USUAL = {"bsk": 0, "sdpa_cudnn": 1, "fa4": 2, "fa3": 3, "flex": 4, "flashinfer": 5}
_USUAL |= {"sdpa_flash": 6, "dense": 7, "sdpa_dense": 7, "fa2": 8, "cudnn_blocks": 10}

# Imports, compilers and launches: not to be mixed with what the device takes.
_OF_THE_HOST = ("host", "reported")


def page(documents: list[dict[str, Any]]) -> str:
    """The whole page: nothing in it is loaded from anywhere."""
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
        "Every time is a median of interleaved rounds, taken after the result was checked against "
        "fp64. TFLOP/s count executed work."
    )
    return (
        "<!DOCTYPE html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # nothing may be loaded, whatever a results file says
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
        f"<title>{escaped(title)}</title><style>{CSS}</style></head><body>"
        f"<header><div>{head}{element('nav', links)}</div></header>"
        f"<main>{_cards(documents)}{sections}{element('footer', escaped(note))}</main>"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def colours_of(document: dict[str, Any]) -> dict[str, int]:
    """A colour for each peer: those that stand in many suites always have the same."""
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
    ratios = [
        ratio["over_best_peer"]
        for case in cases
        for mode, ratio in case.get("ratios", {}).items()
        if mode not in _OF_THE_HOST and ratio.get("over_best_peer", 0) > 0
    ]
    cards = [(f"{len(cases)}", f"cases in {len(documents)} suites")]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        won = sum(ratio >= 1 for ratio in ratios)
        cards.append((f"{mean:.2f}x", "geometric mean on the device against the best other peer"))
        cards.append((f"{won} of {len(ratios)}", "times where we are the fastest"))
    fastest = [
        entry["times"][mode]["executed_tflops"]
        for case in cases
        for mode in MODE_HEADS
        for name, entry in case["peers"].items()
        if name == "bsk" and "executed_tflops" in entry.get("times", {}).get(mode, {})
    ]
    if fastest and max(fastest) >= 1:
        cards.append((f"{max(fastest):.0f}", "TFLOP/s at the most"))
    content = (
        element("div", element("b", escaped(a)) + element("span", escaped(b)), class_="card")
        for a, b in cards
    )
    return element("div", "".join(content), class_="cards")


def _section(document: dict[str, Any], anchor: str) -> str:
    parts = [element("h2", escaped(_title(document)), id=anchor)]
    parts.append(element("p", escaped(_provenance(document)), class_="soft"))
    for mark, words in (
        ("interrupted", "The run was interrupted: cases are missing."),
        ("left_out", "Some cases were left out for lack of time."),
    ):
        if document.get(mark):
            parts.append(element("p", words, class_="warning"))
    parts += [_figure(figure) for figure in figures_of(document, colours_of(document))]
    for mode, words in MODE_HEADS.items():
        parts.append(results_table(document, mode, words))
    parts.append(_details("Who is absent, and why", absent(document["cases"])))
    doubtful = [f"{c['name']}: {c['unsteady']}" for c in document["cases"] if "unsteady" in c]
    parts.append(_details("Times to doubt", doubtful))
    parts.append(_environment(document))
    return element("section", "".join(parts))


def _provenance(document: dict[str, Any]) -> str:
    environment = document["environment"]
    versions = environment.get("versions", {})
    parts = [environment["device_name"]]
    parts += [f"{name} {versions[name]}" for name in ("torch", "triton") if name in versions]
    parts += [f"commit {str(document['commit'])[:10]}"] if document.get("commit") else []
    return " · ".join(parts)


def _figure(figure: Figure) -> str:
    names = "".join(
        element("li", f'<i class="swatch c{colour}"></i>{escaped(name)}')
        for name, colour in figure.legend.items()
    )
    return element(
        "figure",
        element("figcaption", escaped(figure.caption))
        + element("ul", names, class_="legend")
        + element("div", "".join(figure.pictures), class_="pictures"),
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
    """Nested objects as lines of name and value."""
    if not isinstance(value, dict):
        return [(prefix, str(value))]
    found = []
    for key, inner in value.items():
        found += _flattened(inner, f"{prefix}.{key}" if prefix else str(key))
    return found
