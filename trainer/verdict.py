"""Is the model good enough? Every rule, what was found, and on which side it fell.

verdict = judge(EvaluateConfig(...), evaluation)
verdict["blessed"], verdict["reasons"]
"""

from typing import Any

from trainer.config import EvaluateConfig
from trainer.evaluate import LOWER_IS_BETTER

VERDICT_FILE = "verdict.json"


def judge(config: EvaluateConfig, evaluation: dict[str, Any]) -> dict[str, Any]:
    """Applies the thresholds of the evaluate section to an evaluation.

    A `change_threshold` compares with the champion on the same examples; without a champion it does not apply. A champion
    that could not be measured on this data blocks, because nobody can say whether the candidate is better.

    Returns:
        Plain data: `verdict` (`blessed` or `not_blessed`), `blessed`, `reasons` (one sentence a rule) and `rules`.
    """
    baseline = evaluation["baseline"]
    rules = []
    for metric, threshold in config.thresholds.items():
        found = evaluation["metrics"].get(metric)
        if threshold.value_threshold is not None:
            rules.append(_value_rule(metric, found, threshold.value_threshold))
        if threshold.change_threshold is not None and baseline is not None and "incompatible" not in baseline:
            rules.append(_change_rule(metric, found, threshold.change_threshold, baseline))
    if baseline is not None and "incompatible" in baseline:
        rules.append(_incompatible_rule(baseline))
    if not rules:
        rules.append(
            {"metric": None, "kind": "none", "rule": "no rule applies", "found": None, "baseline": None, "passed": True}
        )
    blessed = all(rule["passed"] for rule in rules)
    return {
        "verdict": "blessed" if blessed else "not_blessed",
        "blessed": blessed,
        "reasons": [_reason(rule) for rule in sorted(rules, key=lambda rule: rule["passed"])],
        "rules": rules,
        "baseline_version": baseline["version"] if baseline else None,
        "data_digest": evaluation["data_digest"],
    }


def _value_rule(metric: str, found: float | None, wanted: float) -> dict[str, Any]:
    sign = "≤" if metric in LOWER_IS_BETTER else "≥"
    passed = found is not None and (found <= wanted if metric in LOWER_IS_BETTER else found >= wanted)
    return {
        "metric": metric,
        "kind": "value_threshold",
        "rule": f"{metric} {sign} {wanted:g}",
        "found": found,
        "baseline": None,
        "passed": passed,
    }


def _change_rule(metric: str, found: float | None, wanted: float, baseline: dict[str, Any]) -> dict[str, Any]:
    before = baseline["metrics"].get(metric)
    gain = None
    if found is not None and before is not None:
        gain = before - found if metric in LOWER_IS_BETTER else found - before
    return {
        "metric": metric,
        "kind": "change_threshold",
        "rule": f"{metric} better than champion version {baseline['version']} by ≥ {wanted:g}",
        "found": found,
        "baseline": before,
        "passed": gain is not None and gain >= wanted,
    }


def _incompatible_rule(baseline: dict[str, Any]) -> dict[str, Any]:
    return {
        "metric": None,
        "kind": "baseline",
        "rule": f"champion version {baseline['version']} can be measured on this data ({baseline['incompatible']})",
        "found": None,
        "baseline": None,
        "passed": False,
    }


def _reason(rule: dict[str, Any]) -> str:
    outcome = "holds" if rule["passed"] else "does not hold"
    if rule["metric"] is None:
        return f"{rule['rule']}: {outcome}" if rule["kind"] != "none" else "no rule applies: blessed"
    found = "not defined" if rule["found"] is None else f"{rule['found']:.4f}"
    against = f" against {rule['baseline']:.4f}" if rule["baseline"] is not None else ""
    return f"{rule['rule']} {outcome}: it is {found}{against}"
