"""How good the exported model is on examples it never saw, measured through the signature that will answer.

    evaluation = evaluate(config, examples, model, champion=None)      # plain data, written as evaluation.json

Examples are streamed and only labels, answers and slices are kept. Every metric is computed once over the whole split, so
none depends on the batch size or on how many processes trained; a metric that is not defined is None, never NaN.
"""

import json
import math
import reprlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.config import EvaluateConfig, suggestion
from trainer.data.manifest import Manifest, read_manifest, verify
from trainer.errors import BadInput
from trainer.evaluate.estimates import (
    Estimate,
    average_precision,
    class_rates,
    of_classes,
    of_function,
    of_numbers,
    ranks,
)
from trainer.evaluate.intervals import change, clopper_pearson, interval
from trainer.metric_names import names_of
from trainer.own_code import ask_own, own_function
from trainer.progress import progress

EVALUATION_FILE = "evaluation.json"

Measure = Callable[[np.ndarray, np.ndarray], dict[str, Estimate]]


class _Answered(NamedTuple):
    """What is kept of the split once it has been gone through."""

    labels: np.ndarray
    """[n] int32 or float64."""
    candidate: np.ndarray
    """Probabilities [n, classes] or numbers [n], float64."""
    champion: np.ndarray | None
    """The same of the champion, where there is one that can be asked."""
    slices: list[np.ndarray]
    """For each slicing the name of each example's slice [n] object."""


def evaluate(config: EvaluateConfig, examples: Path, model: Path, champion: tuple[int, Path] | None) -> dict[str, Any]:
    """Measures a model on the test split, and the champion on the same examples.

    Args:
        config: The evaluate section.
        examples: A prepared dataset.
        model: Folder that holds `saved_model/`.
        champion: Version number and SavedModel folder of the model that serves now; None where there is none.

    Returns:
        Plain data. `metrics`, `intervals`, `slices`, `mistakes`, `baseline`, `digests` and `data_statistics`; where the
        label is a class `per_class`, `confusion_matrix`, `roc`, `pr` and `calibration` too. Where answers are not finite
        `num_not_finite` counts them and no metric has a value.

    Raises:
        BadInput: The model was exported for other features or classes; a threshold, slice or metric does not fit the data.
        WorldFailure: A damaged shard.
    """
    from trainer.evaluate.answers import ServedModel
    from trainer.evaluate.slicing import Slicer
    from trainer.export import SAVED_MODEL, read_metadata

    manifest = read_manifest(examples)
    verify(examples, manifest, ["test"])
    check_metrics(config, manifest.task)
    slicers = [Slicer(slicing, index, manifest) for index, slicing in enumerate(config.slices)]
    measure = _measure(config, manifest)
    candidate = ServedModel(model / SAVED_MODEL, manifest)
    asked, baseline = None, None
    if champion is not None:
        version, folder = champion
        baseline = {"version": version, "digest": (read_metadata(folder) or {}).get("digest")}
        try:
            asked = ServedModel(folder, manifest)
        except BadInput as error:
            baseline |= {"incompatible": str(error), "metrics": {}, "per_class": []}
    answered = _ask(examples, manifest, candidate, asked, slicers, config.batch_size)
    finite = _finite(answered.candidate)
    if answered.champion is not None and (bad := int((~_finite(answered.champion)).sum())):
        answered = answered._replace(champion=None)
        reason = f"{bad} of {len(answered.labels)} of its answers are not finite numbers"
        baseline = {**(baseline or {}), "incompatible": reason, "metrics": {}, "per_class": []}
    names = [*names_of(manifest.task, config.quantiles), *config.own_metrics]
    found: dict[str, Any] = {
        "task": manifest.task,
        "split": "test",
        "label": manifest.label.name,
        "num_examples": len(answered.labels),
        "num_not_finite": int((~finite).sum()),
        "class_names": manifest.class_names,
        "confidence_level": config.confidence_level,
        "top_k": config.top_k if manifest.task == "classification" else None,
        "lower_is_better": [name for name in names if config.lower_is_better(name)],
        "data_digest": manifest.digest,
        "model_digest": (read_metadata(model / SAVED_MODEL) or {}).get("digest"),
        "data_statistics": _statistics(examples, manifest),
    }
    if not finite.all():  # an average over the rest would hide what matters most
        nothing = {"metrics": dict.fromkeys(names), "intervals": {}, "slices": [], "mistakes": []}
        return {**found, **nothing, "baseline": baseline and {"metrics": {}, "per_class": [], **baseline}}
    return {
        **found,
        **_whole(answered, measure, manifest, config, baseline),
        "slices": _slices(answered, slicers, measure, config),
        "mistakes": _mistakes(examples, manifest, answered, config.num_mistakes),
    }


