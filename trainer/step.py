"""The train step: the mathematics that must not depend on the number of replicas.

Every number of replicas takes the same global batch, each a contiguous share of it, and the update is that of the whole
batch. The order below decides it:

1. Sum the per-example losses of the share and divide by the examples of the GLOBAL batch, which is smaller at the end of
   an epoch. (A mean of the replicas' means would weigh the examples of a short share more.)
2. Add the regularisation losses once over all replicas: divided by their number.
3. Add the gradients of all replicas (all-reduce by SUM), and only now look whether they are finite: an overflow on one
   replica is an overflow for all. Whether a replica's loss is finite travels with them; the sums for the metrics are added
   over the workers once a call, not once a step.
4. Clip only now: a norm of partial gradients is not the norm of the gradient.
5. Apply, without the optimizer's own addition over the replicas; then move the average of the weights.

Many steps run inside one graph call, so that Python is out of the way.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from trainer.config import TrainConfig
from trainer.consensus import add_over_processes
from trainer.objective import Objective, Totals
from trainer.optimizer import build_optimizer, clip, take_summed_gradients, update_in_one_operation
from trainer.precision import LossScale


class Report(NamedTuple):
    """What a number of training steps gave."""

    totals: Totals
    """Sums over the examples of the steps that were made."""
    left_out: float
    """Examples of the steps that were left out; no sum holds them."""
    skipped: int
    """Steps that were left out."""
    skipped_in_row: int
    """Steps left out without a good one since; goes into the next call."""
    most_skipped_in_row: int
    """The longest such row."""
    first_bad_step: int | None
    """First step (from 0 within the epoch) whose loss or, where that is looked at, gradient was not finite."""
    input_wait_secs: float
    """Seconds that the steps waited for a streamed batch; 0 for a split held in memory."""


class Trainer:
    """Model, optimizer and the compiled loops under one strategy.

    Args:
        strategy: Where it runs.
        build: Makes the model; called inside the strategy's scope.
        config: The train section.
        objective: The loss and the measure of the task.
        total_steps: Steps of the whole training, for the learning-rate schedule.

    Attributes:
        model: The Keras model.
        optimizer: The Keras optimizer.
        averages: Averaged weights, in the order of the trainable variables; empty where none are kept.
        loss_scale: float16's loss scale, or None.

    Raises:
        BadInput: The optimizer or its arguments do not exist.
    """

    def __init__(
        self, strategy: Any, build: Callable[[], Any], config: TrainConfig, objective: Objective, total_steps: int
    ) -> None:
        import tensorflow as tf

        self.strategy, self.config, self.objective = strategy, config, objective
        with strategy.scope():
            self.model = build()
            self.optimizer = build_optimizer(config, total_steps)
            self.optimizer.build(self.model.trainable_variables)
            if config.loop == "own":
                take_summed_gradients(self.optimizer)
                if not isinstance(strategy, tf.distribute.ParameterServerStrategy):
                    update_in_one_operation(self.optimizer)
            self.averages = [
                tf.Variable(tf.identity(variable.value), trainable=False, name=f"average_{index}")
                for index, variable in enumerate(self.model.trainable_variables if config.ema_decay else [])
            ]
            self.loss_scale = LossScale() if config.precision == "float16" else None
        self._guarded = self.loss_scale is not None or config.nan_policy == "skip_step"
        self._compute = self._gradients
        if config.jit_compile:  # of the whole step, XLA would have to reach other replicas' devices
            self._compute = tf.function(self._gradients, jit_compile=True, autograph=False, reduce_retracing=True)
        self._train_loop, self._evaluate_loop = self._run_train_steps, self._run_evaluate_steps
        if not config.eager:
            self._train_loop = tf.function(self._train_loop, reduce_retracing=True)
            self._evaluate_loop = tf.function(self._evaluate_loop, reduce_retracing=True)

    def train_steps(
        self, feed: Any, iterator: Any, epoch: int, first_step: int, num_steps: int, skipped_in_row: int = 0
    ) -> Report:
        """Runs steps `first_step` to `first_step + num_steps` (counted from 0 within the epoch)."""
        found = self._call(self._train_loop, feed, iterator, epoch, first_step, num_steps, skipped_in_row)
        left_out, skipped, in_row, most, first_bad, waited = found[3:]
        return Report(
            Totals(*found[:3]),
            left_out,
            int(skipped),
            int(in_row),
            int(most),
            int(first_bad) if first_bad >= 0 else None,
            waited,
        )

    def evaluate(self, feed: Any, iterator: Any, num_steps: int) -> Totals:
        """Goes once through the split; every example counts once."""
        return Totals(*self._call(self._evaluate_loop, feed, iterator, 0, 0, num_steps))

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step (from 0)."""
        rate = self.optimizer._learning_rate
        return float(rate(step)) if callable(rate) else float(np.asarray(self.optimizer.learning_rate))

    def restart_averages(self) -> None:
        """The averages begin at the weights of now, and so does an optimizer that keeps weights of its own."""
        import keras

        variables = self.model.trainable_variables
        for average, variable in zip(self.averages, variables, strict=False):
            average.assign(variable.numpy())
        if isinstance(self.optimizer, keras.optimizers.ScheduleFreeAdamW):
            for momentum, variable in zip(self.optimizer._momentums, variables, strict=True):
                momentum.assign(variable.numpy())

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """The averaged weights take the place of the trained ones while the block runs, where averages are kept."""
        variables = self.model.trainable_variables if self.averages else []
        trained = [variable.numpy() for variable in variables]
        for variable, average in zip(variables, self.averages, strict=True):
            variable.assign(average.numpy())
        try:
            yield
        finally:
            for variable, value in zip(variables, trained, strict=True):
                variable.assign(value)

    def graph(self, feed: Any, iterator: Any) -> Any:
        """The graph of the train loop, for TensorBoard."""
        import tensorflow as tf

        return self._train_loop.get_concrete_function(feed, iterator, *[tf.constant(0, tf.int64)] * 4).graph

    @staticmethod
    def _call(loop: Any, feed: Any, iterator: Any, *numbers: int) -> list[float]:
        import tensorflow as tf

        return loop(feed, iterator, *(tf.constant(number, tf.int64) for number in numbers)).numpy().tolist()

    def _run_train_steps(
        self, feed: Any, iterator: Any, epoch: Any, first_step: Any, num_steps: Any, skipped_in_row: Any
    ) -> Any:
        """`[loss, measure, count, left out, skipped, in a row, most in a row, first bad step, seconds waited]` float64."""
        import tensorflow as tf

        totals, left_out = tf.zeros(3, tf.float64), tf.constant(0.0, tf.float64)
        skipped = tf.constant(0, tf.int64)
        in_row, most = skipped_in_row, tf.constant(0, tf.int64)
        first_bad, waited = tf.constant(-1, tf.int64), tf.constant(0.0, tf.float64)
        for step in tf.range(first_step, first_step + num_steps):
            (sums, mark, *gradients), seconds = self._on_replicas(self._train_share, feed, iterator, epoch, step)
            sums = self._of_this_process(sums)
            waited += seconds
            bad = tf.logical_not(tf.math.is_finite(self._one(mark)))
            if self._guarded:
                applied, bad = self._apply_if_finite(gradients, bad)
                in_row = tf.where(applied, tf.constant(0, tf.int64), in_row + 1)
                skipped += tf.cast(tf.logical_not(applied), tf.int64)
                most = tf.maximum(most, in_row)
                left_out += tf.where(applied, tf.zeros_like(sums[2]), sums[2])
                sums = tf.where(applied, sums, tf.zeros_like(sums))
            elif self.averages:
                self._move_averages()
            first_bad = tf.where(tf.logical_and(bad, first_bad < 0), step, first_bad)
            totals += sums
        added = self._over_processes(tf.concat([totals, [left_out]], axis=0))
        rest = [tf.cast(value, tf.float64) for value in (skipped, in_row, most, first_bad, waited)]
        return tf.concat([added, tf.stack(rest)], axis=0)

    def _run_evaluate_steps(self, feed: Any, iterator: Any, epoch: Any, first_step: Any, num_steps: Any) -> Any:
        import tensorflow as tf

        totals = tf.zeros(3, tf.float64)
        for step in tf.range(first_step, first_step + num_steps):
            sums, _ = self._on_replicas(self._evaluate_share, feed, iterator, epoch, step)
            totals += self._of_this_process(sums)
        return self._over_processes(totals)

    def _of_this_process(self, per_replica: Any) -> Any:
        """The sum over the replicas of this process."""
        import tensorflow as tf

        return tf.add_n(list(self.strategy.experimental_local_results(per_replica)))

    def _over_processes(self, values: Any) -> Any:
        """The sum of every process's values."""
        replicas = self.strategy.num_replicas_in_sync
        local = replicas if replicas == 1 else len(self.strategy.extended.worker_devices)
        return values if local == replicas else add_over_processes(self.strategy, values, local)

    def _one(self, per_replica: Any) -> Any:
        """The value of a result that every replica holds alike, because it was reduced over all."""
        return self.strategy.experimental_local_results(per_replica)[0]

    def _on_replicas(self, function: Callable, feed: Any, iterator: Any, epoch: Any, step: Any) -> tuple[Any, Any]:
        """The function's result on the replicas' shares of a step, and the seconds that the batch was waited for."""
        import tensorflow as tf

        start = step * self.config.global_batch_size
        size = tf.minimum(tf.cast(self.config.global_batch_size, tf.int64), feed.num_examples - start)
        if not feed.streams:
            return self.strategy.run(self._gathered(function, feed), args=(size, epoch, start)), 0.0
        before = tf.timestamp()
        with tf.control_dependencies([before]):
            batch = next(iterator)
        local = [self.strategy.experimental_local_results(part) for part in tf.nest.flatten(batch)]
        with tf.control_dependencies(tf.nest.flatten(local)):
            after = tf.timestamp()
        return self.strategy.run(function, args=(size, *batch)), after - before

    def _gathered(self, function: Callable, feed: Any) -> Callable:
        import tensorflow as tf

        def replica(size: Any, epoch: Any, start: Any) -> Any:
            context = tf.distribute.get_replica_context()
            index = tf.cast(context.replica_id_in_sync_group, tf.int64)
            low = size * index // context.num_replicas_in_sync
            high = size * (index + 1) // context.num_replicas_in_sync
            return function(size, *feed.take(epoch, start + low, high - low))

        return replica

    def _train_share(self, size: Any, *batch: Any) -> list[Any]:
        """This replica's part of a step: `[sums, mark]`, and the gradients where the update is not made yet.

        The sums are the share's own; the mark is finite, on every replica alike, if the losses of all are.
        """
        import tensorflow as tf

        gradients, sums = self._gradients_in_parts(size, batch)
        mark = tf.cast(tf.where(tf.math.is_finite(sums[0]), 0.0, math.nan), gradients[0].dtype)
        if self.strategy.num_replicas_in_sync > 1:
            context, add = tf.distribute.get_replica_context(), tf.distribute.ReduceOp.SUM
            *gradients, mark = context.all_reduce(add, [*gradients, mark])
        if self._guarded:
            return [sums, mark, *gradients]
        self._update(gradients)
        return [sums, mark]

    def _gradients_in_parts(self, size: Any, batch: tuple[Any, ...]) -> tuple[list[Any], Any]:
        """The share's gradients and sums, gone through in as many parts as are to be accumulated."""
        import tensorflow as tf

        parts = self.config.gradient_accumulation_steps
        if parts == 1:
            return self._compute(size, *batch)
        count = tf.shape(batch[1], tf.int64)[0]
        gradients = [tf.zeros_like(variable.value) for variable in self.model.trainable_variables]
        sums = tf.zeros(3, tf.float64)
        for part in tf.range(tf.constant(parts, tf.int64)):
            low, high = count * part // parts, count * (part + 1) // parts
            piece = tf.nest.map_structure(lambda values: values[low:high], batch)  # noqa: B023 - called at once
            more, more_sums = self._compute(size, *piece)
            gradients = [a + b for a, b in zip(gradients, more, strict=True)]
            sums += more_sums
        return gradients, sums

    def _gradients(self, size: Any, features: Any, labels: Any, *own_weights: Any) -> tuple[list[Any], Any]:
        """The part of these examples in the gradient of the global batch's loss (times the loss scale), and their sums."""
        import tensorflow as tf

        variables = [variable.value for variable in self.model.trainable_variables]
        shares = self.strategy.num_replicas_in_sync * self.config.gradient_accumulation_steps
        with tf.GradientTape() as tape:
            outputs = self.model(features, training=True)
            losses = self.objective.losses(outputs, labels)
            weights = self.objective.weights(labels)
            for own in own_weights:
                weights *= own
            objective = tf.reduce_sum(losses * weights) / tf.cast(size, losses.dtype)
            if self.model.losses:
                objective += tf.add_n([tf.cast(loss, objective.dtype) for loss in self.model.losses]) / shares
            if self.loss_scale is not None:
                objective *= self.loss_scale.factor
        gradients = tape.gradient(objective, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        # Rows of an embedding may stand twice in a sparse gradient, and its norm would be wrong.
        return [tf.convert_to_tensor(gradient) for gradient in gradients], self.objective.sums(losses, outputs, labels)

    def _update(self, gradients: list[Any]) -> None:
        """Clips the summed gradients and applies them; called on every replica."""
        self.optimizer.apply(clip(gradients, self.config), self.model.trainable_variables)

    def _apply_if_finite(self, gradients: list[Any], bad_loss: Any) -> tuple[Any, Any]:
        """Updates the weights unless something is not finite. Called across replicas, where a condition may stand.

        Returns:
            Whether the update was made, and whether the step was bad beyond what a smaller loss scale can mend.
        """
        import tensorflow as tf

        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(self._one(gradient))) for gradient in gradients])
        applies = tf.logical_and(finite, tf.logical_not(bad_loss))
        factor = self.loss_scale.factor if self.loss_scale is not None else None

        def update(*scaled: Any) -> None:
            self._update(list(scaled) if factor is None else [gradient / factor for gradient in scaled])

        def apply() -> Any:
            self.strategy.run(update, args=tuple(gradients))
            if self.averages:
                self._move_averages()
            return tf.constant(0)

        tf.cond(applies, apply, lambda: tf.constant(0))
        if self.loss_scale is None:
            return applies, tf.logical_not(applies)
        bad = tf.logical_or(bad_loss, tf.logical_and(tf.logical_not(finite), factor <= 1.0))
        self.loss_scale.update(finite)
        return applies, bad

    def _evaluate_share(self, size: Any, features: Any, labels: Any, *_: Any) -> Any:
        outputs = self.model(features, training=False)
        return self.objective.sums(self.objective.losses(outputs, labels), outputs, labels)

    def _move_averages(self) -> None:
        decay = self.config.ema_decay
        for average, variable in zip(self.averages, self.model.trainable_variables, strict=True):
            self.strategy.extended.update(
                average, lambda a, v: a.assign(a * decay + v * (1.0 - decay)), args=(variable.value,)
            )
