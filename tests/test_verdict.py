"""The gate's truth table: every kind of rule on both sides of its threshold, and what cannot be judged."""

import itertools

import pytest

from trainer.config import EvaluateConfig, OwnMetric, Slicing, Threshold
from trainer.verdict import judge


def measured(value=0.9, interval=(0.85, 0.94), baseline=None, metric="accuracy", **more):
    return {
        "task": "classification" if metric != "mean_absolute_error" else "regression",
        "num_examples": 100,
        "metrics": {metric: value},
        "intervals": {metric: list(interval)} if interval else {},
        "slices": [],
        "baseline": baseline,
        "data_digest": "sha256:data",
        "model_digest": "sha256:model",
        **more,
    }


def champion(value, gain, low, metric="accuracy"):
    return {
        "version": 3,
        "digest": "sha256:champion",
        "metrics": {metric: value},
        "changes": {metric: {"gain": gain, "low": low, "high": 1.0, "p_value": 0.5}},
    }


def config(metric="accuracy", **threshold):
    return EvaluateConfig(thresholds={metric: Threshold(**threshold)})


@pytest.mark.parametrize(
    ("metric", "value", "interval", "wanted", "confidence", "blessed"),
    [
        # higher is better: the estimate, then the lower end of the interval
        ("accuracy", 0.90, (0.85, 0.94), 0.90, "estimate", True),
        ("accuracy", 0.90, (0.85, 0.94), 0.91, "estimate", False),
        ("accuracy", 0.90, (0.85, 0.94), 0.85, "bound", True),
        ("accuracy", 0.90, (0.85, 0.94), 0.86, "bound", False),
        ("accuracy", 0.90, None, 0.10, "bound", False),
        # lower is better: the estimate, then the upper end
        ("loss", 0.30, (0.25, 0.35), 0.30, "estimate", True),
        ("loss", 0.30, (0.25, 0.35), 0.29, "estimate", False),
        ("loss", 0.30, (0.25, 0.35), 0.35, "bound", True),
        ("loss", 0.30, (0.25, 0.35), 0.34, "bound", False),
        ("loss", 0.30, None, 9.0, "bound", False),
        # not defined never passes
        ("accuracy", None, None, 0.0, "estimate", False),
        ("loss", None, None, 99.0, "estimate", False),
        ("accuracy", None, None, 0.0, "bound", False),
    ],
)
def test_a_value_threshold(metric, value, interval, wanted, confidence, blessed):
    rules = config(metric, value_threshold=wanted, confidence=confidence)
    decision = judge(rules, measured(value, interval, metric=metric))
    assert decision["blessed"] is blessed
    assert decision["verdict"] == ("blessed" if blessed else "not_blessed")
    assert [rule["passed"] for rule in decision["rules"]] == [blessed]


@pytest.mark.parametrize(
    ("metric", "before", "gain", "low", "wanted", "relative", "confidence", "blessed"),
    [
        ("accuracy", 0.90, 0.00, -0.02, 0.0, False, "estimate", True),
        ("accuracy", 0.91, 0.90 - 0.91, -0.03, -0.01, False, "estimate", True),  # −0.010000000000000009
        ("accuracy", 0.92, -0.02, -0.03, -0.01, False, "estimate", False),
        ("accuracy", 0.89, 0.01, -0.01, 0.0, False, "bound", False),
        ("accuracy", 0.85, 0.05, 0.01, 0.0, False, "bound", True),
        ("accuracy", 0.89, 0.01, None, -1.0, False, "bound", False),  # no interval: nothing is proven
        ("loss", 0.40, 0.10, 0.05, 0.0, False, "estimate", True),  # gains are signed: better is positive
        ("loss", 0.20, -0.10, -0.2, 0.0, False, "estimate", False),
        ("loss", 0.20, -0.01, -0.2, -0.05, True, "estimate", True),  # 5 % of 0.20 is 0.01
        ("loss", 0.20, -0.011, -0.2, -0.05, True, "estimate", False),
        ("loss", 2.00, 0.30, 0.19, 0.1, True, "bound", False),
        ("loss", 2.00, 0.30, 0.20, 0.1, True, "bound", True),
        ("accuracy", 0.00, 0.00, 0.0, 0.1, True, "estimate", True),  # a share of nothing is nothing
        ("accuracy", None, None, None, -1.0, False, "estimate", False),
    ],
)
def test_a_change_threshold(metric, before, gain, low, wanted, relative, confidence, blessed):
    baseline = champion(before, gain, low, metric)
    if gain is None:
        baseline["changes"] = {}
    rules = config(metric, change_threshold=wanted, relative=relative, confidence=confidence)
    decision = judge(rules, measured(0.9, metric=metric, baseline=baseline))
    assert decision["blessed"] is blessed
    assert decision["rules"][0]["kind"] == "change_threshold"


