"""HTML that cannot be injected into: text is escaped unless it is already `Markup`.

Class names, slices and configuration come from strangers. Escaping is therefore not a step that someone may forget:
every string put into an element is escaped there, and only `element` makes the type that is let through.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_VOID = frozenset({"br", "col", "img", "link", "meta"})
_SVG_LEAVES = frozenset({"circle", "line", "path", "rect"})
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"})

# Control characters are not allowed in HTML, lone surrogates cannot be written as UTF-8, and characters that turn the
# direction of the text around could make "not blessed" read as something else.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


class Markup(str):
    """A string that is HTML already."""

    __slots__ = ()


def printable(value: object, limit: int = 2000) -> str:
    """Returns `value` as text that a page can hold: no control characters, no more than `limit` characters."""
    text = _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", str(value))
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def escape(value: object) -> Markup:
    """Returns `value` as HTML text; `Markup` is returned as it is."""
    if isinstance(value, Markup):
        return value
    return Markup(_UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", str(value)).translate(_ENTITIES))


def join(children: Iterable[object]) -> Markup:
    """Returns the children one after the other, escaped where they are not `Markup`; None is left out."""
    return Markup("".join(escape(child) for child in children if child is not None))


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """Returns `<tag attributes>children</tag>`.

    Args:
        tag: The element's name.
        *children: Text (escaped), `Markup` (kept) or None (left out).
        **attributes: `class_` means `class` and `aria_label` means `aria-label`. True gives a bare attribute; None and
            False give none.
    """
    opening = [tag]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        name = name.rstrip("_").replace("_", "-")
        opening.append(name if value is True else f'{name}="{escape(value)}"')
    head = " ".join(opening)
    if tag in _VOID:
        return Markup(f"<{head}>")
    if tag in _SVG_LEAVES and not children:
        return Markup(f"<{head}/>")
    return Markup(f"<{head}>{join(children)}</{tag}>")
