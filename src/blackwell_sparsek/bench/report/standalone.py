"""A figure as an SVG file of its own, for Markdown pages: legend and colours are inside."""

import re

from .charts import WIDTH
from .figures import Figure
from .style import CSS
from .svg import element, escaped, text

_LEGEND, _EDGE = 34.0, 12.0


def standalone(figure: Figure) -> str:
    """The pictures of a figure in rows, the legend above them; follows light and dark themes."""
    parts, y = [_legend(figure)], _LEGEND
    x, row = _EDGE, 0.0
    for picture in figure.pictures:
        width, height = _size(picture)
        if x + width > WIDTH + _EDGE + 1 and x > _EDGE:
            x, y, row = _EDGE, y + row, 0.0
        placed = f'<svg x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}"'
        parts.append(picture.replace("<svg", placed, 1))
        x, row = x + width + 24, max(row, height)
    whole, total = WIDTH + 2 * _EDGE, y + row + _EDGE
    back = element("rect", width=whole, height=total, rx=10, class_="back")
    style = element("style", _style())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole:.0f} {total:.0f}" '
        f'width="{whole:.0f}" role="img" aria-label="{escaped(figure.caption)}">'
        f"{style}{back}{''.join(parts)}</svg>\n"
    )


def _size(picture: str) -> tuple[float, float]:
    found = re.search(r'viewBox="0 0 (\d+) (\d+)"', picture)
    assert found is not None  # `picture` writes it
    return float(found[1]), float(found[2])


def _legend(figure: Figure) -> str:
    parts, x = [], _EDGE + 6
    for name, colour in figure.legend.items():
        parts.append(
            element("rect", x=x, y=12, width=11, height=11, rx=3, class_=f"fill c{colour}")
        )
        parts.append(text(x + 17, 22, name))
        # names are short; a line of them never needs measuring
        x += 17 + 7.2 * len(name) + 18
    return "".join(parts)


def _style() -> str:
    """What of the page's style concerns pictures: colours in both themes, and rules for SVG."""
    themes = CSS[: CSS.index("* {")]
    rules = [line for line in CSS.splitlines() if line.startswith("svg ")]
    return themes + "\n".join([*rules, ".back { fill: var(--card) }"])
