"""The curves that a page draws: ROC, precision against recall, calibration; thinned, their areas from all points.

curves = curves_of(labels, probabilities, class_names)     # {"roc": …, "pr": …, "roc_micro": …, "calibration": …}
"""

from typing import Any

import numpy as np

from trainer.evaluate.estimates import average_precision, calibration_bins, ranked_area, ranks

_POINTS = 200
_MOST_CLASSES = 60
"""Classes that are drawn: those that are told apart worst."""


def curves_of(labels: np.ndarray, probabilities: np.ndarray, class_names: list[str]) -> dict[str, Any]:
    """Curves of the classes that some examples are of and some are not.

    Args:
        labels: True classes [n] int.
        probabilities: [n, classes] float64.
        class_names: Names of the classes.
    """
    areas = [ranked_area(labels == index, ranks(scores)).value for index, scores in enumerate(probabilities.T)]
    drawn = sorted((index for index, area in enumerate(areas) if area is not None), key=lambda index: areas[index])
    roc, pr = [], []
    for index in sorted(drawn[:_MOST_CLASSES]):
        positive, scores, name = labels == index, probabilities[:, index], class_names[index]
        true, false, _ = _counts(positive, scores)
        fpr, tpr = false / false[-1], true / true[-1]
        kept = _thin(len(fpr))
        roc.append({"class": name, "fpr": fpr[kept].tolist(), "tpr": tpr[kept].tolist(), "auc": areas[index]})
        precision, recall = true / np.maximum(true + false, 1), tpr
        precision[0] = 1.0  # of no answers, none is wrong
        pr.append(
            {
                "class": name,
                "recall": recall[kept].tolist(),
                "precision": precision[kept].tolist(),
                "average_precision": average_precision(positive, ranks(scores)).value,
            }
        )
    return {
        "roc": roc,
        "pr": pr,
        "roc_micro": _micro_roc(labels, probabilities),
        "calibration": {"bins": _bins(labels, probabilities)},
    }


def _micro_roc(labels: np.ndarray, probabilities: np.ndarray) -> dict[str, list[float]]:
    """One curve over all (example, class) pairs, with finite thresholds, for Kubeflow's single ROC plot."""
    if probabilities.shape[1] < 2:
        return {"fpr": [], "tpr": [], "thresholds": []}
    positive = labels[:, np.newaxis] == np.arange(probabilities.shape[1])
    true, false, thresholds = _counts(positive.ravel(), probabilities.ravel())
    fpr, tpr = false / false[-1], true / true[-1]
    kept = _thin(len(fpr))
    return {"fpr": fpr[kept].tolist(), "tpr": tpr[kept].tolist(), "thresholds": thresholds[kept].tolist()}


def _counts(positive: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """True and false answers [k + 1] at each threshold from above all scores down, as scikit-learn counts them.

    Importing scikit-learn for this took longer than everything else that an evaluation of a small split does.
    """
    order = np.argsort(-scores, kind="stable")
    positive, scores = positive[order], scores[order]
    last = np.append(np.flatnonzero(np.diff(scores)), len(scores) - 1)  # of each run of equal scores
    true = np.cumsum(positive)[last]
    thresholds = np.append(max(1.0, scores[0]), scores[last])  # finite, because no metadata store takes infinity
    return np.append(0, true), np.append(0, last + 1 - true), thresholds


def _bins(labels: np.ndarray, probabilities: np.ndarray) -> list[dict[str, Any]]:
    counts, sure, right = calibration_bins(probabilities.max(axis=1), probabilities.argmax(axis=1) == labels)
    return [
        {"confidence": float(s / c), "accuracy": float(r / c), "num_examples": int(c)}
        for c, s, r in zip(counts, sure, right, strict=True)
        if c
    ]


def _thin(length: int) -> np.ndarray:
    """Places of at most `_POINTS` points, first and last among them."""
    return np.unique(np.linspace(0, length - 1, min(length, _POINTS)).round().astype(int))
