"""A group of processes as a TFJob of the training operator v1, for clusters that still have it.

The operator puts TF_CONFIG into every pod. It starts a pod again whose exit code is 128 or more, one by one, and fails the job
at any other; so a worker that lost its peers ends with 138 there, where on one machine it ends with 1.
"""

import copy
from collections.abc import Mapping
from typing import Any

from trainer.cluster import member_name
from trainer.config import GroupConfig, JobConfig
from trainer.devices import REQUEST_VARIABLE
from trainer.launch.cluster_api import Resource
from trainer.launch.job import (
    Job,
    Owner,
    command_of,
    condition_state,
    group_variables,
    job_name,
    literal,
    manifest_of,
    pod_template,
)
from trainer.launch.pods import RESTARTABLE_EXIT_CODE, labels_of
from trainer.launch.worker import RESTARTABLE_EXIT_CODE as RESTARTABLE_VARIABLE

TFJOBS = Resource("kubeflow.org", "v1", "tfjobs")
KIND = "TFJob"

_CONTAINER = "tensorflow"  # the operator puts TF_CONFIG into no other
_NAME_LABEL = "training.kubeflow.org/job-name"
_KEPT_SECS = 24 * 3600
_NO_SIDECAR = {"sidecar.istio.io/inject": "false"}  # its proxy would end neither with the training nor speak gRPC
_MOUNTS = {
    "scratch": ("/tmp", {}),  # noqa: S108  the pod's copy of the data, and its newest checkpoints
    "shared-memory": ("/dev/shm", {"medium": "Memory", "sizeLimit": "1Gi"}),  # noqa: S108
}
_USER = 10001  # of the image


def tfjob(request: str, config: JobConfig, group: GroupConfig, owner: Owner) -> Job:
    """Builds the job; the arguments are those of `trainjob`."""
    servers = group.num_parameter_servers
    template = pod_template(owner, config, group, _NAME_LABEL)
    for kind in ("labels", "annotations"):
        template["metadata"][kind] = {**template["metadata"].get(kind, {}), **_NO_SIDECAR}
    container = template["spec"]["containers"][0]
    container.update(name=_CONTAINER, command=command_of(), args=[literal(request)])
    container["env"] = [
        *container.get("env", []),
        *group_variables(group),
        {"name": RESTARTABLE_VARIABLE, "value": str(RESTARTABLE_EXIT_CODE)},
    ]
    _confine(template["spec"], container)
    if config.gang == "volcano":
        template["spec"]["schedulerName"] = "volcano"
    replicas = {"Worker": (group.num_workers, template)}
    if servers:
        plain = _without_accelerators(template)
        replicas |= {"Chief": (1, plain), "PS": (servers, plain)}
    num_pods = sum(number for number, _ in replicas.values())
    policy: dict[str, Any] = {
        "activeDeadlineSeconds": config.deadline_secs,
        "backoffLimit": group.max_restarts * num_pods,  # of the whole job; the launcher counts for each process
        "cleanPodPolicy": "Running",  # parameter servers never end by themselves
        "ttlSecondsAfterFinished": _KEPT_SECS,
    }
    if config.gang == "volcano":
        policy["schedulingPolicy"] = {"minAvailable": num_pods, **({"queue": config.queue} if config.queue else {})}
    spec = {
        "runPolicy": policy,
        "tfReplicaSpecs": {
            kind: {"replicas": number, "restartPolicy": "ExitCode", "template": copy.deepcopy(one)}
            for kind, (number, one) in replicas.items()
        },
    }
    name = job_name(owner)
    return Job(
        resource=TFJOBS,
        manifest=manifest_of(TFJOBS, KIND, owner, config, spec),
        container=_CONTAINER,
        pod_selector=f"{_NAME_LABEL}={name}",
        num_pods=num_pods,
        chief=member_name("chief", 0) if servers else member_name("worker", 0),
        member_of=_member,
        state_of=lambda found: condition_state(found, "Succeeded"),
        attempt_of=None,
        makers=(name,),
    )


def _confine(spec: dict[str, Any], container: dict[str, Any]) -> None:
    """What manifests/tensorflow-distributed.yaml allows a TrainJob's pods and no more."""
    spec.update(automountServiceAccountToken=False, enableServiceLinks=False)
    spec["securityContext"] = {
        "runAsNonRoot": True, "runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    container.setdefault("securityContext", {}).update(
        allowPrivilegeEscalation=False, capabilities={"drop": ["ALL"]}, readOnlyRootFilesystem=True
    )
    volumes, mounts = spec.setdefault("volumes", []), container.setdefault("volumeMounts", [])
    for name, (path, volume) in _MOUNTS.items():
        if all(one["name"] != name for one in volumes):  # cluster.shared_memory may have given one
            volumes.append({"name": name, "emptyDir": volume})
            mounts.append({"name": name, "mountPath": path})


def _without_accelerators(template: Mapping[str, Any]) -> dict[str, Any]:
    """A pod for those that compute nothing: what is neither CPU nor memory is not asked for."""
    plain = copy.deepcopy(dict(template))
    container = plain["spec"]["containers"][0]
    for kind in ("requests", "limits"):
        asked = container.get("resources", {}).get(kind, {})
        for resource in [name for name in asked if name not in ("cpu", "memory")]:
            del asked[resource]
    container["env"] = [one for one in container["env"] if one["name"] != REQUEST_VARIABLE]
    return plain


def _member(pod: Mapping[str, Any]) -> str | None:
    labels = labels_of(pod)
    kind, index = labels.get("training.kubeflow.org/replica-type"), labels.get("training.kubeflow.org/replica-index")
    return member_name(kind.lower(), int(index)) if kind and index else None
