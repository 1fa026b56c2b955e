"""Bars, lines and a roofline as SVG; colours are CSS classes, so that they follow the theme.

Everything that comes from a results file is escaped here.
"""

import html
import math
import textwrap
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
        if not self.is_log:
            return _ticks(self.low, self.high)
        # 1, 2, 5, 10 are too far apart for values that differ by a few percent
        rough = _log_ticks(self.low, self.high)
        return rough if len(rough) >= 3 else _ticks(self.low, self.high)


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


def around(values: Iterable[float], level: float, start: float, end: float) -> Axis:
    """A logarithmic axis for ratios: the values and `level`, and no room for a zero."""
    found = [value for value in values if math.isfinite(value) and value > 0]
    # at least 5 % to either side, so that a ratio of 1.01 looks as small as it is
    low, high = min([*found, level / 1.05]), max([*found, level * 1.05])
    edge = (high / low) ** 0.06
    return Axis(low / edge, high * edge, start, end, True)


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
"""Of a picture that takes up a page on a desk."""
GUTTER = 24.0
"""Between pictures side by side."""
NARROW = 354.0
"""Of a picture on a phone."""
_BAR, _GAP, _LINE = 13.0, 12.0, 16.0
# The average width of a character at 12 pixels, plain and bold, and that of the widest one.
_CHARACTER, _BOLD, _WIDEST = 6.6, 7.6, 11.5

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


def bar_chart(
    groups: Sequence[tuple[str, Sequence[Bar]]],
    unit: str,
    colours: Colours,
    width: float = WIDTH,
    level: float | None = None,
) -> str:
    """Horizontal bars, a group for each case below its name; whiskers span the quartiles.

    With `level`, bars begin there on a logarithmic axis: a loss goes to the left.
    """
    values = [max(bar.value, bar.high) for _, group in groups for bar in group]
    start, end = 6.0, width - 60
    across = axis(values, start, end) if level is None else around(values, level, start, end)
    parts, y = [], 4.0
    for name, group in groups:
        for line in lines_of(name, width):
            y += _LINE
            parts.append(text(start, y - 4, line, class_="case"))
        for bar in group:
            parts.append(_bar(bar, across, level, y, unit, colours))
            y += _BAR
        y += _GAP
    grid = _vertical_grid(across, 4, y, unit, width)
    if level is not None:
        at = across.at(level)
        grid.append(element("line", x1=at, x2=at, y1=4.0, y2=y, class_="level"))
    return picture(width, y + 26, [*grid, *parts], f"bars of {unit} by case and peer")


def lines_of(words: str, width: float, character: float = _CHARACTER) -> list[str]:
    """A text in as many lines as it takes to stay within `width`."""
    average = character
    if words:
        average = sum(_WIDEST if c in "WMmw@%" else character for c in words) / len(words)
    return textwrap.wrap(words, max(int((width - 12) / average), 1)) or [""]


def _bar(bar: Bar, across: Axis, level: float | None, y: float, unit: str, colours: Colours) -> str:
    at, first = across.at, across.start if level is None else across.at(level)
    end, centre = at(bar.value), y + (_BAR - 3) / 2
    shape = element(
        "rect",
        x=min(first, end),
        y=y,
        width=abs(end - first) if level is not None else max(end - first, 1.0),
        height=_BAR - 3,
        rx=2,
        class_=f"fill c{colours.get(bar.peer, 0)}",
    )
    whisker = element(
        "line", x1=at(bar.low), x2=at(bar.high), y1=centre, y2=centre, class_="whisker"
    )
    beyond = max(first, end, at(bar.high))
    label = text(beyond + 6, y + _BAR - 4, short_number(bar.value), class_="value")
    spread = f"quartiles {short_number(bar.low)} to {short_number(bar.high)}"
    title = f"{bar.peer}: {short_number(bar.value)} {unit}"
    title += f", {spread}" if bar.low != bar.high else ""
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
    level: float | None = None
    """Where ratios are neither better nor worse: a line in the middle of a logarithmic axis."""
    x_names: Mapping[float, str] = field(default_factory=dict)
    """Names of x values, shown instead of the numbers."""


def line_chart(plot: Plot, colours: Colours, width: float = (WIDTH - GUTTER) / 2) -> str:
    """Curves with a marker at every point; with a level, the axis shows what is around it."""
    title = lines_of(plot.title, width, _BOLD)
    left, top = 44.0, 32.0 + _LINE * len(title)
    bottom, right = top + 204.0, width - 16
    points = [point for line in plot.lines for point in line.points]
    heights = [p[1] for p in points]
    x = axis([p[0] for p in points], left, right, is_log=plot.x_log, zero=False)
    if plot.level is None:
        y = axis(heights, bottom, top)
    else:
        y = around(heights, plot.level, bottom, top)
    parts = [text(4.0, _LINE * (i + 1), line, class_="title") for i, line in enumerate(title)]
    parts.append(text(4.0, top - 14, plot.y_label, class_="tick"))
    for value in y.ticks():
        at = y.at(value)
        parts.append(element("line", x1=left, x2=right, y1=at, y2=at, class_="grid"))
        parts.append(text(left - 8, at + 4, short_number(value), "end", class_="tick"))
    for value, name in (plot.x_names or {tick: short_number(tick) for tick in x.ticks()}).items():
        parts.append(text(x.at(value), bottom + 18, name, "middle", class_="tick"))
    parts.append(text((left + right) / 2, bottom + 38, plot.x_label, "middle", class_="label"))
    if plot.level is not None:
        at = y.at(plot.level)
        parts.append(element("line", x1=left, x2=right, y1=at, y2=at, class_="level"))
    # draw ours last, so that it is on top
    for line in sorted(plot.lines, key=lambda line: -colours.get(line.name, 0)):
        parts.append(_curve(line, x.at, y.at, plot, colours))
    label = f"{plot.title}: {plot.y_label} over {plot.x_label}"
    return picture(width, bottom + 50, parts, label)


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


def roofline(
    spots: Sequence[Spot],
    peak_tflops: float,
    terabytes: float,
    colours: Colours,
    width: float = WIDTH,
) -> str:
    """The limits set by memory and tensor cores, and the rates reached below them."""
    height, left, bottom = 380.0, 50.0, 330.0
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


def _vertical_grid(across: Axis, top: float, bottom: float, unit: str, width: float) -> list[str]:
    parts = []
    for value in across.ticks():
        at = across.at(value)
        parts.append(element("line", x1=at, x2=at, y1=top, y2=bottom, class_="grid"))
        parts.append(text(at, bottom + 16, short_number(value), "middle", class_="tick"))
    parts.append(text(width - 4, bottom + 16, unit, "end", class_="label"))
    return parts
