"""The worst mistakes, shown as the model saw them."""

from __future__ import annotations

from trainer.report.markup import Markup, element, join, printable
from trainer.report.numerals import count, decimal, finite, percent, plural
from trainer.report.pictures import LARGEST_EXACT_SIDE, photograph
from trainer.report.tables import Section, paragraphs

MOST_SHOWN = 24
MOST_VALUES = 12


def mistakes(evaluation: dict) -> Section | None:
    """Shows the examples on which the model was wrong, in the order given: the surest of them first."""
    rows = evaluation.get("mistakes") or []
    if not rows:
        return None
    shown = rows[:MOST_SHOWN]
    sure = any(finite(row.get("probability")) is not None for row in rows)
    given = ", with the probability that the model gave to each" if sure else ""
    note = f"What the label says and what the model says{given}."
    if len(rows) > len(shown):
        note += f" The first {len(shown)} of {plural(len(rows), 'mistake')}."
    cards = [element("li", _card(row)) for row in shown]
    return Section("mistakes", "Worst mistakes", join([paragraphs(note), element("ul", *cards, class_="cards")]))


def _card(row: dict) -> Markup:
    label, predicted = (_value(row.get(field)) for field in ("label", "predicted"))
    index = count(row.get("index"))
    words = f"Example {index}: labelled {label}, predicted {predicted}"
    return element(
        "figure",
        _shown(row, words),
        element(
            "figcaption",
            element(
                "dl",
                _term("Label", label, row.get("label_probability")),
                _term("Model", predicted, row.get("probability")),
                class_="long" if max(len(label), len(predicted)) > 8 else None,
            ),
            element("small", f"Example {index}"),
        ),
    )


def _shown(row: dict, words: str) -> Markup | None:
    if isinstance(row.get("image"), dict):
        try:
            url, side = photograph(row["image"])
        except (ValueError, KeyError, TypeError) as error:
            return element("p", f"No picture: {printable(error, 120)}.", class_="absent")
        return element("img", src=url, alt=words, class_="crisp" if side <= LARGEST_EXACT_SIDE else None)
    if isinstance(row.get("values"), dict):
        shown = list(row["values"].items())[:MOST_VALUES]
        left_out = len(row["values"]) - len(shown)
        pairs = [_term(printable(name, 60), printable(value, 80) or "empty", None) for name, value in shown]
        return element("dl", *pairs, element("small", f"and {left_out} more") if left_out else None, class_="row")
    if row.get("text") is not None:
        return element("blockquote", printable(row["text"], 400), dir="auto")
    return None


def _term(title: str, value: str, probability: object) -> Markup:
    sure = None if finite(probability) is None else element("dd", percent(probability))
    return element("div", element("dt", title), element("dd", value), sure)


def _value(value: object) -> str:
    return decimal(value) if isinstance(value, float) else printable(value, 60)
