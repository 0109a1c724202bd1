"""The train step: the mathematics that must not depend on the number of replicas.

Every number of replicas takes the same global batch, each a contiguous share of it, and the update is that of the whole
batch. The order below decides it:

1. Sum the per-example losses of the share and divide by the examples of the GLOBAL batch, which is smaller at the end of
   an epoch. (A mean of the replicas' means would weigh the examples of a short share more.)
2. Add the regularisation losses once over all replicas: divided by their number.
3. Add the gradients of all replicas (all-reduce by SUM).
4. Clip only now: a norm of partial gradients is not the norm of the gradient.
5. Divide by the number of replicas, because the optimizer's own `apply` adds the replicas' gradients once more.
6. Apply; then move the average of the weights.

Many steps run inside one graph call, so that Python is out of the way.
"""

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from trainer.config import TrainConfig
from trainer.errors import BadInput
from trainer.objective import Objective, Totals


class Trainer:
    """Model, optimizer and the compiled loops under one strategy.

    Args:
        strategy: Where it runs.
        build: Makes the model; called inside the strategy's scope.
        config: The train section.
        objective: The loss and the measure of the task.
        total_steps: Steps of the whole training, for the learning-rate schedule.

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
            self.averages = [
                tf.Variable(tf.identity(variable.value), trainable=False, name=f"average_{index}")
                for index, variable in enumerate(self.model.trainable_variables if config.ema_decay else [])
            ]
        self._train_loop = tf.function(self._run_train_steps, reduce_retracing=True)
        self._evaluate_loop = tf.function(self._run_evaluate_steps, reduce_retracing=True)

    def train_steps(self, feed: Any, iterator: Any, epoch: int, first_step: int, num_steps: int) -> Totals:
        """Runs steps `first_step` to `first_step + num_steps` (counted from 0 within the epoch)."""
        return self._call(self._train_loop, feed, iterator, epoch, first_step, num_steps)

    def evaluate(self, feed: Any, iterator: Any, num_steps: int) -> Totals:
        """Goes once through the split; every example counts once."""
        return self._call(self._evaluate_loop, feed, iterator, 0, 0, num_steps)

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step (from 0)."""
        rate = self.optimizer._learning_rate
        return float(rate(step)) if callable(rate) else float(np.asarray(self.optimizer.learning_rate))

    def _call(self, loop: Any, feed: Any, iterator: Any, *numbers: int) -> Totals:
        import tensorflow as tf

        totals = loop(feed, iterator, *(tf.constant(number, tf.int64) for number in numbers))
        return Totals(*(float(total) for total in totals.numpy()))

    def _run_train_steps(self, feed: Any, iterator: Any, epoch: Any, first_step: Any, num_steps: Any) -> Any:
        import tensorflow as tf

        totals = tf.zeros(3, tf.float64)
        for step in tf.range(first_step, first_step + num_steps):
            totals += self._on_replicas(self._train_share, feed, iterator, epoch, step)
            if self.averages:
                self._move_averages()
        return totals

    def _run_evaluate_steps(self, feed: Any, iterator: Any, epoch: Any, first_step: Any, num_steps: Any) -> Any:
        import tensorflow as tf

        totals = tf.zeros(3, tf.float64)
        for step in tf.range(first_step, first_step + num_steps):
            totals += self._on_replicas(self._evaluate_share, feed, iterator, epoch, step)
        return totals

    def _on_replicas(self, function: Callable, feed: Any, iterator: Any, epoch: Any, step: Any) -> Any:
        import tensorflow as tf

        start = step * self.config.global_batch_size
        size = tf.minimum(tf.cast(self.config.global_batch_size, tf.int64), feed.num_examples - start)
        if feed.streams:
            sums = self.strategy.run(function, args=(size, *next(iterator)))
        else:
            sums = self.strategy.run(self._gathered(function, feed), args=(size, epoch, start))
        return self.strategy.experimental_local_results(sums)[0]  # every replica holds the sum over all

    def _gathered(self, function: Callable, feed: Any) -> Callable:
        import tensorflow as tf

        def replica(size: Any, epoch: Any, start: Any) -> Any:
            context = tf.distribute.get_replica_context()
            index = tf.cast(context.replica_id_in_sync_group, tf.int64)
            low = size * index // context.num_replicas_in_sync
            high = size * (index + 1) // context.num_replicas_in_sync
            return function(size, *feed.take(epoch, start + low, high - low))

        return replica

    def _train_share(self, size: Any, *batch: Any) -> Any:
        import tensorflow as tf

        variables = [variable.value for variable in self.model.trainable_variables]
        parts = self.config.gradient_accumulation_steps
        if parts == 1:
            gradients, sums = self._gradients(size, batch, variables)
        else:
            count = tf.shape(batch[1], tf.int64)[0]
            gradients = [tf.zeros_like(variable) for variable in variables]
            sums = tf.zeros(3, tf.float64)
            for part in tf.range(tf.constant(parts, tf.int64)):
                low, high = count * part // parts, count * (part + 1) // parts
                share = tf.nest.map_structure(lambda values: values[low:high], batch)  # noqa: B023 - used at once
                more, more_sums = self._gradients(size, share, variables)
                gradients = [a + b for a, b in zip(gradients, more, strict=True)]
                sums += more_sums
        context = tf.distribute.get_replica_context()
        replicas = context.num_replicas_in_sync
        if replicas > 1:
            *gradients, sums = context.all_reduce(tf.distribute.ReduceOp.SUM, [*gradients, sums])
        gradients = clip(gradients, self.config)
        if replicas > 1:
            gradients = [gradient / replicas for gradient in gradients]
        self.optimizer.apply(gradients, self.model.trainable_variables)
        return sums

    def _gradients(self, size: Any, batch: tuple, variables: list[Any]) -> tuple[list[Any], Any]:
        """This share's part of the gradient of the global batch's loss, and its sums."""
        import tensorflow as tf

        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        parts = self.config.gradient_accumulation_steps
        features, labels, *own_weights = batch
        with tf.GradientTape() as tape:
            outputs = self.model(features, training=True)
            losses = self.objective.losses(outputs, labels)
            weights = self.objective.weights(labels)
            for own in own_weights:
                weights *= own
            objective = tf.reduce_sum(losses * weights) / tf.cast(size, losses.dtype)
            if self.model.losses:
                objective += tf.add_n(self.model.losses) / (replicas * parts)
        gradients = tape.gradient(objective, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return gradients, self.objective.sums(losses, outputs, labels)

    def _evaluate_share(self, size: Any, features: Any, labels: Any, *_: Any) -> Any:
        import tensorflow as tf

        outputs = self.model(features, training=False)
        sums = self.objective.sums(self.objective.losses(outputs, labels), outputs, labels)
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, sums) if context.num_replicas_in_sync > 1 else sums

    def _move_averages(self) -> None:
        decay = self.config.ema_decay
        for average, variable in zip(self.averages, self.model.trainable_variables, strict=True):
            self.strategy.extended.update(
                average, lambda a, v: a.assign(a * decay + v * (1.0 - decay)), args=(variable.value,)
            )


