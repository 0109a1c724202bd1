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
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainer import storage
from trainer.config import TrainConfig
from trainer.consensus import Consensus
from trainer.errors import BadInput, WorldFailure
from trainer.progress import say

_STEP_FOLDER = re.compile(r"step-(\d{8})")
_STATE_FILE = "state.json"

VARIABLES = "variables"
"""Prefix of TensorFlow's files in a checkpoint's folder."""


@dataclass
class State:
    """Where a run stands, besides the variables."""

    step: int = 0
    """Steps done since the beginning of the training; epoch and place in it follow."""
    epoch_totals: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0, 0.0])
    """Sums of the unfinished epoch: loss, measure, count, left out."""
    skipped_steps: int = 0
    """Steps left out because they were not finite."""
    skipped_in_row: int = 0
    """Those since the last good step."""
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
    """The checkpoints of one run in one folder, which all its workers share.

    Every worker calls every method: reading a variable that replicas hold apart is a collective operation. Only the
    chief's files stay.

    Args:
        folder: Where they are.
        trainer: Holds the variables.
        identity: What must be the same for a checkpoint to be resumed, by the name a person knows it by.
        keep: Newest ones to keep, besides the best.
        workers: Who must agree. None: this process is alone.
        mirror: A prefix of object storage that every checkpoint is copied to while the training goes on, for machines
            whose disk does not outlive them. Leaving the `with` block waits for the last copy. None: there is none.
    """

    def __init__(
        self,
        folder: Path,
        trainer: Any,
        identity: dict[str, Any],
        keep: int,
        workers: Consensus | None = None,
        mirror: str | None = None,
    ) -> None:
        import tensorflow as tf

        self._folder, self._identity, self._keep = folder, identity, keep
        self._workers = workers or Consensus(trainer.strategy, None)
        self._mirror = mirror
        self._copier = ThreadPoolExecutor(1) if mirror else None
        self._copy: Future | None = None
        weights = {id(variable) for variable in trainer.model.weights}
        # Plain lists, so that a weight is found by its number. Keras leaves the random state of dropout out of a model's
        # own checkpoint; a resumed run would differ.
        self._checkpoint = tf.train.Checkpoint(
            weights=[variable.value for variable in trainer.model.weights],
            random_state=[variable.value for variable in trainer.model.variables if id(variable) not in weights],
            optimizer=[variable.value for variable in trainer.optimizer.variables],
            averages=trainer.averages,
            loss_scale=[trainer.loss_scale.variables] if trainer.loss_scale is not None else [],
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self._copier is not None:
            try:
                self._wait_for_copy()
            except WorldFailure as error:
                if kind is None:
                    raise
                say(f"warning: {error}")  # what ended the block says more
            finally:
                self._copier.shutdown()

    def save(self, state: State) -> None:
        """Writes a checkpoint and removes those no longer kept.

        Raises:
            WorldFailure: The disk is full or cannot be written; the earlier checkpoints are untouched.
        """
        if not self._workers.is_chief:
            with tempfile.TemporaryDirectory(prefix="checkpoint-") as unused:
                self._checkpoint.write(str(Path(unused) / VARIABLES))
            return
        target = self._folder / f"step-{state.step:08d}"
        partial = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=self._folder))
            self._checkpoint.write(str(partial / VARIABLES))
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
            if partial is not None:
                shutil.rmtree(partial, ignore_errors=True)
            raise WorldFailure(
                f"the checkpoint of step {state.step} could not be written to {self._folder}: {_reason(error)};"
                " earlier ones are untouched: make room and start the run again, it goes on from the newest"
            ) from error
        self._wait_for_copy()  # of the one before, which may be removed now
        self._remove_old(state.best_step)
        if self._copier is not None:
            self._copy = self._copier.submit(self._copy_out, target, state.best_step)

    def restore(self) -> State | None:
        """Loads the newest whole checkpoint into the variables; all workers load the one that the chief found.

        Returns:
            Its state, or None where there is none.

        Raises:
            BadInput: It belongs to another model, dataset or configuration.
            WorldFailure: A worker does not see the chief's checkpoint.
        """
        content = None
        if self._workers.is_chief:
            content = next(filter(None, map(self._read, sorted(self._steps(), reverse=True))), None)
            if content is not None:
                self._check_identity(content["identity"])
        step = self._workers.from_chief(content["state"]["step"] if content else -1)
        if step < 0:
            return None
        content = content or self._read(step)
        if content is None:
            raise WorldFailure(
                f"{self._folder}: does not hold the checkpoint of step {step} that the chief resumes; put the checkpoints"
                " where all workers can read them"
            )
        self._load(step)
        return State(**content["state"])

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
        """Removes all of them: the run is done and a later one begins anew. For the chief alone."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._mirror is not None:
            self._wait_for_copy()
            storage.delete_prefix(self._mirror)

    def _steps(self) -> set[int]:
        here = [entry.name for entry in self._folder.iterdir()] if self._folder.is_dir() else []
        there = storage.list_folders(self._mirror) if self._mirror is not None else []
        return {int(match[1]) for match in map(_STEP_FOLDER.fullmatch, [*here, *there]) if match}

    def _copy_out(self, folder: Path, best_step: int | None) -> None:
        """Copies one checkpoint to the mirror and removes what is no longer kept there. Runs in a thread."""
        assert self._mirror is not None
        there = storage.join(self._mirror, folder.name)
        storage.delete_prefix(there)  # of an earlier try that stopped at this very step
        storage.publish(folder, there)
        matches = filter(None, map(_STEP_FOLDER.fullmatch, storage.list_folders(self._mirror)))
        for step in sorted((int(match[1]) for match in matches), reverse=True)[self._keep :]:
            if step != best_step:
                storage.delete_prefix(storage.join(self._mirror, f"step-{step:08d}"))

    def _wait_for_copy(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            try:
                copy.result()
            except Exception as error:
                raise WorldFailure(
                    f"a checkpoint could not be copied to {self._mirror}: {_reason(error)}; start the run again, it goes"
                    " on from the newest that is there"
                ) from error

    def _bring(self, step: int) -> None:
        """Brings a checkpoint from the mirror where it is not on this machine."""
        name = f"step-{step:08d}"
        if self._mirror is not None and not (self._folder / name).is_dir():
            try:
                storage.stage(storage.join(self._mirror, name), self._folder / name)
            except (storage.NotFound, WorldFailure) as error:  # half a copy: the one before it is whole
                say(f"warning: the checkpoint of step {step} cannot be brought: {_reason(error)}")

    def _read(self, step: int) -> dict | None:
        """The content of a checkpoint's state file if every file is as it was written."""
        self._bring(step)
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
        status = self._checkpoint.read(str(self._folder / f"step-{step:08d}" / VARIABLES))
        status.assert_consumed()

    def _remove_old(self, best_step: int | None) -> None:
        matches = map(_STEP_FOLDER.fullmatch, (entry.name for entry in self._folder.iterdir()))
        steps = sorted((int(match[1]) for match in matches if match), reverse=True)
        for step in steps[self._keep :]:
            if step != best_step:
                shutil.rmtree(self._folder / f"step-{step:08d}", ignore_errors=True)


def read_weights(folder: Path) -> list[np.ndarray]:
    """The model's weights in one checkpoint's folder, in the order of `model.weights`."""
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(folder / VARIABLES))
    found = (re.fullmatch(r"weights/(\d+)/.*VARIABLE_VALUE", name) for name in reader.get_variable_to_shape_map())
    numbers = {int(match[1]): match[0] for match in found if match}
    return [reader.get_tensor(numbers[number]) for number in sorted(numbers)]


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
