"""One training as a job of the cluster that this process is a pod of.

    summary = train_on_cluster(asked, job, name="digits", task="train-distributed")

Data and model go by URI: this process holds neither. It starts the job, watches it, and looks that the model is there, whole
and of this data, before it says that the training is done.
"""

import os
from collections.abc import Mapping
from typing import Any

from trainer import storage
from trainer.config import GroupConfig, JobConfig
from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_PREEMPTED, BadInput, Preempted, WorldFailure
from trainer.launch import GroupResult, follow
from trainer.launch.cluster import ClusterLauncher
from trainer.launch.cluster_api import PODS, Api, NotFound, connect
from trainer.launch.job import OURS, Job, Owner
from trainer.launch.tfjob import tfjob
from trainer.launch.trainjob import KIND, TRAINJOBS, trainjob
from trainer.launch.worker import WorkerRequest
from trainer.progress import say

_MOST_REQUEST_BYTES = 64 * 1024
_MOST_SHOWN_LINES = 5
_OWN_POD = "KFP_POD_NAME"  # set by Kubeflow's driver in every task's pod
_RUN_LABEL = "pipeline/runid"
_NEEDED = ("train.json", "model.keras", "saved_model/saved_model.pb")


def is_in_cluster(environ: Mapping[str, str]) -> bool:
    """Whether this process is a task's pod on a cluster, and not part of a run on a person's own machine or notebook."""
    return bool(environ.get(_OWN_POD)) and not environ.get("TRIREME_RUN_DIR")


def check_places(places: Mapping[str, str]) -> None:
    """Refuses places that the pods of a job cannot reach, by the name of what is there.

    Raises:
        BadInput: One is not in a bucket.
    """
    for name, uri in places.items():
        if not uri.startswith("gs://"):
            raise BadInput(
                f"{name} = {uri}: the pods of a job can read and write gs:// only; give a pipeline root that begins with"
                " gs:// (cluster.pipeline_root)"
            )


def train_on_cluster(asked: WorkerRequest, config: JobConfig, name: str, task: str, data_digest: str) -> dict[str, Any]:
    """Trains with as many pods as the group says and returns what the model's `train.json` holds.

    Args:
        asked: What each process does.
        config: The job's engine and pods.
        name: Of the pipeline.
        task: Of this task, which with the run makes the job's name.
        data_digest: Of the dataset, which the model must have been trained on.

    Raises:
        BadInput, Preempted, WorldFailure: As the process that failed first said, or as the cluster did.
    """
    request = asked.to_json()
    if len(request.encode()) > _MOST_REQUEST_BYTES:
        raise BadInput(
            f"train: its {len(request.encode()):,} bytes are more than the {_MOST_REQUEST_BYTES:,} that a container's"
            " argument may have; put large settings into a file of the image"
        )
    api = connect()
    try:
        launcher, job = _launcher(api, request, config, asked.group, name, task)
        result = follow(launcher, _emit_for(job), grace_period_secs=asked.group.grace_period_secs)
        if result.exit_code != EXIT_DONE:
            raise _failure(result)
        try:
            return checked_model(asked.model, data_digest)
        except WorldFailure:
            launcher.discard()  # a retry must not take up a job that is done and left no model
            raise
    finally:
        api.close()


def checked_model(uri: str, data_digest: str) -> dict[str, Any]:
    """What `train.json` of a published model holds, once it is known that the model is whole and of this data.

    Raises:
        WorldFailure: It is not there, not whole, or another one.
    """
    storage.check_whole(uri)
    there = storage.list_names(uri)
    if missing := [file for file in _NEEDED if file not in there]:
        raise WorldFailure(f"{uri}: the job ended well and left no {missing[0]}; see the chief's log")
    summary, _ = storage.read_json(storage.join(uri, "train.json"))
    if summary.get("data_digest") != data_digest:
        raise WorldFailure(
            f"{uri}: holds a model of the data {summary.get('data_digest')}, and this run's is {data_digest}"
        )
    return summary


def owner_of(api: Api, name: str, task: str, environ: Mapping[str, str] = os.environ) -> Owner:
    """The run that this process belongs to, by its own pod's owner.

    Raises:
        WorldFailure: The pod cannot be read.
    """
    pod_name = environ.get(_OWN_POD, "")
    try:
        pod = api.get(PODS, pod_name)
    except NotFound as error:
        raise WorldFailure(f"this task's own pod {pod_name} is not in {api.namespace}: {error}") from None
    metadata = pod["metadata"]
    workflow = next((one for one in metadata.get("ownerReferences") or () if one["kind"] == "Workflow"), None)
    reference = None
    if workflow is not None:
        # Not the pod, which a retry replaces; and not as controller, which Argo would take for a pod's.
        kept = {key: workflow[key] for key in ("apiVersion", "kind", "name", "uid")}
        reference = {**kept, "controller": False, "blockOwnerDeletion": False}
    run = (metadata.get("labels") or {}).get(_RUN_LABEL)
    labels = {"app.kubernetes.io/managed-by": "trireme", "app.kubernetes.io/name": name[:63].rstrip("-")}
    if run:
        labels[_RUN_LABEL] = run
    identity = workflow["uid"] if workflow else run or metadata["uid"]
    return Owner(name=name, key=f"{identity}/{task}", labels={**labels, f"{OURS}task": task}, reference=reference)


def _launcher(
    api: Api, request: str, config: JobConfig, group: GroupConfig, name: str, task: str
) -> tuple[ClusterLauncher, Job]:
    owner = owner_of(api, name, task)
    if config.launcher == "trainjob":
        job = trainjob(request, config, group, owner, api.schema(TRAINJOBS, KIND))
    else:
        job = tfjob(request, config, group, owner)
    launcher = ClusterLauncher(
        job,
        api,
        emit=_emit_for(job),
        start_timeout_secs=group.start_timeout_secs,
        max_restarts=group.max_restarts,
    )
    return launcher, job


def _emit_for(job: Job) -> Any:
    def emit(source: str, line: str) -> None:
        if source == "launcher":
            say(line)
        else:
            print(line if source == job.chief else f"{source}: {line}", flush=True)

    return emit


def _failure(result: GroupResult) -> Exception:
    """What the process that failed first said of its failure, under its name."""
    first = result.first_failure
    if first is None:
        return Preempted("told to leave: the job was deleted and its pods saved; the next try goes on from there")
    own = [line.removeprefix("trainer: ") for line in first.last_lines if line.startswith("trainer: ")]
    shown = own or [line.strip() for line in first.last_lines if line.strip()][-_MOST_SHOWN_LINES:]
    text = f"{first}: {' '.join(shown)}" if shown else str(first)
    if result.exit_code == EXIT_BAD_INPUT:
        return BadInput(text)
    return Preempted(text) if result.exit_code == EXIT_PREEMPTED else WorldFailure(text)
