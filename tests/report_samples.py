"""Evaluations, verdicts and histories for the report: small, made here, the same every time."""

import base64
import math
import random


def ramp(height, width, channels):
    """A picture whose every byte is known."""
    pixels = bytes(index % 256 for index in range(height * width * channels))
    return {"shape": [height, width, channels], "pixels_base64": base64.b64encode(pixels).decode()}


def evaluation(num_classes=3, names=None, mistakes=6, dense=False):
    names = names or [str(index) for index in range(num_classes)]
    dice = random.Random(num_classes)
    matrix = [[int(dense)] * num_classes for _ in range(num_classes)]
    for true in range(num_classes):
        matrix[true][true] += 30
        matrix[true][(true + 1) % num_classes] += dice.randrange(1, 6) if num_classes > 1 else 0
    total = sum(map(sum, matrix))
    right = sum(matrix[index][index] for index in range(num_classes))
    columns = [sum(row[index] for row in matrix) for index in range(num_classes)]
    per_class = [
        {
            "class": names[index],
            "precision": matrix[index][index] / columns[index],
            "recall": matrix[index][index] / sum(matrix[index]),
            "f1": 2 * matrix[index][index] / (columns[index] + sum(matrix[index])),
            "support": sum(matrix[index]),
            "intervals": {"precision": [0.6125, 0.9321], "recall": [0.5, 0.99]},
        }
        for index in range(num_classes)
    ]
    steps = [index / 999 for index in range(1000)]
    roc = [
        {
            "class": name,
            "fpr": steps,
            "tpr": [1 - (1 - step) ** (3 + rank) for step in steps],
            "auc": 1 - 1 / (4 + rank),
        }
        for rank, name in enumerate(names)
    ]
    accuracy = right / total
    return {
        "split": "test",
        "num_examples": total,
        "task": "classification",
        "class_names": names,
        "metrics": {"accuracy": accuracy, "loss": 0.0621, "macro_f1": 0.9, "roc_auc": None},
        "per_class": per_class,
        "confusion_matrix": matrix,
        "roc": roc if num_classes > 1 else [],
        "mistakes": [
            {
                "index": 17 + index,
                "label": names[index % num_classes],
                "predicted": names[(index + 1) % num_classes],
                "probability": 0.91,
                "label_probability": 0.05,
                "image": ramp(8, 8, 1),
            }
            for index in range(mistakes)
        ],
        "baseline": None,
    }


def everything(names=None):
    """An evaluation with each optional key."""
    full = evaluation(3, names)
    full["intervals"] = {"accuracy": [0.85, 0.95], "macro_f1": [0.84, 0.96]}
    full["baseline"] = {
        "version": 3,
        "metrics": {"accuracy": full["metrics"]["accuracy"] - 0.01, "loss": 0.05, "macro_f1": 0.9},
        "per_class": full["per_class"],
        "changes": {
            "accuracy": {"gain": 0.01, "low": -0.02, "high": 0.04, "p_value": 0.41},
            "loss": {"gain": -0.0121, "low": -0.02, "high": -0.004, "p_value": 0.0002},
        },
    }
    full["confidence_level"], full["lower_is_better"] = 0.95, ["loss"]
    full["slices"] = [
        {"slice": "country=DE", "num_examples": 50, "metrics": {"accuracy": 0.85, "loss": 0.2}},
        {"slice": "country=FR", "num_examples": 5, "judged": False, "metrics": {"accuracy": 0.6, "loss": 0.9}},
        {"slice": "country=IT", "num_examples": 40, "metrics": {"accuracy": 0.99, "loss": 0.1}},
        {"slice": "country=VA", "num_examples": 0, "metrics": {"accuracy": None, "loss": None}},
    ]
    full["pr"] = [
        {"class": name, "recall": [0, 0.5, 1], "precision": [1, 0.9, 0.4], "average_precision": 0.8}
        for name in full["class_names"]
    ]
    full["calibration"] = {
        "bins": [
            {"confidence": 0.55, "accuracy": 0.5, "num_examples": 12},
            {"confidence": 0.95, "accuracy": 0.8, "num_examples": 80},
        ]
    }
    full["data_statistics"] = {"image": {"mean": 0.31, "missing": 0}, "label": {"unique": 3}}
    row = {"bill_length_mm": "46.5", "a column whose name is long": "3700", "island": "x" * 200, "sex": "missing"}
    full["mistakes"].append({**{k: v for k, v in full["mistakes"][0].items() if k != "image"}, "values": row})
    full["needed"] = {"weighted_f1": 50}
    full["mistakes"].append({**full["mistakes"][0], "index": 900, "image": ramp(96, 130, 3)})
    return full


def verdict(blessed=True):
    return {
        "blessed": blessed,
        "verdict": "blessed" if blessed else "not_blessed",
        "reasons": ["Accuracy is high enough." if blessed else "Accuracy is too low."],
        "rules": [
            {
                "metric": "accuracy",
                "kind": "value_threshold",
                "rule": "accuracy ≥ 0.85",
                "found": 0.9 if blessed else 0.7,
                "baseline": None,
                "passed": blessed,
            },
            {
                "metric": "accuracy",
                "kind": "change_threshold",
                "rule": "accuracy − baseline ≥ 0",
                "found": 0.9,
                "baseline": 0.89,
                "passed": True,
            },
        ],
    }


def history(rows=12):
    return [
        {
            "step": 20 * epoch,
            "epoch": float(epoch),
            "loss": 2 * math.exp(-epoch / 4),
            "learning_rate": 0.003,
            "validation_loss": 2 * math.exp(-epoch / 4) + epoch / 100,
            "validation_accuracy": 1 - math.exp(-epoch / 3),
            "accuracy": 1 - math.exp(-epoch / 2),
            "seconds": 1.5 * epoch,
        }
        for epoch in range(1, rows + 1)
    ]


def provenance():
    return {
        "configuration": {"name": "digits", "train": {"epochs": 12, "layers": [32, 64]}},
        "versions": {"tensorflow": "2.21.0"},
        "digests": {"model": "sha256:" + "9f3c" * 16},
        "seconds": {"train_model": 18.4},
    }
