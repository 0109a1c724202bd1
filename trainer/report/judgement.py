"""What was decided and why: the head of the page."""

from __future__ import annotations

from trainer.report.markup import Markup, element, join, printable
from trainer.report.numerals import (
    count,
    decimal,
    finite,
    leading_metric,
    lower_is_better,
    metric_name,
    plural,
    signed,
)
from trainer.report.tables import Column, Section, table

_KINDS = {"value_threshold": "Against a fixed value", "change_threshold": "Against the baseline"}
_CHECK = "M4 10.5l4 4 8-9"
_CROSS = "M5 5l10 10M15 5L5 15"
_DASH = "M4 10h12"


def headline(evaluation: dict, verdict: dict, provenance: dict) -> tuple[str, Markup]:
    """Returns the page's title and its head: the verdict, the rules in one sentence, and the key figures."""
    name = _name_of_run(provenance)
    blessed = verdict.get("blessed")
    decision = "is blessed" if blessed else "was not judged" if blessed is None else "is not blessed"
    stated = verdict.get("verdict")
    special = None
    if stated and stated not in ("blessed", "not_blessed"):
        special = element("p", metric_name(printable(stated, 80)), class_="stated")
    title = f"{name} {decision}"
    head = element(
        "header",
        element("p", "Trireme evaluation report", class_="eyebrow"),
        element(
            "h1",
            element("bdi", name),
            " ",
            element("span", decision, " ", mark(blessed), class_=f"decision {_tone(blessed)}"),
            id="top",
        ),
        special,
        element("p", _one_sentence(evaluation, verdict), class_="lead"),
        _key_figures(evaluation, verdict),
    )
    return title, head


def reasons(verdict: dict) -> Section:
    """Lists the reasons and every rule, what was found, and which side it fell."""
    parts = []
    given = verdict.get("reasons") or []
    if given:
        parts.append(element("ul", *(element("li", printable(reason)) for reason in given), class_="reasons"))
    rules = verdict.get("rules") or []
    if rules:
        with_baseline = any(rule.get("baseline") is not None for rule in rules)
        columns = [Column("Rule"), Column("Found", "n")]
        columns += [Column("Baseline", "n")] if with_baseline else []
        columns.append(Column("Outcome"))
        rows = []
        for rule in rules:
            kind = _KINDS.get(rule.get("kind"), rule.get("kind"))
            text = join([printable(rule.get("rule"), 300), element("small", printable(kind, 80)) if kind else None])
            row = [text, decimal(rule.get("found"))]
            row += [decimal(rule.get("baseline"))] if with_baseline else []
            rows.append([*row, outcome(rule.get("passed"))])
        parts.append(table("Rules of the judgement", columns, rows, "rules"))
    if not parts:
        parts.append(element("p", "No rule was set and no reason was given."))
    return Section("verdict", "Why", join(parts))


def mark(passed: bool | None) -> Markup:
    """Returns a check, a cross or a dash: the shape says it where the colour cannot."""
    drawn = element("path", d=_DASH if passed is None else _CHECK if passed else _CROSS)
    return element("svg", drawn, class_=f"sign {_tone(passed)}", viewBox="0 0 20 20", aria_hidden="true")


def outcome(passed: bool | None) -> Markup:
    """Returns the mark and the word for one rule."""
    word = "Not judged" if passed is None else "Passed" if passed else "Failed"
    return element("span", mark(passed), word, class_=f"outcome {_tone(passed)}")


def change(metric: str, found: object, baseline: object) -> Markup | str:
    """Returns the difference to the baseline: its sign, an arrow, and whether that is better or worse."""
    now, before = finite(found), finite(baseline)
    if now is None or before is None:
        return decimal(None)
    difference = now - before
    if signed(difference) == decimal(0.0):
        return element("span", "0.0000 same", class_="change")
    better = (difference < 0) == lower_is_better(metric)
    arrow = "▲" if difference > 0 else "▼"
    tone = "good" if better else "bad"
    amount = element("span", element("span", arrow, aria_hidden="true"), f" {signed(difference)}", class_="whole")
    return element("span", amount, " better" if better else " worse", class_=f"change {tone}")


def _tone(passed: bool | None) -> str:
    return "unknown" if passed is None else "good" if passed else "bad"


def _name_of_run(provenance: dict) -> str:
    configuration = provenance.get("configuration")
    inner = configuration.get("name") if isinstance(configuration, dict) else None
    name = provenance.get("name") or inner
    return printable(name, 80) if isinstance(name, str) and name.strip() else "This model"


def _one_sentence(evaluation: dict, verdict: dict) -> str:
    where = ""
    if evaluation.get("num_examples") is not None and evaluation.get("split"):
        examples = plural(evaluation["num_examples"], "example")
        where = f", judged on {examples} of the {printable(evaluation['split'], 80)} split"
    rules = verdict.get("rules") or []
    failed = sum(rule.get("passed") is False for rule in rules)
    open_ = sum(rule.get("passed") is None for rule in rules)
    if not rules:
        return f"No rule was set{where}."
    if failed:
        return f"{count(failed)} of {plural(len(rules), 'rule')} failed{where}."
    if open_:
        return f"{count(open_)} of {plural(len(rules), 'rule')} could not be judged{where}."
    number = {1: "The one rule", 2: "Both rules"}.get(len(rules), f"All {count(len(rules))} rules")
    return f"{number} passed{where}."


def _key_figures(evaluation: dict, verdict: dict) -> Markup | None:
    metrics = evaluation.get("metrics") or {}
    baseline = evaluation.get("baseline") or {}
    interval = (evaluation.get("intervals") or {}).get
    first = leading_metric(evaluation, verdict)
    names = [first] if first else []
    names += [name for name in ("loss", "macro_f1") if name in metrics and name not in names]
    figures = []
    for name in names:
        between = interval(name)
        note = f"{decimal(between[0])} to {decimal(between[1])}" if between else None
        figures.append((metric_name(name), decimal(metrics[name]), note))
    before = (baseline.get("metrics") or {}).get(first)
    if finite(before) is not None and finite(metrics.get(first)) is not None:
        version = printable(baseline.get("version"), 40)
        figures.append((f"Against version {version}", change(first, metrics[first], before), f"was {decimal(before)}"))
    if evaluation.get("num_examples") is not None:
        classes = len(evaluation.get("class_names") or [])
        note = plural(classes, "class", "classes") if classes else None
        split = printable(evaluation.get("split") or "evaluated", 40)
        figures.append((f"{split[:1].upper()}{split[1:]} examples", count(evaluation["num_examples"]), note))
    if not figures:
        return None
    items = [
        element("div", element("dt", title), element("dd", value), element("dd", note, class_="note") if note else None)
        for title, value, note in figures
    ]
    return element("dl", *items, class_="figures")
