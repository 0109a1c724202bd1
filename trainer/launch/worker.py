"""One pod of a training that Kubernetes runs as many: it brings its own data, trains with the others, and the chief publishes.

    python -m trainer train-worker '{"train": {…}, "group": {…}, "seed": 7, "examples": "gs://…", "model": "gs://…",
                                     "checkpoints": "gs://…"}'

Every pod of a group is given the same words; the environment says which one it is (trainer/cluster.py). A pod may be
replaced at any moment by one with an empty disk: all that must outlive it is where the request says.
"""

import hashlib
import json
import os
import posixpath
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from trainer import storage
from trainer.cluster import ClusterDescription, describe
from trainer.config import GroupConfig, Place, Problem, Section, TrainConfig, parse_json
from trainer.data.manifest import FILE_NAME, STATISTICS_FILE, Manifest, read_manifest
from trainer.data.schema import SCHEMA_FILE
from trainer.data.shard_files import bring, leave_in_bucket
from trainer.errors import EXIT_FAILED, EXIT_NO_RESTART_LEFT, BadInput, NoRestartLeft
from trainer.progress import say

RESTART_ATTEMPT = "TRIREME_RESTART_ATTEMPT"
"""Environment variable: how often the group was started again. Not set: nobody counts."""

RESTARTABLE_EXIT_CODE = "TRIREME_RESTARTABLE_EXIT_CODE"
"""Environment variable: what the process ends with, in place of 1, when a restart may help. TFJob restarts from 128 up."""


class WorkerRequest(Section):
    """What every process of a group is asked to do."""

    train: TrainConfig
    """The train section."""
    group: GroupConfig
    """How many processes, and how patient they are."""
    seed: Annotated[int, Field(ge=0, lt=2**31)]
    """Seed of the first weights and of every epoch's order."""
    examples: Place
    """Folder or `gs://` prefix of the prepared dataset."""
    model: Place
    """Folder or `gs://` prefix where the chief publishes the finished model."""
    checkpoints: Place
    """Folder that all processes share, or `gs://` prefix, of this training's checkpoints."""

    def problems(self) -> Iterator[Problem]:
        """Places that pods cannot share, and one inside another: the model is published whole where nothing is."""
        places = {name: getattr(self, name).rstrip("/") for name in ("examples", "model", "checkpoints")}
        for name, place in places.items():
            if not storage.is_remote(place or "/") and not posixpath.isabs(place):
                yield Problem(
                    name, place, "must begin with gs:// or /: what a relative path means differs between pods"
                )
            for other, outer in places.items():
                if other != name and (place == outer or place.startswith(f"{outer}/")):
                    yield Problem(name, place, f"lies in {other}, {outer}; give each a place of its own")


def train_worker(text: str, environ: Mapping[str, str] = os.environ) -> None:
    """Does one process's part of a training, as worker, chief or parameter server.

    Args:
        text: A `WorkerRequest` as JSON.
        environ: Environment variables.

    Raises:
        BadInput: The request, the environment and the data do not fit together.
        NoRestartLeft: The group was started again too often.
        Preempted, WorldFailure: As `trainer.loop.fit` says.
    """
    request = parse_json(WorkerRequest, text, path="request")
    description = describe(environ)
    _check_size(request.group, description)
    _number(environ, RESTARTABLE_EXIT_CODE, EXIT_FAILED)  # refused now rather than when it is needed
    attempt = _attempt(environ)
    if attempt > request.group.max_restarts:
        raise NoRestartLeft(
            f"the group was started again {attempt - 1} times, and cluster.max_restarts is {request.group.max_restarts};"
            " the log of the try before says what ended it"
        )
    # The chief of parameter servers names files to its workers, so that they must lie at the same place everywhere.
    scratch = Path(tempfile.gettempdir()) / f"trireme-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    examples = scratch / "examples" if storage.is_remote(request.examples) else Path(request.examples)
    manifest = _manifest(request, examples)
    if _is_published(request, manifest):
        say(f"{request.model}: the model is there already, of an earlier try; nothing is left to do")
        return
    if description is None or description.task_type != "ps":
        _stage(request, examples, manifest)

    from trainer.loop import fit

    def publish(folder: Path) -> None:
        storage.publish(folder, request.model)
        say(f"the model is in {request.model}")

    remote = storage.is_remote(request.checkpoints)
    fit(
        request.train,
        request.seed,
        examples,
        scratch / "model",
        scratch / "checkpoints" if remote else Path(request.checkpoints),
        request.group,
        request.checkpoints if remote else None,
        deliver=publish,
    )


