"""Asynchronous training: workers take steps whenever they are free, and the variables live on parameter servers.

    summary = fit_asynchronously(config, seed, examples, folder, checkpoints, mirror, description, group, stop, clock)

The chief schedules every step of an epoch once, by its number; the worker that is free gathers that step's batch from the
split, which it holds in memory. So every example is seen once an epoch whichever worker takes it, and a step whose worker
was lost is given to another. Updates come from weights that are some steps old: the result depends on timing, and there is
no replica invariance here. The learning rate and Adam's corrections follow the number of the step, because the optimizer's
own counter loses updates when several workers write it.
"""

import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from trainer.checkpoint import Checkpoints, identity
from trainer.cluster import ClusterDescription
from trainer.config import GroupConfig, TrainConfig
from trainer.data.manifest import Manifest, read_manifest
from trainer.data.reading import take
from trainer.data.records import parser
from trainer.data.shard_files import shard_paths
from trainer.epochs import account, finish_epoch, show
from trainer.errors import EXIT_PREEMPTED, BadInput, WorldFailure
from trainer.finish import finish_run
from trainer.first_batch import check_model
from trainer.group import join_group
from trainer.optimizer import clip
from trainer.preemption import StopSignals
from trainer.progress import progress, say
from trainer.run import Run, announce, begin_warm, check_sizes, preempted, prepare_run, save, seed_everything
from trainer.step import Report, Totals, Trainer

coordinators: list[Any] = []
"""Those of this process, never let go: the destructor would wait for a lost worker for ever, whenever it is collected."""


def fit_asynchronously(
    config: TrainConfig,
    seed: int,
    examples: Path,
    folder: Path,
    checkpoints: Path,
    mirror: str | None,
    description: ClusterDescription,
    group: GroupConfig,
    stop: StopSignals,
    clock: Callable[[], float],
    deliver: Callable[[Path], None] | None = None,
) -> dict[str, Any]:
    """The part of one process: the chief coordinates and returns what `train.json` holds; the others serve until ended.

    Raises:
        BadInput: The split does not fit into the workers' memory, or a setting does not fit.
        Preempted: SIGTERM came; the chief has saved.
        WorldFailure: A parameter server was lost.
    """
    import tensorflow as tf

    strategy = None
    if description.is_chief:
        manifest = read_manifest(examples)
        check_sizes(config, manifest)
        _check_memory(config, manifest)
        strategy = join_group(config, description, group, stop)
    else:
        join_group(config, description, group, stop, serves=True)
        _serve(description)

    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    coordinators.append(coordinator)
    seed_everything(config, seed)
    # The chief's own copy of the model looks at the validation and is exported.
    run = prepare_run(config, seed, examples, manifest, tf.distribute.get_strategy(), None, clock)
    run.num_replicas = run.num_workers = description.num_workers
    run.deliver = deliver
    check_model(run.trainer, run.train_feed, config, strategy_name="parameter_server")
    announce(run)
    trainer = Trainer(strategy, run.build, config, run.trainer.objective, run.total_steps)
    saver = Checkpoints(
        checkpoints, trainer, identity(config, seed, manifest.digest), config.keep_checkpoints, run.workers, mirror
    )
    with saver:
        run.state = saver.restore() or run.state
        if run.state.step:
            say(f"resuming after step {run.state.step:,} of {run.total_steps:,}")
        elif config.warm_start is not None:
            begin_warm(trainer, config.warm_start)

        schedule = _scheduler(trainer, coordinator, examples, manifest, seed)
        stop.defer()
        run.begin()
        with progress("train-model", total=run.total_steps, unit="step") as bar:
            while run.state.step < run.total_steps and not run.state.finished:
                _run_epoch(run, saver, schedule, bar, stop)
                _copy_weights(trainer, run.trainer)
                finish_epoch(run)
                save(run, saver)
                if stop.asked is not None:
                    saver.wait()
                    raise preempted(stop, run.state)
        run.board.close()
        if config.keep_best is not None and run.validation_feed is not None:
            saver.restore_best(run.state)
            _copy_weights(trainer, run.trainer)
        summary = finish_run(run, seed, folder)
        saver.clear()
        return summary


def _serve(description: ClusterDescription) -> None:
    """Gives this process to the chief. Never returns; SIGTERM ends it."""
    import tensorflow as tf

    cluster = {kind: hosts for kind, hosts in description.to_tf_config()["cluster"].items() if kind != "evaluator"}
    server = tf.distribute.Server(
        tf.train.ClusterSpec(cluster), description.task_type, description.task_index, protocol="grpc"
    )
    # It has nothing to save. A handler of its own, because the first process of a container is deaf to SIGTERM without one.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_PREEMPTED))
    while server:  # server.join() would wait outside Python, where no signal is heard
        time.sleep(3600)


