"""What the training makes small, and the measure beside it, by the kind of task.

    objective = objective_of(spec, config)
    losses = objective.losses(outputs, labels)            # [batch] float32, inside the graph
    sums = objective.sums(losses, outputs, labels)        # [loss, measure, count] float64, of real examples
    objective.metrics(totals)                             # {"loss": …, "accuracy": …}

A task is a loss and a measure of each example; everything else, from replicas to reports, needs no more than their sums.
"""

import json
from typing import Any, NamedTuple

import numpy as np

from trainer.config import TrainConfig
from trainer.errors import BadInput
from trainer.spec import ModelSpec


class Totals(NamedTuple):
    """Sums over real examples, from which means follow exactly."""

    loss: float
    """Sum of per-example losses (without regularisation and weights)."""
    measure: float
    """Sum of the task's measure: right answers, or distances between answer and label."""
    count: float
    """Examples."""


class Objective:
    """A loss and a measure of each example."""

    measure: str
    """Name of the measure's mean."""

    def losses(self, outputs: Any, labels: Any) -> Any:
        """Loss of each example [batch] float32.

        Args:
            outputs: What the model answers [batch, outputs].
            labels: [batch] int32 or float32.
        """
        raise NotImplementedError

    def measures(self, outputs: Any, labels: Any) -> Any:
        """Measure of each example [batch] float32."""
        raise NotImplementedError

    def weights(self, labels: Any) -> Any:
        """What each example's loss is multiplied by [batch] float32, or 1.0."""
        return 1.0

    def sums(self, losses: Any, outputs: Any, labels: Any) -> Any:
        """[loss, measure, count] float64 of a share, which may be empty."""
        import tensorflow as tf

        measures = self.measures(outputs, labels)
        sums = [tf.reduce_sum(losses), tf.reduce_sum(measures), tf.cast(tf.size(labels), tf.float32)]
        return tf.cast(tf.stack(sums), tf.float64)

    def metrics(self, totals: Totals) -> dict[str, float]:
        """Means by name."""
        return {"loss": totals.loss / totals.count, self.measure: totals.measure / totals.count}


class Classification(Objective):
    """Cross-entropy of the softmax of the logits, and accuracy.

    Args:
        config: The train section.
        class_names: Names of the classes.
        class_counts: Examples of each class in the training split, for balanced weights.
    """

    measure = "accuracy"

    def __init__(self, config: TrainConfig, class_names: list[str], class_counts: list[int]) -> None:
        self._smoothing = config.label_smoothing
        self._weights = _class_weights(config, class_names, class_counts)

    def losses(self, outputs: Any, labels: Any) -> Any:
        """−Σ target·log softmax(logits), with the label's mass spread by `label_smoothing`."""
        import tensorflow as tf

        logits = tf.cast(outputs, tf.float32)
        if not self._smoothing:
            return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        num_classes = logits.shape[-1]
        targets = tf.one_hot(labels, num_classes) * (1.0 - self._smoothing) + self._smoothing / num_classes
        return tf.nn.softmax_cross_entropy_with_logits(targets, logits)

    def measures(self, outputs: Any, labels: Any) -> Any:
        """1 where the most probable class is the label."""
        import tensorflow as tf

        return tf.cast(tf.equal(tf.argmax(outputs, axis=-1, output_type=tf.int32), labels), tf.float32)

    def weights(self, labels: Any) -> Any:
        """The weight of each example's class."""
        import tensorflow as tf

        return 1.0 if self._weights is None else tf.gather(self._weights, labels)


class Regression(Objective):
    """Squared error (divided by `scale`², the label's variance, so that its size does not depend on the units), and
    absolute error in the label's own units.

    Args:
        scale: Standard deviation of the label in the training split.
    """

    measure = "mean_absolute_error"

    def __init__(self, scale: float) -> None:
        self._scale = scale or 1.0

    def losses(self, outputs: Any, labels: Any) -> Any:
        """((answer − label) / scale)²."""
        import tensorflow as tf

        return tf.square((tf.cast(outputs[:, 0], tf.float32) - labels) / self._scale)

    def measures(self, outputs: Any, labels: Any) -> Any:
        """|answer − label|."""
        import tensorflow as tf

        return tf.abs(tf.cast(outputs[:, 0], tf.float32) - labels)


def objective_of(spec: ModelSpec, config: TrainConfig) -> Objective:
    """The objective of a task.

    Raises:
        BadInput: A setting that this kind of task does not have, or a class weight that names no class.
    """
    found = spec.statistics[spec.label.name]
    watched = [("keep_best", config.keep_best)]
    if config.early_stopping is not None:
        watched.append(("early_stopping.metric", config.early_stopping.metric))
    measure = Classification.measure if spec.task == "classification" else Regression.measure
    for setting, metric in watched:
        if metric not in ("loss", measure, None):
            raise BadInput(f"train.{setting} = {json.dumps(metric)}: {spec.task} has loss and {measure}")
    if spec.label.class_names is not None:
        counted = {value.value: value.count for value in found.values}
        return Classification(config, spec.label.class_names, [counted.get(n, 0) for n in spec.label.class_names])
    for setting in ("class_weights", "label_smoothing"):
        if value := getattr(config, setting):
            raise BadInput(f"train.{setting} = {json.dumps(value)}: {spec.label.name} is a number and has no classes")
    return Regression(found.std_dev or 1.0)


def _class_weights(config: TrainConfig, class_names: list[str], class_counts: list[int]) -> np.ndarray | None:
    """`balanced`: examples / (classes · examples of the class), as scikit-learn has it; absent classes weigh nothing."""
    if config.class_weights == "balanced":
        counts = np.array(class_counts, np.float64)
        present = counts > 0
        weights = np.divide(counts.sum(), present.sum() * counts, out=np.zeros_like(counts), where=present)
        return weights.astype(np.float32)
    for name in config.class_weights:
        if name not in class_names:
            raise BadInput(f"train.class_weights.{name}: no such class (classes: {', '.join(class_names[:20])})")
    if not config.class_weights:
        return None
    return np.array([config.class_weights.get(name, 1.0) for name in class_names], np.float32)
