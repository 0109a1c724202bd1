"""The curves: how learning went, and how well scores separate the classes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainer.report.charts import Line, Point, figure, legend, line_chart, thin_by_extremes, thin_by_length
from trainer.report.markup import Markup, element, join, printable
from trainer.report.numerals import count, decimal, finite, percent, plural
from trainer.report.tables import Column, Section, folded, paragraphs, table

MOST_ROWS = 60  # of the history, shown as numbers
MOST_POINTS = 400  # a learning curve: more than a screen has columns for
ROC_POINTS = 200  # a curve: moves its area by 1e-5
PR_POINTS = 400
FAINT_POINTS = 40  # a curve in the crowd behind the named ones
MOST_FAINT = 60
NAMED = 3  # curves in one drawing that eyes can still tell apart


def learning(history: Sequence[dict]) -> Section | None:
    """Shows loss and accuracy against epochs, the epoch of the lowest validation loss, and the numbers behind."""
    if not history:
        return None
    key, label = ("epoch", "Epoch") if finite(history[0].get("epoch")) is not None else ("step", "Step")
    best = _best(history, key)
    figures = [
        _learning_figure(history, key, label, best, "loss", "Loss", None),
        _learning_figure(history, key, label, best, "accuracy", "Accuracy", 1.0),
        _learning_figure(history, key, label, best, "mean_absolute_error", "Mean absolute error", None),
    ]
    if not any(figures):
        return None
    note = None
    if best:
        note = f"The ring marks the lowest validation loss, {decimal(best[1])}, at {label.lower()} {best[0]:g}."
    body = join([paragraphs(note), element("div", *figures, class_="pair"), _history_table(history, label, key)])
    return Section("learning", "Learning curves", body)


def roc(evaluation: dict) -> Section | None:
    """Shows the rate of true positives against that of false ones, class by class."""
    return _separation(
        evaluation.get("roc"),
        ("roc", "ROC curves", "AUC"),
        ("fpr", "tpr", "auc"),
        ("False positive rate", "True positive rate"),
        "Each class against all others. A curve near the upper left corner separates its class well; "
        "the dashed diagonal is guessing.",
        diagonal=True,
        points=ROC_POINTS,
    )


def precision_recall(evaluation: dict) -> Section | None:
    """Shows precision against recall, class by class."""
    return _separation(
        evaluation.get("pr"),
        ("pr", "Precision and recall curves", "Average precision"),
        ("recall", "precision", "average_precision"),
        ("Recall", "Precision"),
        "Each class against all others. A curve near the upper right corner finds its class without false alarms.",
        diagonal=False,
        points=PR_POINTS,
    )


def calibration(evaluation: dict) -> Section | None:
    """Shows whether a model that is 80 % sure is right in 80 % of cases.

    `evaluation["calibration"]` is {"bins": [{"confidence": mean, "accuracy": fraction, "num_examples": int}]}.
    """
    bins = [
        (sure, right, row.get("num_examples"))
        for row in (evaluation.get("calibration") or {}).get("bins") or []
        if (sure := finite(row.get("confidence"))) is not None and (right := finite(row.get("accuracy"))) is not None
    ]
    if not bins:
        return None
    line = Line("This model", [[(sure, right) for sure, right, _ in bins]], "strong", dots=True)
    widest = max(bins, key=lambda row: abs(row[0] - row[1]))
    note = f"Furthest from the diagonal: {percent(widest[0])} sure, right in {percent(widest[1])} of cases."
    drawn = line_chart(
        "calibration",
        "How often the model is right against how sure it is",
        note,
        [line],
        (0, 1, "How sure"),
        (0, 1),
        "How often right",
        size=(440, 360),
        ceiling=1,
        diagonal=True,
    )
    rows = [[percent(sure), percent(right), count(number)] for sure, right, number in bins]
    columns = [Column("Mean confidence", "n"), Column("Right", "n"), Column("Examples", "n")]
    numbers = table("Confidence and correctness by group of examples", columns, rows)
    text = "On the dashed diagonal the model is right as often as it is sure; below it, it is too sure of itself."
    body = join([paragraphs(text), element("div", figure("Reliability", note, drawn), numbers, class_="pair")])
    return Section("calibration", "Calibration", body)


def _best(history: Sequence[dict], key: str) -> Point | None:
    measured = [
        (at, loss)
        for row in history
        if (loss := finite(row.get("validation_loss"))) is not None and (at := finite(row.get(key))) is not None
    ]
    return min(measured, key=lambda point: point[1], default=None)


def _learning_figure(
    history: Sequence[dict], key: str, label: str, best: Point | None, metric: str, title: str, ceiling: float | None
) -> Markup | None:
    lines, crosses, notes = [], [], []
    for field, name, kind in ((metric, "Training", "plain"), (f"validation_{metric}", "Validation", "strong")):
        pieces, broken = _pieces(history, key, field)
        points = [point for piece in pieces for point in piece]
        crosses += broken
        if broken:
            notes.append(f"{name} {metric} was not finite in {plural(len(broken), 'row')} (×).")
        if points:
            share = MOST_POINTS / max(len(points), MOST_POINTS)
            kind = "fine" if kind == "plain" and len(points) > 100 else kind  # dashes would break a restless line up
            thinned = [thin_by_extremes(piece, math.ceil(len(piece) * share)) for piece in pieces]
            lines.append(Line(name, thinned, kind, dots=len(points) <= 40))
            low, high = min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])
            notes.append(f"{name}: {decimal(points[0][1])} at first, {decimal(points[-1][1])} at last")
            notes[-1] += f", {'highest' if ceiling else 'lowest'} {decimal((high if ceiling else low)[1])}."
    if not lines:
        return element("p", " ".join(notes)) if notes else None
    points = [point for line in lines for piece in line.pieces for point in piece]
    values = [value for _, value in points]
    places = [at for at, _ in points] + crosses
    first, last = min(places), max(places)
    mark = None
    if best:
        at_best = {at: value for piece in lines[-1].pieces for at, value in piece}.get(best[0])
        if lines[-1].name == "Validation" and at_best is not None:
            mark = ((best[0], at_best), f"{label.lower()} {best[0]:g}")
    logarithmic = ceiling is None and min(values) > 0 and max(values) / min(values) > 50
    drawn = line_chart(
        f"learning-{metric}",
        f"{title} by {label.lower()}",
        " ".join(notes),
        lines,
        (first, last if last > first else first + 1, label),
        values,
        f"{title} (logarithmic)" if logarithmic else title,
        ceiling=ceiling if max(values) <= 1 else None,
        may_be_logarithmic=logarithmic,
        mark=mark,
        crosses=crosses[:: max(1, len(crosses) // 50)],
    )
    broken_note = " ".join(note for note in notes if "not finite" in note) or None
    return figure(title, broken_note, legend(lines), drawn)


def _pieces(history: Sequence[dict], key: str, field: str) -> tuple[list[list[Point]], list[float]]:
    """Returns the curve, cut where a value is not finite, and the places of the cuts.

    The training loss is measured in every row, so there None stands for a value that JSON could not hold; elsewhere it
    stands for a row without that measurement.
    """
    pieces: list[list[Point]] = [[]]
    broken = []
    for row in history:
        at, value = finite(row.get(key)), row.get(field)
        if at is None or field not in row or (value is None and field != "loss"):
            continue
        number = finite(value)
        if number is not None:
            pieces[-1].append((at, number))
        else:
            broken.append(at)
            pieces.append([])
    return [piece for piece in pieces if piece], broken


def _history_table(history: Sequence[dict], label: str, key: str) -> Markup:
    fields = {
        "loss": ("Loss", 4),
        "validation_loss": ("Validation loss", 4),
        "accuracy": ("Accuracy", 4),
        "validation_accuracy": ("Validation accuracy", 4),
        "mean_absolute_error": ("Mean absolute error", 4),
        "validation_mean_absolute_error": ("Validation error", 4),
        "learning_rate": ("Learning rate", 6),
        "seconds": ("Seconds", 1),
    }
    shown = {field: how for field, how in fields.items() if any(row.get(field) is not None for row in history)}
    stride = math.ceil(len(history) / MOST_ROWS)
    rows = [*history[:-1:stride], history[-1]]
    columns = [Column(label, "n"), *([Column("Step", "n")] if key == "epoch" else [])]
    columns += [Column(title, "n") for title, _ in shown.values()]
    lines = []
    for row in rows:
        at = finite(row.get(key))
        line = [
            decimal(row.get(key)) if at is None else f"{at:g}",
            *([count(row.get("step"))] if key == "epoch" else []),
        ]
        lines.append(line + [decimal(row.get(field), places) for field, (_, places) in shown.items()])
    caption = "Training history" if stride == 1 else f"Training history, every {stride}th of {count(len(history))} rows"
    return folded("The numbers behind the curves", table(caption, columns, lines))


def _separation(
    curves: Sequence[dict] | None,
    names: tuple[str, str, str],
    fields: tuple[str, str, str],
    axes: tuple[str, str],
    text: str,
    *,
    diagonal: bool,
    points: int,
) -> Section | None:
    """Draws one curve a class: the weakest by name, the others as a crowd behind them."""
    key, title, area_name = names
    drawable = []
    for curve in curves or []:
        across, up = ([finite(value) for value in curve.get(field) or []] for field in fields[:2])
        pairs = [(x, y) for x, y in zip(across, up, strict=False) if x is not None and y is not None]
        if len(pairs) > 1:
            drawable.append((finite(curve.get(fields[2])), printable(curve.get("class"), 40), pairs))
    if not drawable:
        return None
    drawable.sort(key=lambda curve: math.inf if curve[0] is None else curve[0])
    named, crowd = drawable[:NAMED], drawable[NAMED : NAMED + MOST_FAINT]
    left_out = len(drawable) - len(named) - len(crowd)
    lines = []
    if crowd:
        pieces = [thin_by_length(pairs, points if len(crowd) <= 17 else FAINT_POINTS) for _, _, pairs in crowd]
        word = "class" if len(crowd) == 1 else "classes"
        lines.append(Line(f"{len(crowd)} other {word}", pieces, "faint"))
    for (_, name, pairs), kind in reversed(list(zip(named, ("strong", "dashed", "dotted"), strict=False))):
        lines.append(Line(name, [thin_by_length(pairs, points)], kind))
    areas = [(name, area) for area, name, _ in drawable]
    description = f"Lowest {area_name}: " + ", ".join(f"{name} {decimal(area)}" for name, area in areas[:NAMED]) + "."
    drawn = line_chart(
        key, title, description, lines, (0, 1, axes[0]), (0, 1), axes[1], size=(440, 400), ceiling=1, diagonal=diagonal
    )
    note = None
    if left_out:
        note = f"Drawn: the {len(named) + len(crowd)} lowest. The {plural(left_out, 'curve')} above them are left out."
    columns = [Column("Class", "name"), Column(area_name, "n")]
    several = len(areas) > 1
    caption = f"{area_name} by class, lowest first" if several else f"{area_name}"
    if len(areas) > 12:
        caption = f"The 12 lowest of {count(len(areas))} classes by {area_name}"
    numbers = table(caption, columns, [[name, decimal(area)] for name, area in areas[:12]])
    shown = figure("The weakest classes by name" if crowd else "By class", note, legend(lines[::-1]), drawn)
    return Section(key, title, join([paragraphs(text), element("div", shown, numbers, class_="pair")]))
