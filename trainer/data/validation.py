"""Is this the data that was expected? Every anomaly with its feature, what was expected, what was found, and how grave it is.

anomalies = validate(config, manifest, statistics, schema=schema, baseline=statistics_of_the_champion)
[anomaly for anomaly in anomalies if anomaly.severity == "error"]
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from trainer.config import ValidateConfig
from trainer.data.manifest import Manifest
from trainer.data.schema import FeatureSchema, Schema
from trainer.data.statistics import FeatureStatistics, Statistics

DEFAULT_SEVERITIES = {
    "type": "error",
    "presence": "error",
    "range": "warning",
    "new_values": "warning",
    "drift": "warning",
    "skew": "warning",
    "few_examples": "warning",
    "leakage": "warning",
}
_CHANCE = 1.95  # Smirnov's critical value for 1 in 1,000


class Anomaly(NamedTuple):
    """One thing that is not as it should be."""

    check: str
    """Which rule it breaks: a key of `DEFAULT_SEVERITIES`."""
    severity: str
    """`error` or `warning`."""
    split: str
    """Where it was found."""
    feature: str
    """The feature, or the label."""
    expected: str
    """The rule, in words and numbers."""
    found: str
    """What stands there instead."""

    def __str__(self) -> str:
        return f"{self.feature} ({self.split}): expected {self.expected}, found {self.found}"


def validate(
    config: ValidateConfig,
    manifest: Manifest,
    statistics: Statistics,
    schema: Schema | None = None,
    baseline: Statistics | None = None,
) -> list[Anomaly]:
    """Everything that is wrong with a prepared dataset, errors first.

    Args:
        config: Thresholds and severities.
        manifest: The dataset.
        statistics: Its statistics.
        schema: What is expected. None: only what a dataset tells of itself is looked at.
        baseline: Statistics of the data that the champion was trained on, to measure drift. None: there is no drift.
    """
    found: list[tuple[str, str, str, str, str]] = []
    if schema is not None:
        found += _against_schema(schema, manifest, statistics)
    if baseline is not None and "train" in baseline.splits:
        found += _distances(config, "drift", "the champion's data", baseline.splits["train"], "train", statistics)
    for split in statistics.splits:
        if split != "train":
            found += _distances(config, "skew", "train", statistics.splits["train"], split, statistics)
    found += _few_examples(config, manifest)
    for pair, count in statistics.shared_examples.items():
        first, second = pair.split("/")
        found.append(("leakage", second, "(all features)", f"no example of {first}", f"{count:,} of them"))
    severities = {**DEFAULT_SEVERITIES, **config.severities}
    anomalies = [Anomaly(check, severities[check], *rest) for check, *rest in found if severities[check] != "off"]
    return sorted(anomalies, key=lambda anomaly: anomaly.severity != "error")


def _against_schema(schema: Schema, manifest: Manifest, statistics: Statistics) -> Iterator[tuple[str, ...]]:
    label = manifest.label.name
    if schema.label_name != label:
        yield ("type", "all splits", label, f"a label named {schema.label_name}", label)
    shapes = {name: feature.shape for name, feature in manifest.features.items()}
    for name in sorted(schema.features.keys() | shapes.keys()):
        if name not in shapes:
            yield (
                "presence",
                "all splits",
                name,
                f"a feature of kind {schema.features[name].kind}",
                "none of this name",
            )
        elif name not in schema.features:
            yield ("type", "all splits", name, "no such feature", manifest.features[name].kind)
    rules = {name: rule for name, rule in schema.features.items() if name in shapes}
    rules[label] = schema.label
    for split, by_name in statistics.splits.items():
        for name, rule in rules.items():
            yield from _against_rule(rule, split, name, shapes.get(name, ()), by_name[name])


def _against_rule(
    rule: FeatureSchema, split: str, name: str, shape: tuple[int, ...], found: FeatureStatistics
) -> Iterator[tuple[str, ...]]:
    if (found.kind, tuple(shape)) != (rule.kind, tuple(rule.shape)):
        yield ("type", split, name, f"{rule.kind} {list(rule.shape)}", f"{found.kind} {list(shape)}")
        return
    missing = found.num_missing / max(1, found.num_examples)
    if missing > rule.max_missing_fraction:
        yield ("presence", split, name, f"at most {rule.max_missing_fraction:.1%} missing", f"{missing:.1%} missing")
    if found.kind == "number" and found.low is not None:
        if rule.low is not None and found.low < rule.low:
            yield ("range", split, name, f"no number below {rule.low:g}", f"{found.low:g}")
        if rule.high is not None and found.high > rule.high:
            yield ("range", split, name, f"no number above {rule.high:g}", f"{found.high:g}")
    if found.kind == "category" and rule.values is not None:
        known = set(rule.values)
        new = [value for value in found.values if value.value not in known]
        share = sum(value.count for value in new) / max(1, found.num_examples)
        if new and share > rule.max_new_fraction:
            shown = ", ".join(repr(value.value) for value in new[:5]) + (", …" if len(new) > 5 else "")
            yield (
                "new_values",
                split,
                name,
                f"one of {len(known)} known values",
                f"{shown} in {share:.1%} of examples",
            )


def _distances(
    config: ValidateConfig, check: str, origin: str, before: dict[str, FeatureStatistics], split: str, statistics: Statistics
) -> Iterator[tuple[str, ...]]:  # fmt: skip
    limit = config.drift_threshold if check == "drift" else config.skew_threshold
    for name, now in statistics.splits[split].items():
        then = before.get(name)
        if then is None or then.kind != now.kind:
            continue
        kind = config.category_distance if now.kind == "category" else config.number_distance
        value = distance(kind, then, now)
        if value is None:
            continue
        room = chance(then.num_examples, now.num_examples) if kind != "jensen_shannon" else 0.0
        if value > limit + room:
            expected = f"a {kind} distance from {origin} of at most {limit:g}" + (
                f" (and {room:.3f} that chance explains)" if room else ""
            )
            yield (check, split, name, expected, f"{value:.3f}")


def _few_examples(config: ValidateConfig, manifest: Manifest) -> Iterator[tuple[str, ...]]:
    for split, content in manifest.splits.items():
        for name, count in zip(manifest.class_names, content.label_counts, strict=True):
            if count < config.min_examples_per_class:
                expected = f"at least {config.min_examples_per_class} examples of each class"
                yield ("few_examples", split, manifest.label.name, expected, f"{count} of {name}")


def distance(kind: str, one: FeatureStatistics, other: FeatureStatistics) -> float | None:
    """How far two distributions of a feature are apart, from 0 (the same) to 1.

    `l_infinity`: the largest difference of a value's share. `jensen_shannon`: the Jensen-Shannon divergence to base 2
    (Lin, 1991). `kolmogorov_smirnov`: the largest difference of the cumulative distributions. Numbers, text lengths and
    pixels are compared by their quantiles, to within 0.01. None where one of them has no values.
    """
    if one.kind == "category":
        p, q = _shares(one, other)
        if p is None:
            return None
        return float(np.abs(p - q).max()) if kind == "l_infinity" else _jensen_shannon(p, q)
    if not one.quantiles or not other.quantiles:
        return None
    edges = np.unique([*one.quantiles, *other.quantiles])
    first, second = _cumulative(one, edges), _cumulative(other, edges)
    if kind == "kolmogorov_smirnov":
        return float(np.abs(first - second).max())
    return _jensen_shannon(np.diff(first, prepend=0.0), np.diff(second, prepend=0.0))


def chance(first: int, second: int) -> float:
    """What two samples of one distribution differ by once in a thousand times: c·√((n + m) / nm) (Smirnov, 1948)."""
    return _CHANCE * math.sqrt((first + second) / max(1, first * second))


def _shares(one: FeatureStatistics, other: FeatureStatistics) -> tuple[Any, Any]:
    counts = [{value.value: value.count for value in found.values} for found in (one, other)]
    if not counts[0] or not counts[1]:
        return None, None
    values = sorted(counts[0].keys() | counts[1].keys())
    rows = [np.array([count.get(value, 0) for value in values], np.float64) for count in counts]
    return tuple(row / row.sum() for row in rows)


def _cumulative(found: FeatureStatistics, edges: np.ndarray) -> np.ndarray:
    """Share of the values up to each edge; a value that fills several quantiles is a step."""
    quantiles = np.array(found.quantiles)
    values, last = np.unique(quantiles[::-1], return_index=True)
    levels = (len(quantiles) - 1 - last) / (len(quantiles) - 1)
    if len(values) == 1:
        return (edges >= values[0]).astype(np.float64)
    return np.interp(edges, values, levels, left=0.0, right=1.0)


def _jensen_shannon(p: np.ndarray, q: np.ndarray) -> float:
    middle = (p + q) / 2

    def divergence(from_: np.ndarray) -> float:
        there = from_ > 0
        return float(np.sum(from_[there] * np.log2(from_[there] / middle[there])))

    return min(1.0, max(0.0, (divergence(p) + divergence(q)) / 2))
