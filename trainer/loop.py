"""fit: from a prepared dataset to an exported model.

    summary = fit(config, seed=7, examples=Path("examples"), folder=Path("model"), checkpoints=Path("checkpoints"))

The host decides when to stop, save and look at the validation; the compiled step (trainer/step.py) does the mathematics.
"""

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.atomic import aside
from trainer.checkpoint import Checkpoints, State
from trainer.config import TrainConfig
from trainer.data.manifest import Manifest, read_manifest
from trainer.data.reading import open_feed
from trainer.errors import BadInput, Preempted, WorldFailure
from trainer.export import export_model, reference_examples
from trainer.models import build_model
from trainer.objective import Totals, objective_of
from trainer.progress import progress, say
from trainer.registry_files import keep_data
from trainer.spec import spec_of
from trainer.step import Trainer
from trainer.strategy import build_strategy

_SECONDS_PER_LOOP = 0.5  # longest time between two looks at signals and the progress display
_MOST_STEPS_PER_LOOP = 512


def fit(
    config: TrainConfig,
    seed: int,
    examples: Path,
    folder: Path,
    checkpoints: Path,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Trains and exports a model.

    Args:
        config: The train section.
        seed: Seed of the first weights and of every epoch's order.
        examples: A prepared dataset.
        folder: Where the model goes: `saved_model/`, `model.keras`, `history.jsonl`, `train.json`.
        checkpoints: Folder of this training's checkpoints; a training found there goes on. Removed at the end.
        clock: Seconds that only grow.

    Returns:
        What `train.json` holds: steps, epochs, the validation of the exported weights, throughput.

    Raises:
        BadInput: Something in the configuration does not fit the data or the devices.
        Preempted: SIGTERM or Ctrl-C came; a checkpoint was saved.
        WorldFailure: A damaged shard, a full disk, a loss that is not finite.
    """
    import keras

    manifest = read_manifest(examples)
    _check_sizes(config, manifest)

    # 1. Devices before anything touches TensorFlow, seeds before any weight is drawn.
    strategy = build_strategy(config)
    keras.utils.set_random_seed(seed)
    _check_replicas(config, strategy.num_replicas_in_sync)

    # 2. Data and model.
    train_feed = open_feed(examples, manifest, "train", seed=seed, config=config, shuffle=True)
    validation_feed = None
    if "validation" in manifest.splits:
        validation_feed = open_feed(examples, manifest, "validation", seed=seed, config=config, shuffle=False)
    steps_per_epoch = math.ceil(train_feed.num_examples / config.global_batch_size)
    total_steps = steps_per_epoch * config.epochs

    spec = spec_of(manifest, examples, config.augmentation)

    def build() -> Any:
        return build_model(config, spec)

    trainer = Trainer(strategy, build, config, objective_of(spec, config), total_steps)
    say(
        f"training {config.model} with {trainer.model.count_params():,} parameters on {train_feed.num_examples:,} examples:"
        f" {config.epochs} epochs of {steps_per_epoch} steps, batch {config.global_batch_size} over"
        f" {strategy.num_replicas_in_sync} replica(s), strategy {config.strategy}"
    )

    # 3. Where an earlier try stopped.
    saver = Checkpoints(checkpoints, trainer, _identity(config, seed, manifest), config.keep_checkpoints)
    state = saver.restore() or State()
    if state.step:
        say(f"resuming after step {state.step:,} of {total_steps:,}")

    # 4. Epoch by epoch, until all are done or the validation no longer improves.
    started, first_step = clock(), state.step
    with _stop_signals() as stop, progress("train-model", total=total_steps, unit="step") as bar:
        pace = _Pace(config, clock)
        while state.step < total_steps and not state.finished:
            epoch = state.step // steps_per_epoch
            _run_epoch(trainer, train_feed, state, epoch, steps_per_epoch, config, saver, bar, pace, stop)
            _finish_epoch(trainer, train_feed, validation_feed, state, epoch, config, clock() - started)
            saver.save(state)  # after the bookkeeping, so that a resumed run does not do it twice
            _stop_if_asked(stop, state)
    seconds = clock() - started

    # 5. The best weights, then the averages if they are what is wanted, leave the strategy and are exported.
    if config.keep_best is not None and validation_feed is not None:
        saver.restore_best(state)
    summary = {
        "steps": state.step,
        "epochs": state.step // steps_per_epoch,
        "best_epoch": state.best_step // steps_per_epoch if state.best_step else None,
        "resumed_after_step": first_step or None,
        "num_replicas": strategy.num_replicas_in_sync,
        "num_parameters": trainer.model.count_params(),
        "seconds": round(seconds, 3),
        "examples_per_second": round(
            sum(row["num_examples"] for row in state.history if row["step"] > first_step) / seconds
        )
        if state.step > first_step
        else None,
        "data_digest": manifest.digest,
        "train": json.loads(config.to_json()),
        "seed": seed,
    }
    with aside(folder) as partial:
        reference = reference_examples(examples, manifest)
        exported = export_model(_plain_copy(trainer, build), manifest, reference, partial)
        summary["model_digest"] = exported["digest"]
        keep_data(examples, partial)
        history = "".join(json.dumps(row) + "\n" for row in state.history)
        (partial / "history.jsonl").write_text(history, encoding="utf-8")
        (partial / "train.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    saver.clear()
    return summary


def _run_epoch(
    trainer: Trainer,
    feed: Any,
    state: State,
    epoch: int,
    steps_per_epoch: int,
    config: TrainConfig,
    saver: Checkpoints,
    bar: Any,
    pace: "_Pace",
    stop: dict,
) -> None:
    """Runs what is left of an epoch, saving and looking at signals on the way."""
    in_epoch = state.step - epoch * steps_per_epoch
    iterator = None
    if feed.streams:
        batch = config.global_batch_size
        iterator = feed.iterator(trainer.strategy, batch, epoch, in_epoch * batch, epoch + 1)
    while in_epoch < steps_per_epoch:
        num_steps = min(pace.steps(), steps_per_epoch - in_epoch)
        if every := config.checkpoint_every_steps:
            num_steps = min(num_steps, every - state.step % every)
        with pace.measured(num_steps):
            totals = trainer.train_steps(feed, iterator, epoch, in_epoch, num_steps)
        state.epoch_totals = [a + b for a, b in zip(state.epoch_totals, totals, strict=True)]
        state.step += num_steps
        in_epoch += num_steps
        loss = totals.loss / totals.count
        if not math.isfinite(loss):
            raise WorldFailure(
                f"the loss became {loss} between steps {state.step - num_steps:,} and {state.step:,}"
                f" (learning rate {trainer.learning_rate(state.step - 1):.3g}): lower train.learning_rate or set"
                " train.clip_global_norm; the checkpoints before it are kept"
            )
        rate = totals.count / pace.seconds if pace.seconds else 0.0
        bar.update(state.step, f"epoch {epoch + 1}/{config.epochs} · loss {loss:.4f} · {rate:,.0f} examples/s")
        if every and state.step % every == 0 and in_epoch < steps_per_epoch:
            saver.save(state)
        if stop and in_epoch < steps_per_epoch:
            saver.save(state)
            _stop_if_asked(stop, state)


def _finish_epoch(
    trainer: Trainer, train_feed: Any, feed: Any, state: State, epoch: int, config: TrainConfig, seconds: float
) -> None:
    """Looks at the validation, writes the epoch's row, and decides about the best weights and the end."""
    totals = Totals(*state.epoch_totals)
    assert totals.count == train_feed.num_examples, f"an epoch saw {totals.count} of {train_feed.num_examples} examples"
    row: dict[str, Any] = {
        "epoch": epoch + 1,
        "step": state.step,
        "num_examples": int(totals.count),
        **trainer.objective.metrics(totals),
        "learning_rate": trainer.learning_rate(state.step - 1),
        "seconds": round(seconds, 3),
    }
    if feed is not None:
        found = _evaluate(trainer, feed, config)
        assert found.count == feed.num_examples, f"the validation saw {found.count} of {feed.num_examples} examples"
        row |= {f"validation_{name}": value for name, value in trainer.objective.metrics(found).items()}
        _judge_epoch(state, row, config)
    state.history.append(row)
    state.epoch_totals = [0.0, 0.0, 0.0]
    validation = ""
    if feed is not None:
        measure = trainer.objective.measure
        validation = f", validation loss {row['validation_loss']:.4f}, {measure} {row[f'validation_{measure}']:.4f}"
    say(f"epoch {epoch + 1}/{config.epochs}: loss {row['loss']:.4f}{validation}")


def _evaluate(trainer: Trainer, feed: Any, config: TrainConfig) -> Totals:
    iterator = feed.iterator(trainer.strategy, config.global_batch_size, 0, 0, 1) if feed.streams else None
    with averaged_weights(trainer):
        return trainer.evaluate(feed, iterator, math.ceil(feed.num_examples / config.global_batch_size))


def _judge_epoch(state: State, row: dict, config: TrainConfig) -> None:
    stopping = config.early_stopping
    metric = config.keep_best or (stopping.metric if stopping else None)
    if metric is None:
        return
    value = row[f"validation_{metric}"]
    gain = 0.0 if state.best_value is None else (state.best_value - value) * (-1 if metric == "accuracy" else 1)
    if state.best_value is None or gain > (stopping.min_delta if stopping else 0.0):
        state.best_value, state.best_step, state.epochs_without_improvement = value, row["step"], 0
        return
    state.epochs_without_improvement += 1
    if stopping and state.epochs_without_improvement >= stopping.patience_epochs:
        say(f"validation {metric} has not improved for {stopping.patience_epochs} epochs: stopping")
        state.finished = True


@contextmanager
def averaged_weights(trainer: Trainer) -> Iterator[None]:
    """The averaged weights take the place of the trained ones while the block runs, where averages are kept."""
    variables = trainer.model.trainable_variables if trainer.averages else []
    trained = [variable.numpy() for variable in variables]
    for variable, average in zip(variables, trainer.averages, strict=True):
        variable.assign(average.numpy())
    try:
        yield
    finally:
        for variable, value in zip(variables, trained, strict=True):
            variable.assign(value)


def _plain_copy(trainer: Trainer, build: Callable[[], Any]) -> Any:
    """The model with ordinary variables: an export must not carry the strategy that trained it."""
    with averaged_weights(trainer):
        weights = trainer.model.get_weights()
    model = build()
    model.set_weights(weights)
    return model


class _Pace:
    """How many steps one call of the compiled loop runs: about half a second's worth."""

    def __init__(self, config: TrainConfig, clock: Callable[[], float]) -> None:
        self._fixed, self._clock = config.steps_per_loop, clock
        self._steps, self._calls = 8, 0
        self.seconds = 0.0

    def steps(self) -> int:
        return self._fixed or self._steps

    @contextmanager
    def measured(self, num_steps: int) -> Iterator[None]:
        started = self._clock()
        yield
        self.seconds = self._clock() - started
        self._calls += 1
        if self._calls > 1:  # the first call compiles
            wanted = _SECONDS_PER_LOOP * num_steps / max(self.seconds, 1e-6)
            self._steps = int(min(max(1, wanted), self._steps * 4, _MOST_STEPS_PER_LOOP))


@contextmanager
def _stop_signals() -> Iterator[dict]:
    """Collects SIGTERM and SIGINT as `{"signal": name}` while the block runs; a second one ends the process at once."""
    asked: dict[str, str] = {}

    def ask(number: int, _: Any) -> None:
        if asked:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        asked["signal"] = signal.Signals(number).name

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop_if_asked(stop: dict, state: State) -> None:
    if stop:
        raise Preempted(f"{stop['signal']} after step {state.step:,}: saved; the next run goes on from there")


def _identity(config: TrainConfig, seed: int, manifest: Manifest) -> dict[str, Any]:
    """What decides the weights. How often is saved, how many are kept and where it runs do not."""
    without = {
        "checkpoint_every_steps", "keep_checkpoints", "steps_per_loop", "strategy", "num_virtual_devices",
    }  # fmt: skip
    fields = {f"train.{key}": value for key, value in config.model_dump(mode="json").items() if key not in without}
    return {**fields, "seed": seed, "the prepared data": manifest.digest}


def _check_sizes(config: TrainConfig, manifest: Manifest) -> None:
    have = manifest.splits["train"].num_examples
    if config.global_batch_size > have:
        raise BadInput(f"train.global_batch_size = {config.global_batch_size}: the train split has {have:,} examples")
    if "validation" not in manifest.splits:
        if config.early_stopping is not None:
            raise BadInput("train.early_stopping: there is no validation split to watch; set data.splits.validation")
        if config.keep_best is not None:
            say("there is no validation split: the weights of the last epoch are exported")


def _check_replicas(config: TrainConfig, num_replicas: int) -> None:
    if config.global_batch_size < num_replicas:
        raise BadInput(
            f"train.global_batch_size = {config.global_batch_size}: {num_replicas} replicas need at least one example each"
        )