def exit_code_for_operator(code: int, text: str, environ: Mapping[str, str] = os.environ) -> int:
    """What the process must end with so that whoever restarts pods does what the configuration says.

    Args:
        code: The process's exit code on one machine.
        text: The request.
        environ: Environment variables.
    """
    if code != EXIT_FAILED:
        return code
    request = parse_json(WorkerRequest, text, path="request")
    if environ.get(RESTART_ATTEMPT) and _attempt(environ) >= request.group.max_restarts:
        return EXIT_NO_RESTART_LEFT
    return _number(environ, RESTARTABLE_EXIT_CODE, EXIT_FAILED)


def _attempt(environ: Mapping[str, str]) -> int:
    return _number(environ, RESTART_ATTEMPT, 0)


def _number(environ: Mapping[str, str], variable: str, default: int) -> int:
    text = environ.get(variable) or str(default)
    if not text.isdecimal():
        raise BadInput(f"{variable} = {text!r}: must be a whole number from 0")
    return int(text)


def _check_size(group: GroupConfig, description: ClusterDescription | None) -> None:
    """The numbers of pods stand in two places, the request and the environment: they must agree."""
    there = (description.num_workers, description.num_parameter_servers) if description else (1, 0)
    asked = (group.num_workers, group.num_parameter_servers)
    if there != asked:
        source = description.source if description else "an environment without a cluster (docs/clusters.md)"
        raise BadInput(
            f"request.group.num_workers = {asked[0]}, num_parameter_servers = {asked[1]}: {source} describes"
            f" {there[0]} and {there[1]}"
        )


def _manifest(request: WorkerRequest, examples: Path) -> Manifest:
    if storage.is_remote(request.examples):
        try:
            storage.stage(request.examples, examples, [FILE_NAME])
        except storage.NotFound:
            raise BadInput(
                f"request.examples = {request.examples}: holds no {FILE_NAME}, so it is not a prepared dataset; if it came"
                " from Kubeflow's cache, it was deleted since: run once with --set cluster.cache=false"
            ) from None
    return read_manifest(examples)


def _stage(request: WorkerRequest, examples: Path, manifest: Manifest) -> None:
    """Brings what the training reads; the test split stays where it is."""
    if not storage.is_remote(request.examples):
        return
    if request.train.read_shards == "streamed":
        leave_in_bucket(examples, request.examples)
        storage.stage(request.examples, examples, [SCHEMA_FILE, STATISTICS_FILE])
        return
    splits = [split for name, split in manifest.splits.items() if name != "test"]
    shards = [shard.name for split in splits for shard in split.shards]
    bring(request.examples, examples, manifest, [SCHEMA_FILE, STATISTICS_FILE, *shards])


def _is_published(request: WorkerRequest, manifest: Manifest) -> bool:
    """Whether an earlier try of this very training published its model and was killed before it could say so.

    Raises:
        BadInput: Another training's model is there.
    """
    if not storage.is_remote(request.model):
        _check_folder(Path(request.model))
    if not storage.exists(request.model):
        return False
    there, _ = storage.read_json(storage.join(request.model, "train.json"))
    if there is None and not storage.list_names(request.model):
        return False
    wanted = {"train": json.loads(request.train.to_json()), "seed": request.seed, "data_digest": manifest.digest}
    if there is None or any(there.get(key) != value for key, value in wanted.items()):
        raise BadInput(
            f"request.model = {request.model}: another model is there already; name a place where nothing is"
        )
    return True


def _check_folder(model: Path) -> None:
    """Looks before the training whether the model's folder can be made after it.

    Raises:
        BadInput: A file is there, or on the way there, or this user may not write.
    """
    there = next(path for path in (model, *model.parents) if path.exists())
    if not there.is_dir():
        raise BadInput(f"request.model = {model}: {there} is a file and no folder")
    if not os.access(there, os.W_OK):
        raise BadInput(f"request.model = {model}: user {os.getuid()} may not write to {there}")
