"""The verdict in a few lines of Markdown, for the interface of Kubeflow Pipelines."""

from __future__ import annotations

import re

from trainer.report.judgement import directions
from trainer.report.markup import printable
from trainer.report.numerals import confidence, decimal, finite, lower_is_better, metric_name, plural, signed

WEAKEST = 3

# Everything that Markdown, or the HTML inside it, would take for more than a letter.
_ACTIVE = re.compile(r"([\\`*_\[\]#|~!@])|(://)")
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def markdown_summary(evaluation: dict, verdict: dict) -> str:
    """Returns verdict, reasons, rules and metrics as Markdown; takes the same dicts as `render`."""
    blessed = verdict.get("blessed")
    title = "Not judged" if blessed is None else "Blessed" if blessed else "Not blessed"
    blocks = [f"# {title}"]
    if evaluation.get("num_examples") is not None and evaluation.get("split"):
        examples = plural(evaluation["num_examples"], "example")
        blocks.append(f"Judged on {examples} of the {_plain(evaluation['split'])} split.")
    given = verdict.get("reasons") or []
    if given:
        blocks.append("\n".join(f"- {_plain(reason)}" for reason in given))
    rules = verdict.get("rules") or []
    if rules:
        outcomes = {True: "passed", False: "**failed**", None: "not judged"}
        rows = [
            [
                _plain(rule.get("rule")),
                decimal(rule.get("found")),
                decimal(rule.get("baseline")),
                outcomes.get(rule.get("passed"), "not judged"),
            ]
            for rule in rules
        ]
        blocks.append(_table(["Rule", "Found", "Baseline", "Outcome"], rows))
    metrics = evaluation.get("metrics") or {}
    if metrics:
        blocks.append(_metrics_table(metrics, evaluation))
    weakest = sorted(
        (row for row in evaluation.get("per_class") or [] if finite(row.get("f1")) is not None),
        key=lambda row: finite(row["f1"]),
    )
    if len(weakest) > 1:
        named = ", ".join(f"{_plain(row.get('class'))} ({decimal(row['f1'])})" for row in weakest[:WEAKEST])
        blocks.append(f"Weakest classes by F1: {named}.")
    return "\n\n".join(blocks) + "\n"


def _metrics_table(metrics: dict, evaluation: dict) -> str:
    intervals, baseline = evaluation.get("intervals") or {}, evaluation.get("baseline")
    lower = directions(evaluation)
    before = (baseline or {}).get("metrics") or {}
    head = ["Metric", "This model"]
    level = finite(evaluation.get("confidence_level"))
    head += [f"{confidence(level)} interval" if level else "Interval"] if intervals else []
    head += [f"Version {_plain((baseline or {}).get('version'))}", "Change"] if baseline else []
    rows = []
    for name, value in metrics.items():
        row = [_plain(metric_name(name, evaluation.get("top_k"))), decimal(value)]
        if intervals:
            between = intervals.get(name)
            row.append(f"{decimal(between[0])} to {decimal(between[1])}" if between else decimal(None))
        if baseline:
            row += [decimal(before.get(name)), _change(value, before.get(name), lower.get(name, lower_is_better(name)))]
        rows.append(row)
    return _table(head, rows)


def _change(value: object, before: object, lower: bool) -> str:
    now, earlier = finite(value), finite(before)
    if now is None or earlier is None:
        return decimal(None)
    written = signed(now - earlier)
    if written == decimal(0.0):
        return "same"
    better = (now < earlier) == lower
    return f"{written} {'better' if better else 'worse'}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    aligned = [":---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, aligned, *rows])


def _plain(value: object) -> str:
    """Returns text on one line that Markdown and HTML show as it is."""
    line = " ".join(printable(value, 300).split())
    line = _ACTIVE.sub(lambda found: "\\" + found[1] if found[1] else ":\\//", line.translate(_ENTITIES))
    return re.sub(r"^(\d*)([-+.)])", r"\1\\\2", line)