def clip(gradients: list[Any], config: TrainConfig) -> list[Any]:
    """Clips summed gradients as the configuration says; the same formulas as `tf.clip_by_*`."""
    import tensorflow as tf

    if config.clip_value is not None:
        return [tf.clip_by_value(gradient, -config.clip_value, config.clip_value) for gradient in gradients]
    if config.clip_norm is not None:
        return [tf.clip_by_norm(gradient, config.clip_norm) for gradient in gradients]
    if config.clip_global_norm is not None:
        return tf.clip_by_global_norm(gradients, config.clip_global_norm)[0]
    return gradients


def build_optimizer(config: TrainConfig, total_steps: int) -> Any:
    """The Keras optimizer that the section names, with its learning-rate schedule.

    Raises:
        BadInput: Keras has no such optimizer, or it does not take the arguments.
    """
    import keras

    schedule = config.learning_rate_schedule
    rate: Any = config.learning_rate
    if schedule.name != "constant" or schedule.warmup_steps:
        from trainer.schedule import WarmupSchedule

        rate = WarmupSchedule(config.learning_rate, schedule, total_steps)
    identifier = {"class_name": config.optimizer, "config": {**config.optimizer_args, "learning_rate": rate}}
    try:
        return keras.optimizers.deserialize(identifier)
    except (TypeError, ValueError) as error:
        classes = vars(keras.optimizers).values()
        known = sorted(
            c.__name__.lower() for c in classes if isinstance(c, type) and c is not keras.optimizers.Optimizer
        )
        if config.optimizer.lower() not in known:
            raise BadInput(
                f"train.optimizer = {json.dumps(config.optimizer)}: must be one of {', '.join(known)}"
            ) from None
        reason = str(error).strip().splitlines()[0]
        raise BadInput(f"train.optimizer_args = {json.dumps(config.optimizer_args)}: {reason}") from None
