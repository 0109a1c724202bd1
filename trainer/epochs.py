"""What a training keeps of its steps and epochs: sums, progress, the validation, the best weights and the end."""

import math
from typing import Any

from trainer.checkpoint import State
from trainer.config import TrainConfig
from trainer.errors import WorldFailure
from trainer.objective import Objective, Totals
from trainer.progress import say
from trainer.run import Run
from trainer.step import Report


def advice_against_nan(config: TrainConfig) -> str:
    """What to try when the loss is not finite: the settings that are not at their best for it yet, and the data."""
    steps = ["lower train.learning_rate"]
    if config.loop == "own":
        clips = [key for key in ("clip_value", "clip_norm", "clip_global_norm") if getattr(config, key) is not None]
        steps += [f"lower train.{key} ({getattr(config, key):g})" for key in clips] or ["set train.clip_global_norm"]
    if config.precision != "float32":
        steps.append(f"set train.precision to float32 (it is {config.precision})")
    steps.append(
        "look for extreme values in the data: statistics.json of the prepared dataset has each feature's range"
    )
    if config.loop == "own" and config.nan_policy == "stop" and config.strategy != "parameter_server":
        steps.append("or leave single steps out with train.nan_policy skip_step")
    return ", ".join(steps)


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
    rate = run.trainer.learning_rate(state.step - 1)
    advice = f" (learning rate {rate:.3g}): {advice_against_nan(config)}; the checkpoints before it are kept"
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
        **_means(objective, totals),
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
                f"the validation loss is {found_metrics['loss']} after step {state.step:,}: {advice_against_nan(config)};"
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


def _means(objective: Objective, totals: Totals) -> dict[str, float | None]:
    """The epoch's loss and measure; None for what was not looked at, as by a model with a train step of its own."""
    if not totals.count:
        return {"loss": None, objective.measure: None}
    return {name: None if math.isnan(value) else value for name, value in objective.metrics(totals).items()}


def evaluate(run: Run) -> Totals:
    """Sums over the validation split of the weights that would be exported now."""
    feed, batch = run.validation_feed, run.config.global_batch_size
    iterator = feed.iterator(run.trainer.strategy, batch, 0, 0, 1) if feed.streams else None
    with run.trainer.averaged_weights():
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
