"""Where the model comes from: configuration, versions, digests, hardware, seconds; and what the data looked like."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.report.markup import element, join, printable
from trainer.report.numerals import decimal, plural
from trainer.report.tables import Column, Section, folded, table

_WHOLE = "Run"


def provenance(values: dict) -> Section | None:
    """Shows every value by its dotted path, a fold for each part."""
    return _folds("provenance", "Configuration and versions", values)


def data_statistics(evaluation: dict) -> Section | None:
    """Shows the statistics of the data by dotted path, a fold for each part."""
    return _folds("data", "Data", evaluation.get("data_statistics") or {})


def _folds(key: str, title: str, values: dict) -> Section | None:
    parts: dict[str, list] = {}
    for name, value in values.items():
        name = printable(name, 120)
        if isinstance(value, dict):
            parts.setdefault(name, []).extend(_flat(value, ""))
        else:
            parts.setdefault(_WHOLE, []).extend(_flat(value, name))
    folds = []
    for name, rows in parts.items():
        heading = name.replace("_", " ")
        heading = heading[:1].upper() + heading[1:]
        summary = join([element("bdi", heading), " ", element("small", plural(len(rows), "entry", "entries"))])
        columns = [Column("Name", "name"), Column("Value")]
        folds.append(folded(summary, table(heading, columns, rows, "values")))
    return Section(key, title, join(folds)) if folds else None


def _flat(value: object, path: str) -> Iterator[list[str]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{path}.{printable(name, 120)}" if path else printable(name, 120))
    elif isinstance(value, list) and any(isinstance(inner, (dict, list)) for inner in value):
        for index, inner in enumerate(value):
            yield from _flat(inner, f"{path}[{index}]")
    else:
        yield [path, _written(value)]


def _written(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return printable(", ".join(map(_written, value))) or "none"
    if isinstance(value, float):
        return decimal(value) if value != value or value in (float("inf"), float("-inf")) else repr(value)
    return "none" if value == {} else printable(value)
