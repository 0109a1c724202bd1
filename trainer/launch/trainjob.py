"""A group of processes as a TrainJob of Kubeflow Trainer v2.

The runtime that it refers to (manifests/) holds what a TrainJob cannot say: how pods are started again, which exit codes end
the group, and who each pod is. What a run decides goes into `trainer`, and what pods get besides into the patch that
the server knows: `runtimePatches` since 2.2, `podTemplateOverrides` in 2.1, `podSpecOverrides` before.
"""

from collections.abc import Mapping
from typing import Any

from trainer.config import GroupConfig, JobConfig
from trainer.errors import BadInput, WorldFailure
from trainer.launch.cluster_api import Resource
from trainer.launch.job import (
    CONTAINER,
    OURS,
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
from trainer.launch.pods import labels_of, node_member

TRAINJOBS = Resource("trainer.kubeflow.org", "v1alpha1", "trainjobs")
KIND = "TrainJob"

_JOB = "node"  # the runtimes' one replicated job
_NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"
_INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
_ATTEMPT_LABEL = "jobset.sigs.k8s.io/restart-attempt"
_VOLCANO_QUEUE = "scheduling.volcano.sh/queue-name"

# What a configuration set for a field that a server's patch may lack. Of what is not here the runtime has its own.
_SETTINGS = {
    "affinity": "cluster.node_affinity or cluster.topology",
    "containers.securityContext": "cluster.security",
    "containers.volumeMounts": "cluster.volumes, cluster.secrets or cluster.shared_memory",
    "imagePullSecrets": "cluster.pull_secrets",
    "metadata": "cluster.labels or cluster.annotations",
    "nodeSelector": "cluster.node_selector or cluster.gpu",
    "serviceAccountName": "cluster.service_account",
    "tolerations": "cluster.tolerations or cluster.gpu",
    "volumes": "cluster.volumes, cluster.secrets or cluster.shared_memory",
}


def trainjob(
    request: str, config: JobConfig, group: GroupConfig, owner: Owner, schema: Mapping[str, Any] | None
) -> Job:
    """Builds the job.

    Args:
        request: What every pod is asked to do, as JSON.
        config: The job's engine and pods.
        group: How many processes.
        owner: Whose job it is.
        schema: The server's OpenAPI schema of a TrainJob; None where it has no such kind.

    Raises:
        WorldFailure: The cluster has no Kubeflow Trainer.
        BadInput: Its version cannot say something that the configuration asks for.
    """
    if schema is None:
        raise WorldFailure(
            f"this cluster has no TrainJob ({TRAINJOBS.group}/{TRAINJOBS.version}): install Kubeflow Trainer v2 and"
            " manifests/, or set cluster.launcher to tfjob where the training operator is installed"
        )
    fields = schema["properties"]["spec"]["properties"]
    servers = group.num_parameter_servers
    num_pods = group.num_workers + servers + (1 if servers else 0)
    template = pod_template(owner, config, group, _NAME_LABEL)
    container = template["spec"].pop("containers")[0]
    trainer: dict[str, Any] = {
        "image": container.pop("image"),
        "command": command_of(),
        "args": [literal(request)],
        "numNodes": num_pods,
        "env": [*container.pop("env", []), *group_variables(group)],
    }
    if resources := container.pop("resources", None):
        trainer["resourcesPerNode"] = resources
    container.pop("imagePullPolicy", None)  # refused beforehand where it is not what Kubernetes does by itself
    if len(container) > 1:  # more than its name
        template["spec"]["containers"] = [container]
    spec: dict[str, Any] = {
        "runtimeRef": {"apiGroup": TRAINJOBS.group, "kind": "ClusterTrainingRuntime", "name": config.runtime},
        "trainer": trainer,
        **_patch(template, config, fields),
    }
    if "activeDeadlineSeconds" in fields:
        spec["activeDeadlineSeconds"] = config.deadline_secs
    name = job_name(owner)
    return Job(
        resource=TRAINJOBS,
        manifest=manifest_of(TRAINJOBS, KIND, owner, config, spec),
        container=CONTAINER,
        pod_selector=f"{_NAME_LABEL}={name}",
        num_pods=num_pods,
        chief=node_member(0, servers, group.num_workers),
        member_of=lambda pod: _member(pod, group),
        state_of=lambda found: condition_state(found, "Complete"),
        attempt_of=lambda pod: int(labels_of(pod).get(_ATTEMPT_LABEL, "0")),
        makers=(name, f"{name}-{_JOB}-0"),
    )


def _member(pod: Mapping[str, Any], group: GroupConfig) -> str | None:
    index = labels_of(pod).get(_INDEX_LABEL)
    return None if index is None else node_member(int(index), group.num_parameter_servers, group.num_workers)


def _patch(template: dict[str, Any], config: JobConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What is left of the pod template, in the shape that the server knows."""
    metadata, spec = template["metadata"], template["spec"]
    queue = {_VOLCANO_QUEUE: config.queue} if config.gang == "volcano" and config.queue else {}
    if "runtimePatches" in fields:
        patch = _at(fields, "runtimePatches", "trainingRuntimeSpec", "template")
        pod = _at(patch, "spec", "replicatedJobs", "template", "spec", "template")
        inner = {"metadata": metadata, "spec": _known(spec, _at(pod, "spec"), "runtimePatches")}
        job = {"name": _JOB, "template": {"spec": {"template": inner}}}
        jobset = {"spec": {"replicatedJobs": [job]}}
        if queue:
            jobset["metadata"] = {"annotations": queue}
        return {"runtimePatches": [{"manager": OURS + "launcher", "trainingRuntimeSpec": {"template": jobset}}]}
    outer = {"annotations": queue} if queue else {}
    target = [{"name": _JOB}]
    if "podTemplateOverrides" in fields:
        known = _known(spec, _at(fields, "podTemplateOverrides", "spec"), "podTemplateOverrides")
        return {**outer, "podTemplateOverrides": [{"targetJobs": target, "metadata": metadata, "spec": known}]}
    if "podSpecOverrides" in fields:
        if config.pod.get("metadata"):
            raise _lacking("metadata", "podSpecOverrides")
        known = _known(spec, _at(fields, "podSpecOverrides"), "podSpecOverrides")
        return {**outer, **({"podSpecOverrides": [{"targetJobs": target, **known}]} if known else {})}
    raise WorldFailure(
        "this cluster's TrainJob has neither runtimePatches nor podTemplateOverrides nor podSpecOverrides: it is of a"
        " version that this launcher does not know; update Kubeflow Trainer to 2.x"
    )


def _at(fields: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """The fields of an object of the schema, further in; through lists."""
    for name in path:
        inner = fields.get(name, {})
        fields = inner.get("items", inner).get("properties", {})
    return fields


def _known(spec: dict[str, Any], fields: Mapping[str, Any], shape: str) -> dict[str, Any]:
    """The part of a pod's specification that the server's patch can say."""
    found: dict[str, Any] = {}
    for field, value in spec.items():
        if field not in fields:
            if field in _SETTINGS:
                raise _lacking(field, shape)
        elif field == "containers":
            known = _at(fields, "containers")
            found[field] = [
                {key: _of_container(key, inner, known, shape) for key, inner in one.items()} for one in value
            ]
        else:
            found[field] = value
    return found


def _of_container(key: str, value: Any, known: Mapping[str, Any], shape: str) -> Any:
    if key not in known:
        raise _lacking(f"containers.{key}", shape)
    return value


def _lacking(field: str, shape: str) -> BadInput:
    return BadInput(
        f"{_SETTINGS.get(field, field)}: this cluster's TrainJob ({shape}) has no {field}; update Kubeflow Trainer to 2.2"
        " or later, or put it into a runtime of your own and leave the setting out (cluster.runtime)"
    )
