"""Is the model good enough? Every rule, what was found, and on which side it fell.

    verdict = judge(EvaluateConfig(...), evaluation)
    verdict["blessed"], verdict["reasons"]

A pure function of the settings and of what was measured. Whatever cannot be judged is said so: a rule for the whole split
that has no value does not hold; a slice with too few examples is left open and does not decide.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from trainer.config import EvaluateConfig, Threshold

VERDICT_FILE = "verdict.json"

_SLACK = 1e-9  # 0.90 − 0.91 is −0.010000000000000009, and a threshold of −0.01 means it
_DEFAULTS = {"classification": "accuracy", "regression": "mean_absolute_error"}


def judge(
    config: EvaluateConfig, evaluation: Mapping[str, Any], serving: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Applies the evaluate section to an evaluation.

    A `change_threshold` compares with the champion on the same examples; without a champion it does not apply. A champion
    that could not be measured on this data blocks, unless `accept_new_baseline` is set: then value thresholds decide.

    Args:
        config: The evaluate section.
        evaluation: What `trainer.evaluate` found.
        serving: What the serving check found; None where it was not made.

    Returns:
        Plain data: `verdict` (`blessed`, `not_blessed` or `baseline_incompatible`), `blessed`, `reasons` (one sentence a
        rule, those that do not hold first), `rules`, and the digests of data, model and baseline.
    """
    baseline = evaluation.get("baseline")
    incompatible = baseline is not None and "incompatible" in baseline
    rules = list(_answer_rules(evaluation))
    thresholds = config.thresholds
    if thresholds is None:
        thresholds = {_DEFAULTS[evaluation["task"]]: Threshold(change_threshold=0.0)}
    for metric, threshold in thresholds.items():
        rules += _rules(config, metric, threshold, evaluation, None if incompatible else baseline)
    for index, slicing in enumerate(config.slices):
        for row in evaluation.get("slices", []):
            if row["slicing"] == index:
                for metric, threshold in slicing.thresholds.items():
                    rules += _slice_rules(config, metric, threshold, row, None if incompatible else baseline)
    if incompatible:
        rules.append(_incompatible_rule(baseline, accepted=config.accept_new_baseline))
    rules += _serving_rules(serving)
    blessed = all(rule["passed"] is not False for rule in rules)
    verdict = "blessed" if blessed else "not_blessed"
    if incompatible and not config.accept_new_baseline:
        verdict = "baseline_incompatible"
    ordered = sorted(rules, key=lambda rule: {False: 0, None: 1, True: 2}[rule["passed"]])
    return {
        "verdict": verdict,
        "blessed": blessed,
        "reasons": [_reason(rule) for rule in ordered] or ["no rule applies: blessed"],
        "rules": rules,
        "baseline_version": baseline["version"] if baseline else None,
        "data_digest": evaluation["data_digest"],
        "digests": {
            "data": evaluation["data_digest"],
            "model": evaluation.get("model_digest"),
            "baseline": baseline.get("digest") if baseline else None,
        },
    }


def _rules(
    config: EvaluateConfig, metric: str, threshold: Threshold, found: Mapping[str, Any], baseline: Mapping | None
) -> Iterator[dict[str, Any]]:
    """The rules that one threshold makes for the whole split or for a slice of it."""
    if threshold.value_threshold is not None:
        yield _value_rule(config, metric, threshold, found)
    if threshold.change_threshold is not None and baseline is not None:
        yield _change_rule(config, metric, threshold, found.get("baseline") or {}, found, baseline["version"])


def _slice_rules(
    config: EvaluateConfig, metric: str, threshold: Threshold, row: Mapping[str, Any], baseline: Mapping | None
) -> Iterator[dict[str, Any]]:
    for rule in _rules(config, metric, threshold, row, baseline):
        rule |= {"slice": row["slice"], "rule": f"{row['slice']}: {rule['rule']}"}
        if not row["judged"]:
            examples = f"{row['num_examples']:,} examples, at least {config.min_slice_examples:,} are needed"
            rule |= {"passed": None, "why": f"not judged: {examples}"}
        elif rule["found"] is None:
            rule |= {"passed": None, "why": "not judged: not defined on these examples"}
        elif threshold.confidence == "bound" and rule["bound"] is None:
            rule |= {"passed": None, "why": f"not judged: {rule['why']}"}
        yield rule


