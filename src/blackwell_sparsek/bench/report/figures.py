"""The plots of a results file, chosen by the parameters that vary between its cases."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..machine import peak_of
from .charts import GUTTER, WIDTH, Bar, Colours, Line, Plot, Spot, bar_chart, line_chart, roofline

# Reading the problem of a case. Files are untrusted: anything may be missing.

_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def amount(problem: Any, name: str) -> float | None:
    """The field `name` of a problem if it is a positive number that plots can hold, else None."""
    value: Any = problem.get(name) if isinstance(problem, dict) else None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and 1e-18 < value < 1e18 else None


def _sizes(problem: Any, name: str) -> list[float]:
    value = problem.get(name)
    if not isinstance(value, list):
        return []
    return [x for x in (amount({"x": x}, "x") for x in value) if x is not None]


def names_of(problem: dict[str, Any], besides: str) -> str:
    """The parameters of a problem in words, without `besides` and those that vary with it."""
    parts = []
    if block := _sizes(problem, "block"):
        parts.append(f"blocks {'x'.join(f'{side:g}' for side in block)}")
    if (weight := _sizes(problem, "weight")) and besides != "weight":
        parts.append(f"{'x'.join(f'{side:g}' for side in weight)}")
    if (head_dim := amount(problem, "head_dim")) is not None:
        parts.append(f"D{head_dim:g}")
    heads, kv_heads = amount(problem, "heads"), amount(problem, "kv_heads")
    if heads and kv_heads and heads != kv_heads:
        parts.append(f"GQA {heads:g}:{kv_heads:g}")
    if isinstance(problem.get("causal"), bool):
        parts.append("causal" if problem["causal"] else "full")
    for name in ("window", "page_size"):
        if (value := amount(problem, name)) is not None:
            parts.append(f"{name.replace('_', ' ')} {value:g}")
    if "page_size" in problem:
        parts.append(f"batch {amount(problem, 'batch') or 0:g}")
        if (queries := amount(problem, "queries")) is not None:
            parts.append(f"queries {queries:g}")
    if isinstance(problem.get("lengths"), list):
        parts.append("mixed lengths")
    if besides != "density" and (density := amount(problem, "density")) is not None:
        parts.append(f"{density:.0%} kept")
    if besides != "n" and (n := amount(problem, "n")) is not None:
        parts.append(f"n {n:g}")
    return " ".join(parts) or "all"


def product_of(problem: Any) -> tuple[tuple[float, ...], tuple[float, ...], float] | None:
    """Size (M, K, N), block and density of a product, or None if the problem is not a product."""
    if not isinstance(problem, dict):
        return None
    weight, block = _sizes(problem, "weight"), _sizes(problem, "block")
    n, density = amount(problem, "n"), amount(problem, "density")
    if len(weight) != 2 or len(block) != 2 or n is None or density is None:
        return None
    return (*weight, n), tuple(block), density


def is_sweep(problems: Iterable[Any]) -> bool:
    """Whether the problems are products of several sizes at three densities or more.

    A sweep has too many cases to list one by one: it gets curves and a table over the density.
    """
    densities: dict[tuple[float, ...], set[float]] = {}
    for size, _, density in filter(None, map(product_of, problems)):
        densities.setdefault(size, set()).add(density)
    return sum(len(found) >= 3 for found in densities.values()) >= 2


def least_bytes(problem: Any) -> float | None:
    """Bytes moved when every tensor is read or written once, or None if unknown."""
    if not isinstance(problem, dict):
        return None
    size = _BYTES.get(str(problem.get("dtype")))
    if size is None:
        return None
    weight, n = _sizes(problem, "weight"), amount(problem, "n")
    if len(weight) == 2 and n:
        kept = amount(problem, "density") or 1.0
        return size * (weight[0] * weight[1] * kept + n * (weight[0] + weight[1]))
    batch, heads, length, dim = (
        amount(problem, name) for name in ("batch", "heads", "length", "head_dim")
    )
    if not (batch and heads and length and dim):
        return None
    kv_heads = amount(problem, "kv_heads") or heads
    if "page_size" in problem:
        queries = amount(problem, "queries") or 1
        return size * batch * dim * 2 * (kv_heads * length + heads * queries)
    return size * batch * length * dim * 2 * (heads + kv_heads)


MODES = ("graph", "eager", "sustained", "host", "reported")
# How a case was timed, in words.
MODE_NAMES = {
    "eager": "single calls",
    "graph": "CUDA graph",
    "sustained": "sustained",
    "host": "host time",
    "reported": "wall clock",
}
# How the caption of a comparison with the dense computation begins.
OVER_DENSE = "Speedup over the same computation without sparsity"
# These do more work than the others, so their TFLOP/s would be high and meaningless.
DENSE_PEERS = ("dense", "sdpa_dense", "dense_packed_k")


Group = tuple[str, list[Bar]]
"""The name of a case and its bars."""


@dataclass(frozen=True)
class Figure:
    """Plots shown side by side, with their caption and the names in their legend."""

    caption: str
    pictures: list[str]
    legend: Mapping[str, int]


def figures_of(document: dict[str, Any], colours: Colours, width: float = WIDTH) -> list[Figure]:
    """All figures of one suite, drawn for a page of `width` pixels."""
    cases = document["cases"]
    mode = next((m for m in MODES if any(_median(c, p, m) for c in cases for p in c["peers"])), "")
    if not mode:
        return []
    found = []
    if not is_sweep(case["problem"] for case in cases):
        found += _over_length(document, mode, colours, width)
        groups = _groups(cases, "length").values() if found else ()
        drawn = [id(case) for group in groups for case in group]
        rest = [case for case in cases if id(case) not in drawn]
        found += _bars({**document, "cases": rest}, mode, colours, width)
        found += _faster_than_dense(cases, mode, colours, width)
    found += _speedup_over_length(cases, mode, width)
    found += _crossings(document, width) or _speedup_over_density(cases, mode, width)
    found += _roof(document, mode, colours, width)
    return found


def _median(case: dict[str, Any], peer: str, mode: str) -> float | None:
    figures = case["peers"].get(peer, {}).get("times", {}).get(mode)
    return None if figures is None else figures["quantiles_s"]["p50"]


def _value(figures: dict[str, Any], unit: str, problem: Any, which: str = "p50") -> float:
    """A quantile, converted to the unit of the suite."""
    quantiles = figures["quantiles_s"]
    seconds = quantiles.get(which, quantiles["p50"])
    if unit == "tflops" and "executed_tflops" in figures:
        return float(figures["executed_tflops"] * quantiles["p50"] / seconds)
    if unit == "us_per_head":
        return float(seconds * 1e6 / (amount(problem, "heads") or 1))
    return float(seconds * (1e6 if unit == "us" else 1e3))


def _unit(document: dict[str, Any], mode: str) -> tuple[str, str]:
    """The unit, and its label."""
    unit = document.get("unit", "tflops")
    entries = (e for c in document["cases"] for e in c["peers"].values())
    timed = [e["times"][mode] for e in entries if mode in e.get("times", {})]
    if unit == "tflops" and not all("executed_tflops" in figures for figures in timed):
        unit = "ms"
    names = {"tflops": "TFLOP/s", "us": "µs", "us_per_head": "µs per head"}
    return unit, names.get(unit, "ms")


def _bars(document: dict[str, Any], mode: str, colours: Colours, width: float) -> list[Figure]:
    unit, written = _unit(document, mode)
    groups: list[Group] = []
    for case in document["cases"]:
        bars = []
        for peer, entry in case["peers"].items():
            if unit == "tflops" and peer in DENSE_PEERS:
                continue
            if (figures := entry.get("times", {}).get(mode)) is not None:
                value, a, b = (
                    _value(figures, unit, case["problem"], which) for which in ("p50", "p25", "p75")
                )
                bars.append(Bar(peer, value, min(a, b), max(a, b)))
        if bars:
            groups.append((case["name"], bars))
    better = "higher" if unit == "tflops" else "lower"
    caption = f"{_in_words(unit, written)} by case, {MODE_NAMES[mode]}; {better} is better."
    caption += " Whiskers span the quartiles."
    return _bar_figure(caption, groups, colours, bar_chart(groups, written, colours, width))


def _in_words(unit: str, written: str) -> str:
    return f"{written} of executed work" if unit == "tflops" else written


def _bar_figure(caption: str, groups: list[Group], colours: Colours, drawn: str) -> list[Figure]:
    shown = {bar.peer: colours.get(bar.peer, 0) for _, bars in groups for bar in bars}
    return [Figure(caption, [drawn], shown)] if groups else []


def _faster_than_dense(
    cases: list[dict[str, Any]], mode: str, colours: Colours, width: float
) -> list[Figure]:
    """Speedup of every peer over the dense peer."""
    groups: list[Group] = []
    for case in cases:
        times = {peer: _median(case, peer, mode) for peer in case["peers"]}
        dense = next((times[peer] for peer in DENSE_PEERS[:2] if times.get(peer)), None)
        bars = [
            Bar(peer, dense / seconds, dense / seconds, dense / seconds)
            for peer, seconds in times.items()
            if dense and seconds and peer not in DENSE_PEERS
        ]
        if bars:
            groups.append((case["name"], bars))
    caption = f"{OVER_DENSE}, {MODE_NAMES[mode]}; below 1, dense is faster."
    drawn = bar_chart(groups, "times", colours, width, level=1.0)
    return _bar_figure(caption, groups, colours, drawn)


def _groups(cases: Iterable[dict[str, Any]], x: str) -> dict[str, list[dict[str, Any]]]:
    """Cases that differ only in `x` and what depends on it, keyed by their other parameters.

    No group has two cases at the same `x`: a curve through them would jump up and down.
    """
    alike: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        if amount(case["problem"], x) is not None:
            alike.setdefault(names_of(case["problem"], x), []).append(case)
    found: dict[str, list[dict[str, Any]]] = {}
    for name, group in alike.items():
        fields = _fields_apart(group, x)
        for case in group:
            words = [_field(field, case["problem"].get(field)) for field in fields]
            found.setdefault(" ".join([name, *filter(None, words)]), []).append(case)
    return {
        name: group
        for name, group in found.items()
        if len({amount(case["problem"], x) for case in group}) == len(group) >= 3
    }


def _fields_apart(cases: list[dict[str, Any]], x: str) -> list[str]:
    """The parameters in which cases with the same `x` differ."""
    at: dict[float | None, list[dict[str, Any]]] = {}
    for case in cases:
        at.setdefault(amount(case["problem"], x), []).append(case["problem"])
    names = dict.fromkeys(name for case in cases for name in case["problem"])
    return [
        name
        for name in names
        if any(len({str(problem.get(name)) for problem in same}) > 1 for same in at.values())
    ]


def _field(name: str, value: Any) -> str:
    """A parameter in words; nothing for one that is not given."""
    if value is None:
        return ""
    if name in ("kept", "density"):
        share = amount({name: value}, name)
        return "" if share is None else f"{share:.0%} {'kept' if name == 'kept' else 'density'}"
    # a list of lengths is in the name already
    return "" if isinstance(value, list) else f"{name.replace('_', ' ')} {value}"


def _over_length(
    document: dict[str, Any], mode: str, colours: Colours, width: float
) -> list[Figure]:
    unit, written = _unit(document, mode)
    pictures: list[str] = []
    shown: dict[str, int] = {}
    for name, cases in _groups(document["cases"], "length").items():
        lines: dict[str, list[tuple[float, float]]] = {}
        for case in cases:
            for peer, entry in case["peers"].items():
                if (figures := entry.get("times", {}).get(mode)) is not None:
                    at = amount(case["problem"], "length")
                    assert at is not None
                    value = _value(figures, unit, case["problem"])
                    lines.setdefault(peer, []).append((at, value))
        if lines:
            shown |= {peer: colours.get(peer, 0) for peer in lines}
            plot = Plot(
                name,
                "sequence length",
                written,
                [Line(peer, points) for peer, points in lines.items()],
                x_log=True,
                x_names=_length_names(cases),
            )
            pictures.append(line_chart(plot, colours, _half(width)))
    caption = f"{_in_words(unit, written)} by sequence length, {MODE_NAMES[mode]}."
    return [Figure(caption, pictures, shown)] if pictures else []


def _half(width: float) -> float:
    """The width of a picture of which two stand side by side where there is room."""
    return (width - GUTTER) / 2 if width >= 600 else width


def _length_names(cases: Iterable[dict[str, Any]]) -> dict[float, str]:
    lengths = {amount(case["problem"], "length") for case in cases} - {None}
    return {n: f"{n / 1024:g}k" if n % 1024 == 0 else f"{n:g}" for n in lengths if n is not None}


def _ratio(case: dict[str, Any], mode: str, key: str) -> float | None:
    ratio = case.get("ratios", {}).get(mode, {}).get(key)
    return ratio if ratio is not None and math.isfinite(ratio) else None


def _curves(
    groups: dict[str, list[dict[str, Any]]], mode: str, x: str, key: str
) -> tuple[list[Line], dict[str, int]]:
    lines = []
    for name, cases in groups.items():
        points = []
        for case in cases:
            at, ratio = amount(case["problem"], x), _ratio(case, mode, key)
            if at is not None and ratio is not None:
                points.append((at, ratio))
        if len(points) >= 2:
            lines.append(Line(name, points))
    return lines, {line.name: i for i, line in enumerate(lines)}


def _speedup_over_length(cases: list[dict[str, Any]], mode: str, width: float) -> list[Figure]:
    lines, shown = _curves(_groups(cases, "length"), mode, "length", "over_best_peer")
    if not lines:
        return []
    plot = Plot(
        "speedup over the best peer",
        "sequence length",
        "times faster",
        lines,
        x_log=True,
        level=1.0,
        x_names=_length_names(cases),
    )
    caption = f"Speedup over the best peer by sequence length, {MODE_NAMES[mode]}."
    return [Figure(caption, [line_chart(plot, shown, width)], shown)]


def _speedup_over_density(cases: list[dict[str, Any]], mode: str, width: float) -> list[Figure]:
    """Speedup over dense by sparsity; where a curve crosses 1, dense becomes faster.

    A sweep has a plot for each size, with a curve for each block shape.
    """
    by_size: dict[str, list[dict[str, Any]]] = {"speedup over the dense product": cases}
    if is_sweep(case["problem"] for case in cases):
        by_size = _by_size(cases)
    pictures: list[str] = []
    shown: dict[str, int] = {}
    for title, some in by_size.items():
        lines, _ = _curves(_groups(some, "density"), mode, "density", "over_dense")
        sparsities = [Line(x.name, [(100 * (1 - d), r) for d, r in x.points]) for x in lines]
        for line in sparsities:
            shown.setdefault(line.name, len(shown))
        if lines:
            plot = Plot(title, "% sparse", "times faster", sparsities, level=1.0)
            each = width if len(by_size) == 1 else _half(width)
            pictures.append(line_chart(plot, shown, each))
    words = f"{MODE_NAMES[mode]}; below 1, dense is faster"
    caption = f"Speedup over the dense product by sparsity, {words}."
    return [Figure(caption, pictures, shown)] if pictures else []


def _by_size(cases: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Products keyed by their size in words, with the size removed from their problems."""
    found: dict[tuple[float, ...], list[dict[str, Any]]] = {}
    for case in cases:
        if (product := product_of(case["problem"])) is not None:
            size, block, density = product
            alone = {"block": list(block), "density": density}
            found.setdefault(size, []).append({**case, "problem": alone})
    return {" x ".join(f"{side:g}" for side in size): found[size] for size in sorted(found)}


