"""Step-exact checkpoints: everything a run needs to go on as if it had never stopped, whole or not at all.

    checkpoints = Checkpoints(folder, trainer, identity={"data": "sha256:…", "model": "cnn", …}, keep=3)
    state = checkpoints.restore()             # None: nothing to resume
    checkpoints.save(State(step=230, …))

A checkpoint is a folder `step-00000230` with TensorFlow's files and `state.json`, which holds their digests; it is
written beside its place and renamed. A damaged one is passed over, with a warning, for the one before it.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainer import storage
from trainer.config import TrainConfig
from trainer.consensus import Consensus
from trainer.errors import BadInput, WorldFailure, reason_of
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
        mirror: A prefix of object storage that every checkpoint is copied to, for machines whose disk does not outlive
            them. None: there is none.

    Writing and copying go on beside the training; leaving the `with` block waits for them. Within it the folder is this
    run's alone on this machine.
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
        self._folder, self._identity, self._keep = folder, identity, keep
        self._workers = workers or Consensus(trainer.strategy, None)
        self._mirror = mirror
        self._writer = ThreadPoolExecutor(1)
        self._written: Future | None = None
        self._held: int | None = None
        weights = {id(variable) for variable in trainer.model.weights}
        # Plain lists, so that a weight is found by its number. Keras leaves the random state of dropout out of a model's
        # own checkpoint; a resumed run would differ.
        groups = {
            "weights": [variable.value for variable in trainer.model.weights],
            "random_state": [variable.value for variable in trainer.model.variables if id(variable) not in weights],
            "optimizer": [variable.value for variable in trainer.optimizer.variables],
            "averages": trainer.averages,
            "loss_scale": [trainer.loss_scale.variables] if trainer.loss_scale is not None else [],
        }
        self._variables = {
            f"{group}/{number}": variable for group, listed in groups.items() for number, variable in enumerate(listed)
        }

    def __enter__(self) -> "Checkpoints":
        """Takes the folder.

        Raises:
            WorldFailure: It cannot be written, or another training saves into it.
        """
        if self._workers.is_chief:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                Path(tempfile.mkdtemp(prefix=".partial-", dir=self._folder)).rmdir()  # rather now than after an epoch
            except OSError as error:
                raise WorldFailure(
                    f"{self._folder}: no checkpoint can be written there: {_reason(error)}; make room, or name another folder"
                ) from error
            self._held = os.open(self._folder, os.O_RDONLY)
            try:
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._release()
                raise WorldFailure(
                    f"{self._folder}: another training is saving its checkpoints there; wait until it ends, or name another"
                    " folder"
                ) from None
            except OSError:  # a file system that knows no locks
                pass
        return self

    def _release(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None
            with contextlib.suppress(OSError):
                self._folder.rmdir()  # only where nothing was saved

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            self.wait()
        except WorldFailure as error:
            if kind is None:
                raise
            say(f"warning: {error}")  # what ended the block says more
        finally:
            self._writer.shutdown()
            self._release()

    def save(self, state: State) -> None:
        """Takes the values of now and writes them in a thread, so that the next steps need not wait for the disk.

        Raises:
            WorldFailure: The checkpoint before this one could not be written.
        """
        values = {name: variable.numpy() for name, variable in self._variables.items()}
        if self._workers.is_chief:
            self.wait()
            self._written = self._writer.submit(self._write, values, asdict(state))

    def wait(self) -> None:
        """Returns when the last checkpoint is whole.

        Raises:
            WorldFailure: The disk is full or cannot be written; the earlier checkpoints are untouched.
        """
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def _write(self, values: dict[str, np.ndarray], state: dict[str, Any]) -> None:
        """Writes one checkpoint, copies it to the mirror, and removes those no longer kept."""
        step, partial = state["step"], None
        target = self._folder / f"step-{step:08d}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=self._folder))
            write_tensors(partial / VARIABLES, values)
            digests = {file.name: _digest(file) for file in sorted(partial.iterdir())}
            content = {"state": state, "identity": self._identity, "sha256": digests}
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
                f"the checkpoint of step {step} could not be written to {self._folder}: {_reason(error)};"
                " earlier ones are untouched: make room and start the run again, it goes on from the newest"
            ) from error
        _remove_old(self._folder, self._keep, state["best_step"])
        if self._mirror is not None:
            try:
                self._copy_out(target, state["best_step"])
            except Exception as error:
                raise WorldFailure(
                    f"the checkpoint of step {step} could not be copied to {self._mirror}: {_reason(error)}; start the run"
                    " again, it goes on from the newest that is there"
                ) from error

    def restore(self) -> State | None:
        """Loads the newest whole checkpoint into the variables; all workers load the one that the chief found.

        Returns:
            Its state, or None where there is none.

        Raises:
            BadInput: It belongs to another model, dataset or configuration.
            WorldFailure: A worker does not see the chief's checkpoint.
        """
        self.wait()
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
        self.wait()
        self._workers.wait()  # the chief has written it
        if self._read(state.best_step) is None:
            raise WorldFailure(
                f"the best checkpoint, step {state.best_step}, is damaged; start the run again from its data"
            )
        self._load(state.best_step)

    def clear(self) -> None:
        """Removes all of them: the run is done and a later one begins anew. For the chief alone."""
        self.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._mirror is not None:
            storage.delete_prefix(self._mirror)

    def _steps(self) -> set[int]:
        here = [entry.name for entry in self._folder.iterdir()] if self._folder.is_dir() else []
        there = storage.list_folders(self._mirror) if self._mirror is not None else []
        return {int(match[1]) for match in map(_STEP_FOLDER.fullmatch, [*here, *there]) if match}

    def _copy_out(self, folder: Path, best_step: int | None) -> None:
        """Copies one checkpoint to the mirror and removes what is no longer kept there."""
        there = storage.join(self._mirror, folder.name)
        storage.delete_prefix(there)  # of an earlier try that stopped at this very step
        storage.publish(folder, there)
        for step in _outdated(storage.list_folders(self._mirror), self._keep, best_step):
            storage.delete_prefix(storage.join(self._mirror, f"step-{step:08d}"))

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
        import tensorflow as tf

        reader = tf.train.load_checkpoint(str(self._folder / f"step-{step:08d}" / VARIABLES))
        found = set(reader.get_variable_to_shape_map())
        assert found == self._variables.keys(), f"variables differ: {sorted(found ^ self._variables.keys())[:5]}"
        for name, variable in self._variables.items():
            variable.assign(reader.get_tensor(name))


def write_tensors(prefix: Path, values: dict[str, np.ndarray]) -> None:
    """Writes named values as a checkpoint that TensorFlow reads (`tf.train.load_checkpoint`)."""
    import tensorflow as tf

    with tf.device("/cpu:0"):
        tf.raw_ops.SaveV2(
            prefix=str(prefix),
            tensor_names=list(values),
            shape_and_slices=[""] * len(values),
            tensors=list(values.values()),
        )


def _outdated(names: Iterable[str], keep: int, best_step: int | None) -> list[int]:
    """Steps of checkpoints that are neither among the newest `keep` nor the best."""
    steps = sorted((int(match[1]) for match in map(_STEP_FOLDER.fullmatch, names) if match), reverse=True)
    return [step for step in steps[keep:] if step != best_step]


def _remove_old(folder: Path, keep: int, best_step: int | None) -> None:
    for step in _outdated([entry.name for entry in folder.iterdir()], keep, best_step):
        shutil.rmtree(folder / f"step-{step:08d}", ignore_errors=True)


def read_weights(folder: Path) -> list[np.ndarray]:
    """The model's weights in one checkpoint's folder, in the order of `model.weights`."""
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(folder / VARIABLES))
    count = sum(name.startswith("weights/") for name in reader.get_variable_to_shape_map())
    return [reader.get_tensor(f"weights/{number}") for number in range(count)]


_NOT_IDENTITY = frozenset({
    "checkpoint_every_steps", "checkpoint_every_secs", "keep_checkpoints", "steps_per_loop", "strategy",
    "num_virtual_devices", "cross_device", "communication", "bytes_per_pack", "tensorboard_dir", "profile_steps", "eager",
    "jit_compile", "deterministic", "max_skipped_steps",
})  # fmt: skip


def identity(config: TrainConfig, seed: int, data_digest: str) -> dict[str, Any]:
    """What decides the weights. How often is saved, how many are kept and where it runs do not."""
    values = config.model_dump(mode="json").items()
    fields = {f"train.{key}": value for key, value in values if key not in _NOT_IDENTITY}
    return {**fields, "seed": seed, "the prepared data": data_digest}


def run_key(config: TrainConfig, seed: int, data_digest: str) -> str:
    """Folder name of a training's checkpoints: what decides the weights decides it, and where it runs does not."""
    text = json.dumps(identity(config, seed, data_digest), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return reason_of(error)
