"""Bars, lines and a roofline as SVG; colours are CSS classes, so that they follow the theme.

Everything that comes from a results file is escaped here.
"""

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field


def escaped(text: object) -> str:
    """Escape text for HTML and SVG, in elements and in quoted attributes.

    Examples
    --------
    >>> escaped('<b a="1">')
    '&lt;b a=&quot;1&quot;&gt;'
    """
    return html.escape(str(text), quote=True)


def element(name: str, content: str = "", /, **attributes: object) -> str:
    """An element; attributes such as `class_` and `stroke_width` become class and stroke-width.

    `content` is markup, so the caller must escape text in it; attributes are escaped here.
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
    """Markup that shows `title` as a tooltip, without a script."""
    return element("g", element("title", escaped(title)) + markup)


def picture(width: float, height: float, content: Iterable[str], label: str) -> str:
    """An image that scales with the page, with `label` as its text alternative."""
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
        """The pixel of a value; values outside the axis are clamped to its ends."""
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
    """An axis that spans all values: from zero, or over whole powers of two or ten."""
    found = [value for value in values if math.isfinite(value)] or [1.0]
    low, high = min(found), max(found)
    if is_log:
        low, high = max(low, 1e-12), max(high, 1e-12)
        return Axis(low / 1.15, high * 1.15, start, end, True)
    low = min(low, 0.0) if zero else low
    # floats that differ in their last digits would leave no room between two ticks
    apart = high - low > 1e-9 * max(abs(low), abs(high))
    high = high if apart else low + max(1.0, abs(low))
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
    """Format a number for axes and bars.

    Examples
    --------
    >>> [short_number(x) for x in (0.00123, 0.5, 42.3, 612.4, 16384.0)]
    ['0.00123', '0.5', '42.3', '612', '16384']
    """
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


WIDTH = 960.0
_LABELS = 330.0
_BAR, _GAP = 13.0, 14.0

Place = Callable[[float], float]
Colours = Mapping[str, int]
"""The colour of each peer, the same in every plot of a page."""


@dataclass(frozen=True)
class Bar:
    """One value with its quartiles."""

    peer: str
    value: float
    low: float
    high: float


def bar_chart(groups: Sequence[tuple[str, Sequence[Bar]]], unit: str, colours: Colours) -> str:
    """Horizontal bars, a group for each case; whiskers span the quartiles."""
    bars = [bar for _, group in groups for bar in group]
    across = axis([max(bar.value, bar.high) for bar in bars], _LABELS, WIDTH - 70)
    height = sum(len(group) * _BAR + _GAP for _, group in groups) + 34
    parts = _vertical_grid(across, 8, height - 26, unit)
    y = 14.0
    for name, group in groups:
        middle = y + len(group) * _BAR / 2 + 4
        parts.append(text(_LABELS - 10, middle, _cut(name, 50), "end", class_="case"))
        for bar in group:
            parts.append(_bar(bar, across.at, y, unit, colours))
            y += _BAR
        y += _GAP
    return picture(WIDTH, height, parts, f"bars of {unit} by case and peer")


def _bar(bar: Bar, at: Place, y: float, unit: str, colours: Colours) -> str:
    end, centre = at(bar.value), y + (_BAR - 3) / 2
    shape = element(
        "rect",
        x=_LABELS,
        y=y,
        width=max(end - _LABELS, 1.0),
        height=_BAR - 3,
        rx=2,
        class_=f"fill c{colours.get(bar.peer, 0)}",
    )
    whisker = element(
        "line", x1=at(bar.low), x2=at(bar.high), y1=centre, y2=centre, class_="whisker"
    )
    beyond = max(end, at(bar.high))
    label = text(beyond + 6, y + _BAR - 4, short_number(bar.value), class_="value")
    spread = f"quartiles {short_number(bar.low)} to {short_number(bar.high)}"
    title = f"{bar.peer}: {short_number(bar.value)} {unit}, {spread}"
    return titled(shape + whisker + label, title)


@dataclass(frozen=True)
class Line:
    """A curve of one peer, or of one block shape."""

    name: str
    points: Sequence[tuple[float, float]]
    is_dashed: bool = False


@dataclass(frozen=True)
class Plot:
    """Title, axes and curves of a line chart."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line] = ()
    x_log: bool = False
    y_log: bool = False
    level: float | None = None
    """A horizontal reference line, such as "as fast as dense"."""
    x_names: Mapping[float, str] = field(default_factory=dict)
    """Names of x values, shown instead of the numbers."""


