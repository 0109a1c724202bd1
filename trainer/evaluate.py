"""How good the exported model is on examples it never saw, measured through the signature that will answer.

    evaluation = evaluate(config, examples, model, champion=None)      # plain data, written as evaluation.json

Every metric is computed once over the whole split, so none depends on the batch size; a metric that is not defined
(a class with no example) is None, never NaN.
"""

import base64
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config import EvaluateConfig
from trainer.data.manifest import Manifest, read_manifest, verify
from trainer.data.reading import load_split
from trainer.errors import BadInput, WorldFailure
from trainer.export import SAVED_MODEL
from trainer.progress import progress

EVALUATION_FILE = "evaluation.json"

_CURVE_POINTS = 200

LOWER_IS_BETTER = frozenset({"loss", "mean_absolute_error", "root_mean_squared_error"})


def evaluate(config: EvaluateConfig, examples: Path, model: Path, champion: tuple[int, Path] | None) -> dict[str, Any]:
    """Measures a model on the test split, and the champion on the same examples.

    Args:
        config: The evaluate section.
        examples: A prepared dataset.
        model: Folder that holds `saved_model/`.
        champion: Version number and SavedModel folder of the model that serves now; None where there is none.

    Returns:
        Plain data: `metrics`, `mistakes`, `baseline` and digests; where the label is a class `per_class`,
        `confusion_matrix` and `roc` too.

    Raises:
        BadInput: The model was exported for other features or classes.
        WorldFailure: A damaged shard, or a model that answers NaN.
    """
    manifest = read_manifest(examples)
    verify(examples, manifest, ["test"])
    features, labels = load_split(examples, manifest, "test")[:2]
    answers = predict(model / SAVED_MODEL, features, manifest, config.batch_size)
    found = _measure(labels, answers, manifest)
    baseline = None
    if champion is not None:
        baseline = _measure_champion(*champion, features, labels, manifest, config)
    return {
        "task": manifest.task,
        "split": "test",
        "num_examples": len(labels),
        "class_names": manifest.class_names,
        **found,
        "mistakes": worst_mistakes(features, labels, answers, manifest, config.num_mistakes),
        "baseline": baseline,
        "data_digest": manifest.digest,
    }


def predict(saved_model: Path, features: dict[str, np.ndarray], manifest: Manifest, batch_size: int) -> np.ndarray:
    """What the exported model answers, float64: class probabilities [n, classes], or numbers [n].

    Raises:
        BadInput: Its signature does not take these features or answers other classes.
        WorldFailure: An answer is not finite.
    """
    import tensorflow as tf

    loaded = tf.saved_model.load(str(saved_model))
    signature = loaded.signatures["serving_default"]
    takes = {name: [*spec.shape[1:], spec.dtype.name] for name, spec in signature.structured_input_signature[1].items()}
    holds = {name: [*feature.shape, feature.dtype] for name, feature in manifest.features.items()}
    if takes != holds:
        raise BadInput(f"{saved_model}: its signature takes {takes}, the data holds {holds}")
    key = "probabilities" if manifest.task == "classification" else "prediction"
    answers = signature.structured_outputs.get(key)
    if answers is None:
        raise BadInput(f"{saved_model}: answers no {key}, and the data is for {manifest.task}")
    if manifest.class_names and answers.shape[-1] != len(manifest.class_names):
        raise BadInput(f"{saved_model}: answers {answers.shape[-1]} classes, the data has {len(manifest.class_names)}")
    num_examples = len(next(iter(features.values())))
    parts = []
    with progress("evaluate-model", total=num_examples, unit="example") as bar:
        for start in range(0, num_examples, batch_size):
            batch = {name: tf.constant(values[start : start + batch_size]) for name, values in features.items()}
            parts.append(signature(**batch)[key].numpy().astype(np.float64))
            bar.update(min(start + batch_size, num_examples))
    found = np.concatenate(parts)
    if bad := int(np.sum(~np.isfinite(found.reshape(num_examples, -1)).all(axis=1))):
        raise WorldFailure(f"{saved_model}: {bad} of {num_examples} answers are not finite numbers; train it again")
    return found


def _measure(labels: np.ndarray, answers: np.ndarray, manifest: Manifest) -> dict[str, Any]:
    if manifest.task == "regression":
        return measure_numbers(labels.astype(np.float64), answers)
    return measure(labels, answers, manifest.class_names)


def measure_numbers(labels: np.ndarray, predictions: np.ndarray) -> dict[str, Any]:
    """Metrics of predicted numbers.

    Args:
        labels: True numbers [n] float64.
        predictions: [n] float64.

    Returns:
        `metrics` by name, in the label's units; `r2` is None where all labels are the same.
    """
    errors = predictions - labels
    squares, spread = float(np.mean(errors**2)), float(np.var(labels))
    return {
        "metrics": {
            "mean_absolute_error": float(np.mean(np.abs(errors))),
            "root_mean_squared_error": math.sqrt(squares),
            "r2": 1.0 - squares / spread if spread > 0 else None,
        }
    }


