"""Results of any suite as Markdown: a row for each case, a column for each peer."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .figures import amount

MODE_HEADS = {
    "eager": "single calls, cold L2",
    "graph": "CUDA graph, cold inputs",
    "sustained": "sustained",
    "host": "host time per call",
    "reported": "wall clock",
}
_MOST_NAMES = 8
UNITS = {"tflops": "TFLOP/s", "ms": "ms", "us": "us", "us_per_head": "us per head"}


def implementation(ours: dict[str, Any], missing: str = "n/a") -> str:
    """What ran, as recorded: one name, or several by what they computed.

    Examples
    --------
    >>> implementation({"implementation": {"forward": "sm90", "dw": "dense"}})
    'forward sm90, dw dense'
    """
    ran = ours.get("implementation", missing)
    if not isinstance(ran, dict):
        return str(ran)
    names = list(dict.fromkeys(map(str, ran.values())))
    return names[0] if len(names) == 1 else ", ".join(f"{x} {name}" for x, name in ran.items())


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are right-aligned.

    Examples
    --------
    >>> print(table(["a|b", "ms"], [["x", "1"]]))
    | a\\|b | ms |
    | --- | ---: |
    | x | 1 |
    """
    lines = [head, ["---", *(["---:"] * (len(head) - 1))], *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return as_text(text).replace("|", r"\|")


def as_text(words: object) -> str:
    """One line that Markdown shows literally: text from a results file must not act as HTML."""
    return printable(words).replace("<", "&lt;")


def printable(words: object) -> str:
    """One line for a terminal: text from a results file must not move its cursor.

    Examples
    --------
    >>> printable("red\\x1b[31m") == r"red\\x1b[31m"
    True
    """
    line = " ".join(str(words).splitlines())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def number(value: float) -> str:
    """Three significant digits; larger numbers as whole numbers, without an exponent."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def times_faster(ratio: float | None) -> str:
    """A speedup such as 1.25x, or n/a."""
    return "n/a" if ratio is None else f"{ratio:.2f}x"


def heading(document: dict[str, Any]) -> str:
    """Suite, device, versions and commit in one line."""
    environment = document["environment"]
    versions = environment.get("versions", {})
    where = f"{environment['device_name']}, torch {versions.get('torch', 'unknown')}"
    where += f", triton {versions['triton']}" if "triton" in versions else ""
    where += f", commit {document['commit'][:10]}" if document.get("commit") else ""
    return f"**{as_text(document['suite'].replace('_', ' '))}** ({as_text(where)})"


def peer_tables(document: dict[str, Any]) -> str:
    """One table for each mode."""
    parts = [heading(document)]
    cases = document["cases"]
    show = _shown(document.get("unit", "tflops"))
    for mode in MODE_HEADS:
        timed = [c for c in cases if any(mode in e.get("times", {}) for e in c["peers"].values())]
        if timed:
            unit = UNITS.get(document.get("unit", "tflops"), "ms")
            parts.append(_mode_table(timed, mode, unit, show))
    for note in notes(document):
        parts.append(note)
    return "\n\n".join(parts)


def _mode_table(
    cases: list[dict[str, Any]], mode: str, unit: str, show: Callable[[Any, Any], str]
) -> str:
    names = dict.fromkeys(
        name for c in cases for name, e in c["peers"].items() if mode in e.get("times", {})
    )
    compared = any("best_peer" in c.get("ratios", {}).get(mode, {}) for c in cases)
    tiers = any("tiers_us_per_head" in c["problem"] for c in cases)
    ran = any("implementation" in c["peers"].get("bsk", {}) for c in cases)
    head = [f"{unit}, {MODE_HEADS[mode]}", *(["implementation"] if ran else []), *names]
    to_dense = any("over_dense" in c.get("ratios", {}).get(mode, {}) for c in cases)
    head += ["bsk speedup over dense"] if to_dense else []
    head += ["bsk speedup over best peer"] if compared else []
    head += ["tier reached, us per head"] if tiers else []
    rows = []
    for case in cases:
        entries = case["peers"]
        mark = " ~" if "unsteady" in case else ""
        row = [case["name"] + mark]
        row += [implementation(entries.get("bsk", {}))] if ran else []
        for name in names:
            figures = entries.get(name, {}).get("times", {}).get(mode)
            row.append("n/a" if figures is None else show(figures, case["problem"]))
        ratio = case.get("ratios", {}).get(mode, {})
        if to_dense:
            row.append(times_faster(ratio.get("over_dense")))
        if compared:
            best = ratio.get("best_peer")
            row.append(f"{times_faster(ratio['over_best_peer'])} ({best})" if best else "n/a")
        if tiers:
            row.append(_tier(entries.get("bsk", {}).get("times", {}).get(mode), case["problem"]))
        rows.append(row)
    return table(head, rows)


def _shown(unit: str) -> Callable[[Any, Any], str]:
    """The function that formats times in `unit`."""

    def show(figures: dict[str, Any], problem: dict[str, Any]) -> str:
        seconds = figures["quantiles_s"]["p50"]
        if unit == "tflops":
            if "executed_tflops" in figures:
                return number(figures["executed_tflops"])
            return f"{number(seconds * 1e3)} ms"
        if unit == "us_per_head":
            return number(seconds * 1e6 / (amount(problem, "heads") or 1))
        return number(seconds * (1e6 if unit == "us" else 1e3))

    return show


def _tier(figures: dict[str, Any] | None, problem: dict[str, Any]) -> str:
    """The lowest tier that the time per head stays under."""
    if figures is None or "tiers_us_per_head" not in problem:
        return "n/a"
    per_head = figures["quantiles_s"]["p50"] * 1e6 / (amount(problem, "heads") or 1)
    given = problem["tiers_us_per_head"]
    tiers = given if isinstance(given, list) else []
    tiers = [tier for tier in tiers if isinstance(tier, (int, float))]
    reached = [tier for tier in tiers if per_head < tier]
    return f"under {min(reached)}" if reached else "none"


def notes(document: dict[str, Any]) -> list[str]:
    """Notes below the tables: peers without times and why, unsteady clocks, an interrupted run."""
    found = []
    if reasons := absent(document["cases"]):
        found.append("\n".join(map(as_text, reasons)))
    unsteady = [c for c in document["cases"] if "unsteady" in c]
    if unsteady:
        lines = [as_text(f"- ~ {case['name']}: {case['unsteady']}") for case in unsteady]
        found.append("\n".join(lines))
    if document.get("interrupted"):
        found.append("The run was interrupted; some cases are missing.")
    if document.get("left_out"):
        found.append(f"Skipped for lack of time: {names_of_some(document['left_out'])}.")
    return found


def names_of_some(names: Any) -> str:
    """The first few names; the results file has them all."""
    few = [as_text(name) for name in names[:_MOST_NAMES]]
    more = len(names) - len(few)
    return ", ".join(few) + (f" and {more} more" if more else "")


def absent(cases: list[dict[str, Any]]) -> list[str]:
    """The reasons why peers have no times, each once."""
    found: dict[str, None] = {}
    for case in cases:
        if "error" in case:
            found[f"- {case['name']}: {case['error']}"] = None
        for name, entry in case["peers"].items():
            if "n/a" in entry:
                found[f"- {name}: n/a: {entry['n/a']}"] = None
            if "failed" in entry:
                found[f"- {name}: failed its check ({case['name']}): {entry['failed']}"] = None
            if "crashed" in entry:
                found[f"- {name}: crashed ({case['name']}): {entry['crashed']}"] = None
    return list(found)