def _crossings(document: dict[str, Any], width: float) -> list[Figure]:
    """Speedup of stored blocks over the dense product by density, and where it crosses 1."""
    lines, meetings = [], []
    for curve in document.get("crossover", []):
        name = "x".join(map(str, curve["block"]))
        lines.append(Line(name, [(100 * d, ratio) for d, ratio in curve["speedups"]]))
        if curve.get("density"):
            meetings.append(f"{curve['density']:.0%} for {name}")
    if not lines:
        return []
    shown = {line.name: i for i, line in enumerate(lines)}
    plot = Plot(
        "stored blocks compared with the dense product",
        "% of blocks stored",
        "times faster",
        lines,
        level=1.0,
    )
    limits = ", ".join(meetings) or "none that was measured"
    caption = f"Density above which the dense product is faster: {limits}."
    return [Figure(caption, [line_chart(plot, shown, width)], shown)]


def _roof(document: dict[str, Any], mode: str, colours: Colours, width: float) -> list[Figure]:
    peak = peak_of(document["environment"]["device_name"])
    spots = []
    for case in document["cases"]:
        moved = least_bytes(case["problem"])
        for peer, entry in case["peers"].items():
            figures = entry.get("times", {}).get(mode, {})
            tflops = figures.get("executed_tflops")
            if moved and tflops and tflops > 0:
                flops = tflops * 1e12 * figures["quantiles_s"]["p50"]
                spots.append(Spot(case["name"], peer, flops / moved, tflops))
    if peak is None or not spots:
        return []
    shown = {spot.peer: colours.get(spot.peer, 0) for spot in spots}
    caption = f"Roofline of the data sheet, {MODE_NAMES[mode]}; every byte is counted once."
    picture = roofline(spots, peak.tflops, peak.terabytes, colours, width)
    return [Figure(caption, [picture], shown)]
