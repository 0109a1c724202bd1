"""Tables that screen readers can walk and phones can scroll."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trainer.report.markup import Markup, element, join


@dataclass(frozen=True)
class Section:
    """A part of the page: its `key` names it in the contents, its `title` is its heading."""

    key: str
    title: str
    body: Markup


@dataclass(frozen=True)
class Column:
    """A heading and how the cells under it look.

    Attributes:
        title: The heading.
        kind: CSS classes of heading and cells: `n` sets numbers to the right, `wide` hides the column on phones.
        spoken: The heading for screen readers, where the visible one is a drawing.
    """

    title: object
    kind: str | None = None
    spoken: str | None = None


def table(caption: str, columns: list[Column], rows: Iterable[list[object]], kind: str = "") -> Markup:
    """Returns a table in a frame that scrolls by itself, the first cell of each row being its heading.

    Args:
        caption: Says what the table holds; also the name of the frame.
        columns: One for each cell of a row.
        rows: Cells: text, or `Markup`.
        kind: CSS classes of the table.
    """
    heads = [
        element("th", column.title, scope="col", class_=column.kind, aria_label=column.spoken) for column in columns
    ]
    lines = []
    for row in rows:
        cells = [element("th", row[0], scope="row", class_=columns[0].kind)]
        cells += [element("td", cell, class_=col.kind) for cell, col in zip(row[1:], columns[1:], strict=True)]
        lines.append(element("tr", *cells))
    return scrolling(
        element(
            "table",
            element("caption", caption),
            element("thead", element("tr", *heads)),
            element("tbody", *lines),
            class_=kind or None,
        ),
        caption,
    )


def scrolling(content: Markup, name: str) -> Markup:
    """Returns content that may be wider than a phone, in a frame of its own. The script makes it focusable if it is."""
    return element("div", content, class_="scroll", data_name=name)


def folded(summary: object, *body: object) -> Markup:
    """Returns content that waits behind its summary."""
    return element("details", element("summary", summary), element("div", *body, class_="folded"))


def paragraphs(*texts: object) -> Markup:
    """Returns each text that is not None as a paragraph."""
    return join(element("p", text) for text in texts if text is not None)