def _check_memory(config: TrainConfig, manifest: Manifest) -> None:
    size = manifest.splits["train"].num_bytes
    if size > config.cache_bytes:
        raise BadInput(
            f"train.strategy = parameter_server: every worker holds the train split in memory; it has {size:,} bytes and"
            f" train.cache_bytes is {config.cache_bytes:,}"
        )


def _scheduler(
    trainer: Trainer, coordinator: Any, examples: Path, manifest: Manifest, seed: int
) -> Callable[[int, int, int], list[np.ndarray]]:
    """A function that schedules steps of an epoch and returns their sums when all are done."""
    import tensorflow as tf

    split = manifest.splits["train"]
    files = shard_paths(examples, manifest, "train")
    batch_size = trainer.config.global_batch_size

    def whole_split() -> Any:
        # One element: the whole split, read once by each worker and handed on without a copy.
        return tf.data.TFRecordDataset(files).batch(split.num_examples).map(parser(manifest)).cache().repeat()

    def share(whole: Any, epoch: Any, start: Any, size: Any, step: Any) -> Any:
        batch = take(whole, split.num_examples, seed, epoch, start, size)
        gradients, sums = trainer._gradients(size, *batch)
        trainer.optimizer.iterations.assign(tf.cast(step, trainer.optimizer.iterations.dtype))
        trainer.optimizer.apply(clip(gradients, trainer.config), trainer.model.trainable_variables)
        return sums

    @tf.function
    def take_step(iterator: Any, epoch: Any, start: Any, size: Any, step: Any) -> Any:
        return trainer.strategy.run(share, args=(next(iterator), epoch, start, size, step))

    iterator = iter(coordinator.create_per_worker_dataset(whole_split))

    def schedule(epoch: int, first: int, last: int) -> list[np.ndarray]:
        steps_per_epoch = math.ceil(split.num_examples / batch_size)
        results = []
        for in_epoch in range(first, last):
            start = in_epoch * batch_size
            size = min(batch_size, split.num_examples - start)
            numbers = (epoch, start, size, epoch * steps_per_epoch + in_epoch)
            arguments = tuple(tf.constant(number, tf.int64) for number in numbers)
            results.append(coordinator.schedule(take_step, args=(iterator, *arguments)))
        try:
            coordinator.join()
        except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
            raise WorldFailure(
                f"the chief lost its peer: a parameter server ({str(error).splitlines()[0]}); start the group again, it"
                " goes on from the newest checkpoint"
            ) from error
        return [np.asarray(result.fetch()) for result in results]

    return schedule


def _run_epoch(run: Run, saver: Checkpoints, schedule: Callable, bar: Any, stop: StopSignals) -> None:
    """Runs what is left of an epoch, in chunks after which nothing is under way."""
    config, state = run.config, run.state
    epoch = state.step // run.steps_per_epoch
    in_epoch = state.step - epoch * run.steps_per_epoch
    while in_epoch < run.steps_per_epoch:
        num_steps = min(max(run.pace.steps, 2 * run.num_workers), run.steps_per_epoch - in_epoch)
        if every := config.checkpoint_every_steps:
            num_steps = min(num_steps, every - state.step % every)
        with run.timed("stepping"), run.pace.measured(num_steps):
            sums = schedule(epoch, in_epoch, in_epoch + num_steps)
        bad = next((place for place, part in enumerate(sums) if not math.isfinite(part[0])), None)
        report = Report(Totals(*sum(sums).tolist()), 0.0, 0, 0, 0, None if bad is None else in_epoch + bad, 0.0)
        account(run, report, in_epoch, num_steps)
        in_epoch += num_steps
        show(run, report, num_steps, epoch, run.pace.seconds, bar)
        secs = config.checkpoint_every_secs
        late = secs is not None and run.clock() - run.saved_at >= secs
        if in_epoch < run.steps_per_epoch:
            if stop.asked is not None or late or (every and state.step % every == 0):
                save(run, saver)
            if stop.asked is not None:
                saver.wait()
                raise preempted(stop, state)


def _copy_weights(source: Trainer, target: Trainer) -> None:
    for mine, theirs in zip(target.model.weights, source.model.weights, strict=True):
        mine.assign(theirs.value.read_value().numpy())