def _value_rule(config: EvaluateConfig, metric: str, threshold: Threshold, found: Mapping[str, Any]) -> dict[str, Any]:
    lower = config.lower_is_better(metric)
    value, bound = found["metrics"].get(metric), None
    if threshold.confidence == "bound":
        ends = found.get("intervals", {}).get(metric)
        bound = None if ends is None else ends[1 if lower else 0]
    decisive = bound if threshold.confidence == "bound" else value
    wanted = threshold.value_threshold
    passed = decisive is not None and (decisive <= wanted + _SLACK if lower else decisive >= wanted - _SLACK)
    return {
        "metric": metric,
        "kind": "value_threshold",
        "slice": None,
        "rule": f"{metric} {'≤' if lower else '≥'} {wanted:g}" + _for_certain(config, threshold),
        "found": value,
        "bound": bound,
        "baseline": None,
        "passed": passed and value is not None,
        "why": _why(value, bound, None, threshold, needed=found.get("needed", {}).get(metric)),
    }


def _change_rule(
    config: EvaluateConfig,
    metric: str,
    threshold: Threshold,
    before: Mapping[str, Any],
    found: Mapping[str, Any],
    version: int,
) -> dict[str, Any]:
    changes = before.get("changes", {}).get(metric) or {}
    value, baseline = found["metrics"].get(metric), before.get("metrics", {}).get(metric)
    gain, bound = changes.get("gain"), None
    if threshold.confidence == "bound":
        bound = changes.get("low")
    decisive = bound if threshold.confidence == "bound" else gain
    wanted = threshold.change_threshold
    if threshold.relative and baseline is not None:
        wanted *= abs(baseline)
    shown = f"{threshold.change_threshold:+.4g}" if not threshold.relative else f"{threshold.change_threshold:+.4%}"
    return {
        "metric": metric,
        "kind": "change_threshold",
        "slice": None,
        "rule": f"{metric} better than champion version {version} by ≥ {shown}" + _for_certain(config, threshold),
        "found": value,
        "bound": bound,
        "gain": gain,
        "baseline": baseline,
        "p_value": changes.get("p_value"),
        "passed": decisive is not None and decisive >= wanted - _SLACK,
        "why": _why(value, bound, baseline, threshold, gain, needed=found.get("needed", {}).get(metric)),
    }


def _answer_rules(evaluation: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if bad := evaluation.get("num_not_finite"):
        yield _plain(
            "answers", "every answer is a finite number", False, f"{bad} of {evaluation['num_examples']} are not"
        )


def _incompatible_rule(baseline: Mapping[str, Any], *, accepted: bool) -> dict[str, Any]:
    rule = f"baseline incompatible: champion version {baseline['version']} cannot be measured on this data"
    why = baseline["incompatible"] + ("; accepted, because accept_new_baseline is set" if accepted else "")
    return _plain("baseline", rule, accepted, why)


def _serving_rules(serving: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    """One rule for all that is well, one for each thing that is not."""
    findings = (serving or {}).get("findings", [])
    failed = [finding for finding in findings if not finding["passed"]]
    for finding in failed:
        yield _plain("serving", f"serving check: {finding['check']}", False, finding["message"])
    if findings and not failed:
        yield _plain("serving", "serving check", True, f"{len(findings)} of {len(findings)} findings are well")


def _plain(kind: str, rule: str, passed: bool, why: str) -> dict[str, Any]:
    return {
        "metric": None, "kind": kind, "slice": None, "rule": rule, "found": None, "bound": None, "baseline": None,
        "passed": passed, "why": why,
    }  # fmt: skip


def _for_certain(config: EvaluateConfig, threshold: Threshold) -> str:
    return f" at {config.confidence_level:.4g} confidence" if threshold.confidence == "bound" else ""


def _why(
    value: float | None,
    bound: float | None,
    baseline: float | None,
    threshold: Threshold,
    gain: float | None = None,
    *,
    needed: int | None = None,
) -> str:
    if value is None:
        return "it is not defined on these examples"
    told = f"it is {value:.4f}"
    if baseline is not None:
        told += f" against {baseline:.4f}"
    if threshold.confidence == "bound":
        of = " of the gain" if gain is not None else ""
        missing = f"no interval{of} is given" + (f" for fewer than {needed} examples" if needed else "")
        told += f", and {missing}" if bound is None else f", with the bound{of} at {bound:.4f}"
    return told


def _reason(rule: Mapping[str, Any]) -> str:
    if rule["passed"] is None or rule["kind"] == "baseline":  # these say themselves how they fell
        return f"{rule['rule']}: {rule['why']}"
    return f"{rule['rule']} {'holds' if rule['passed'] else 'does not hold'}: {rule['why']}"
