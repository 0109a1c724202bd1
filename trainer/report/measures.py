"""What was measured: metrics against the baseline, class by class, and slice by slice."""

from __future__ import annotations

import math

from trainer.report.charts import Scale, bar
from trainer.report.judgement import change, directions
from trainer.report.markup import Markup, element, join, printable
from trainer.report.numerals import (
    confidence,
    count,
    decimal,
    finite,
    leading_metric,
    lower_is_better,
    metric_name,
    plural,
    signed,
)
from trainer.report.tables import Column, Section, folded, paragraphs, table

MOST_CLASSES_IN_ORDER = 30  # beyond, the weakest come first and the others wait behind a fold
MOST_SLICES = 20
MOST_FOLDED_SLICES = 500


def metrics(evaluation: dict) -> Section | None:
    """Shows every metric with its interval, the baseline's value and the difference."""
    measured = evaluation.get("metrics") or {}
    if not measured:
        return None
    intervals = evaluation.get("intervals") or {}
    baseline = evaluation.get("baseline")
    before = (baseline or {}).get("metrics") or {}
    changes, lower = (baseline or {}).get("changes") or {}, directions(evaluation)
    axis = _shared_axis(measured, intervals, before) if intervals or before else None
    columns = [Column("Metric"), Column("This model", "n")]
    if baseline:
        columns += [Column(f"Version {printable(baseline.get('version'), 40)}", "n"), Column("Change", "n")]
    if axis:
        ends = element("span", element("span", f"{axis.low:g}"), element("span", f"{axis.high:g}"), class_="ends")
        columns.append(Column(ends, "wide strip", "Drawn to scale"))
    rows = []
    for name, value in measured.items():
        row: list[object] = [
            metric_name(printable(name, 80), evaluation.get("top_k")),
            valued(value, intervals.get(name)),
        ]
        if baseline:
            difference = change(name, value, before.get(name), lower.get(name))
            row += [decimal(before.get(name)), join([difference, _between(changes.get(name), lower.get(name))])]
        if axis:
            fraction = _is_fraction(name, value)
            row.append(_strip(axis, value, intervals.get(name), before.get(name)) if fraction else None)
        rows.append(row)
    notes: list[object] = []
    if intervals:
        level = finite(evaluation.get("confidence_level"))
        holds = f", which holds the true value in {confidence(level)} of cases" if level else ""
        notes.append(f"Under a value: its interval{holds}. ")
    for name, needed in (evaluation.get("needed") or {}).items():
        notes.append(
            join(
                [
                    "No interval of ",
                    metric_name(printable(name, 80), evaluation.get("top_k")),
                    f" below {needed} examples. ",
                ]
            )
        )
    if changes:
        notes.append("Under a change: its interval and, where it is chance alone, how often one as large is met (p). ")
    if axis:
        drawn = ["the dot is this model"]
        drawn += ["the line its interval"] if intervals else []
        drawn += ["the upright stroke the baseline"] if before else []
        notes.append(element("span", f"In the drawing {', '.join(drawn)}. ", class_="wide"))
    if baseline is None:
        notes.append("There was no baseline to compare with.")
    split = printable(evaluation.get("split") or "evaluated", 80)
    body = join([table(f"Metrics on the {split} split", columns, rows), paragraphs(join(notes) if notes else None)])
    return Section("metrics", "Metrics", body)


