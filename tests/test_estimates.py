"""Metrics against scikit-learn, on random and on degenerate inputs; influences against what leaving an example out does."""

import numpy as np
import pytest

from trainer.evaluate import estimates
from trainer.metric_names import CLASSIFICATION, REGRESSION, names_of


def sklearn_says(labels, probabilities, top_k):
    from sklearn import metrics

    classes = np.arange(probabilities.shape[1])
    predicted = probabilities.argmax(axis=1)
    found = {"accuracy": metrics.accuracy_score(labels, predicted)}
    for average in ("macro", "micro", "weighted"):
        values = metrics.precision_recall_fscore_support(
            labels, predicted, labels=classes, average=average, zero_division=np.nan
        )
        found |= {f"{average}_{name}": values[i] for i, name in enumerate(("precision", "recall", "f1"))}
    if len(classes) > 2:  # of two classes scikit-learn takes one column of scores
        found["top_k_accuracy"] = metrics.top_k_accuracy_score(labels, probabilities, k=top_k, labels=classes)
    found["loss"] = metrics.log_loss(labels, probabilities, labels=classes)
    both = [k for k in classes if 0 < (labels == k).sum() < len(labels)]
    found["roc_auc"] = np.mean([metrics.roc_auc_score(labels == k, probabilities[:, k]) for k in both])
    found["pr_auc"] = np.mean([metrics.average_precision_score(labels == k, probabilities[:, k]) for k in both])
    one_hot = np.eye(len(classes))[labels]
    squares = np.square(probabilities - one_hot).sum(axis=1).mean()
    found["brier"] = squares / 2 if len(classes) == 2 else squares
    return found


@pytest.mark.parametrize(("num_examples", "num_classes"), [(200, 2), (500, 7), (40, 10), (3, 2)])
@pytest.mark.parametrize("coarse", [False, True])
def test_metrics_of_classes_are_those_of_scikit_learn(predictions, num_examples, num_classes, coarse):
    labels, probabilities = predictions(num_examples, num_classes, seed=num_examples)
    if coarse:  # ties in every ranking, and rows that sum to 1 no longer exactly
        probabilities = np.round(probabilities, 1) + 0.01
        probabilities /= probabilities.sum(axis=1, keepdims=True)
    found = estimates.of_classes(labels, probabilities, top_k=3)
    expected = sklearn_says(labels, probabilities, 3)
    if coarse and num_classes > 2:
        del expected["top_k_accuracy"]  # scikit-learn breaks ties the other way round
    assert {name: found[name].value for name in expected} == pytest.approx(expected, abs=1e-12)


def test_the_brier_score_of_two_classes_is_that_of_scikit_learn(predictions):
    from sklearn.metrics import brier_score_loss

    labels, probabilities = predictions(150, 2)
    found = estimates.of_classes(labels, probabilities)["brier"].value
    assert found == pytest.approx(brier_score_loss(labels, probabilities[:, 1]), abs=1e-12)


def test_metrics_of_numbers_are_those_of_scikit_learn():
    from sklearn import metrics

    random = np.random.default_rng(1)
    labels = random.normal(size=300)
    predicted = labels + random.exponential(size=300)
    found = {name: each.value for name, each in estimates.of_numbers(labels, predicted, quantiles=[0.1, 0.9]).items()}
    assert found == pytest.approx(
        {
            "mean_absolute_error": metrics.mean_absolute_error(labels, predicted),
            "root_mean_squared_error": metrics.root_mean_squared_error(labels, predicted),
            "r2": metrics.r2_score(labels, predicted),
            "pinball_0.1": metrics.mean_pinball_loss(labels, predicted, alpha=0.1),
            "pinball_0.9": metrics.mean_pinball_loss(labels, predicted, alpha=0.9),
        },
        abs=1e-12,
    )


def test_the_calibration_error_is_the_gap_between_sure_and_right():
    probabilities = np.array([[0.95, 0.05]] * 10 + [[0.25, 0.75]] * 10)
    labels = np.array([0] * 9 + [1] + [1] * 5 + [0] * 5)  # 90 % right at 95 %, 50 % right at 75 %
    found = estimates.of_classes(labels, probabilities)["expected_calibration_error"].value
    assert found == pytest.approx((0.05 + 0.25) / 2)


def test_every_metric_of_a_task_is_there(predictions):
    assert set(estimates.of_classes(*predictions())) == set(CLASSIFICATION)
    assert set(estimates.of_numbers(np.arange(3.0), np.ones(3))) == set(REGRESSION)
    assert names_of("regression", [0.25]) == (*REGRESSION, "pinball_0.25")


def test_the_first_k_of_no_more_classes_than_k_say_nothing(predictions):
    labels, probabilities = predictions(30, 3)
    assert estimates.of_classes(labels, probabilities, top_k=3)["top_k_accuracy"].value is None
    assert estimates.of_classes(labels, probabilities, top_k=2)["top_k_accuracy"].value is not None


