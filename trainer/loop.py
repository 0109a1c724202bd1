"""fit: from a prepared dataset to an exported model.

    summary = fit(config, seed=7, examples=Path("examples"), folder=Path("model"), checkpoints=Path("checkpoints"))

The host decides when to stop, save and look at the validation; the compiled step (trainer/step.py) does the mathematics.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainer import devices
from trainer.atomic import aside
from trainer.checkpoint import Checkpoints, State, identity
from trainer.cluster import ClusterDescription, configure_collective_timeouts, describe, explain_lost_peer
from trainer.config import GroupConfig, TrainConfig, WarmStart
from trainer.consensus import Consensus
from trainer.data.manifest import Manifest, read_manifest
from trainer.data.reading import open_feed
from trainer.errors import BadInput, Preempted, TriremeError, WorldFailure
from trainer.export import export_model, reference_examples
from trainer.first_batch import check_model
from trainer.models import build_model
from trainer.objective import Totals, objective_of
from trainer.optimizer import scaled_learning_rate
from trainer.pace import Pace
from trainer.preemption import StopSignals
from trainer.progress import be_quiet, progress, say
from trainer.registry_files import keep_data
from trainer.rendezvous import wait_for_peers
from trainer.spec import spec_of
from trainer.step import Report, Trainer
from trainer.strategy import build_strategy, chosen_strategy
from trainer.tensorboard import Board
from trainer.warm_start import warm_start


def fit(
    config: TrainConfig,
    seed: int,
    examples: Path,
    folder: Path,
    checkpoints: Path,
    group: GroupConfig | None = None,
    mirror: str | None = None,
    clock: Callable[[], float] = time.monotonic,
    deliver: Callable[[Path], None] | None = None,
) -> dict[str, Any]:
    """Trains and exports a model. Every process of a group calls it; the environment says who it is.

    Args:
        config: The train section.
        seed: Seed of the first weights and of every epoch's order.
        examples: A prepared dataset.
        folder: Where the chief puts the model: `saved_model/`, `model.keras`, `history.jsonl`, `train.json`.
        checkpoints: Folder of this training's checkpoints, which all workers share; a training found there goes on.
            Removed at the end.
        group: How patient the processes are with one another.
        mirror: Prefix of object storage that checkpoints are copied to, and found again on another machine.
        clock: Seconds that only grow.
        deliver: Called by the chief with the finished model's folder while the checkpoints are still there: whatever ends
            it, the training is not lost.

    Returns:
        What `train.json` holds: steps, epochs, the validation of the exported weights, throughput.

    Raises:
        BadInput: Something in the configuration does not fit the data, the model, the devices or the cluster.
        Preempted: SIGTERM or Ctrl-C came; a checkpoint was saved.
        WorldFailure: A damaged shard, a full disk, a lost peer, a loss that is not finite.
    """
    description = describe(os.environ)
    group = group or GroupConfig()
    with StopSignals() as stop, _explained(description):
        if description is not None and description.parameter_servers:
            from trainer.parameter_server import fit_asynchronously

            return fit_asynchronously(
                config, seed, examples, folder, checkpoints, mirror, description, group, stop, clock, deliver
            )

        # 1. Who trains, then devices, before anything touches TensorFlow; seeds before any weight is drawn.
        manifest = read_manifest(examples)
        check_sizes(config, manifest)
        check_memory(config, manifest, description)
        strategy = join_group(config, description, group, stop)
        workers = Consensus(strategy, description)
        seed_everything(config, seed)
        check_replicas(config, strategy.num_replicas_in_sync)
        found = devices.look()
        devices.check(found, strategy.num_replicas_in_sync // (description.num_workers if description else 1))
        for line in devices.describe(found):
            say(line)

        # 2. Data and model, tried on one batch.
        run = prepare_run(config, seed, examples, manifest, strategy, workers, clock)
        run.deliver = deliver
        check_model(run.trainer, run.train_feed, config, strategy_name=config.strategy)
        announce(run)
        if config.loop == "keras_fit":
            from trainer.keras_fit import fit_with_keras

            return fit_with_keras(run, seed, folder, checkpoints, mirror, stop)

        # 3. Where an earlier try stopped.
        saver = Checkpoints(
            checkpoints, run.trainer, identity(config, seed, manifest.digest), config.keep_checkpoints, workers, mirror
        )
        with saver:
            run.state = saver.restore() or run.state
            if run.state.step:
                say(f"resuming after step {run.state.step:,} of {run.total_steps:,}")
            elif config.warm_start is not None:
                begin_warm(run.trainer, config.warm_start)

            # 4. Epoch by epoch, until all are done or the validation no longer improves.
            stop.defer()
            run.begin()
            with progress("train-model", total=run.total_steps, unit="step") as bar:
                while run.state.step < run.total_steps and not run.state.finished:
                    _run_epoch(run, saver, bar, stop)
                    finish_epoch(run)
                    save(run, saver)  # after the bookkeeping, so that a resumed run does not do it twice
                    if workers.add([float(stop.asked is not None)])[0]:
                        saver.wait()
                        raise preempted(stop, run.state)
            run.board.close()

            # 5. The best weights, then the averages if they are what is wanted, leave the strategy and are exported.
            if config.keep_best is not None and run.validation_feed is not None:
                saver.restore_best(run.state)
            summary = finish_run(run, seed, folder)
            workers.wait()  # the chief has written the model; only now may anybody leave
            if workers.is_chief:
                saver.clear()
        return summary


@dataclass
class Run:
    """A training under way: what it works on, how far it is, and where its time went."""

    config: TrainConfig
    examples: Path
    """The prepared dataset's folder."""
    manifest: Manifest
    trainer: Trainer
    build: Callable[[], Any]
    """Makes the model anew."""
    train_feed: Any
    validation_feed: Any
    workers: Consensus
    board: Board
    clock: Callable[[], float]
    pace: Pace
    steps_per_epoch: int
    total_steps: int
    num_replicas: int
    num_workers: int
    state: State = field(default_factory=State)
    seconds: dict[str, float] = field(
        default_factory=lambda: {"stepping": 0.0, "waiting_for_input": 0.0, "validating": 0.0, "saving": 0.0}
    )
    """Where the time went; `waiting_for_input` is part of `stepping`."""
    started: float = 0.0
    first_step: int = 0
    """Step at which this try began."""
    num_examples: int = 0
    """Examples that this try has trained on."""
    saved_at: float = 0.0
    deliver: Callable[[Path], None] | None = None
    """What the chief does with the finished model's folder."""

    def begin(self) -> None:
        """The long work begins."""
        self.started = self.saved_at = self.clock()
        self.first_step = self.state.step

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Adds the block's time to a kind of `seconds`."""
        began = self.clock()
        yield
        self.seconds[kind] += self.clock() - began