def per_class(evaluation: dict) -> Section | None:
    """Shows precision and recall of each class as bars, with the baseline's as ticks."""
    rows = evaluation.get("per_class") or []
    if not rows:
        return None
    before = {row.get("class"): row for row in (evaluation.get("baseline") or {}).get("per_class") or []}
    many = len(rows) > MOST_CLASSES_IN_ORDER
    if many:
        rows = sorted(rows, key=lambda row: _none_last(row.get("f1")))
    told = ["Under a rate: its interval."] if any(row.get("intervals") for row in rows) else []
    note = " ".join([*told, "The tick on a bar is the baseline."] if before else told) or None
    first = rows[:MOST_CLASSES_IN_ORDER]
    caption = "Precision and recall by class"
    if many:
        caption = f"The {len(first)} weakest of {count(len(rows))} classes by F1"
    parts = [paragraphs(note), _class_table(caption, first, before, drawn=True)]
    if many:
        rest = rows[len(first) :]
        title = f"The other {plural(len(rest), 'class', 'classes')}"
        parts.append(folded(title, _class_table(f"{title}, weakest first", rest, before, drawn=False)))
    return Section("classes", "Classes", join(parts))


def slices(evaluation: dict, verdict: dict) -> Section | None:
    """Shows the slices, the most harmful first.

    Harm is how far a slice falls behind the whole split, times its examples: for accuracy, the mistakes it has beyond
    those it would have at the accuracy of the whole.
    """
    rows = evaluation.get("slices") or []
    first = leading_metric(evaluation, verdict)
    if not rows or first is None:
        return None
    whole = finite((evaluation.get("metrics") or {}).get(first))
    direction = -1 if directions(evaluation).get(first, lower_is_better(first)) else 1

    def gap(row: dict) -> float | None:
        value = finite((row.get("metrics") or {}).get(first))
        return None if value is None or whole is None else direction * (value - whole)

    def harm(row: dict) -> float:
        behind = gap(row)
        return -math.inf if behind is None else -behind * (finite(row.get("num_examples")) or 0)

    ordered = sorted(rows, key=harm, reverse=True)
    others = [name for name in ordered[0].get("metrics") or {} if name != first][:2]
    columns = [
        Column("Slice", "name"),
        Column("Examples", "n"),
        Column(metric_name(first), "n"),
        Column("Gap", "n gap"),
    ]
    columns += [Column(metric_name(name, evaluation.get("top_k")), "n wide") for name in others]
    widest = max((abs(behind) for row in ordered if (behind := gap(row)) is not None), default=0)

    def cells(row: dict) -> list[object]:
        values = row.get("metrics") or {}
        behind = gap(row)
        value = valued(values.get(first), (row.get("intervals") or {}).get(first))
        small = element("small", "too few to judge") if row.get("judged") is False else None
        line = [printable(row.get("slice"), 120), join([count(row.get("num_examples")), small]), value]
        line.append("not judged" if behind is None else _gap(behind * direction, behind, widest))
        return line + [decimal(values.get(name)) for name in others]

    shown = ordered[:MOST_SLICES]
    text = (
        "The gap is to the whole split. Harm is the gap times the examples, so that a small gap in a large slice "
        "counts as much as a large gap in a small one."
    )
    parts = [
        paragraphs(text),
        table(
            f"{metric_name(first, evaluation.get('top_k'))} by slice, most harmful first", columns, map(cells, shown)
        ),
    ]
    rest = ordered[MOST_SLICES : MOST_SLICES + MOST_FOLDED_SLICES]
    if rest:
        title = f"{plural(len(rest), 'less harmful slice')}"
        parts.append(folded(title, table(title, columns, map(cells, rest))))
    left_out = len(ordered) - len(shown) - len(rest)
    if left_out:
        parts.append(element("p", f"{plural(left_out, 'slice')} with less harm left out."))
    return Section("slices", "Slices", join(parts))


def _between(found: dict | None, lower: bool | None) -> Markup | None:
    """Returns the interval of a change and its p-value; gains are turned back into differences of the value."""
    ends = [finite((found or {}).get(end)) for end in ("low", "high")]
    if None in ends:
        return None
    low, high = (-ends[1], -ends[0]) if lower else ends
    p_value = finite(found.get("p_value"))
    told = "" if p_value is None else "p < 0.001" if p_value < 0.001 else f"p {decimal(p_value, 3)}"
    ends = [element("span", f"{signed(low)} to", class_="whole"), f" {signed(high)}" + (", " if told else "")]
    return element("small", *ends, element("span", told, class_="whole") if told else None)


