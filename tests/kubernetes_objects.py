"""Pods, schemas and runs for tests of the launchers, as the engines and the API server make them."""

import re
from functools import lru_cache

import pytest
import yaml
from conftest import REPOSITORY

from trainer.config import GroupConfig, JobConfig, TrainConfig
from trainer.launch.job import Owner
from trainer.launch.worker import WorkerRequest

CRDS = REPOSITORY.parent / "shared" / "crds"
WORKFLOW = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "digits-x7k2p", "uid": "9f1c"}
OWNER = Owner(
    name="digits",
    key="9f1c/train-distributed",
    labels={"pipeline/runid": "run-1"},
    reference={**WORKFLOW, "controller": False, "blockOwnerDeletion": False},
)
FILES = {
    "TrainJob": "trainer.kubeflow.org_trainjobs.yaml",
    "TFJob": "kubeflow.org_tfjobs.yaml",
    "ClusterTrainingRuntime": "trainer.kubeflow.org_clustertrainingruntimes.yaml",
}
TRAINJOB_API = "/openapi/v3/apis/trainer.kubeflow.org/v1alpha1"


@lru_cache
def published_schema(kind):
    """The published schema of a kind; the test is skipped where it is not at hand."""
    file = CRDS / FILES[kind]
    if not file.is_file():
        pytest.skip(f"the published custom-resource definitions are not beside this repository ({file.name})")
    found = yaml.CSafeLoader(file.read_text()).get_single_data()
    return found["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def fields(*names, **inner):
    """A schema of an object with these fields."""
    return {"type": "object", "properties": {name: {} for name in names} | inner}


def listed(inner):
    return {"type": "array", "items": inner}


_CONTAINERS = listed(fields("name", "env", "volumeMounts", "securityContext"))
_POD = ("serviceAccountName", "nodeSelector", "affinity", "tolerations", "volumes", "imagePullSecrets",
        "terminationGracePeriodSeconds")  # fmt: skip


def trainjob_schema(shape):
    """What a server of one version publishes, as far as the launcher looks."""
    common = fields("runtimeRef", "trainer", "suspend", "activeDeadlineSeconds")["properties"]
    if shape == "runtimePatches":
        pod = fields("metadata", spec=fields(*_POD, containers=_CONTAINERS))
        jobs = listed(fields("name", template=fields(spec=fields(template=pod))))
        patch = fields("metadata", spec=fields(replicatedJobs=jobs))
        common["runtimePatches"] = listed(fields("manager", trainingRuntimeSpec=fields(template=patch)))
    elif shape == "podTemplateOverrides":
        known = [name for name in _POD if name != "terminationGracePeriodSeconds"]
        pod = fields(*known, containers=listed(fields("name", "env", "volumeMounts")))
        common["podTemplateOverrides"] = listed(fields("targetJobs", "metadata", spec=pod))
        common |= {"labels": {}, "annotations": {}}
    elif shape == "podSpecOverrides":
        pod = fields("targetJobs", "serviceAccountName", "nodeSelector", "tolerations", "volumes",
                     containers=listed(fields("name", "env", "volumeMounts")))  # fmt: skip
        common["podSpecOverrides"] = listed(pod)
        common.pop("activeDeadlineSeconds")
        common |= {"labels": {}, "annotations": {}}
    return {"type": "object", "properties": {"spec": {"type": "object", "properties": common}},
            "x-kubernetes-group-version-kind": [{"kind": "TrainJob"}]}  # fmt: skip


def openapi(schema):
    """The document of the API group that holds the schema."""
    return {TRAINJOB_API: {"components": {"schemas": {"org.example.TrainJobSpec": {}, "org.example.TrainJob": schema}}}}


def job_config(launcher="trainjob", **settings):
    pod = {"spec": {"containers": [{"name": "node", "image": "example/trireme:1"}]}}
    return JobConfig(**{"launcher": launcher, "runtime": "tensorflow-distributed", "pod": pod, **settings})


def asked(num_workers=2, num_parameter_servers=0, **settings):
    group = GroupConfig(num_workers=num_workers, num_parameter_servers=num_parameter_servers, **settings)
    place = "gs://bucket/root"
    return WorkerRequest(train=TrainConfig(), group=group, seed=7, examples=f"{place}/examples", model=f"{place}/model",
                 checkpoints=f"{place}/checkpoints")  # fmt: skip


def pod(job, index, *, attempt=0, engine="trainjob", suffix="", **status):
    """A pod as the engine makes it."""
    if engine == "trainjob":
        name = f"{job}-node-0-{index}-{attempt}{suffix}"
        labels = {
            "jobset.sigs.k8s.io/jobset-name": job,
            "batch.kubernetes.io/job-completion-index": str(index),
            "jobset.sigs.k8s.io/restart-attempt": str(attempt),
        }
    else:
        name = f"{job}-worker-{index}"
        labels = {
            "training.kubeflow.org/job-name": job,
            "training.kubeflow.org/replica-type": "worker",
            "training.kubeflow.org/replica-index": str(index),
        }
    return {"metadata": {"name": name, "labels": labels}, "status": {"phase": "Pending", **status}}


def running(container="node"):
    return {"phase": "Running", "containerStatuses": [{"name": container, "state": {"running": {}}}]}


def ended(code, moment="2026-11-30T12:00:05Z", container="node", reason="Error"):
    state = {"terminated": {"exitCode": code, "reason": reason, "finishedAt": moment}}
    phase = "Failed" if code else "Succeeded"
    return {"phase": phase, "containerStatuses": [{"name": container, "state": state}]}


def waiting(reason, message="", container="node"):
    state = {"waiting": {"reason": reason, "message": message}}
    return {
        "phase": "Pending",
        "containerStatuses": [{"name": container, "image": "example/trireme:1", "state": state}],
    }


def unschedulable(message):
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "conditions": [condition]}


def condition(kind, reason="", message=""):
    return {"conditions": [{"type": kind, "status": "True", "reason": reason, "message": message}]}


def violations(schema, value, path=""):
    """Where a value breaks a structural schema; a field that the schema does not know is a violation too."""
    if schema.get("x-kubernetes-int-or-string") or value is None:
        return
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "number": (int, float)}
    expected = kinds.get(schema.get("type"))
    if expected and (not isinstance(value, expected) or (isinstance(value, bool) and expected is int)):
        yield f"{path}: {value!r} is no {schema['type']}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is not one of {schema['enum']}"
    if isinstance(value, str):
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{path}: {value!r} does not match {schema['pattern']}"
        if len(value) > schema.get("maxLength", len(value)):
            yield f"{path}: {len(value)} characters are more than {schema['maxLength']}"
    if isinstance(value, int) and value < schema.get("minimum", value):
        yield f"{path}: {value} is less than {schema['minimum']}"
    if isinstance(value, list):
        if len(value) > schema.get("maxItems", len(value)):
            yield f"{path}: {len(value)} items are more than {schema['maxItems']}"
        for number, item in enumerate(value):
            yield from violations(schema.get("items", {}), item, f"{path}[{number}]")
    if isinstance(value, dict):
        for name in schema.get("required", ()):
            if name not in value:
                yield f"{path}.{name}: is missing"
        others = schema.get("additionalProperties")
        for name, item in value.items():
            inner = schema.get("properties", {}).get(name, others)
            if isinstance(inner, dict):
                yield from violations(inner, item, f"{path}.{name}")
            elif not schema.get("x-kubernetes-preserve-unknown-fields") and path != ".metadata":
                yield f"{path}.{name}: is unknown"