def line_chart(plot: Plot, colours: Colours, width: float = WIDTH / 2 - 12) -> str:
    """Curves with a marker at every point."""
    height, left, bottom = 300.0, 54.0, 250.0
    points = [point for line in plot.lines for point in line.points]
    levels = [] if plot.level is None else [plot.level]
    x = axis([p[0] for p in points], left, width - 16, is_log=plot.x_log, zero=False)
    y = axis([p[1] for p in points] + levels, bottom, 34, is_log=plot.y_log)
    parts = [text(left, 16, plot.title, class_="title")]
    for value in y.ticks():
        at = y.at(value)
        parts.append(element("line", x1=left, x2=width - 16, y1=at, y2=at, class_="grid"))
        parts.append(text(left - 8, at + 4, short_number(value), "end", class_="tick"))
    for value, name in (plot.x_names or {tick: short_number(tick) for tick in x.ticks()}).items():
        parts.append(text(x.at(value), bottom + 18, name, "middle", class_="tick"))
    parts.append(text((left + width - 16) / 2, bottom + 38, plot.x_label, "middle", class_="label"))
    parts.append(text(width - 16, 16, plot.y_label, "end", class_="tick"))
    if plot.level is not None:
        at = y.at(plot.level)
        parts.append(element("line", x1=left, x2=width - 16, y1=at, y2=at, class_="level"))
    # draw ours last, so that it is on top
    for line in sorted(plot.lines, key=lambda line: -colours.get(line.name, 0)):
        parts.append(_curve(line, x.at, y.at, plot, colours))
    return picture(width, height, parts, f"{plot.title}: {plot.y_label} over {plot.x_label}")


def _curve(line: Line, x_at: Place, y_at: Place, plot: Plot, colours: Colours) -> str:
    colour = colours.get(line.name, 0)
    places = [(x_at(x), y_at(y)) for x, y in sorted(line.points)]
    path = " ".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(places))
    dashed = " dashed" if line.is_dashed else ""
    parts = [element("path", d=path, class_=f"line c{colour}{dashed}")]
    for (x, y), (px, py) in zip(sorted(line.points), places, strict=True):
        mark = element("circle", cx=px, cy=py, r=4, class_=f"mark c{colour}")
        where = plot.x_names.get(x, short_number(x))
        parts.append(titled(mark, f"{line.name}: {short_number(y)} {plot.y_label} at {where}"))
    return element("g", "".join(parts))


@dataclass(frozen=True)
class Spot:
    """A case on the roofline: work per byte, and the TFLOP/s reached."""

    name: str
    peer: str
    intensity: float
    tflops: float


def roofline(spots: Sequence[Spot], peak_tflops: float, terabytes: float, colours: Colours) -> str:
    """The limits set by memory and tensor cores, and the rates reached below them."""
    width, height, left, bottom = WIDTH, 380.0, 60.0, 330.0
    knee = peak_tflops / terabytes
    x = axis([s.intensity for s in spots] + [knee / 8, knee * 8], left, width - 24, is_log=True)
    least = min([s.tflops for s in spots] + [peak_tflops / 20])
    y = axis([least, peak_tflops * 1.3], bottom, 20, is_log=True)
    parts = _grid(x, y, left, width - 24, bottom)
    first, last = x.low, x.high
    roof = [(first, first * terabytes), (knee, peak_tflops), (last, peak_tflops)]
    path = " ".join(
        f"{'L' if i else 'M'}{x.at(a):.1f} {y.at(b):.1f}" for i, (a, b) in enumerate(roof)
    )
    parts.append(element("path", d=path, class_="roof"))
    peak = f"{short_number(peak_tflops)} TFLOP/s"
    parts.append(text(width - 28, y.at(peak_tflops) - 8, peak, "end", class_="tick"))
    middle = (first * knee) ** 0.5
    memory = f"{short_number(terabytes)} TB/s"
    parts.append(text(x.at(middle) - 8, y.at(middle * terabytes) - 6, memory, "end", class_="tick"))
    for spot in spots:
        mark = element(
            "circle",
            cx=x.at(spot.intensity),
            cy=y.at(spot.tflops),
            r=5,
            class_=f"mark c{colours.get(spot.peer, 0)}",
        )
        share = spot.tflops / min(peak_tflops, spot.intensity * terabytes)
        title = f"{spot.name}, {spot.peer}: {short_number(spot.tflops)} TFLOP/s"
        parts.append(titled(mark, f"{title}, {share:.0%} of what the roof allows"))
    parts.append(text((left + width) / 2, height - 8, "FLOP per byte", "middle", class_="label"))
    parts.append(text(left, 14, "TFLOP/s", class_="tick"))
    return picture(width, height, parts, "roofline")


def _grid(x: Axis, y: Axis, left: float, right: float, bottom: float) -> list[str]:
    parts = []
    for value in y.ticks():
        at = y.at(value)
        parts.append(element("line", x1=left, x2=right, y1=at, y2=at, class_="grid"))
        parts.append(text(left - 8, at + 4, short_number(value), "end", class_="tick"))
    for value in x.ticks():
        parts.append(text(x.at(value), bottom + 18, short_number(value), "middle", class_="tick"))
    return parts


def _vertical_grid(across: Axis, top: float, bottom: float, unit: str) -> list[str]:
    parts = []
    for value in across.ticks():
        at = across.at(value)
        parts.append(element("line", x1=at, x2=at, y1=top, y2=bottom, class_="grid"))
        parts.append(text(at, bottom + 16, short_number(value), "middle", class_="tick"))
    parts.append(text(WIDTH - 4, bottom + 16, unit, "end", class_="label"))
    return parts


def _cut(name: str, longest: int) -> str:
    return name if len(name) <= longest else f"{name[: longest - 1]}…"
