"""The confusion matrix: a table while its numbers can be read, a picture beyond, and the worst pairs in words."""

from __future__ import annotations

import heapq
import math

from trainer.report.charts import figure
from trainer.report.markup import Markup, element, join, printable
from trainer.report.numerals import count, percent, plural
from trainer.report.pictures import data_url, indexed_png
from trainer.report.tables import Column, Section, paragraphs, scrolling, table

MOST_CLASSES_AS_TABLE = 30
MOST_DOTS = 500  # a side of the picture: smaller dots would fade away on a screen
MOST_PAIRS = 8

# The picture's colours are seen on white and on near black, so they are mid tones that fade by opacity.
_HIT, _MISS = (36, 124, 204), (214, 84, 52)
_PALETTE = [
    (0, 0, 0, 0),
    *((*_MISS, 90 + 165 * level // 7) for level in range(1, 8)),
    *((*_HIT, 55 + 200 * level // 8) for level in range(1, 9)),
]


def confusion(evaluation: dict) -> Section | None:
    """Shows what was predicted for each true class: rows are true, columns predicted."""
    matrix = evaluation.get("confusion_matrix") or []
    if not matrix:
        return None
    given = evaluation.get("class_names") or []
    names = [printable(given[index] if index < len(given) else index, 80) for index in range(len(matrix))]
    mistakes = sum(map(sum, matrix)) - sum(matrix[index][index] for index in range(len(matrix)))
    text = f"{plural(mistakes, 'example')} off the diagonal. Rows are true classes, columns predicted ones."
    pairs = _pairs(matrix, names) if len(matrix) > 2 and mistakes else None
    if len(matrix) <= MOST_CLASSES_AS_TABLE:
        body = element("div", _as_table(matrix, names), pairs, class_="beside")
    else:
        body = join([_as_picture(matrix, mistakes), pairs])
    return Section("confusion", "Confusion matrix", join([paragraphs(text), body]))


def _as_table(matrix: list[list[int]], names: list[str]) -> Markup:
    long = any(len(name) > 4 for name in names)
    heads = [element("th", element("span", _short(name)), scope="col", title=name) for name in names]
    rows = []
    for true, (row, name) in enumerate(zip(matrix, names, strict=True)):
        total = sum(row)
        cells = [
            element("td", count(number) if number else None, class_=_shade(number / total, true == predicted))
            if number
            else element("td")
            for predicted, number in enumerate(row)
        ]
        rows.append(element("tr", element("th", _short(name), scope="row", title=name), *cells))
    corner = element("td", element("span", "predicted →"), element("span", "true ↓"), class_="corner")
    caption = "Examples by true and predicted class. The stronger the colour, the larger its share of the row."
    drawn = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", corner, *heads)),
        element("tbody", *rows),
        class_="matrix" + (" upright" if long else "") + (" dense" if len(names) > 15 else ""),
    )
    return scrolling(drawn, "Confusion matrix")


def _as_picture(matrix: list[list[int]], mistakes: int) -> Markup:
    size = len(matrix)
    block = math.ceil(size / MOST_DOTS)
    dots = math.ceil(size / block)
    lines = [bytearray(dots) for _ in range(dots)]
    for true, row in enumerate(matrix):
        total = sum(row)
        line = lines[true // block]
        for predicted, number in enumerate(row):
            if number:
                share = number / total
                level = 7 + math.ceil(8 * share) if predicted == true else math.ceil(7 * math.sqrt(share))
                line[predicted // block] = max(line[predicted // block], level)
    alt = (
        f"Confusion matrix of {size} classes: true classes from top to bottom, predicted ones from left to right. "
        f"{plural(mistakes, 'example')} off the diagonal; the table of pairs below names the most frequent."
    )
    picture = element("img", src=data_url("png", indexed_png(lines, _PALETTE)), alt=alt, width=dots, height=dots)
    note = "Blue on the diagonal is right, orange is wrong; the stronger the colour, the larger its share of the row."
    if block > 1:
        note += f" A dot stands for {block} × {block} classes and shows the strongest."
    axes = [
        element("span", "true ↓ predicted →", class_="axes"),
        element("div", picture, class_="picture crisp"),
    ]
    return figure(f"{count(size)} × {count(size)} classes", note, *axes)


def _pairs(matrix: list[list[int]], names: list[str]) -> Markup:
    wrong = (
        (number, -true, -predicted)
        for true, row in enumerate(matrix)
        for predicted, number in enumerate(row)
        if number and true != predicted
    )
    rows = [
        [names[-true], names[-predicted], count(number), percent(number / sum(matrix[-true]))]
        for number, true, predicted in heapq.nlargest(MOST_PAIRS, wrong)
    ]
    columns = [
        Column("True", "name"),
        Column("Predicted", "name"),
        Column("Examples", "n"),
        Column("Of the class", "n"),
    ]
    return table("Most frequent confusions", columns, rows)


def _shade(share: float, right: bool) -> str:
    return f"h{math.ceil(9 * share)}" if right else f"m{math.ceil(9 * math.sqrt(share))}"


def _short(name: str) -> str:
    return name if len(name) <= 18 else f"{name[:17]}…"