def join_group(
    config: TrainConfig,
    description: ClusterDescription | None,
    group: GroupConfig,
    stop: StopSignals,
    *,
    serves: bool = False,
) -> Any:
    """The strategy, once all processes that it needs are there; None for a process that serves a chief."""
    if description is not None:
        chosen_strategy(config, 0, description)  # a strategy that does not fit is refused before anybody is waited for
        if not description.is_chief:
            be_quiet()
        wait_for_peers(description, group.start_timeout_secs, report=say)
        configure_collective_timeouts(description)
    if serves:
        return None
    strategy = build_strategy(config, description)
    stop.take_back()
    return strategy


def seed_everything(config: TrainConfig, seed: int) -> None:
    """Seeds Python, numpy, TensorFlow and Keras, and asks for deterministic operations where they are wanted."""
    import keras
    import tensorflow as tf

    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(seed)


def prepare_run(
    config: TrainConfig,
    seed: int,
    examples: Path,
    manifest: Manifest,
    strategy: Any,
    workers: Consensus | None,
    clock: Callable[[], float],
) -> Run:
    """Data, model and optimizer, ready to train."""
    train_feed = open_feed(examples, manifest, "train", seed=seed, config=config, shuffle=True)
    validation_feed = None
    if "validation" in manifest.splits:
        validation_feed = open_feed(examples, manifest, "validation", seed=seed, config=config, shuffle=False)
    steps_per_epoch = math.ceil(train_feed.num_examples / config.global_batch_size)
    total_steps = steps_per_epoch * config.epochs

    spec = spec_of(manifest, examples, config.augmentation)

    def build() -> Any:
        return build_model(config, spec)

    workers = workers or Consensus(strategy, None)
    return Run(
        config=config,
        examples=examples,
        manifest=manifest,
        trainer=Trainer(strategy, build, config, objective_of(spec, config), total_steps),
        build=build,
        train_feed=train_feed,
        validation_feed=validation_feed,
        workers=workers,
        board=Board(config.tensorboard_dir if workers.is_chief else None, config.profile_steps),
        clock=clock,
        pace=Pace(config.steps_per_loop, clock),
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        num_replicas=strategy.num_replicas_in_sync,
        num_workers=workers.num_workers,
    )


