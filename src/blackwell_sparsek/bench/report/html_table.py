"""The figures of a suite as a table that can be sorted."""

from collections.abc import Iterable
from typing import Any

from ..peer_tables import number, times_faster
from .problems import amount
from .svg import element, escaped


def results_table(document: dict[str, Any], mode: str, words: str) -> str:
    """Cases down, peers across, in one mode; nothing where nobody was timed in it."""
    cases = [c for c in document["cases"] if any(_figures(c, p, mode) for p in c["peers"])]
    if not cases:
        return ""
    peers = dict.fromkeys(p for c in cases for p in c["peers"] if _figures(c, p, mode))
    with_work = any("executed_tflops" in (_figures(c, "bsk", mode) or {}) for c in cases)
    keys = [
        key for key in ("over_dense", "over_best_peer") if any(_ratio(c, mode, key) for c in cases)
    ]
    shown = (with_work, keys)
    names = {"over_dense": "over dense", "over_best_peer": "over the best peer"}
    ran = any("implementation" in c["peers"].get("bsk", {}) for c in cases)
    scale, unit = (1e3, "ms") if document.get("unit") == "ms" else (1e6, "µs")
    head = ["case", *(["ran"] if ran else []), *(f"{peer} {unit}" for peer in peers)]
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
    implementation = str(case["peers"].get("bsk", {}).get("implementation", "–"))
    return [*cells, _cell(implementation, implementation)] if ran else cells


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
        kind = "none" if ratio is None else "win" if ratio >= 1 else "loss"
        cells.append(_cell("–" if ratio is None else times_faster(ratio), ratio, kind))
    return cells


def _why(case: dict[str, Any], peer: str) -> str:
    """One word in a cell; the reasons stand below the table."""
    entry = case["peers"].get(peer, {})
    return next((word for word in ("failed", "crashed") if word in entry), "n/a")


def _cell(content: str, value: object, kind: str | None = None) -> str:
    return element("td", escaped(content), class_=kind, data_value=value)
