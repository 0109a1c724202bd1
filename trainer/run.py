"""A training under way: data, model and optimizer made ready, how far it is, and where its time went.

run = prepare_run(config, seed, examples, manifest, strategy, workers, clock)
announce(run)
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.checkpoint import Checkpoints, State
from trainer.config import TrainConfig, WarmStart
from trainer.consensus import Consensus
from trainer.data.manifest import Manifest
from trainer.data.reading import open_feed
from trainer.errors import BadInput, Preempted
from trainer.models import build_model
from trainer.objective import objective_of
from trainer.optimizer import scaled_learning_rate
from trainer.pace import Pace
from trainer.preemption import StopSignals
from trainer.progress import say
from trainer.spec import spec_of
from trainer.step import Trainer
from trainer.tensorboard import Board
from trainer.warm_start import warm_start


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


def check_replicas(config: TrainConfig, num_replicas: int) -> None:
    """Refuses more replicas than examples in a step."""
    if config.global_batch_size < num_replicas:
        raise BadInput(
            f"train.global_batch_size = {config.global_batch_size}: {num_replicas} replicas need at least one example each"
        )


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


def next_steps(run: Run, in_epoch: int) -> int:
    """How many steps the next call of the compiled loop makes, as far as this process knows."""
    steps = min(run.pace.steps, run.steps_per_epoch - in_epoch)
    if every := run.config.checkpoint_every_steps:
        steps = min(steps, every - run.state.step % every)
    edge = run.board.steps_until_profile(run.state.step)
    return steps if edge is None else min(steps, edge)


def save(run: Run, saver: Checkpoints) -> None:
    """Saves a checkpoint and books the time."""
    with run.timed("saving"):
        saver.save(run.state)
    run.saved_at = run.clock()


def preempted(stop: StopSignals, state: State) -> Preempted:
    """What to raise after the state was saved."""
    who = stop.asked or "another worker's SIGTERM"
    return Preempted(f"{who} after step {state.step:,}: saved; the next run goes on from there")