def announce(run: Run) -> None:
    """Says what is about to be trained, and what was derived."""
    config, replicas = run.config, run.num_replicas
    say(
        f"training {config.model} with {run.trainer.model.count_params():,} parameters on"
        f" {run.train_feed.num_examples:,} examples: {config.epochs} epochs of {run.steps_per_epoch} steps, batch"
        f" {config.global_batch_size} over {replicas} replica(s) on {run.num_workers} worker(s), strategy"
        f" {config.strategy}"
    )
    if (rate := scaled_learning_rate(config)) != config.learning_rate:
        say(
            f"learning rate {config.learning_rate:g} for a batch of {config.base_batch_size} becomes {rate:g} for"
            f" {config.global_batch_size} ({config.learning_rate_scaling} scaling)"
        )


def begin_warm(trainer: Trainer, config: WarmStart) -> None:
    """Puts an earlier training's weights into the model, and the averages with them."""
    say(
        f"warm start: {warm_start(trainer.model, config)} of {len(trainer.model.weights)} weights are those of {config.source}"
    )
    trainer.restart_averages()


def _run_epoch(run: Run, saver: Checkpoints, bar: Any, stop: StopSignals) -> None:
    """Runs what is left of an epoch, saving and looking at signals on the way."""
    config, state, board = run.config, run.state, run.board
    epoch = state.step // run.steps_per_epoch
    in_epoch = state.step - epoch * run.steps_per_epoch
    iterator, pace = None, run.pace
    if run.train_feed.streams:
        batch = config.global_batch_size
        iterator = run.train_feed.iterator(run.trainer.strategy, batch, epoch, in_epoch * batch, epoch + 1)
    stopped, steps = False, pace.steps
    while in_epoch < run.steps_per_epoch:
        num_steps = min(steps, run.steps_per_epoch - in_epoch)
        if every := config.checkpoint_every_steps:
            num_steps = min(num_steps, every - state.step % every)
        if (edge := board.steps_until_profile(state.step)) is not None:
            num_steps = min(num_steps, edge)
        board.profile(state.step)
        with run.timed("stepping"), pace.measured(num_steps):
            report = run.trainer.train_steps(run.train_feed, iterator, epoch, in_epoch, num_steps, state.skipped_in_row)
        account(run, report, in_epoch, num_steps)
        if (
            not config.eager and run.num_workers == 1
        ):  # a trace of the chief's alone would give its collectives other keys
            board.graph(lambda: run.trainer.graph(run.train_feed, iterator))
        in_epoch += num_steps
        show(run, report, num_steps, epoch, pace.seconds, bar)

        # What clocks and signals say differs between workers; what is done about it may not.
        secs = config.checkpoint_every_secs
        due = secs is not None and run.clock() - run.saved_at >= secs
        chief = run.workers.is_chief
        asked, late, next_steps = run.workers.add(
            [float(stop.asked is not None), float(chief and due), float(pace.steps if chief else 0)]
        )
        stopped, steps = asked > 0, int(next_steps)
        if in_epoch < run.steps_per_epoch:
            if stopped or late or (every and state.step % every == 0):
                save(run, saver)
            if stopped:
                saver.wait()
                raise preempted(stop, state)


def account(run: Run, report: Report, in_epoch: int, num_steps: int) -> None:
    """Books what the steps gave, and stops the training where it went wrong."""
    state, config = run.state, run.config
    first = state.step
    sums = [*report.totals, report.left_out]
    state.epoch_totals = [a + b for a, b in zip(state.epoch_totals, sums, strict=True)]
    state.step += num_steps
    state.skipped_steps += report.skipped
    state.skipped_in_row = report.skipped_in_row
    run.num_examples += int(report.totals.count + report.left_out)
    run.seconds["waiting_for_input"] += report.input_wait_secs
    advice = (
        f" (learning rate {run.trainer.learning_rate(state.step - 1):.3g}): lower train.learning_rate or set"
        " train.clip_global_norm; the checkpoints before it are kept"
    )
    if config.nan_policy == "stop" and report.first_bad_step is not None:
        step = first + report.first_bad_step - in_epoch + 1
        raise WorldFailure(f"the loss or its gradient is not a finite number at step {step:,}{advice}")
    if config.nan_policy == "skip_step" and report.skipped:
        say(f"warning: {report.skipped} step(s) up to step {state.step:,} were not finite and were left out")
        if report.most_skipped_in_row > config.max_skipped_steps:
            raise WorldFailure(
                f"{report.most_skipped_in_row} steps in a row up to step {state.step:,} were not finite"
                f" (train.max_skipped_steps = {config.max_skipped_steps}){advice}"
            )


