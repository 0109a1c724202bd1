"""The end of a training: its weights leave the strategy and are exported, with what became of the run beside them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from trainer.atomic import aside
from trainer.errors import WorldFailure
from trainer.export import export_model, reference_examples
from trainer.progress import say
from trainer.registry_files import keep_data
from trainer.run import Run


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


def plain_copy(run: Run) -> Any:
    """The model with ordinary variables: an export must not carry the strategy that trained it.

    Raises:
        WorldFailure: A weight is not a finite number.
    """
    with run.trainer.averaged_weights():
        weights = run.trainer.model.get_weights()
    if not all(np.isfinite(weight).all() for weight in weights):
        raise WorldFailure("a weight is not a finite number after the last step: lower train.learning_rate")
    model = run.build()
    model.set_weights(weights)
    return model