def check_metrics(config: EvaluateConfig, task: str) -> None:
    """Raises BadInput where a threshold names a metric that this kind of task does not have."""
    known = [*names_of(task, config.quantiles), *config.own_metrics]
    wrong = [
        f"evaluate.{path}.{metric}: {task} has {', '.join(known)}{suggestion(metric, known)}"
        for path, thresholds in config.thresholds_by_path()
        for metric in thresholds
        if metric not in known
    ]
    if config.quantiles and task == "classification":
        wrong.append(f"evaluate.quantiles = {config.quantiles}: the label is a class and has no quantiles")
    if wrong:
        raise BadInput("\n".join(wrong))


def write_json(file: Path, value: Any) -> None:
    """Strict JSON: NaN and infinity are an error here rather than in whoever reads it."""
    file.write_text(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def _measure(config: EvaluateConfig, manifest: Manifest) -> Measure:
    """All metrics of labels and answers, one's own among them."""
    own = {name: _own_metric(name, metric.function) for name, metric in config.own_metrics.items()}

    def measure(labels: np.ndarray, answers: np.ndarray) -> dict[str, Estimate]:
        if manifest.task == "classification":
            found = of_classes(labels, answers, top_k=config.top_k)
        else:
            found = of_numbers(labels, answers, quantiles=config.quantiles)
        found = {name: found[name] for name in names_of(manifest.task, config.quantiles) if name in found}
        if len(labels):
            found |= {name: of_function(function, labels, answers) for name, function in own.items()}
        return found

    return measure


def _own_metric(name: str, path: str) -> Callable[[np.ndarray, np.ndarray], float]:
    setting = f"evaluate.own_metrics.{name}.function"
    function = own_function(path, setting=setting)

    def measure(labels: np.ndarray, answers: np.ndarray) -> float:
        value = ask_own(function, labels, answers, setting=setting)
        number = np.asarray(value)
        if number.ndim or number.dtype.kind not in "biuf":
            raise BadInput(f"{setting}: gave {reprlib.repr(value)}; must give one number")
        return float(number)

    return measure


def _batches(examples: Path, manifest: Manifest, batch_size: int) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
    """Features and labels of the test split, in the order it was written."""
    import tensorflow as tf

    from trainer.data.records import parser

    files = [str(examples / shard.name) for shard in manifest.splits["test"].shards]
    batches = tf.data.TFRecordDataset(files).batch(batch_size).map(parser(manifest)).prefetch(1)
    for batch in batches.as_numpy_iterator():
        yield batch[0], batch[1]


def _ask(
    examples: Path, manifest: Manifest, candidate: Any, champion: Any, slicers: list[Any], batch_size: int
) -> _Answered:
    labels, answers, before = [], [], []
    names: list[list[str | None]] = [[] for _ in slicers]
    expected, done = manifest.splits["test"].num_examples, 0
    with progress("evaluate-model", total=expected, unit="example") as bar:
        for features, truth in _batches(examples, manifest, batch_size):
            labels.append(truth if manifest.task == "classification" else truth.astype(np.float64))
            answers.append(candidate(features))
            if champion is not None:
                before.append(champion(features))
            for listed, slicer in zip(names, slicers, strict=True):
                listed.extend(slicer(features, truth))
            done += len(truth)
            bar.update(done)
    assert done == expected, f"{done} examples were measured, the manifest says {expected}"
    return _Answered(
        np.concatenate(labels),
        np.concatenate(answers),
        np.concatenate(before) if before else None,
        [np.array(listed, object) for listed in names],
    )


def _finite(answers: np.ndarray) -> np.ndarray:
    return np.isfinite(answers.reshape(len(answers), -1)).all(axis=1)


def _whole(
    answered: _Answered, measure: Measure, manifest: Manifest, config: EvaluateConfig, baseline: dict | None
) -> dict[str, Any]:
    """Metrics of the whole split, and of the champion on it."""
    found = measure(answered.labels, answered.candidate)
    result = _told(found, config)
    if answered.champion is not None:
        before = measure(answered.labels, answered.champion)
        baseline = {**(baseline or {}), **_told(before, config), "changes": _changes(found, before, config)}
    if manifest.task == "classification":
        from trainer.evaluate.curves import curves_of

        result |= _by_class(answered.labels, answered.candidate, manifest.class_names, config.confidence_level)
        result |= curves_of(answered.labels, answered.candidate, manifest.class_names)
        if baseline is not None and answered.champion is not None:
            told = _by_class(answered.labels, answered.champion, manifest.class_names, config.confidence_level)
            baseline["per_class"] = told["per_class"]
    return {**result, "baseline": baseline}


def _told(found: dict[str, Estimate], config: EvaluateConfig) -> dict[str, Any]:
    """Values and intervals as plain data; an interval that cannot be given is left out."""
    ends = {name: interval(name, estimate, config.confidence_level) for name, estimate in found.items()}
    too_few = {name: found[name].needed for name, between in ends.items() if between is None and _lacks(found[name])}
    return {
        "metrics": {name: _number(estimate.value) for name, estimate in found.items()},
        "intervals": {name: list(between) for name, between in ends.items() if between is not None},
        **({"needed": too_few} if too_few else {}),
    }


def _lacks(estimate: Estimate) -> bool:
    """Whether an interval is not given for want of examples."""
    return estimate.influence is not None and len(estimate.influence) < estimate.needed


def _changes(
    found: dict[str, Estimate], before: dict[str, Estimate], config: EvaluateConfig
) -> dict[str, dict[str, float | None]]:
    changes = {
        name: change(
            name, estimate, before[name], config.confidence_level, lower_is_better=config.lower_is_better(name)
        )
        for name, estimate in found.items()
    }
    return {name: each._asdict() for name, each in changes.items() if each is not None}


def _by_class(labels: np.ndarray, answers: np.ndarray, class_names: list[str], level: float) -> dict[str, Any]:
    """Confusion matrix (rows true, columns predicted) and rates of each class."""
    counted = class_rates(labels, answers.argmax(axis=1), len(class_names))
    support, guesses = counted.confusion.sum(axis=1), counted.confusion.sum(axis=0)
    rows = []
    for index, name in enumerate(class_names):
        hits = int(counted.confusion[index, index])
        among = {"precision": int(guesses[index]), "recall": int(support[index])}
        rows.append(
            {
                "class": name,
                "precision": _number(counted.precision[index]),
                "recall": _number(counted.recall[index]),
                "f1": _number(counted.f1[index]),
                "average_precision": average_precision(labels == index, ranks(answers[:, index])).value,
                "support": int(support[index]),
                "intervals": {
                    rate: list(clopper_pearson(hits, count, level)) for rate, count in among.items() if count
                },
            }
        )
    return {"per_class": rows, "confusion_matrix": counted.confusion.tolist()}


def _slices(answered: _Answered, slicers: list[Any], measure: Measure, config: EvaluateConfig) -> list[dict[str, Any]]:
    """Each slice with its metrics, and the champion's on the same examples; the largest come first."""
    from trainer.evaluate.slicing import MOST_SLICES

    rows = []
    for index, (slicer, names) in enumerate(zip(slicers, answered.slices, strict=True)):
        places: dict[str, list[int]] = {name: [] for name in slicer.expected}
        for place, name in enumerate(names):
            if name is not None:
                places.setdefault(name, []).append(place)
        ordered = sorted(places.items(), key=lambda item: -len(item[1]))
        for name, members in ordered[:MOST_SLICES]:
            chosen = np.array(members, np.int64)
            found = measure(answered.labels[chosen], answered.candidate[chosen])
            row = {
                "slice": name,
                "slicing": index,
                "num_examples": len(members),
                "judged": len(members) >= config.min_slice_examples,
                **_told(found, config),
                "baseline": None,
            }
            if answered.champion is not None:
                before = measure(answered.labels[chosen], answered.champion[chosen])
                row["baseline"] = {
                    "metrics": _told(before, config)["metrics"],
                    "changes": _changes(found, before, config),
                }
            rows.append(row)
        rest = ordered[MOST_SLICES:]
        if rest:
            rows.append(
                {
                    "slice": f"{len(rest)} smaller slices",
                    "slicing": index,
                    "num_examples": sum(len(members) for _, members in rest),
                    "judged": False,
                    "metrics": {},
                    "intervals": {},
                    "baseline": None,
                }
            )
    return rows


def _mistakes(examples: Path, manifest: Manifest, answered: _Answered, count: int) -> list[dict[str, Any]]:
    """The worst mistakes; their features are read again, so that those of a large split need not be kept."""
    from trainer.evaluate.mistakes import told, worst

    places = worst(answered.labels, answered.candidate, count)
    if not len(places):
        return []
    wanted, seen, first = set(places.tolist()), {}, 0
    for features, labels in _batches(examples, manifest, 256):
        for place in range(first, first + len(labels)):
            if place in wanted:
                seen[place] = {name: values[place - first] for name, values in features.items()}
        first += len(labels)
    return told(places, answered.labels, answered.candidate, seen, manifest)


def _statistics(examples: Path, manifest: Manifest) -> dict[str, Any]:
    """What a reader wants to know of the data: each split's features in a few numbers."""
    from trainer.data.statistics import read_statistics

    told: dict[str, Any] = {}
    for split, features in read_statistics(examples, manifest).splits.items():
        told[f"{split} split"] = {"examples": manifest.splits[split].num_examples}
        for name, found in features.items():
            kept = found.model_dump(
                mode="json", exclude_none=True, exclude={"num_examples", "quantiles", "histogram", "values"}
            )
            if found.values:
                kept["most_frequent"] = ", ".join(f"{each.value} ({each.count:,})" for each in found.values[:10])
            told[f"{split} split"][name] = kept
    return told


def _number(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else float(value)