def show(run: Run, report: Report, num_steps: int, epoch: int, seconds: float, bar: Any) -> None:
    """One line of progress, and one point of each curve."""
    state, totals = run.state, report.totals
    learning_rate = run.trainer.learning_rate(state.step - 1)
    loss = totals.loss / max(1.0, totals.count)
    rate = (totals.count + report.left_out) / seconds if seconds else 0.0
    waiting = (
        f" · waiting for input {report.input_wait_secs / seconds:.0%}" if run.train_feed.streams and seconds else ""
    )
    bar.update(
        state.step,
        f"epoch {epoch + 1}/{run.config.epochs} · loss {loss:.4f} · learning rate {learning_rate:.3g} ·"
        f" {rate:,.0f} examples/s · {1000 * seconds / num_steps:.3g} ms/step{waiting} ·"
        f" {(run.total_steps - state.step) * seconds / num_steps:,.0f} s left",
    )
    curves = {"loss": loss, "learning_rate": learning_rate, "examples_per_second": rate}
    if run.trainer.loss_scale is not None:
        curves["loss_scale"] = float(run.trainer.loss_scale.variables.numpy()[0])
    run.board.scalars(state.step, {f"train/{key}": value for key, value in curves.items()})


def finish_epoch(run: Run) -> None:
    """Looks at the validation, writes the epoch's row, and decides about the best weights and the end."""
    state, config = run.state, run.config
    *sums, left_out = state.epoch_totals
    totals, have = Totals(*sums), run.train_feed.num_examples
    assert totals.count + left_out == have, f"an epoch saw {totals.count + left_out} of {have} examples"
    objective = run.trainer.objective
    epoch = state.step // run.steps_per_epoch
    row: dict[str, Any] = {
        "epoch": epoch,
        "step": state.step,
        "num_examples": have,
        **(objective.metrics(totals) if totals.count else {"loss": None, objective.measure: None}),
        "learning_rate": run.trainer.learning_rate(state.step - 1),
        "seconds": round(run.clock() - run.started, 3),
    }
    shown = ""
    if run.validation_feed is not None:
        with run.timed("validating"):
            found = evaluate(run)
        found_metrics = objective.metrics(found)
        row |= {f"validation_{name}": value for name, value in found_metrics.items()}
        if not math.isfinite(found_metrics["loss"]):
            raise WorldFailure(
                f"the validation loss is {found_metrics['loss']} after step {state.step:,}: lower train.learning_rate;"
                " the checkpoints before it are kept"
            )
        _judge_epoch(state, row, config)
        shown = "".join(f", validation {name} {value:.4f}" for name, value in found_metrics.items())
    state.history.append(row)
    state.epoch_totals = [0.0] * 4
    curves = {f"epoch/{key}": value for key, value in row.items() if isinstance(value, float)}
    run.board.scalars(state.step, curves)
    run.board.flush()
    loss = "not a number" if row["loss"] is None else format(row["loss"], ".4f")
    say(f"epoch {epoch}/{config.epochs}: loss {loss}{shown}")


def evaluate(run: Run) -> Totals:
    """Sums over the validation split of the weights that would be exported now."""
    feed, batch = run.validation_feed, run.config.global_batch_size
    iterator = feed.iterator(run.trainer.strategy, batch, 0, 0, 1) if feed.streams else None
    with averaged_weights(run.trainer):
        found = run.trainer.evaluate(feed, iterator, math.ceil(feed.num_examples / batch))
    assert found.count == feed.num_examples, f"the validation saw {found.count} of {feed.num_examples} examples"
    return found


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


def save(run: Run, saver: Checkpoints) -> None:
    """Saves a checkpoint and books the time."""
    with run.timed("saving"):
        saver.save(run.state)
    run.saved_at = run.clock()