@pytest.mark.parametrize("value_holds", [True, False])
@pytest.mark.parametrize("change_holds", [True, False, None])
@pytest.mark.parametrize("serving_holds", [True, False, None])
def test_every_rule_must_hold_and_the_change_counts_only_against_a_champion(value_holds, change_holds, serving_holds):
    baseline = None if change_holds is None else champion(0.8, 0.1 if change_holds else -0.1, 0.0)
    serving = None
    if serving_holds is not None:
        serving = {"findings": [{"check": "it loads", "passed": serving_holds, "message": "in 0.1 s"}]}
    rules = config(value_threshold=0.9 if value_holds else 0.95, change_threshold=0.0)
    decision = judge(rules, measured(0.9, baseline=baseline), serving)
    assert decision["blessed"] is (value_holds and change_holds is not False and serving_holds is not False)
    assert len(decision["rules"]) == 1 + (baseline is not None) + (serving is not None)


@pytest.mark.parametrize(("value_holds", "accepted"), list(itertools.product([True, False], repeat=2)))
def test_a_champion_that_cannot_read_the_data_blocks_unless_that_is_accepted(value_holds, accepted):
    baseline = {"version": 3, "digest": "d", "incompatible": "takes no sex", "metrics": {}}
    threshold = Threshold(value_threshold=0.9 if value_holds else 0.95, change_threshold=0.5)
    rules = EvaluateConfig(thresholds={"accuracy": threshold}, accept_new_baseline=accepted)
    decision = judge(rules, measured(0.9, baseline=baseline))
    assert decision["blessed"] is (value_holds and accepted)
    if not accepted:
        assert decision["verdict"] == "baseline_incompatible"
    said = next(reason for reason in decision["reasons"] if reason.startswith("baseline incompatible"))
    assert "takes no sex" in said
    assert ("accepted" in said) is accepted
    assert decision["baseline_version"] == 3


def sliced(num_examples, value, judged, baseline=None):
    row = {
        "slice": "sex = f",
        "slicing": 0,
        "num_examples": num_examples,
        "judged": judged,
        "metrics": {},
        "intervals": {},
    }
    return row | {"metrics": {"accuracy": value}, "baseline": baseline}


@pytest.mark.parametrize(
    ("num_examples", "value", "judged", "passed"),
    [
        (50, 0.9, True, True),
        (50, 0.7, True, False),
        (5, 0.0, False, None),
        (0, None, False, None),
        (50, None, True, None),
    ],
)
def test_a_slice_decides_only_where_it_has_enough_examples(num_examples, value, judged, passed):
    rules = EvaluateConfig(
        thresholds={}, slices=[Slicing(by=["sex"], thresholds={"accuracy": Threshold(value_threshold=0.8)})]
    )
    decision = judge(rules, measured(slices=[sliced(num_examples, value, judged)]))
    assert [rule["passed"] for rule in decision["rules"]] == [passed]
    assert decision["blessed"] is (passed is not False)
    assert decision["rules"][0]["slice"] == "sex = f"
    if passed is None:
        assert "not judged" in decision["reasons"][0]