def measure(labels: np.ndarray, probabilities: np.ndarray, class_names: list[str]) -> dict[str, Any]:
    """Metrics of predicted probabilities.

    Args:
        labels: True classes [n] int.
        probabilities: [n, classes] float64, rows that sum to 1.
        class_names: Names of the classes.

    Returns:
        `metrics` by name, `per_class`, `confusion_matrix` (rows true, columns predicted) and `roc` by class.
    """
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    classes = np.arange(len(class_names))
    predicted = probabilities.argmax(axis=1)
    chosen = probabilities[np.arange(len(labels)), labels]
    precision, recall, f1, support = precision_recall_fscore_support(
        labels, predicted, labels=classes, zero_division=np.nan
    )
    roc = [_roc(labels == index, probabilities[:, index], name) for index, name in enumerate(class_names)]
    areas = [curve["auc"] for curve in roc if curve["auc"] is not None]
    return {
        "metrics": {
            "accuracy": float(np.mean(predicted == labels)),
            "loss": float(-np.mean(np.log(np.clip(chosen, np.finfo(np.float32).tiny, 1.0)))),
            "macro_precision": _mean(precision),
            "macro_recall": _mean(recall),
            "macro_f1": _mean(f1),
            "roc_auc": float(np.mean(areas)) if areas else None,
        },
        "per_class": [
            {"class": name, "precision": _number(p), "recall": _number(r), "f1": _number(f), "support": int(s)}
            for name, p, r, f, s in zip(class_names, precision, recall, f1, support, strict=True)
        ],
        "confusion_matrix": confusion_matrix(labels, predicted, labels=classes).tolist(),
        "roc": roc,
        "roc_micro": _micro_roc(labels, probabilities),
    }


def worst_mistakes(
    features: dict[str, np.ndarray], labels: np.ndarray, answers: np.ndarray, manifest: Manifest, count: int
) -> list[dict[str, Any]]:
    """The examples whose wrong answer was the surest (numbers: the farthest from the label), with what was seen."""
    if manifest.task == "regression":
        worst = np.argsort(-np.abs(answers - labels), kind="stable")[:count]
        told = [{"label": float(labels[index]), "predicted": float(answers[index])} for index in worst]
    else:
        predicted = answers.argmax(axis=1)
        wrong = np.flatnonzero(predicted != labels)
        worst = wrong[np.argsort(-answers[wrong, predicted[wrong]], kind="stable")][:count]
        told = [
            {
                "label": manifest.class_names[labels[index]],
                "predicted": manifest.class_names[predicted[index]],
                "probability": float(answers[index, predicted[index]]),
                "label_probability": float(answers[index, labels[index]]),
            }
            for index in worst
        ]
    return [
        {"index": int(index), **told, **_seen(features, manifest, index)}
        for index, told in zip(worst, told, strict=True)
    ]


def _seen(features: dict[str, np.ndarray], manifest: Manifest, index: int) -> dict[str, Any]:
    """One example for a page: its first image as raw bytes, everything else as text."""
    seen: dict[str, Any] = {}
    words = []
    for name, feature in sorted(manifest.features.items()):
        value = features[name][index]
        if feature.kind == "image" and "image" not in seen:
            seen["image"] = {
                "shape": list(value.shape),
                "pixels_base64": base64.b64encode(value.tobytes()).decode(),
            }
        elif feature.kind == "number":
            words.append(f"{name} {np.array2string(value, precision=4, threshold=8)}")
        elif feature.kind != "image":
            text = value.decode("utf-8", errors="replace")
            words.append(text if len(features) == 1 else f"{name} {text}")
    return {**seen, "text": ", ".join(words)} if words else seen


def write_json(file: Path, value: Any) -> None:
    """Strict JSON: NaN and infinity are an error here rather than in whoever reads it."""
    file.write_text(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def _measure_champion(
    version: int,
    folder: Path,
    features: dict[str, np.ndarray],
    labels: np.ndarray,
    manifest: Manifest,
    config: EvaluateConfig,
) -> dict[str, Any]:
    try:
        answers = predict(folder, features, manifest, config.batch_size)
    except BadInput as error:
        return {"version": version, "incompatible": str(error), "metrics": {}, "per_class": []}
    found = _measure(labels, answers, manifest)
    return {"version": version, "metrics": found["metrics"], "per_class": found.get("per_class", [])}


def _roc(positive: np.ndarray, scores: np.ndarray, name: str) -> dict[str, Any]:
    from sklearn.metrics import roc_auc_score, roc_curve

    if positive.all() or not positive.any():
        return {"class": name, "fpr": [], "tpr": [], "auc": None}
    fpr, tpr, _ = roc_curve(positive, scores)
    kept = _thin(len(fpr))
    area = float(roc_auc_score(positive, scores))  # of all points, whatever is drawn
    return {"class": name, "fpr": fpr[kept].tolist(), "tpr": tpr[kept].tolist(), "auc": area}


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


def _thin(length: int) -> np.ndarray:
    """Places of at most `_CURVE_POINTS` points, first and last among them."""
    return np.unique(np.linspace(0, length - 1, min(length, _CURVE_POINTS)).round().astype(int))


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _mean(values: np.ndarray) -> float | None:
    """Mean over the classes for which the metric is defined."""
    return None if np.isnan(values).all() else float(np.nanmean(values))
