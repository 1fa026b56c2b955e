"""Products of many sizes as one table: sizes and blocks down, sparsity across."""

from typing import Any

from .peer_tables import number, table, times_faster
from .report.problems import product_of


def sweep_table(cases: list[dict[str, Any]], mode: str, head: str) -> str:
    """Times faster than the dense product, and milliseconds of ours, for each density."""
    rows: dict[tuple[Any, ...], dict[float, str]] = {}
    for case in cases:
        if (product := product_of(case["problem"])) is not None:
            size, block, density = product
            rows.setdefault((size, block), {})[density] = _cell(case, mode)
    densities = sorted({density for cells in rows.values() for density in cells}, reverse=True)
    lines = [
        [_in_words(*key), *(cells.get(density, "") for density in densities)]
        for key, cells in sorted(rows.items(), key=lambda row: _largest_blocks_first(*row[0]))
    ]
    first = f"faster than dense (bsk ms), {head}"
    text = table([first, *(f"{1 - density:.0%} sparse" for density in densities)], lines)
    if any("dense" in cell for line in lines for cell in line[1:]):
        text += "\n\ndense: `auto` took the dense product."
    return text


def _cell(case: dict[str, Any], mode: str) -> str:
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
