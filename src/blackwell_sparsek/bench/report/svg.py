"""Small pieces of SVG: everything that comes from a file is escaped here."""

import html
import math
from collections.abc import Iterable
from dataclasses import dataclass


def escaped(text: object) -> str:
    """Text for HTML and SVG, inside of elements and of quoted attributes.

    Examples
    --------
    >>> escaped('<b a="1">')
    '&lt;b a=&quot;1&quot;&gt;'
    """
    return html.escape(str(text), quote=True)


def element(name: str, content: str = "", /, **attributes: object) -> str:
    """An element; `class_` and `stroke_width` stand for the names with other signs.

    `content` is markup, so text in it must be escaped already; attributes are escaped here.
    """
    pairs = (
        f' {key.rstrip("_").replace("_", "-")}="{escaped(_short(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    opened = f"<{name}{''.join(pairs)}"
    return f"{opened}>{content}</{name}>" if content else f"{opened}/>"


def _short(value: object) -> object:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


def text(x: float, y: float, content: object, anchor: str = "start", **more: object) -> str:
    """A line of text at a point."""
    return element("text", escaped(content), x=x, y=y, text_anchor=anchor, **more)


def titled(markup: str, title: str) -> str:
    """Markup that shows `title` under the pointer, without a script."""
    return element("g", element("title", escaped(title)) + markup)


def picture(width: float, height: float, content: Iterable[str], label: str) -> str:
    """An image that scales with the page and says what it shows."""
    return element(
        "svg",
        "".join(content),
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        role="img",
        aria_label=label,
        preserveAspectRatio="xMinYMin meet",
    )


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` along pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value; values beyond the ends stay at the ends."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values, not too many."""
        return _log_ticks(self.low, self.high) if self.is_log else _ticks(self.low, self.high)


def axis(
    values: Iterable[float], start: float, end: float, *, is_log: bool = False, zero: bool = True
) -> Axis:
    """An axis that holds all values: from zero, or over whole powers of two or ten."""
    found = [value for value in values if math.isfinite(value)] or [1.0]
    low, high = min(found), max(found)
    if is_log:
        low, high = max(low, 1e-12), max(high, 1e-12)
        return Axis(low / 1.15, high * 1.15, start, end, True)
    low = min(low, 0.0) if zero else low
    high = high if high > low else low + 1.0
    step = _step(low, high)
    return Axis(math.floor(low / step) * step, math.ceil(high / step - 1e-9) * step, start, end)


def _step(low: float, high: float) -> float:
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)


def _ticks(low: float, high: float) -> list[float]:
    step = _step(low, high)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    found = []
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        found += [base * 10.0**power for base in (1, 2, 5) if low <= base * 10.0**power <= high]
    return found


def short_number(value: float) -> str:
    """A number for axes and bars.

    Examples
    --------
    >>> [short_number(x) for x in (0.00123, 0.5, 42.3, 612.4, 16384.0)]
    ['0.00123', '0.5', '42.3', '612', '16384']
    """
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
