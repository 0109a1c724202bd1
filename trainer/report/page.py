"""Puts the parts together to one HTML document that needs nothing else."""

from __future__ import annotations

import base64
import hashlib

from trainer.report import origins
from trainer.report.confusion import confusion
from trainer.report.curves import calibration, learning, precision_recall, roc
from trainer.report.judgement import headline, reasons
from trainer.report.markup import Markup, element
from trainer.report.measures import metrics, per_class, slices
from trainer.report.mistakes import mistakes
from trainer.report.script import SCRIPT
from trainer.report.style import STYLE
from trainer.report.tables import Section


def render(evaluation: dict, verdict: dict, history: list[dict], provenance: dict) -> str:
    """Returns the report as one HTML document; the same inputs give the same bytes.

    Args:
        evaluation: What was measured: `split`, `num_examples`, `task`, `class_names`, `metrics`, `per_class`,
            `confusion_matrix` [true, predicted], `roc`, `mistakes`, `baseline`; and where they exist `intervals`,
            `slices`, `pr` (`class`, `recall`, `precision`, `average_precision`), `calibration` (see
            `curves.calibration`) and `data_statistics` (a nested dict). What is missing is left out of the page.
        verdict: What was decided: `blessed`, `verdict`, `reasons`, `rules`.
        history: Rows of the training, in order; may be empty.
        provenance: A nested dict of anything that JSON can hold. Its `name`, or that of its `configuration`, names the
            page.

    Returns:
        A page of at most 3 MB for 1000 classes. It loads nothing, and its policy forbids every script but its own.
    """
    title, head = headline(evaluation, verdict, provenance)
    return assemble(title, head, _sections(evaluation, verdict, history, provenance))


def assemble(title: str, head: Markup, sections: list[Section]) -> str:
    """Returns one HTML document that loads nothing.

    Args:
        title: Of the page.
        head: What stands above the sections.
        sections: The parts, in order.
    """
    document = element(
        "html",
        element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", http_equiv="Content-Security-Policy", content=_policy()),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("meta", name="color-scheme", content="light dark"),
            element("title", title),
            element("link", rel="icon", href="data:,"),
            element("style", Markup(STYLE)),
        ),
        element(
            "body",
            head,
            element("div", _contents(sections), element("main", *map(_section, sections)), class_="columns"),
            element("footer", element("p", "This page is whole: it loads nothing and sends nothing.")),
            element("script", Markup(SCRIPT)),
        ),
        lang="en",
    )
    return f"<!doctype html>\n{document}\n"


def _sections(evaluation: dict, verdict: dict, history: list[dict], provenance: dict) -> list[Section]:
    found = [
        reasons(verdict),
        metrics(evaluation),
        learning(history),
        confusion(evaluation),
        per_class(evaluation),
        slices(evaluation, verdict),
        mistakes(evaluation),
        roc(evaluation),
        precision_recall(evaluation),
        calibration(evaluation),
        origins.data_statistics(evaluation),
        origins.provenance(provenance),
    ]
    return [section for section in found if section]


def _contents(sections: list[Section]) -> Markup:
    buttons = [
        element("li", element("button", section.title, type="button", data_to=f"{section.key}-heading"))
        for section in sections
    ]
    return element("nav", element("ul", *buttons), hidden=True, aria_label="Contents")


def _section(section: Section) -> Markup:
    heading = f"{section.key}-heading"
    return element(
        "section",
        element("h2", section.title, id=heading, tabindex="-1"),
        section.body,
        aria_labelledby=heading,
        data_heading=heading,
    )


def _policy() -> str:
    """Returns a policy under which a string that slipped through escaping could neither run nor call home."""
    allowed = {"style-src": STYLE, "script-src": SCRIPT}
    rules = ["default-src 'none'", "img-src data:", "base-uri 'none'", "form-action 'none'"]
    for name, text in allowed.items():
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        rules.append(f"{name} 'sha256-{digest}'")
    return "; ".join(rules)
