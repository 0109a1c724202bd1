"""The curves that a page draws: ROC, precision against recall, calibration; thinned, their areas from all points.

curves = curves_of(labels, probabilities, class_names)     # {"roc": …, "pr": …, "roc_micro": …, "calibration": …}
"""

from typing import Any

import numpy as np

from trainer.evaluate.estimates import average_precision, calibration_bins, ranked_area

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
    from sklearn.metrics import precision_recall_curve, roc_curve

    areas = [ranked_area(labels == index, scores).value for index, scores in enumerate(probabilities.T)]
    drawn = sorted((index for index, area in enumerate(areas) if area is not None), key=lambda index: areas[index])
    roc, pr = [], []
    for index in sorted(drawn[:_MOST_CLASSES]):
        positive, scores, name = labels == index, probabilities[:, index], class_names[index]
        fpr, tpr, _ = roc_curve(positive, scores)
        kept = _thin(len(fpr))
        roc.append({"class": name, "fpr": fpr[kept].tolist(), "tpr": tpr[kept].tolist(), "auc": areas[index]})
        precision, recall, _ = precision_recall_curve(positive, scores)
        kept = _thin(len(recall))[::-1]  # from recall 0 on
        pr.append(
            {
                "class": name,
                "recall": recall[kept].tolist(),
                "precision": precision[kept].tolist(),
                "average_precision": average_precision(positive, scores).value,
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
    from sklearn.metrics import roc_curve

    if probabilities.shape[1] < 2:
        return {"fpr": [], "tpr": [], "thresholds": []}
    positive = labels[:, np.newaxis] == np.arange(probabilities.shape[1])
    fpr, tpr, thresholds = roc_curve(positive.ravel(), probabilities.ravel())
    thresholds[0] = max(1.0, thresholds[1])  # scikit-learn begins with infinity, which no metadata store takes
    kept = _thin(len(fpr))
    return {"fpr": fpr[kept].tolist(), "tpr": tpr[kept].tolist(), "thresholds": thresholds[kept].tolist()}


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
