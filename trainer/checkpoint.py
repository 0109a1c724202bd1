"""Step-exact checkpoints: everything a run needs to go on as if it had never stopped, whole or not at all.

    checkpoints = Checkpoints(folder, trainer, identity={"data": "sha256:…", "model": "cnn", …}, keep=3)
    state = checkpoints.restore()             # None: nothing to resume
    checkpoints.save(State(step=230, …))

A checkpoint is a folder `step-00000230` with TensorFlow's files and `state.json`, which holds their digests; it is
written beside its place and renamed. A damaged one is passed over, with a warning, for the one before it.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.config import TrainConfig
from trainer.errors import BadInput, WorldFailure
from trainer.progress import say

_STEP_FOLDER = re.compile(r"step-(\d{8})")
_STATE_FILE = "state.json"


@dataclass
class State:
    """Where a run stands, besides the variables."""

    step: int = 0
    """Steps done since the beginning of the training; epoch and place in it follow."""
    epoch_totals: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """Sums of the unfinished epoch: loss, measure, count."""
    best_step: int | None = None
    """Step of the checkpoint with the best validation so far."""
    best_value: float | None = None
    """The watched metric there."""
    epochs_without_improvement: int = 0
    """For early stopping."""
    history: list[dict] = field(default_factory=list)
    """One row per finished epoch."""
    finished: bool = False
    """Early stopping has ended the training."""


class Checkpoints:
    """The checkpoints of one run in one folder.

    Args:
        folder: Where they are.
        trainer: Holds the variables.
        identity: What must be the same for a checkpoint to be resumed, by the name a person knows it by.
        keep: Newest ones to keep, besides the best.
    """

    def __init__(self, folder: Path, trainer: Any, identity: dict[str, Any], keep: int) -> None:
        import tensorflow as tf

        self._folder, self._identity, self._keep = folder, identity, keep
        weights = {id(variable) for variable in trainer.model.weights}
        # Keras leaves the random state of dropout out of a model's checkpoint; a resumed run would differ.
        random_state = [variable.value for variable in trainer.model.variables if id(variable) not in weights]
        self._checkpoint = tf.train.Checkpoint(
            model=trainer.model, optimizer=trainer.optimizer, averages=trainer.averages, random_state=random_state
        )

    def save(self, state: State) -> None:
        """Writes a checkpoint and removes those no longer kept.

        Raises:
            WorldFailure: The disk is full or cannot be written; the earlier checkpoints are untouched.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        target = self._folder / f"step-{state.step:08d}"
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=self._folder))
        try:
            self._checkpoint.write(str(partial / "variables"))
            digests = {file.name: _digest(file) for file in sorted(partial.iterdir())}
            content = {"state": asdict(state), "identity": self._identity, "sha256": digests}
            with (partial / _STATE_FILE).open("w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            if target.exists():  # the same step was saved before a restart; what is there is as good or damaged
                target.rename(partial / "replaced")
            partial.rename(target)
            shutil.rmtree(target / "replaced", ignore_errors=True)
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise WorldFailure(
                f"the checkpoint of step {state.step} could not be written to {self._folder}: {_reason(error)};"
                " earlier ones are untouched: make room and start the run again, it goes on from the newest"
            ) from error
        self._remove_old(state.best_step)

    def restore(self) -> State | None:
        """Loads the newest whole checkpoint into the variables.

        Returns:
            Its state, or None where there is none.

        Raises:
            BadInput: It belongs to another model, dataset or configuration.
        """
        for step in sorted(self._steps(), reverse=True):
            content = self._read(step)
            if content is not None:
                self._check_identity(content["identity"])
                self._load(step)
                return State(**content["state"])
        return None

    def restore_best(self, state: State) -> None:
        """Loads the variables of the best checkpoint, if one was named.

        Raises:
            WorldFailure: It is damaged.
        """
        if state.best_step is None:
            return
        if self._read(state.best_step) is None:
            raise WorldFailure(
                f"the best checkpoint, step {state.best_step}, is damaged; start the run again from its data"
            )
        self._load(state.best_step)

    def clear(self) -> None:
        """Removes all of them: the run is done and a later one begins anew."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _steps(self) -> list[int]:
        if not self._folder.is_dir():
            return []
        matches = (_STEP_FOLDER.fullmatch(entry.name) for entry in self._folder.iterdir())
        return [int(match[1]) for match in matches if match]

    def _read(self, step: int) -> dict | None:
        """The content of a checkpoint's state file if every file is as it was written."""
        folder = self._folder / f"step-{step:08d}"
        try:
            content = json.loads((folder / _STATE_FILE).read_text(encoding="utf-8"))
            damaged = [name for name, digest in content["sha256"].items() if _digest(folder / name) != digest]
        except (OSError, ValueError, KeyError) as error:
            damaged = [f"{_STATE_FILE} ({_reason(error)})"]
        if damaged:
            say(
                f"warning: the checkpoint of step {step} is damaged ({', '.join(damaged)}); looking for the one before it"
            )
            return None
        return content

    def _check_identity(self, found: dict[str, Any]) -> None:
        for key in sorted(self._identity.keys() | found.keys()):
            if self._identity.get(key) != found.get(key):
                raise BadInput(
                    f"{key} = {json.dumps(self._identity.get(key))}: the checkpoints in {self._folder} were made with"
                    f" {json.dumps(found.get(key))}; use the old value, or remove the folder to begin anew"
                )

    def _load(self, step: int) -> None:
        status = self._checkpoint.read(str(self._folder / f"step-{step:08d}" / "variables"))
        status.assert_consumed()

    def _remove_old(self, best_step: int | None) -> None:
        steps = sorted(self._steps(), reverse=True)
        for step in steps[self._keep :]:
            if step != best_step:
                shutil.rmtree(self._folder / f"step-{step:08d}", ignore_errors=True)


def run_key(config: TrainConfig, seed: int, data_digest: str) -> str:
    """Folder name of a training's checkpoints: another configuration, seed or dataset is another training."""
    text = json.dumps([config.to_json(), seed, data_digest])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