def finish_run(run: Run, seed: int, folder: Path) -> dict[str, Any]:
    """Exports the model and writes what became of the training; returns the latter."""
    state, replicas = run.state, run.num_replicas
    seconds = run.clock() - run.started
    model = plain_copy(run)
    rate = run.num_examples / seconds if run.num_examples and seconds else None
    summary = {
        "steps": state.step,
        "epochs": state.step // run.steps_per_epoch,
        "best_epoch": state.best_step // run.steps_per_epoch if state.best_step else None,
        "resumed_after_step": run.first_step or None,
        "skipped_steps": state.skipped_steps,
        "num_replicas": replicas,
        "num_workers": run.num_workers,
        "num_parameters": model.count_params(),
        "seconds": round(seconds, 3),
        "seconds_by_kind": {kind: round(value, 3) for kind, value in run.seconds.items()},
        "examples_per_second": round(rate) if rate else None,
        "examples_per_second_per_replica": round(rate / replicas) if rate else None,
        "data_digest": run.manifest.digest,
        "train": json.loads(run.config.to_json()),
        "seed": seed,
    }
    if run.workers.is_chief:
        with aside(folder) as partial:
            reference = reference_examples(run.examples, run.manifest)
            summary["model_digest"] = export_model(model, run.manifest, reference, partial)["digest"]
            keep_data(run.examples, partial)
            history = "".join(json.dumps(row) + "\n" for row in state.history)
            (partial / "history.jsonl").write_text(history, encoding="utf-8")
            (partial / "train.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        if run.deliver is not None:
            run.deliver(folder)
    if rate and seconds:
        shares = ", ".join(f"{kind.replace('_', ' ')} {value / seconds:.0%}" for kind, value in run.seconds.items())
        say(
            f"{replicas} replica(s) on {run.num_workers} worker(s): {rate:,.0f} examples/s,"
            f" {rate / replicas:,.0f} a replica; time: {shares}"
        )
    return summary


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


def plain_copy(run: Run) -> Any:
    """The model with ordinary variables: an export must not carry the strategy that trained it.

    Raises:
        WorldFailure: A weight is not a finite number.
    """
    with averaged_weights(run.trainer):
        weights = run.trainer.model.get_weights()
    if not all(np.isfinite(weight).all() for weight in weights):
        raise WorldFailure("a weight is not a finite number after the last step: lower train.learning_rate")
    model = run.build()
    model.set_weights(weights)
    return model


@contextmanager
def _explained(description: ClusterDescription | None) -> Iterator[None]:
    """TensorFlow's report of a broken collective becomes one sentence with the lost worker's name."""
    try:
        yield
    except TriremeError:
        raise
    except Exception as error:
        explained = explain_lost_peer(error, description) if description is not None else None
        if explained is None:
            raise
        raise explained from error


def preempted(stop: StopSignals, state: State) -> Preempted:
    """What to raise after the state was saved."""
    who = stop.asked or "another worker's SIGTERM"
    return Preempted(f"{who} after step {state.step:,}: saved; the next run goes on from there")


def check_sizes(config: TrainConfig, manifest: Manifest) -> None:
    """Refuses a batch that the split cannot fill, and settings that need a validation split where there is none."""
    have = manifest.splits["train"].num_examples
    if config.global_batch_size > have:
        raise BadInput(f"train.global_batch_size = {config.global_batch_size}: the train split has {have:,} examples")
    if "validation" not in manifest.splits:
        if config.early_stopping is not None:
            raise BadInput("train.early_stopping: there is no validation split to watch; set data.splits.validation")
        if config.keep_best is not None:
            say("there is no validation split: the weights of the last epoch are exported")


def check_memory(config: TrainConfig, manifest: Manifest, description: ClusterDescription | None) -> None:
    """Refuses a streamed split over several workers, which was seen to wait for ever (docs/decisions/0009)."""
    if description is None or description.num_workers < 2:
        return
    for name in ("train", "validation"):
        split = manifest.splits.get(name)
        if split is not None and split.num_bytes > config.cache_bytes:
            raise BadInput(
                f"train.cache_bytes = {config.cache_bytes:,}: several workers hold each split in memory, and {name} has"
                f" {split.num_bytes:,} bytes"
            )


def check_replicas(config: TrainConfig, num_replicas: int) -> None:
    """Refuses more replicas than examples in a step."""
    if config.global_batch_size < num_replicas:
        raise BadInput(
            f"train.global_batch_size = {config.global_batch_size}: {num_replicas} replicas need at least one example each"
        )
