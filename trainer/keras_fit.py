"""`train.loop: keras_fit`: Keras' own loop, for a model that brings its own `compile` or `train_step`.

Data, order, validation, checkpoints and export are this project's; the mathematics of a step are Keras'. On several
replicas Keras averages the means of the replicas' shares, which is wrong for a last batch that does not divide evenly: those
examples are left out of every epoch, and that is said. What it does wrong otherwise is refused.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np

from trainer.checkpoint import Checkpoints, identity
from trainer.data.reading import MemoryFeed
from trainer.epochs import advice_against_nan, finish_epoch
from trainer.errors import BadInput, Preempted, WorldFailure
from trainer.finish import finish_run
from trainer.preemption import StopSignals
from trainer.progress import progress, say
from trainer.run import Run, save

_STEPS_PER_EXECUTION = 32


def fit_with_keras(
    run: Run, seed: int, folder: Path, checkpoints: Path, mirror: str | None, stop: StopSignals
) -> dict[str, Any]:
    """Trains with `model.fit`, an epoch a call, and exports.

    A run that was stopped goes on from the last finished epoch.

    Raises:
        BadInput: Something that Keras would do wrong or not at all.
        Preempted: A signal came; the last finished epoch is saved.
        WorldFailure: The loss is not a finite number.
    """
    import keras

    config, trainer = run.config, run.trainer
    _check(run)
    metric = _compile(run)
    trainer.optimizer = trainer.model.optimizer
    trainer.optimizer.build(trainer.model.trainable_variables)
    kept = run.train_feed.num_examples
    if run.num_replicas > 1:
        kept -= (kept % config.global_batch_size) % run.num_replicas
        if left := run.train_feed.num_examples - kept:
            say(
                f"keras_fit: {left} example(s) of each epoch are left out: over {run.num_replicas} replicas Keras weighs an"
                " uneven last batch wrongly"
            )
    saver = Checkpoints(
        checkpoints, trainer, identity(config, seed, run.manifest.digest), config.keep_checkpoints, run.workers, mirror
    )
    with saver:
        run.state = saver.restore() or run.state
        stop.defer()
        run.begin()

        class Watch(keras.callbacks.Callback):
            """Shows progress, and ends the fit when a signal came."""

            def __init__(self) -> None:
                super().__init__()
                self.losses: list[float] = []

            def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
                loss = (logs or {}).get("loss")
                self.losses.append(math.nan if loss is None else float(loss))
                bar.update(run.state.step + batch + 1, f"loss {loss:.4f}" if loss is not None else "")
                if stop.asked is not None:
                    self.model.stop_training = True

        state, steps = run.state, math.ceil(kept / config.global_batch_size)
        with progress("train-model", total=run.total_steps, unit="step") as bar:
            while state.step < run.total_steps and not state.finished:
                epoch = state.step // run.steps_per_epoch
                watch = Watch()
                with run.timed("stepping"):
                    history = trainer.model.fit(
                        _epoch(run.train_feed, epoch, kept, config.global_batch_size, steps),
                        initial_epoch=epoch,
                        epochs=epoch + 1,
                        verbose=0,
                        shuffle=False,
                        callbacks=[watch],
                    ).history
                if stop.asked is not None:
                    raise Preempted(
                        f"{stop.asked} in epoch {epoch + 1}: keras_fit keeps no place inside an epoch; the next run goes on"
                        f" after step {state.step:,}"
                    )
                loss = history["loss"][-1]
                if _is_untouched(getattr(trainer.model, "_loss_tracker", None)):
                    sizes = [min(config.global_batch_size, kept - at * config.global_batch_size) for at in range(steps)]
                    loss = float(np.average(watch.losses, weights=sizes if len(watch.losses) == steps else None))
                if not math.isfinite(loss):
                    raise WorldFailure(f"the loss is {loss} in epoch {epoch + 1}: {advice_against_nan(config)}")
                state.step = (epoch + 1) * run.steps_per_epoch
                measure = history.get(trainer.objective.measure, [math.nan])[-1]
                if _is_untouched(metric):
                    measure = math.nan
                state.epoch_totals = [
                    loss * kept,
                    measure * kept,
                    float(kept),
                    float(run.train_feed.num_examples - kept),
                ]
                run.num_examples += kept
                finish_epoch(run)
                save(run, saver)
        run.board.close()
        if config.keep_best is not None and run.validation_feed is not None:
            saver.restore_best(state)
        summary = finish_run(run, seed, folder)
        saver.clear()
        return summary


def _check(run: Run) -> None:
    """Refuses what Keras would do wrong on these replicas."""
    config, replicas = run.config, run.num_replicas
    if run.workers.num_workers > 1:
        raise BadInput(
            f"train.loop = keras_fit: Keras cannot read its metrics on {run.workers.num_workers} workers; use own"
        )
    if not isinstance(run.train_feed, MemoryFeed):
        size = run.manifest.splits["train"].num_bytes
        raise BadInput(
            f"train.loop = keras_fit: gathers each batch from memory; the train split has {size:,} bytes and"
            f" train.cache_bytes is {config.cache_bytes:,}"
        )
    if run.manifest.weight is not None and replicas > 1:
        raise BadInput(
            f"train.loop = keras_fit: over {replicas} replicas Keras divides weighted losses by each share's own count;"
            " use own"
        )
    if replicas > 1:
        for key, value, reason in (
            ("precision", config.precision == "float16", "Keras looks for an overflow on the first replica only"),
            ("jit_compile", config.jit_compile, "XLA of the whole step cannot reach the other replicas' devices"),
        ):
            if value:
                raise BadInput(f"train.{key}: not with keras_fit over {replicas} replicas: {reason}; use own")
    if config.warm_start is not None:
        raise BadInput("train.warm_start: load the weights in the model's own build function with keras_fit")


def _compile(run: Run) -> Any:
    """Compiles a model that does not bring its own compilation.

    Returns:
        The metric that its steps should feed; None where the model compiles itself.
    """
    import keras

    config, model = run.config, run.trainer.model
    if getattr(model, "compiled", False):
        for key in ("jit_compile", "eager"):
            if getattr(config, key):
                raise BadInput(f"train.{key}: the model compiles itself; say it in its own compile")
        say(
            "keras_fit: the model compiles itself; train.optimizer, learning_rate and their schedule are its own affair"
        )
        return None
    regression = run.manifest.task == "regression"
    with run.trainer.strategy.scope():
        measure = (
            keras.metrics.MeanAbsoluteError(name="mean_absolute_error")
            if regression
            else keras.metrics.SparseCategoricalAccuracy(name="accuracy")
        )
        model.compile(
            optimizer=run.trainer.optimizer,
            loss=_loss(run.trainer.objective, "float32" if regression else "int32"),
            metrics=[measure],
            jit_compile=config.jit_compile,
            run_eagerly=config.eager,
            steps_per_execution=1 if config.eager else min(_STEPS_PER_EXECUTION, run.steps_per_epoch),
        )
        # Keras reads its metrics after every epoch and fails over those that a step of the model's own never met.
        inputs, labels = run.train_feed.first(2)[:2]
        model._compile_metrics.build(labels, model(inputs, training=False))
    return measure


def _is_untouched(tracker: Any) -> bool:
    """Whether a step of the model's own never told Keras its loss or measure, for which Keras' history then has 0."""
    import keras

    return tracker is not None and float(keras.ops.convert_to_numpy(tracker.count)) == 0.0


def _loss(objective: Any, label_dtype: str) -> Any:
    """The task's loss as Keras wants it: a function of labels and outputs that gives one value an example."""

    def loss(labels: Any, outputs: Any) -> Any:
        import tensorflow as tf

        # Keras gives labels the outputs' type and an axis of their own.
        return objective.losses(outputs, tf.cast(tf.reshape(labels, [-1]), label_dtype))

    return loss


def _epoch(feed: MemoryFeed, epoch: int, kept: int, batch_size: int, steps: int) -> Any:
    """One epoch's batches, in the same order as the project's own loop takes them."""
    import tensorflow as tf

    def batch(step: Any) -> Any:
        start = step * batch_size
        size = tf.minimum(tf.constant(batch_size, tf.int64), kept - start)
        return feed.take(tf.constant(epoch, tf.int64), start, size)

    return tf.data.Dataset.range(steps).map(batch, num_parallel_calls=2, deterministic=True).prefetch(2)
