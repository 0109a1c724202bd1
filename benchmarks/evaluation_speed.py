"""What metrics, intervals and paired changes cost beside scikit-learn and scipy, side by side in one run.

    python benchmarks/evaluation_speed.py --examples 20000 --classes 100

Ours gives every metric with its influences; theirs are the same metrics one by one, and for the intervals a bootstrap of
macro-F1. Each prints seconds and the ratio theirs / ours.
"""

import argparse
import time

import numpy as np

from trainer.evaluate.estimates import of_classes
from trainer.evaluate.intervals import change, interval
from trainer.metric_names import lower_is_better

_BOOTSTRAP_DRAWS = 200


def seconds_of(work):
    """Wall time of a call, and its result."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def scikit_learn(labels, probabilities):
    """The metrics that scikit-learn has."""
    from sklearn import metrics

    classes = np.arange(probabilities.shape[1])
    predicted = probabilities.argmax(axis=1)
    one_hot = np.eye(len(classes))[labels]
    found = [metrics.accuracy_score(labels, predicted), metrics.log_loss(labels, probabilities, labels=classes)]
    for average in ("macro", "micro", "weighted"):
        found.append(metrics.precision_recall_fscore_support(labels, predicted, average=average, zero_division=np.nan))
    found.append(metrics.top_k_accuracy_score(labels, probabilities, k=5, labels=classes))
    found.append(metrics.roc_auc_score(one_hot, probabilities, average="macro"))
    found.append(metrics.average_precision_score(one_hot, probabilities, average="macro"))
    return found


def bootstrap(labels, probabilities):
    """A percentile bootstrap of macro-F1 with scikit-learn's own function."""
    from sklearn.metrics import f1_score

    random, predicted = np.random.default_rng(0), probabilities.argmax(axis=1)
    drawn = []
    for _ in range(_BOOTSTRAP_DRAWS):
        rows = random.integers(len(labels), size=len(labels))
        drawn.append(f1_score(labels[rows], predicted[rows], average="macro", zero_division=0))
    return np.quantile(drawn, (0.025, 0.975))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--classes", type=int, default=100)
    arguments = parser.parse_args()
    random = np.random.default_rng(0)
    labels = random.integers(0, arguments.classes, arguments.examples)
    scores = random.normal(size=(arguments.examples, arguments.classes))
    scores[np.arange(len(labels)), labels] += 3
    powers = np.exp(scores)
    probabilities = powers / powers.sum(axis=1, keepdims=True)
    import sklearn.metrics  # noqa: F401 - so that its import is not timed

    ours, found = seconds_of(lambda: of_classes(labels, probabilities))
    theirs, _ = seconds_of(lambda: scikit_learn(labels, probabilities))
    print(f"metrics: ours {ours:.2f} s, scikit-learn {theirs:.2f} s, ratio {theirs / ours:.1f}")
    ours, _ = seconds_of(lambda: {name: interval(name, each, 0.95) for name, each in found.items()})
    theirs, _ = seconds_of(lambda: bootstrap(labels, probabilities))
    told = f"{_BOOTSTRAP_DRAWS} draws of macro-F1 alone {theirs:.2f} s"
    print(f"intervals: ours of all metrics {ours:.3f} s, {told}, ratio {theirs / ours:.0f}")
    ours, _ = seconds_of(
        lambda: [change(n, each, each, 0.95, lower_is_better=lower_is_better(n)) for n, each in found.items()]
    )
    print(f"changes of all metrics against another model: {ours:.3f} s")


if __name__ == "__main__":
    main()
