"""Do the intervals hold the truth as often as they say? Seen by simulation, for as few as 30 examples."""

import numpy as np
import pytest

from trainer.evaluate import estimates
from trainer.evaluate.intervals import change, clopper_pearson, interval

_REPEATS = 400
_SLACK = 0.035  # three standard errors of a share of 0.95 in 400 repeats


def classes(num_examples, num_classes, margin, random):
    labels = random.integers(0, num_classes, num_examples)
    scores = random.normal(size=(num_examples, num_classes)) + margin * np.eye(num_classes)[labels]
    powers = np.exp(2 * scores)
    return labels, powers / powers.sum(axis=1, keepdims=True)


def numbers(num_examples, random):
    labels = random.normal(size=num_examples)
    return labels, labels + random.normal(size=num_examples) / 2


def coverage(draw, measure, num_examples, names, truth):
    held = dict.fromkeys(names, 0)
    for _ in range(_REPEATS):
        found = measure(*draw(num_examples))
        for name in names:
            ends = interval(name, found[name], 0.95)
            held[name] += ends is not None and ends[0] <= truth[name] <= ends[1]
    return {name: count / _REPEATS for name, count in held.items()}


def test_clopper_pearson_is_the_exact_interval_of_scipy():
    from scipy.stats import binomtest

    for hits, count in ((0, 30), (1, 30), (29, 30), (30, 30), (70, 100)):
        expected = binomtest(hits, count).proportion_ci(0.95, method="exact")
        assert clopper_pearson(hits, count, 0.95) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize(("num_examples", "level"), [(30, 0.95), (30, 0.8), (100, 0.95), (7, 0.99)])
def test_the_interval_of_a_proportion_holds_every_true_value_at_least_as_often_as_it_says(num_examples, level):
    """Not simulated: the probability of each count, summed over the counts whose interval holds the truth."""
    from scipy.stats import binom

    counts = np.arange(num_examples + 1)
    truths = np.linspace(0.0, 1.0, 5001)[:, np.newaxis]  # 0.994, where Wilson's interval falls to 0.84, among them
    low, high = np.array([clopper_pearson(hits, num_examples, level) for hits in counts]).T
    held = (binom.pmf(counts, num_examples, truths) * ((low <= truths) & (truths <= high))).sum(axis=1)
    assert held.min() >= level - 1e-9


def test_the_interval_of_a_gain_in_accuracy_holds_every_true_gain_at_least_as_often_as_it_says():
    """Not simulated either: over the counts of examples that were gained and lost, for a grid of their true shares."""
    from scipy.stats import multinomial

    counts = [(gained, lost) for gained in range(31) for lost in range(31 - gained)]
    found = []
    for gained, lost in counts:
        one, other = (
            np.repeat([first, not first, True], [gained, lost, 30 - gained - lost]) for first in (True, False)
        )
        found.append(
            change("accuracy", estimates.proportion(one), estimates.proportion(other), 0.95, lower_is_better=False)
        )
    low, high = np.array([(each.low, each.high) for each in found]).T
    cells = np.array([(gained, lost, 30 - gained - lost) for gained, lost in counts])
    # scipy's probability is not a number for a sum that is 1 but for rounding: no corner and no edge, but close to them.
    shares = [0.001, 0.005, *np.linspace(0.012, 0.998, 40)]
    held = [
        multinomial.pmf(cells, 30, [up, down, 1 - up - down]) @ ((low <= up - down) & (up - down <= high))
        for up in shares
        for down in shares
        if up + down < 1
    ]
    assert min(held) >= 0.949


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_classes", "margin", "num_examples"),
    [(2, 2.0, 30), (3, 2.5, 30), (3, 2.5, 200), (10, 3.5, 200)],  # of 10 classes in 30 examples see docs/evaluation.md
)
def test_intervals_of_classes_hold_the_truth(num_classes, margin, num_examples):
    random = np.random.default_rng(num_classes)
    names = (
        "accuracy", "macro_precision", "macro_recall", "macro_f1", "weighted_precision", "weighted_f1",
        "roc_auc", "pr_auc", "brier", "expected_calibration_error",
    )  # fmt: skip
    large = estimates.of_classes(*classes(300_000, num_classes, margin, random))
    truth = {name: large[name].value for name in names}
    found = coverage(
        lambda n: classes(n, num_classes, margin, random), estimates.of_classes, num_examples, names, truth
    )
    assert all(share >= 0.95 - _SLACK for share in found.values()), found