def valued(value: object, interval: object, places: int = 4) -> Markup | str:
    """Returns a number, with its interval under it where there is one."""
    if not interval:
        return decimal(value, places)
    low, high = (decimal(end, places) for end in interval)
    return join([decimal(value, places), element("small", element("span", f"{low} to", class_="whole"), f" {high}")])


def _class_table(caption: str, rows: list[dict], before: dict, *, drawn: bool) -> Markup:
    columns = [
        Column("Class", "name"),
        Column("Precision", "n"),
        Column("Recall", "n"),
        Column("F1", "n"),
        Column("Examples", "n"),
    ]

    def measured(row: dict, metric: str) -> Markup | str:
        value, earlier = finite(row.get(metric)), finite((before.get(row.get("class")) or {}).get(metric))
        between = (row.get("intervals") or {}).get(metric)
        return join([valued(row.get(metric), between, 3), bar(value, earlier) if drawn else None])

    lines = [
        [
            printable(row.get("class"), 80),
            measured(row, "precision"),
            measured(row, "recall"),
            decimal(row.get("f1"), 3),
            count(row.get("support")),
        ]
        for row in rows
    ]
    return table(caption, columns, lines, "classes")


def _gap(difference: float, behind: float, widest: float) -> Markup:
    """Returns the difference with a bar that grows to the left when the slice is behind."""
    share = 50 * abs(behind) / widest if widest else 0
    tone = "behind" if behind < 0 else "ahead"
    drawing = element(
        "svg",
        element("rect", class_="track", y=3, width="100%", height=6, rx=3),
        element(
            "rect", class_=tone, x=f"{50 - share if behind < 0 else 50:.4g}%", y=3, width=f"{share:.4g}%", height=6
        ),
        element("rect", class_="tick", x="49.5%", width="1%", height=12),
        class_="bar",
        aria_hidden="true",
    )
    return join([signed(difference), drawing])


def _shared_axis(measured: dict, intervals: dict, before: dict) -> Scale | None:
    """Returns one scale up to 1 for all metrics that are fractions, or None when there are none."""
    values = []
    for name, value in measured.items():
        if _is_fraction(name, value):
            values += [value, *(intervals.get(name) or ()), before.get(name)]
    known = [number for value in values if (number := finite(value)) is not None and 0 <= number <= 1]
    if not known:
        return None
    step = 0.1 if min(known) < 0.8 else 0.02
    return Scale(round(min(math.floor(min(known) / step + 1e-9) * step, 0.98), 2), 1.0, 4, 156)


def _is_fraction(name: str, value: object) -> bool:
    number = finite(value)
    return number is not None and 0 <= number <= 1 and not lower_is_better(name)


def _strip(axis: Scale, value: object, interval: object, before: object) -> Markup:
    parts = [element("line", class_="grid", x1=4, x2=156, y1=10, y2=10)]
    ends = [end for end in (finite(end) for end in interval or ()) if end is not None]
    if len(ends) == 2:
        low, high = (axis(min(max(end, axis.low), 1.0)) for end in ends)
        parts.append(element("line", class_="whisker", x1=f"{low:.1f}", x2=f"{high:.1f}", y1=10, y2=10))
    earlier = finite(before)
    if earlier is not None and axis.low <= earlier <= 1:
        at = f"{axis(earlier):.1f}"
        parts.append(element("line", class_="before", x1=at, x2=at, y1=3, y2=17))
    parts.append(element("circle", class_="now", cx=f"{axis(finite(value)):.1f}", cy=10, r=4))
    return element("svg", *parts, class_="whiskers", viewBox="0 0 160 20", aria_hidden="true")


def _none_last(value: object) -> float:
    number = finite(value)
    return math.inf if number is None else number
