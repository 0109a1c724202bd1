"""The pods of a run, read back from the compiled YAML through kfp's own loader."""

import subprocess
import sys

import pytest
from conftest import REPOSITORY
from google.protobuf import json_format
from kfp import components

from pipelines.cli import main
from pipelines.config import load_config
from pipelines.training import compile_pipeline

EVERYTHING = """
name: tiny
cluster:
  image: trireme:0.1.0
  cpu: "4"
  memory: 32Gi
  gpu: {type: nvidia-l4, count: 4}
  shared_memory: 8Gi
  node_selector: {disk: ssd}
  node_affinity:
    - require: [{key: zone, values: [a, b]}, {key: cores, operator: Gt, values: ["8"]}]
    - {weight: 50, require: [{key: spot, operator: DoesNotExist}]}
  tolerations:
    - {key: team, value: vision, effect: NoSchedule}
    - {operator: Exists, effect: NoExecute, seconds: 300}
  timeout_secs: 86400
  service_account: trainer
  secrets:
    - {name: wandb, variables: {key: WANDB_KEY}}
    - {name: certificates, path: /etc/certificates, optional: true}
  volumes: [{name: datasets, path: /data, sub_path: vision}]
  pull_policy: IfNotPresent
  pull_secrets: [registry]
  labels: {example.org/team: vision, cost: research}
  annotations: {example.org/note: "a long, free text"}
  security: {run_as_user: 1000, run_as_group: 2000}
  retries: 3
train: {strategy: mirrored}
notify:
  channels: [{kind: slack, secret: chat}, {kind: email, secret: mail}]
"""
EVERY_TASK = {"prepare-data", "train-model", "evaluate-model", "judge-model", "push-model", "record-outcome"}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pods")
    (folder / "config.yaml").write_text(EVERYTHING)
    compile_pipeline(load_config(folder / "config.yaml"), folder / "pipeline.yaml")
    component = components.load_component_from_file(str(folder / "pipeline.yaml"))
    executors = json_format.MessageToDict(component.platform_spec)["platforms"]["kubernetes"]["deploymentSpec"][
        "executors"
    ]
    pods = {name.removeprefix("exec-"): content for name, content in executors.items()}
    containers = {
        name.removeprefix("exec-"): executor["container"]
        for name, executor in json_format.MessageToDict(component.pipeline_spec)["deploymentSpec"]["executors"].items()
    }
    return pods, containers


