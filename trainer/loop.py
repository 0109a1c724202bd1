"""fit: from a prepared dataset to an exported model.

    summary = fit(config, seed=7, examples=Path("examples"), folder=Path("model"), checkpoints=Path("checkpoints"))

The host decides when to stop, save and look at the validation; the compiled step (trainer/step.py) does the mathematics.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer import devices
from trainer.checkpoint import Checkpoints, identity
from trainer.cluster import describe
from trainer.config import GroupConfig, TrainConfig
from trainer.consensus import Consensus
from trainer.data.manifest import read_manifest
from trainer.epochs import account, finish_epoch, show
from trainer.finish import finish_run
from trainer.first_batch import check_model
from trainer.group import join_group, lost_peers_named
from trainer.preemption import StopSignals
from trainer.progress import progress, say
from trainer.run import (
    Run,
    announce,
    begin_warm,
    check_replicas,
    check_sizes,
    next_steps,
    preempted,
    prepare_run,
    save,
    seed_everything,
)


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
    with StopSignals() as stop, lost_peers_named(description):
        if description is not None and description.parameter_servers:
            from trainer.parameter_server import fit_asynchronously

            return fit_asynchronously(
                config, seed, examples, folder, checkpoints, mirror, description, group, stop, clock, deliver
            )

        # 1. Who trains, then devices, before anything touches TensorFlow; seeds before any weight is drawn.
        manifest = read_manifest(examples)
        check_sizes(config, manifest)
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


def _run_epoch(run: Run, saver: Checkpoints, bar: Any, stop: StopSignals) -> None:
    """Runs what is left of an epoch, saving and looking at signals on the way."""
    config, state, board = run.config, run.state, run.board
    epoch = state.step // run.steps_per_epoch
    in_epoch = state.step - epoch * run.steps_per_epoch
    iterator, pace = None, run.pace
    if run.train_feed.streams:
        batch = config.global_batch_size
        iterator = run.train_feed.iterator(run.trainer.strategy, batch, epoch, in_epoch * batch, epoch + 1)
    while in_epoch < run.steps_per_epoch:
        # Clocks, signals and a profile's edges differ between workers; what is done about them may not. A worker that made
        # one step more than the others would wait for them in its all-reduce for ever.
        secs, every = config.checkpoint_every_secs, config.checkpoint_every_steps
        chief = run.workers.is_chief
        late = chief and secs is not None and run.clock() - run.saved_at >= secs
        asked, late, num_steps = run.workers.add(
            [float(stop.asked is not None), float(late), float(next_steps(run, in_epoch) if chief else 0)]
        )
        if asked or late:
            save(run, saver)
        if asked:
            saver.wait()
            raise preempted(stop, state)

        num_steps = int(num_steps)
        board.profile(state.step)
        with run.timed("stepping"), pace.measured(num_steps):
            report = run.trainer.train_steps(run.train_feed, iterator, epoch, in_epoch, num_steps, state.skipped_in_row)
        account(run, report, in_epoch, num_steps)
        if not config.eager:
            board.graph(lambda: run.trainer.graph(run.train_feed, iterator))
        in_epoch += num_steps
        show(run, report, num_steps, epoch, pace.seconds, bar)
        if every and state.step % every == 0 and in_epoch < run.steps_per_epoch:
            save(run, saver)
