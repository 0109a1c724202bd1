"""Line charts as inline SVG, small and without a library, so that they take the page's colours in light and dark."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainer.report.markup import Markup, element, join
from trainer.report.numerals import decimal

Point = tuple[float, float]

LEFT, RIGHT, TOP, BOTTOM = 52, 14, 22, 44  # room around the plot for what is written there


@dataclass(frozen=True)
class Scale:
    """Maps values in [low, high] to drawing units in [start, end], straight or by the logarithm.

    A `whole` scale that is long enough has ticks at whole numbers only, because there is no epoch 2.5 to read off.
    """

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False
    whole: bool = False

    def __call__(self, value: float) -> float:
        """Returns the drawing unit of `value`."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, self.low))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        """Returns some five round values in the range, with the text that says each."""
        if self.logarithmic:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            length = math.log10(self.high / self.low)
            steps = (1,) if length > 2.5 else (1, 3) if length > 1.2 else (1, 2, 5)
            stride = max(1, len(decades) // 5)
            values = [step * 10.0**decade for decade in decades[::stride] for step in steps]
            return [(value, f"{value:g}") for value in values if self.low <= value <= self.high]
        span = self.high - self.low
        step = max(1.0, round_step(span)) if self.whole and span >= 2 else round_step(span)
        places = max(0, -math.floor(math.log10(step) + 1e-9))
        first = math.ceil(self.low / step - 1e-9)
        values = [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]
        return [(value, f"{value:.{places}f}" if self.high < 1e5 else f"{value:.4g}") for value in values]


@dataclass(frozen=True)
class Line:
    """One line of a chart: what it is called, its pieces (a gap lies between two), and the CSS class that draws it."""

    name: str
    pieces: list[list[Point]]
    kind: str
    dots: bool = False


def round_step(span: float) -> float:
    """Returns the 1, 2 or 5 times a power of ten that divides `span` into parts, as near to five as may be."""
    rough = span / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return min((power * factor for factor in (1, 2, 5, 10)), key=lambda step: abs(math.log(step / rough)))


def scale_for(
    values: Iterable[float], start: float, end: float, ceiling: float | None = None, may_be_logarithmic: bool = False
) -> Scale:
    """Returns a scale with round ends that holds all values.

    Args:
        values: At least one finite number.
        start: Drawing unit of the low end.
        end: Drawing unit of the high end.
        ceiling: The scale ends here when rounding would pass it.
        may_be_logarithmic: Values that are all positive and span a factor over 50 get a logarithmic scale.
    """
    values = list(values)
    low, high = min(values), max(values)
    if may_be_logarithmic and low > 0 and high / low > 50:
        return Scale(low / 1.2, high * 1.2, start, end, logarithmic=True)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = abs(high) / 10 or 1.0
        low, high = low - margin, high + margin
    step = round_step(high - low)
    high = step * math.ceil(high / step - 1e-9)
    if ceiling is not None:
        high = min(high, ceiling)
    return Scale(step * math.floor(low / step + 1e-9), high, start, end)


def line_chart(
    key: str,
    title: str,
    description: str,
    lines: Sequence[Line],
    x: tuple[float, float, str],
    y_values: Iterable[float],
    y_label: str,
    *,
    size: tuple[int, int] = (440, 270),
    ceiling: float | None = None,
    may_be_logarithmic: bool = False,
    diagonal: bool = False,
    mark: tuple[Point, str] | None = None,
    crosses: Iterable[float] = (),
) -> Markup:
    """Returns a chart of lines over one horizontal axis.

    Args:
        key: Unique on the page; names the title and the description.
        title: A few words, for screen readers and on hover.
        description: What the chart shows, in sentences, for who cannot see it.
        lines: Drawn in this order, so the most important comes last.
        x: Low end, high end and label of the horizontal axis.
        y_values: What the vertical axis has to hold.
        y_label: Written above the vertical axis.
        size: Width and height in drawing units.
        ceiling: A value the vertical axis cannot pass, such as 1 for an accuracy.
        may_be_logarithmic: See `scale_for`.
        diagonal: Draws the line y = x.
        mark: A point to single out, and the words beside it.
        crosses: Horizontal positions where the value was not finite.
    """
    width, height = size
    across = Scale(x[0], x[1], LEFT, width - RIGHT, whole=True)
    up = scale_for(y_values, height - BOTTOM, TOP, ceiling, may_be_logarithmic)
    parts = [element("title", title, id=f"{key}-title"), element("desc", description, id=f"{key}-text")]
    for value, text in up.ticks():
        at = _short(up(value))
        parts.append(element("line", class_="grid", x1=LEFT, x2=width - RIGHT, y1=at, y2=at))
        parts.append(element("text", text, class_="end", x=LEFT - 8, y=at, dy="0.32em"))
    for value, text in across.ticks():
        at = _short(across(value))
        parts.append(element("line", class_="axis", x1=at, x2=at, y1=height - BOTTOM, y2=height - BOTTOM + 4))
        parts.append(element("text", text, class_="mid", x=at, y=height - BOTTOM + 18))
    base = height - BOTTOM
    parts.append(element("line", class_="axis", x1=LEFT, x2=width - RIGHT, y1=base, y2=base))
    parts.append(element("text", x[2], class_="mid", x=(LEFT + width - RIGHT) // 2, y=height - 6))
    parts.append(element("text", y_label, class_="start", x=0, y=11))
    if diagonal:
        ends = {"x1": across(x[0]), "y1": up(x[0]), "x2": across(x[1]), "y2": up(x[1])}
        parts.append(element("line", class_="diagonal", **{name: _short(at) for name, at in ends.items()}))
    if mark:
        (at, value), words = mark
        middle = _short(across(at))
        parts.append(element("line", class_="mark", x1=middle, x2=middle, y1=TOP, y2=base))
        before = across(at) > width * 0.62
        beside = _short(across(at) + (-6 if before else 6))
        height_of_words = TOP + 10 if up(value) > (TOP + base) / 2 else base - 8  # away from the curve
        parts.append(element("text", words, class_="end" if before else "start", x=beside, y=height_of_words))
    for line in lines:
        parts.append(_path(line, across, up))
        if line.dots:
            parts += [_dot(point, line, across, up, x[2]) for piece in line.pieces for point in piece]
    if mark:
        parts.append(element("circle", class_="ring", cx=middle, cy=_short(up(value)), r=5))
    for at in crosses:
        left = _short(across(at) - 4)
        parts.append(element("path", class_="cross", d=f"M{left} {TOP}l8 8m0-8l-8 8"))
    return element(
        "svg",
        *parts,
        class_="chart",
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_labelledby=f"{key}-title",
        aria_describedby=f"{key}-text",
    )


def legend(lines: Sequence[Line]) -> Markup:
    """Returns the names of the lines, each beside a piece of it."""
    items = []
    for line in lines:
        sample = element("svg", element("path", class_=line.kind, d="M1 6H27"), viewBox="0 0 28 12", aria_hidden="true")
        items.append(element("li", sample, element("bdi", line.name)))
    return element("ul", *items, class_="legend")


def figure(title: str, note: object, *body: object) -> Markup:
    """Returns a figure with its heading, a sentence under it, and the drawing."""
    heading = element("figcaption", element("h3", title), element("p", note) if note else None)
    return element("figure", heading, *body)


def bar(value: float | None, reference: float | None = None) -> Markup:
    """Returns a bar for a fraction in [0, 1] with a tick at `reference`, to stand beside the same number."""
    parts = [element("rect", class_="track", y=3, width="100%", height=6, rx=3)]
    if value is not None:
        parts.append(element("rect", class_="fill", y=3, width=f"{100 * min(max(value, 0), 1):.4g}%", height=6, rx=3))
    if reference is not None:
        parts.append(
            element("rect", class_="tick", x=f"{98.5 * min(max(reference, 0), 1):.4g}%", width="1.5%", height=12)
        )
    return element("svg", *parts, class_="bar", aria_hidden="true")


def thin_by_length(points: Sequence[Point], limit: int) -> list[Point]:
    """Returns at most `limit` of the points, evenly spread along the curve, its ends among them.

    Spreading along the length (|dx| + |dy|) rather than over the list keeps the steep part of a ROC curve, where one
    step in x may hold half the curve.
    """
    if len(points) <= limit:
        return list(points)
    lengths = [0.0]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        lengths.append(lengths[-1] + abs(x1 - x0) + abs(y1 - y0))
    kept, goal = [points[0]], 1
    for point, length in zip(points[1:-1], lengths[1:-1], strict=True):
        if length * (limit - 1) >= goal * lengths[-1] and len(kept) < limit - 1:
            kept.append(point)
            goal = math.floor(length * (limit - 1) / lengths[-1]) + 1 if lengths[-1] else limit
    return [*kept, points[-1]]


def thin_by_extremes(points: Sequence[Point], limit: int) -> list[Point]:
    """Returns at most `limit` of the points: the lowest and the highest of each stretch, so that no spike is lost."""
    if len(points) <= limit:
        return list(points)
    stretches = max(1, limit // 2)
    kept = []
    for index in range(stretches):
        stretch = points[index * len(points) // stretches : (index + 1) * len(points) // stretches]
        ends = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def _path(line: Line, across: Scale, up: Scale) -> Markup:
    drawn = join(
        "M" + "L".join(f"{_short(across(px))} {_short(up(py))}" for px, py in piece) for piece in line.pieces if piece
    )
    return element("path", class_=line.kind, d=drawn)


def _dot(point: Point, line: Line, across: Scale, up: Scale, x_label: str) -> Markup:
    words = f"{line.name}, {x_label.lower()} {point[0]:g}: {decimal(point[1])}"
    at = {"cx": _short(across(point[0])), "cy": _short(up(point[1]))}
    return element("circle", element("title", words), class_=f"dot {line.kind}", r=2.5, **at)


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
