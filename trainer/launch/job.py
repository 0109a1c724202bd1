"""What one engine's job is to the launcher, and what the jobs of all engines have in common.

Names are at most 26 characters: a JobSet's hosts, `<name>-node-0-<index>`, and a coordinator's label must fit into 63.
"""

import copy
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from trainer.config import GroupConfig, JobConfig
from trainer.launch.cluster_api import Resource

OURS = "trireme-ml.github.io/"
"""Begins the names of our annotations and labels."""

KEY, SPEC = OURS + "key", OURS + "spec"
"""Annotations: whose job this is, and a digest of what it was asked to do."""

CONTAINER = "node"
"""Name of the container in the pod template that a configuration holds."""

COMPONENT = {"app.kubernetes.io/component": "trireme-training"}
"""Label of every pod that trains, which manifests/network-policy.yaml selects."""

_MOST_NAME = 26
_DIGEST = 10
_MORE_GRACE_SECS = 10


class State(NamedTuple):
    """How a job is."""

    kind: Literal["suspended", "active", "done", "failed"]
    text: str = ""
    """The engine's own reason."""


@dataclass(frozen=True)
class Owner:
    """The run that a job belongs to.

    Attributes:
        name: Of the pipeline.
        key: Differs between any two tasks of any two runs, and is the same for every try of one.
        labels: Of the run, for the job and its pods.
        reference: The owner's entry in `ownerReferences`; None: nobody deletes the job when the run is deleted.
    """

    name: str
    key: str
    labels: Mapping[str, str]
    reference: Mapping[str, Any] | None


@dataclass(frozen=True)
class Job:
    """One engine's job, and how to read what the engine says of it."""

    resource: Resource
    manifest: dict[str, Any]
    container: str
    """Of every pod, the one that trains."""
    pod_selector: str
    """Labels by which its pods are found."""
    num_pods: int
    chief: str
    """Name of the process whose log is shown as it comes."""
    member_of: Callable[[Mapping[str, Any]], str | None]
    """The name of the process that a pod is; None for a pod that is none of the group."""
    state_of: Callable[[Mapping[str, Any]], State]
    attempt_of: Callable[[Mapping[str, Any]], int] | None
    """How often the group had been started again when a pod was made. None: the engine starts pods again one by one,
    as often as they end so that it may."""
    makers: tuple[str, ...]
    """Names of the objects that make the pods, whose events say why they do not."""

    @property
    def name(self) -> str:
        """Of the job."""
        return self.manifest["metadata"]["name"]

    @property
    def title(self) -> str:
        """What people call it: `TrainJob digits-0a1b2c3d4e`."""
        return f"{self.manifest['kind']} {self.name}"


def job_name(owner: Owner) -> str:
    """A name that every try of one task finds again, and no other task has."""
    digest = hashlib.sha256(owner.key.encode()).hexdigest()[:_DIGEST]
    return f"{owner.name[: _MOST_NAME - _DIGEST - 1].rstrip('-')}-{digest}"


def manifest_of(
    resource: Resource, kind: str, owner: Owner, config: JobConfig, spec: Mapping[str, Any]
) -> dict[str, Any]:
    """The job's object: whose it is, by whom it ends, the queue that it waits in, and the engine's own `spec`."""
    labels = dict(owner.labels)
    if config.gang == "kueue" and config.queue:
        labels["kueue.x-k8s.io/queue-name"] = config.queue
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()
    metadata: dict[str, Any] = {
        "name": job_name(owner),
        "labels": labels,
        "annotations": {KEY: owner.key, SPEC: digest},
    }
    if owner.reference is not None:
        metadata["ownerReferences"] = [dict(owner.reference)]
    api = f"{resource.group}/{resource.version}"
    return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": dict(spec)}


def command_of() -> list[str]:
    """What every pod runs; its request follows as the one argument."""
    return ["python", "-m", "trainer", "train-worker"]


def literal(text: str) -> str:
    """JSON as an argument or a variable of a container, in which Kubernetes would replace `$(NAME)`."""
    return text.replace("$", "\\u0024")


def group_variables(group: GroupConfig) -> list[dict[str, str]]:
    """The numbers that no engine puts into a pod."""
    return [
        {"name": "TRIREME_NUM_WORKERS", "value": str(group.num_workers)},
        {"name": "TRIREME_NUM_PARAMETER_SERVERS", "value": str(group.num_parameter_servers)},
    ]


def pod_template(owner: Owner, config: JobConfig, group: GroupConfig, name_label: str) -> dict[str, Any]:
    """The configured pod template with what every engine's pods get: the run's labels, time to save, and one place."""
    template = copy.deepcopy(config.pod)
    metadata, spec = template.setdefault("metadata", {}), template["spec"]
    metadata["labels"] = {**owner.labels, **metadata.get("labels", {}), **COMPONENT}
    spec["terminationGracePeriodSeconds"] = round(group.grace_period_secs) + _MORE_GRACE_SECS
    if config.topology:
        term = {
            "topologyKey": config.topology,
            "labelSelector": {"matchLabels": {name_label: job_name(owner)}},
        }
        affinity = spec.setdefault("affinity", {})
        affinity["podAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    return template


def condition_state(found: Mapping[str, Any], done: str) -> State:
    """The state that the conditions of a job say; a running one may have none."""
    for condition in found.get("status", {}).get("conditions") or ():
        if condition["status"] == "True" and condition["type"] in (done, "Failed"):
            said = ": ".join(part for part in (condition.get("reason"), condition.get("message")) if part)
            return State("done" if condition["type"] == done else "failed", said)
    spec = found.get("spec", {})
    if spec.get("suspend") or spec.get("runPolicy", {}).get("suspend"):
        return State("suspended")
    return State("active")
