"""Metrics against scikit-learn, and defined values where a metric is not defined; the verdict's whole truth table."""

import itertools
import json

import numpy as np
import pytest
from sklearn import metrics

from trainer.config import EvaluateConfig, parse
from trainer.evaluate import measure
from trainer.verdict import judge

NAMES = ["a", "b", "c", "d"]


@pytest.mark.parametrize("seed", range(5))
def test_metrics_agree_with_scikit_learn(predictions, seed):
    labels, probabilities = predictions(seed=seed)
    predicted = probabilities.argmax(axis=1)
    found = measure(labels, probabilities, NAMES)
    assert found["metrics"] == pytest.approx(
        {
            "accuracy": metrics.accuracy_score(labels, predicted),
            "loss": metrics.log_loss(labels, probabilities),
            "macro_precision": metrics.precision_score(labels, predicted, average="macro"),
            "macro_recall": metrics.recall_score(labels, predicted, average="macro"),
            "macro_f1": metrics.f1_score(labels, predicted, average="macro"),
            "roc_auc": metrics.roc_auc_score(labels, probabilities, multi_class="ovr", average="macro"),
        }
    )
    assert found["confusion_matrix"] == metrics.confusion_matrix(labels, predicted).tolist()
    assert [entry["support"] for entry in found["per_class"]] == np.bincount(labels, minlength=4).tolist()


@pytest.mark.parametrize(
    "labels",
    [[0, 0, 0], [0, 1, 1], [2]],
    ids=["one class only", "classes absent from the split", "one example"],
)
def test_what_is_not_defined_is_none_and_never_nan(labels):
    probabilities = np.full((len(labels), 4), 0.1)
    probabilities[:, 0] = 0.7
    found = measure(np.array(labels), probabilities, NAMES)
    json.dumps(found, allow_nan=False)
    absent = [entry for entry in found["per_class"] if entry["support"] == 0]
    assert absent
    assert all(entry["recall"] is None for entry in absent)
    assert 0.0 <= found["metrics"]["accuracy"] <= 1.0


def test_a_certain_wrong_answer_gives_a_large_finite_loss():
    found = measure(np.array([1]), np.array([[1.0, 0.0, 0.0, 0.0]]), NAMES)
    assert 80 < found["metrics"]["loss"] < 100


def test_the_curve_for_kubeflow_has_finite_thresholds_and_ends_at_both_corners(predictions):
    curve = measure(*predictions(num_examples=3000), NAMES)["roc_micro"]
    assert np.isfinite(curve["thresholds"]).all()
    assert (curve["fpr"][0], curve["tpr"][0], curve["fpr"][-1], curve["tpr"][-1]) == (0.0, 0.0, 1.0, 1.0)
    assert len(curve["fpr"]) <= 200


def evaluation(accuracy, loss=0.5, baseline=None):
    return {"metrics": {"accuracy": accuracy, "loss": loss}, "baseline": baseline, "data_digest": "sha256:0"}


def verdict(thresholds, found):
    return judge(parse(EvaluateConfig, {"thresholds": thresholds}), found)


@pytest.mark.parametrize(
    ("value_holds", "change_holds", "champion"), list(itertools.product([True, False], [True, False], [True, False]))
)
@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_a_model_is_blessed_when_every_rule_that_applies_holds(metric, value_holds, change_holds, champion):
    better = 0.1 if metric == "accuracy" else -0.1
    baseline = {"version": 3, "metrics": {metric: 0.5}} if champion else None
    found = {"accuracy": 0.9, "loss": 0.3} | {metric: 0.5 + better}
    thresholds = {
        metric: {
            "value_threshold": 0.5 + (better if value_holds else 2 * better),
            "change_threshold": 0.05 if change_holds else 0.2,
        }
    }
    decision = verdict(thresholds, {"metrics": found, "baseline": baseline, "data_digest": "sha256:0"})
    assert decision["blessed"] is (value_holds and (change_holds or not champion))
    assert decision["verdict"] == ("blessed" if decision["blessed"] else "not_blessed")
    assert len(decision["reasons"]) == (2 if champion else 1)
    assert decision["baseline_version"] == (3 if champion else None)


def test_a_threshold_that_is_met_exactly_holds():
    assert verdict({"accuracy": {"value_threshold": 0.9}}, evaluation(0.9))["blessed"]
    assert not verdict({"accuracy": {"value_threshold": 0.9}}, evaluation(np.nextafter(0.9, 0)))["blessed"]


def test_a_metric_that_is_not_defined_does_not_pass():
    decision = verdict({"roc_auc": {"value_threshold": 0.1}}, evaluation(0.9))
    assert decision["reasons"] == ["roc_auc ≥ 0.1 does not hold: it is not defined"]
    assert not decision["blessed"]


def test_a_champion_that_cannot_be_measured_on_this_data_blocks():
    baseline = {"version": 3, "metrics": {}, "incompatible": "answers 9 classes, the data has 10"}
    decision = verdict({"accuracy": {"value_threshold": 0.1}}, evaluation(0.9, baseline=baseline))
    assert not decision["blessed"]
    assert "answers 9 classes" in decision["reasons"][0]