@pytest.mark.parametrize("num_examples", [30, 200])
def test_intervals_of_numbers_hold_the_truth(num_examples):
    random = np.random.default_rng(11)
    large = estimates.of_numbers(*numbers(300_000, random), quantiles=[0.9])
    truth = {name: each.value for name, each in large.items()}
    found = coverage(
        lambda n: numbers(n, random),
        lambda *pair: estimates.of_numbers(*pair, quantiles=[0.9]),
        num_examples,
        list(truth),
        truth,
    )
    assert all(share >= 0.95 - _SLACK for share in found.values()), found


SKEWED = {
    "exponential errors": lambda n, random: (random.normal(size=n), (random.exponential(size=n) - 1) / 2),
    "exponential labels": lambda n, random: (random.exponential(size=n), random.normal(size=n) / 2),
    "heavy tails": lambda n, random: (random.normal(size=n), random.standard_t(5, n) / 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SKEWED)
def test_of_30_skewed_numbers_intervals_hold_the_truth_in_nine_of_ten_cases(kind):
    random = np.random.default_rng(1)

    def draw(count):
        labels, errors = SKEWED[kind](count, random)
        return labels, labels + errors

    truth = {name: each.value for name, each in estimates.of_numbers(*draw(1_000_000)).items()}
    found = coverage(draw, estimates.of_numbers, 30, list(truth), truth)
    assert all(share >= 0.90 for share in found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize(("num_classes", "margin"), [(10, 3.5), (30, 1.5), (100, 3.0)])
def test_averages_over_many_classes_have_an_interval_from_five_examples_a_class_on_and_it_holds_the_truth(
    num_classes, margin
):
    """Of so few examples a class each rate is a little low or high, together by more than the interval is wide."""
    random = np.random.default_rng(10)

    def drawn(count):
        labels, probabilities = classes(count, num_classes, margin, random)
        predicted = probabilities.argmax(axis=1)
        found = estimates._averages(labels, predicted, estimates.class_rates(labels, predicted, num_classes))
        return found | (estimates._areas(labels, probabilities) if num_classes < 100 else {})  # which take their time

    truth = {name: found.value for name, found in drawn(50_000).items()}
    held = dict.fromkeys(truth, 0)
    for _ in range(_REPEATS):
        for name, found in drawn(5 * num_classes).items():
            low, high = interval(name, found, 0.95)
            held[name] += low <= truth[name] <= high
    assert all(count / _REPEATS >= 0.95 - _SLACK for count in held.values()), held
    one, other = (drawn(3 * num_classes) for _ in range(2))
    for name in ("macro_f1", "weighted_precision"):
        assert interval(name, one[name], 0.95) is None
        found = change(name, one[name], other[name], 0.95, lower_is_better=False)
        assert (found.gain, found.low, found.p_value) == (
            pytest.approx(one[name].value - other[name].value),
            None,
            None,
        )


def test_30_right_answers_of_30_do_not_prove_that_all_are_right(predictions):
    """Where a percentile bootstrap says [1, 1]."""
    labels = np.arange(30) % 3
    found = estimates.of_classes(labels, np.eye(3)[labels] * 0.98 + 0.01 * (1 - np.eye(3)[labels]))
    for name in ("accuracy", "macro_f1", "macro_recall", "roc_auc", "pr_auc"):
        low, high = interval(name, found[name], 0.95)
        assert (0.8 < low < 0.95, high) == (True, 1.0), name


def test_an_interval_holds_its_estimate_and_is_always_the_same(predictions):
    found = estimates.of_classes(*predictions(35, 3), top_k=2)
    for name, each in found.items():
        low, high = interval(name, each, 0.9)
        assert low <= each.value <= high, name
        assert interval(name, each, 0.9) == (low, high), name
        wider = interval(name, each, 0.99)
        assert wider[0] <= low, name
        assert high <= wider[1], name


def test_nothing_is_said_where_nothing_varies():
    assert (
        interval("mean_absolute_error", estimates.of_numbers(np.zeros(9), np.ones(9))["mean_absolute_error"], 0.95)
        is None
    )
    assert interval("roc_auc", estimates.UNDEFINED, 0.95) is None


@pytest.mark.parametrize("num_examples", [30, 200])
def test_intervals_of_the_gain_on_the_same_examples_hold_the_truth(num_examples):
    random = np.random.default_rng(4)

    def pair(count):
        labels, better = classes(count, 3, 2.5, random)
        mixed = better**0.5 * random.dirichlet(np.ones(3), count) ** 0.5
        return labels, better, mixed / mixed.sum(axis=1, keepdims=True)

    names = ("accuracy", "macro_f1", "loss", "roc_auc", "brier")
    lower = {"loss", "brier"}

    def gains(count):
        labels, one, other = pair(count)
        first, second = estimates.of_classes(labels, one), estimates.of_classes(labels, other)
        return {n: change(n, first[n], second[n], 0.95, lower_is_better=n in lower) for n in names}

    truth = {name: found.gain for name, found in gains(300_000).items()}
    assert all(gain > 0 for gain in truth.values())
    held = dict.fromkeys(names, 0)
    for _ in range(_REPEATS):
        for name, found in gains(num_examples).items():
            held[name] += found.low <= truth[name] <= found.high
    shares = {name: count / _REPEATS for name, count in held.items()}
    assert all(share >= 0.95 - _SLACK for share in shares.values()), shares


def test_comparing_on_the_same_examples_sees_what_two_intervals_hide():
    """100 of 1,000 wrong against 115, ten of them different: the intervals overlap widely, and yet one is better."""
    right = np.ones(1000, bool)
    candidate, baseline = right.copy(), right.copy()
    candidate[:100] = False
    baseline[:100] = False
    baseline[100:115] = False
    first, second = (estimates.proportion(hits) for hits in (candidate, baseline))
    assert interval("accuracy", first, 0.95)[0] < second.value
    found = change("accuracy", first, second, 0.95, lower_is_better=False)
    assert found.low > 0
    assert found.p_value == pytest.approx(2 * 0.5**15)


def test_the_p_value_is_that_of_the_exact_mcnemar_test():
    from scipy.stats import binomtest

    candidate = np.array([1] * 9 + [0] * 3 + [1] * 20, bool)
    baseline = np.array([0] * 9 + [1] * 3 + [1] * 20, bool)
    found = change(
        "accuracy", estimates.proportion(candidate), estimates.proportion(baseline), 0.95, lower_is_better=False
    )
    assert found.gain == pytest.approx(6 / 32)
    assert found.p_value == pytest.approx(binomtest(9, 12).pvalue)


@pytest.mark.parametrize("num_examples", [40, 400])
def test_p_value_and_interval_agree(predictions, num_examples):
    labels, one = predictions(num_examples, 3, seed=1)
    other = 0.7 * one + 0.3 * predictions(num_examples, 3, seed=2)[1]
    first, second = estimates.of_classes(labels, one), estimates.of_classes(labels, other)
    for name in ("macro_f1", "roc_auc", "pr_auc", "loss", "brier"):
        for level in (0.5, 0.8, 0.9, 0.99):
            found = change(name, first[name], second[name], level, lower_is_better=name in ("loss", "brier"))
            assert (found.low > 0 or found.high < 0) == (found.p_value < 1 - level), (name, level, found)


def test_a_smaller_loss_is_a_gain():
    first, second = estimates.mean(np.array([0.1, 0.2, 0.3])), estimates.mean(np.array([0.4, 0.4, 0.6]))
    found = change("loss", first, second, 0.95, lower_is_better=True)
    assert found.gain == pytest.approx(0.8 / 3)
    assert found.low < found.gain < found.high


def test_two_that_answer_alike_do_not_differ():
    one = estimates.mean(np.array([0.1, 0.2, 0.3]))
    assert change("loss", one, one, 0.95, lower_is_better=True) == (0.0, 0.0, 0.0, 1.0)
    hits = estimates.proportion(np.ones(30, bool))
    found = change("accuracy", hits, hits, 0.95, lower_is_better=False)
    assert found.low < 0 < found.high  # 30 examples do not prove that they never differ
    assert found.p_value == 1.0