def test_too_few_examples_for_an_interval_block_the_whole_and_leave_a_slice_open():
    bound = Threshold(value_threshold=0.5, confidence="bound")
    rules = EvaluateConfig(thresholds={"macro_f1": bound}, slices=[Slicing(by=["sex"], thresholds={"macro_f1": bound})])
    row = {**sliced(40, 0.9, True), "metrics": {"macro_f1": 0.9}, "needed": {"macro_f1": 50}}
    found = measured(0.9, None, metric="macro_f1", needed={"macro_f1": 50}, slices=[row])
    decision = judge(rules, found)
    assert [rule["passed"] for rule in decision["rules"]] == [False, None]
    assert not decision["blessed"]
    assert all("no interval is given for fewer than 50 examples" in rule["why"] for rule in decision["rules"])
    assert decision["rules"][1]["why"].startswith("not judged: ")


def test_a_slice_is_compared_with_the_champion_on_the_same_slice():
    worse = {
        "metrics": {"accuracy": 0.9},
        "changes": {"accuracy": {"gain": -0.2, "low": -0.3, "high": 0, "p_value": 0}},
    }
    rules = EvaluateConfig(
        thresholds={"accuracy": Threshold(change_threshold=0.0)},
        slices=[Slicing(by=["sex"], thresholds={"accuracy": Threshold(change_threshold=-0.1)})],
    )
    decision = judge(rules, measured(baseline=champion(0.8, 0.1, 0.0), slices=[sliced(50, 0.7, True, worse)]))
    assert [rule["passed"] for rule in decision["rules"]] == [True, False]
    assert not decision["blessed"]


def test_answers_that_are_not_numbers_are_never_blessed():
    decision = judge(EvaluateConfig(thresholds={}), measured(None, None, num_not_finite=2))
    assert not decision["blessed"]
    assert "2 of 100 are not" in decision["reasons"][0]


@pytest.mark.parametrize(("task", "metric"), [("classification", "accuracy"), ("regression", "mean_absolute_error")])
def test_without_thresholds_a_model_must_be_no_worse_than_the_champion(task, metric):
    better, worse = (
        measured(metric=metric, baseline=champion(0.5, gain, gain, metric)) | {"task": task} for gain in (0.1, -0.1)
    )
    assert judge(EvaluateConfig(), better)["blessed"]
    assert not judge(EvaluateConfig(), worse)["blessed"]
    assert judge(EvaluateConfig(), measured(metric=metric) | {"task": task})["reasons"] == ["no rule applies: blessed"]


def test_the_direction_of_ones_own_metric_is_ones_own():
    own = {"cost": OwnMetric(function="money:cost", lower_is_better=True)}
    rules = EvaluateConfig(own_metrics=own, thresholds={"cost": Threshold(value_threshold=5.0)})
    assert judge(rules, measured(4.0, metric="cost"))["blessed"]
    assert not judge(rules, measured(6.0, metric="cost"))["blessed"]


def test_the_verdict_names_what_it_is_about():
    decision = judge(config(value_threshold=0.5), measured(baseline=champion(0.8, 0.1, 0.0)))
    assert decision["digests"] == {"data": "sha256:data", "model": "sha256:model", "baseline": "sha256:champion"}


def test_what_does_not_hold_comes_first():
    rules = EvaluateConfig(
        thresholds={"accuracy": Threshold(value_threshold=0.5), "loss": Threshold(value_threshold=0.1)}
    )
    found = measured()
    found["metrics"]["loss"] = 0.2
    assert judge(rules, found)["reasons"] == [
        "loss ≤ 0.1 does not hold: it is 0.2000",
        "accuracy ≥ 0.5 holds: it is 0.9000",
    ]
