"""One training as a group of processes on this machine.

    summary = train_as_group(config, seed, examples, folder, checkpoints, group)

The same as `trainer.loop.fit`, which every process of the group calls with TF_CONFIG set. The chief's lines are handed on
as they are, the others' with their names; each process's whole output is in a file of its own.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from trainer.config import GroupConfig, TrainConfig
from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_PREEMPTED, BadInput, Preempted, WorldFailure
from trainer.launch import GroupResult
from trainer.launch.local import run_group
from trainer.progress import say


def train_as_group(
    config: TrainConfig,
    seed: int,
    examples: Path,
    folder: Path,
    checkpoints: Path,
    group: GroupConfig,
    mirror: str | None = None,
) -> dict[str, Any]:
    """Trains with as many processes as the group says and returns what `train.json` holds.

    Args:
        config: The train section.
        seed: Seed of the first weights and of every epoch's order.
        examples: A prepared dataset.
        folder: Where the chief puts the model; logs go beside it, into `<folder>.logs`.
        checkpoints: Folder of this training's checkpoints.
        group: How many processes, and how patient they are.
        mirror: Prefix of object storage that checkpoints are copied to.

    Raises:
        BadInput, Preempted, WorldFailure: As the process that failed first said.
    """
    chief = "chief" if group.num_parameter_servers else "worker 0"
    logs = folder.with_name(folder.name + ".logs")

    def emit(source: str, line: str) -> None:
        if source == "launcher":  # restarts, which a person should see and not only find in the log
            say(line)
        else:
            print(line if source == chief else f"{source}: {line}", flush=True)

    say(
        f"starting {group.num_workers} workers"
        + (f", {group.num_parameter_servers} parameter server(s) and a chief" if group.num_parameter_servers else "")
        + f" on this machine; logs are in {logs}"
    )
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "training.json"  # JSON is YAML, so it is a configuration file
        sections = {"seed": seed, "train": config.model_dump(mode="json"), "cluster": group.model_dump(mode="json")}
        file.write_text(json.dumps(sections), encoding="utf-8")
        result = run_group(
            [
                *(sys.executable, "-m", "trainer", "train", str(file)),
                *("--examples", str(examples), "--output", str(folder), "--checkpoints", str(checkpoints)),
                *(("--mirror", mirror) if mirror else ()),
            ],
            group.num_workers,
            group.num_parameter_servers,
            max_restarts=group.max_restarts,
            grace_period_secs=group.grace_period_secs,
            log_folder=logs,
            emit=emit,
        )
    if result.exit_code != EXIT_DONE:
        raise _failure(result)
    return json.loads((folder / "train.json").read_text(encoding="utf-8"))


def _failure(result: GroupResult) -> Exception:
    """What the process that failed first said of its failure, under its name."""
    first = result.first_failure
    lines = (
        [line.removeprefix("trainer: ") for line in first.last_lines if line.startswith("trainer: ")] if first else []
    )
    text = f"{first}: {' '.join(lines)}" if first and lines else str(first or "the group was told to leave")
    if result.exit_code == EXIT_BAD_INPUT:
        return BadInput(text)
    if result.exit_code == EXIT_PREEMPTED:
        return Preempted(text if first else "the group was told to leave: saved; the next run goes on from there")
    return WorldFailure(text)