def test_the_order_of_the_examples_does_not_matter(predictions):
    labels, probabilities = predictions(300, 5)
    order = np.random.default_rng(0).permutation(300)
    one, other = (estimates.of_classes(labels[o], probabilities[o], top_k=2) for o in (np.arange(300), order))
    for name, found in one.items():
        assert found.value == pytest.approx(other[name].value, abs=1e-12), name
        np.testing.assert_allclose(found.influence[order], other[name].influence, atol=1e-9, err_msg=name)


def test_influences_are_what_leaving_an_example_out_does(predictions):
    """The jackknife, which knows no formula: (n − 1) · (θ − θ without i), up to terms of 1/n."""
    labels, probabilities = predictions(900, 3, seed=5)
    kept = np.flatnonzero((labels != 0) | (np.arange(900) % 4 == 0))  # classes of different sizes and rates
    labels, probabilities = labels[kept], probabilities[kept]
    num_examples = len(labels)
    probabilities[labels == 2] = 0.5 * probabilities[labels == 2] + [0.25, 0.25, 0.0]
    whole = estimates.of_classes(labels, probabilities, top_k=2)
    rows = np.arange(num_examples)
    without = [estimates.of_classes(labels[rows != i], probabilities[rows != i], top_k=2) for i in range(60)]
    for name, found in whole.items():
        expected = np.array([(num_examples - 1) * (found.value - each[name].value) for each in without])
        assert abs(found.influence.sum()) < 1e-6 * num_examples, name
        np.testing.assert_allclose(found.influence[:60], expected, atol=0.06, err_msg=name)


def test_influences_of_numbers_too():
    random = np.random.default_rng(2)
    labels = random.normal(size=400)
    predicted = labels + random.normal(size=400) / 2
    rows = np.arange(400)
    for name, found in estimates.of_numbers(labels, predicted, quantiles=[0.8]).items():
        expected = [
            399
            * (found.value - estimates.of_numbers(labels[rows != i], predicted[rows != i], quantiles=[0.8])[name].value)
            for i in range(60)
        ]
        np.testing.assert_allclose(found.influence[:60], expected, atol=0.06, err_msg=name)


def test_a_split_of_one_class_has_an_accuracy_and_no_areas(predictions):
    _, probabilities = predictions(50, 3)
    found = estimates.of_classes(np.zeros(50, int), probabilities)
    assert found["roc_auc"].value is None
    assert found["pr_auc"].value is None
    assert found["accuracy"].value == found["macro_recall"].value


def test_a_class_that_is_nowhere_is_left_out_of_the_mean():
    labels = np.array([0, 0, 1, 1])
    probabilities = np.eye(3)[[0, 0, 1, 0]]
    found = estimates.of_classes(labels, probabilities)
    assert found["macro_recall"].value == pytest.approx((1 + 0.5) / 2)
    assert found["macro_f1"].value == pytest.approx((4 / 5 + 2 / 3) / 2)


def test_no_example_has_no_metric():
    assert estimates.of_classes(np.zeros(0, int), np.zeros((0, 3))) == {}
    assert estimates.of_numbers(np.zeros(0), np.zeros(0)) == {}


def test_labels_that_are_all_the_same_have_no_r2():
    assert estimates.of_numbers(np.ones(5), np.arange(5.0))["r2"].value is None


def test_a_certain_and_wrong_answer_costs_a_finite_loss():
    found = estimates.of_classes(np.array([0]), np.array([[0.0, 1.0]]))
    assert 80 < found["loss"].value < 100


def test_ones_own_metric_is_moved_as_its_formula_says():
    labels = np.random.default_rng(3).normal(size=90)
    found = estimates.of_function(lambda truth, told: np.mean(np.abs(truth - told)), labels, np.zeros(90))
    assert found.value == pytest.approx(np.abs(labels).mean())
    np.testing.assert_allclose(found.influence, np.abs(labels) - found.value, atol=1e-9)


def test_ones_own_metric_that_is_not_a_number_is_not_defined():
    assert estimates.of_function(lambda truth, told: np.nan, np.zeros(3), np.zeros(3)).value is None


@pytest.mark.parametrize("decimals", [1, 5], ids=["many ties", "few ties"])
def test_curves_have_the_points_of_scikit_learn(decimals):
    from sklearn.metrics import precision_recall_curve, roc_curve

    from trainer.evaluate.curves import curves_of

    random = np.random.default_rng(decimals)
    for _ in range(20):
        labels = np.append([0, 1], random.integers(0, 2, random.integers(1, 50)))
        scores = np.round(random.random(len(labels)), decimals)
        curves = curves_of(labels, np.stack([1 - scores, scores], axis=1), ["no", "yes"])
        fpr, tpr, _ = roc_curve(labels == 1, scores, drop_intermediate=False)
        precision, recall, _ = precision_recall_curve(labels == 1, scores)
        roc, pr = ({curve["class"]: curve for curve in curves[kind]}["yes"] for kind in ("roc", "pr"))
        np.testing.assert_allclose((roc["fpr"], roc["tpr"]), (fpr, tpr))
        np.testing.assert_allclose((pr["recall"], pr["precision"]), (recall[::-1], precision[::-1]))
