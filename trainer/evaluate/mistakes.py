"""The worst mistakes, with what the model saw.

places = worst(labels, answers, count=24)
told(places, labels, answers, examples, manifest)
"""

import base64
from typing import Any

import numpy as np

from trainer.data.manifest import Manifest


def worst(labels: np.ndarray, answers: np.ndarray, count: int) -> np.ndarray:
    """Places of the examples whose wrong answer was the surest (numbers: the farthest from the label), worst first."""
    if answers.ndim == 1:
        return np.argsort(-np.abs(answers - labels), kind="stable")[:count]
    predicted = answers.argmax(axis=1)
    wrong = np.flatnonzero(predicted != labels)
    return wrong[np.argsort(-answers[wrong, predicted[wrong]], kind="stable")][:count]


def told(
    places: np.ndarray,
    labels: np.ndarray,
    answers: np.ndarray,
    seen: dict[int, dict[str, np.ndarray]],
    manifest: Manifest,
) -> list[dict[str, Any]]:
    """The mistakes as plain data.

    Args:
        places: Of the examples, worst first.
        labels: True classes or numbers [n].
        answers: Probabilities [n, classes] or numbers [n].
        seen: Features of each of those examples by place.
        manifest: Names features and classes.
    """
    return [
        {"index": int(place), **_answered(place, labels, answers, manifest), **_seen(seen[place], manifest)}
        for place in places.tolist()
    ]


def _answered(place: int, labels: np.ndarray, answers: np.ndarray, manifest: Manifest) -> dict[str, Any]:
    if answers.ndim == 1:
        return {"label": float(labels[place]), "predicted": float(answers[place])}
    predicted, label = int(answers[place].argmax()), int(labels[place])
    return {
        "label": manifest.class_names[label],
        "predicted": manifest.class_names[predicted],
        "probability": float(answers[place, predicted]),
        "label_probability": float(answers[place, label]),
    }


def _seen(features: dict[str, np.ndarray], manifest: Manifest) -> dict[str, Any]:
    """One example for a page: its first image as raw bytes; a text alone as it is; values by feature."""
    seen: dict[str, Any] = {}
    values: dict[str, str] = {}
    for name, feature in sorted(manifest.features.items()):
        value = features[name]
        if feature.kind == "image":
            if "image" not in seen:
                pixels = base64.b64encode(value.tobytes()).decode()
                seen["image"] = {"shape": list(value.shape), "pixels_base64": pixels}
        elif feature.kind == "number":
            values[name] = _number(value)
        else:
            values[name] = value.decode("utf-8", errors="replace")
    if len(features) == 1 and values:
        return {"text": next(iter(values.values()))}
    return {**seen, "values": values} if values else seen


def _number(value: np.ndarray) -> str:
    if value.ndim:
        return np.array2string(value, precision=4, threshold=8)
    return "missing" if np.isnan(value) else f"{value:.6g}"
