"""Results files as Markdown tables: what `bsk bench` prints and `bsk report --markdown` writes."""

from typing import Any

from .figures import is_sweep, product_of
from .tables import (
    MODE_HEADS,
    heading,
    implementation,
    notes,
    number,
    peer_tables,
    table,
    times_faster,
)

CASE_HEADS = {mode: f"case, {MODE_HEADS[mode]}" for mode in ("eager", "graph", "sustained")}
CASE_HEADS["graph"] = "case, CUDA graph, cold weights"


def suite_tables(document: dict[str, Any]) -> str:
    """The tables of a results file."""
    is_matmul = document["suite"].startswith("matmul_")
    return matmul_tables(document) if is_matmul else peer_tables(document)


def matmul_tables(document: dict[str, Any]) -> str:
    """The tables of products: ours against the dense product and the best peer."""
    parts = [heading(document)]
    cases = document["cases"]
    swept = is_sweep(case["problem"] for case in cases)
    for mode in CASE_HEADS:
        timed = [(case, row) for case in cases if (row := _row(case, mode)) is not None]
        if swept and timed:
            parts.append(sweep_table([case for case, _ in timed], mode, MODE_HEADS[mode]))
        # cases that do not fit the sweep table get rows below it
        rows = [row for case, row in timed if not swept or product_of(case["problem"]) is None]
        if rows:
            parts.append(_times_table(mode, rows))
    if document.get("crossover"):
        parts.append(_crossover_table(document["crossover"]))
    parts += notes(document)
    return "\n\n".join(parts)


def _row(case: dict[str, Any], mode: str) -> list[str] | None:
    """The row of one case, or None if no peer has times in this mode."""
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
        implementation(peers.get("bsk", {})),
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
        "implementation",
        "bsk ms",
        "dense ms",
        "speedup over dense",
        "best sparse peer ms",
        "speedup over peer",
        "executed TFLOP/s",
        "dense-equivalent TFLOP/s",
    ]
    # drop columns in which nothing was measured
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
    return table(["block", "faster than dense below a density of", "speedup over dense"], rows)


def _has(entry: dict[str, Any], mode: str) -> bool:
    return mode in entry.get("times", {})


# Sweeps over sizes of products as one table: a row for each size and block, sparsity across.


def sweep_table(cases: list[dict[str, Any]], mode: str, head: str) -> str:
    """Speedup over the dense product and our time in milliseconds, for each density."""
    rows: dict[tuple[Any, ...], dict[float, str]] = {}
    for case in cases:
        if (product := product_of(case["problem"])) is not None:
            size, block, density = product
            rows.setdefault((size, block), {})[density] = _sweep_cell(case, mode)
    densities = sorted({density for cells in rows.values() for density in cells}, reverse=True)
    lines = [
        [_in_words(*key), *(cells.get(density, "") for density in densities)]
        for key, cells in sorted(rows.items(), key=lambda row: _largest_blocks_first(*row[0]))
    ]
    first = f"speedup over dense (bsk ms), {head}"
    text = table([first, *(f"{1 - density:.0%} sparse" for density in densities)], lines)
    if any("dense" in cell for line in lines for cell in line[1:]):
        text += "\n\n*dense* marks cases in which `auto` ran the dense product."
    return text


def _sweep_cell(case: dict[str, Any], mode: str) -> str:
    ours = case["peers"].get("bsk", {})
    times = ours.get("times", {}).get(mode)
    if times is None:
        return "n/a"
    ratio = case.get("ratios", {}).get(mode, {}).get("over_dense")
    text = f"{times_faster(ratio)} ({number(times['quantiles_s']['p50'] * 1e3)} ms"
    return f"{text}, dense)" if ours.get("implementation") == "dense" else f"{text})"


def _in_words(size: tuple[float, ...], block: tuple[float, ...]) -> str:
    blocks = "x".join(f"{side:g}" for side in block)
    return f"{' x '.join(f'{side:g}' for side in size)}, blocks {blocks}"


def _largest_blocks_first(size: tuple[float, ...], block: tuple[float, ...]) -> tuple[float, ...]:
    return (*size, *(-side for side in block))