def test_the_gpu_block_becomes_accelerator_selector_and_toleration(loaded):
    pods, containers = loaded
    training = pods["train-model"]
    assert containers["train-model"]["resources"]["accelerator"] == {
        "count": "4", "type": "nvidia.com/gpu", "resourceCount": "4", "resourceType": "nvidia.com/gpu",
    }  # fmt: skip
    assert training["nodeSelector"]["labels"] == {"cloud.google.com/gke-accelerator": "nvidia-l4", "disk": "ssd"}
    assert training["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "team", "operator": "Equal", "value": "vision", "effect": "NoSchedule"},
        {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": "300"},
    ]


def test_the_training_gets_its_nodes_memory_and_time(loaded):
    pods, containers = loaded
    training, resources = pods["train-model"], containers["train-model"]["resources"]
    assert (resources["cpuRequest"], resources["memoryRequest"], resources["memoryLimit"]) == (
        4.0,
        34.359738368,
        34.359738368,
    )
    assert training["nodeAffinity"] == [
        {"matchExpressions": [
            {"key": "zone", "operator": "In", "values": ["a", "b"]}, {"key": "cores", "operator": "Gt", "values": ["8"]}]},
        {"matchExpressions": [{"key": "spot", "operator": "DoesNotExist"}], "weight": 50},
    ]  # fmt: skip
    assert training["emptyDirMounts"] == [
        {"volumeName": "shared-memory", "mountPath": "/dev/shm", "medium": "Memory", "sizeLimit": "8Gi"}
    ]
    assert training["activeDeadlineSeconds"] == "86400"


def test_what_can_fail_for_a_moment_is_tried_again_with_growing_pauses(tmp_path):
    (tmp_path / "config.yaml").write_text(EVERYTHING)
    compile_pipeline(load_config(tmp_path / "config.yaml"), tmp_path / "pipeline.yaml")
    spec = json_format.MessageToDict(components.load_component_from_file(str(tmp_path / "pipeline.yaml")).pipeline_spec)
    tasks = {
        name: task for one in spec["components"].values() for name, task in one.get("dag", {}).get("tasks", {}).items()
    }
    for name in ("prepare-data", "train-model", "evaluate-model", "push-model"):
        assert tasks[name]["retryPolicy"] == {
            "maxRetryCount": 3, "backoffDuration": "30s", "backoffFactor": 2.0, "backoffMaxDuration": "86400s",
        }  # fmt: skip


def test_no_other_task_asks_for_gpus_or_nodes(loaded):
    pods, containers = loaded
    for name in EVERY_TASK - {"train-model"}:
        assert "resources" not in containers[name], name
        assert not {"nodeSelector", "tolerations", "nodeAffinity", "emptyDirMounts"} & set(pods[name]), name


@pytest.mark.parametrize("name", sorted(EVERY_TASK))
def test_every_task_gets_secrets_volumes_labels_and_security(loaded, name):
    pods, containers = loaded
    pod = pods[name]
    own = [one for one in pod["secretAsEnv"] if one["secretName"] == "wandb"]
    assert own[0]["keyToEnv"] == [{"secretKey": "key", "envVar": "WANDB_KEY"}]
    (folder,) = pod["secretAsVolume"]
    assert (folder["secretName"], folder["mountPath"], folder["optional"]) == (
        "certificates",
        "/etc/certificates",
        True,
    )
    (claim,) = pod["pvcMount"]
    assert (claim["constant"], claim["mountPath"], claim["subPath"]) == ("datasets", "/data", "vision")
    assert pod["imagePullPolicy"] == "IfNotPresent"
    assert pod["imagePullSecret"][0]["secretName"] == "registry"
    assert pod["podMetadata"] == {
        "labels": {"example.org/team": "vision", "cost": "research"},
        "annotations": {"example.org/note": "a long, free text"},
    }
    assert pod["securityContext"] == {"runAsUser": "1000", "runAsGroup": "2000", "runAsNonRoot": True}
    assert containers[name]["image"] == "trireme:0.1.0"


def test_the_exit_task_alone_gets_the_addresses_and_runs_without_them(loaded):
    pods, _ = loaded
    given = {
        name: {
            key["envVar"]: one["optional"]
            for one in pod["secretAsEnv"] for key in one["keyToEnv"] if "NOTIFY" in key["envVar"]
        }
        for name, pod in pods.items()
    }  # fmt: skip
    assert given.pop("record-outcome") == {
        "TRIREME_NOTIFY_0_URL": True, "TRIREME_NOTIFY_1_URL": True, "TRIREME_NOTIFY_1_TO": True,
        "TRIREME_NOTIFY_1_FROM": True,
    }  # fmt: skip
    assert not any(given.values())


def test_a_cached_task_learns_its_run_from_a_label_and_not_from_a_parameter(loaded):
    pods, _ = loaded
    for name in ("prepare-data", "train-model"):
        assert pods[name]["fieldPathAsEnv"] == [
            {"name": "TRIREME_RUN", "fieldPath": "metadata.labels['pipeline/runid']"}
        ]


def test_with_every_setting_the_bytes_are_the_same_in_every_process(tmp_path):
    (tmp_path / "config.yaml").write_text(EVERYTHING)
    written = []
    for seed in ("1", "2"):
        target = str(tmp_path / f"{seed}.yaml")
        command = [sys.executable, "-m", "pipelines.cli", "compile", str(tmp_path / "config.yaml"), "-o", target]
        subprocess.run(command, cwd=REPOSITORY, check=True, env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin"})
        written.append((tmp_path / f"{seed}.yaml").read_bytes())
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("priority_class: high", "cluster.priority_class = \"high\": cannot be said in a compiled pipeline"),
        ("security: {read_only_root_filesystem: true}", "set it by a policy of the cluster"),
        ("security: {allow_privilege_escalation: false}", "is forbidden by the server for every task already"),
        ("security: {run_as_user: 0}", "cluster.security.run_as_user = 0: is root, and run_as_non_root is true"),
        ("affinity: {}", "give node_affinity; the affinity of pods is ignored by Kubeflow's server"),
        ("pod_anti_affinity: []", "is ignored by Kubeflow's server; set it by a policy"),
        ("runtime_class: gvisor", "cannot be said in a compiled pipeline"),
        ("resources: {gpu: {type: l4}}", "give cluster.cpu, cluster.memory and cluster.gpu"),
        ("gpu: {type: l4}\n  accelerator: {count: 1}", "stands beside cluster.gpu; give one of them"),
        ("gpu: {type: l4}\n  node_selector: {cloud.google.com/gke-accelerator: t4}", "cluster.gpu.type is l4"),
        ("shared_memory: 1Gi", "counts as memory, and cluster.memory is null"),
        ("tolerations: [{effect: NoSchedule}]", "cluster.tolerations.0.key = null: can be left out with operator Exists only"),
        ("tolerations: [{key: a, operator: Exists, value: b}]", "Exists takes any value"),
        ("tolerations: [{key: a, seconds: 3}]", "goes with effect NoExecute only"),
        ("node_affinity: [{require: [{key: a}]}]", "node_affinity.0.require.0.values = []: must not be empty with operator In"),
        ("node_affinity: [{require: [{key: a, operator: Gt, values: [b]}]}]", "must be one whole number"),
        ("node_affinity: [{require: [{key: a, operator: Exists, values: [b]}]}]", "must be empty with operator Exists"),
        ("secrets: [{name: a}]", "a secret needs variables, path or both"),
        ("secrets: [{name: a, path: /x}]\n  volumes: [{name: b, path: /x}]", "is taken by secrets.0.path"),
        ("labels: {a b: c}", "must be a Kubernetes label's key"),
        ("service_account: Trainer", "must be a Kubernetes name"),
    ],
)  # fmt: skip
def test_what_kubernetes_or_the_compiled_pipeline_cannot_do_is_refused_with_the_remedy(
    configuration, tmp_path, capsys, settings, message
):
    file = configuration(f"name: tiny\ncluster:\n  {settings}\n")
    assert main(["compile", str(file), "-o", str(tmp_path / "x.yaml")]) == 2
    assert message in capsys.readouterr().err
