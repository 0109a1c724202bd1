"""The objects that the launchers create, held against the published schemas and against what the engines do with them."""

import json

import pytest
import yaml
from conftest import REPOSITORY
from kubernetes_objects import (
    OWNER,
    TRAINJOB_API,
    asked,
    job_config,
    openapi,
    published_schema,
    trainjob_schema,
    violations,
)

from pipelines.config import load_config
from trainer.cluster import describe
from trainer.errors import BadInput, WorldFailure
from trainer.launch.job import job_name
from trainer.launch.tfjob import tfjob
from trainer.launch.trainjob import trainjob

EVERYTHING = """
name: digits
cluster:
  launcher: {launcher}
  num_workers: 4
  num_parameter_servers: {servers}
  image: example/trireme:7
  pipeline_root: gs://bucket/root
  cpu: "4"
  memory: 32Gi
  gpu: {{type: nvidia-l4, count: 2}}
  shared_memory: 8Gi
  topology: topology.kubernetes.io/zone
  gang: kueue
  queue: vision
  node_affinity:
    - require: [{{key: zone, values: [a, b]}}, {{key: cores, operator: Gt, values: ["8"]}}]
    - {{weight: 50, require: [{{key: spot, operator: DoesNotExist}}]}}
  tolerations: [{{key: team, value: vision, effect: NoSchedule}}, {{operator: Exists, effect: NoExecute, seconds: 300}}]
  timeout_secs: 86400
  service_account: trainer
  secrets:
    - {{name: wandb, variables: {{key: WANDB_KEY}}}}
    - {{name: certificates, path: /etc/certificates, optional: true}}
  volumes: [{{name: datasets, path: /data, sub_path: vision}}]
  pull_secrets: [registry]
  labels: {{example.org/team: vision}}
  annotations: {{example.org/note: "a long, free text"}}
  security: {{run_as_user: 1000, run_as_group: 2000}}
train: {{strategy: auto}}
"""


@pytest.fixture
def made(configuration):
    """The job of a configuration with every setting."""

    def make(launcher, servers=0, schema=None, *settings):
        config = load_config(configuration(EVERYTHING.format(launcher=launcher, servers=servers)), settings)
        request = asked().model_copy(update={"group": config.cluster.group(), "train": config.train})
        job = config.cluster.job()
        if launcher == "tfjob":
            return tfjob(request.to_json(), job, request.group, OWNER), request
        return trainjob(request.to_json(), job, request.group, OWNER, schema), request

    return make


@pytest.mark.parametrize("servers", [0, 2])
def test_a_trainjob_with_every_setting_fits_the_published_schema(made, servers):
    schema = published_schema("TrainJob")
    job, _ = made("trainjob", servers, schema)
    assert "runtimePatches" in job.manifest["spec"]
    assert list(violations(schema, job.manifest)) == []


@pytest.mark.parametrize("servers", [0, 2])
def test_a_tfjob_with_every_setting_fits_the_published_schema(made, servers):
    job, _ = made("tfjob", servers)
    assert list(violations(published_schema("TFJob"), job.manifest)) == []


def test_the_schema_check_finds_unknown_and_wrong_fields():
    schema = published_schema("TFJob")
    replica = {"replicas": "two", "restartPolicy": "ExitCode", "template": {"spec": {"containers": [{"nam": "x"}]}}}
    found = list(violations(schema, {"spec": {"tfReplicaSpecs": {"Worker": replica}, "numWorkers": 3}}))
    assert [one.partition(":")[0] for one in found] == [
        ".spec.tfReplicaSpecs.Worker.replicas",
        ".spec.tfReplicaSpecs.Worker.template.spec.containers[0].name",
        ".spec.tfReplicaSpecs.Worker.template.spec.containers[0].nam",
        ".spec.numWorkers",
    ]


def test_every_pod_is_told_the_same_request_and_how_many_there_are(made):
    job, request = made("trainjob", 0, trainjob_schema("runtimePatches"))
    trainer = job.manifest["spec"]["trainer"]
    assert [*trainer["command"], json.loads(trainer["args"][0])] == [
        *("python", "-m", "trainer", "train-worker"),
        request.model_dump(mode="json"),
    ]
    assert (trainer["image"], trainer["numNodes"]) == ("example/trireme:7", 4)
    assert {"name": "TRIREME_NUM_WORKERS", "value": "4"} in trainer["env"]
    assert {"name": "TRIREME_NUM_ACCELERATORS", "value": "2"} in trainer["env"]
    assert trainer["resourcesPerNode"] == {
        "requests": {"cpu": "4", "memory": "32Gi"},
        "limits": {"memory": "32Gi", "nvidia.com/gpu": "2"},
    }


def test_a_chief_workers_and_servers_are_as_many_pods_of_one_job(made):
    job, _ = made("trainjob", 2, trainjob_schema("runtimePatches"))
    spec = job.manifest["spec"]
    assert spec["runtimeRef"]["name"] == "tensorflow-parameter-server"
    assert spec["trainer"]["numNodes"] == job.num_pods == 1 + 4 + 2
    environ = {one["name"]: one["value"] for one in spec["trainer"]["env"] if "value" in one}
    environ |= {"TRIREME_JOBSET_NAME": job.name, "TRIREME_REPLICATED_JOB": "node"}
    for index in range(7):  # the launcher's names are those that the processes give themselves
        pod = {"metadata": {"labels": {"batch.kubernetes.io/job-completion-index": str(index)}}}
        assert job.member_of(pod) == describe(environ | {"JOB_COMPLETION_INDEX": str(index)}).name


def test_a_dollar_in_a_setting_reaches_the_pod_as_it_stands(made):
    job, request = made("trainjob", 0, trainjob_schema("runtimePatches"), "train.model_args={note: $(HOME) $$ é}")
    (argument,) = job.manifest["spec"]["trainer"]["args"]
    assert "$" not in argument  # Kubernetes would replace $(HOME) and halve $$
    assert json.loads(argument)["train"]["model_args"] == {"note": "$(HOME) $$ é"} == request.train.model_args


@pytest.mark.parametrize("shape", ["runtimePatches", "podTemplateOverrides"])
def test_the_pods_settings_take_the_shape_that_the_server_knows(made, shape):
    settings = ["cluster.security=null"] if shape == "podTemplateOverrides" else []
    job, _ = made("trainjob", 0, trainjob_schema(shape), *settings)
    (patch,) = job.manifest["spec"][shape]
    assert not {"runtimePatches", "podTemplateOverrides", "podSpecOverrides"} - {shape} & set(job.manifest["spec"])
    if shape == "runtimePatches":
        assert patch["manager"].count("/") == 1  # the webhook wants domain/path
        (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        assert node["name"] == "node"
        pod = node["template"]["spec"]["template"]
    else:
        assert patch["targetJobs"] == [{"name": "node"}]
        pod = patch
    spec = pod["spec"]
    assert pod["metadata"]["labels"]["example.org/team"] == "vision"
    assert spec["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-l4"}
    assert spec["tolerations"][0] == {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in spec["volumes"]
    (container,) = spec["containers"]
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert not {"image", "env", "resources", "command"} & set(container)  # the webhook refuses them here
    (zone,) = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert zone == {"topologyKey": "topology.kubernetes.io/zone",
                    "labelSelector": {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": job.name}}}  # fmt: skip
    assert len(spec["affinity"]["nodeAffinity"]) == 2
    assert ("terminationGracePeriodSeconds" in spec) == (shape == "runtimePatches")  # else the runtime's


@pytest.mark.parametrize(
    ("shape", "settings", "message"),
    [
        ("podTemplateOverrides", {}, "cluster.security: this cluster's TrainJob (podTemplateOverrides) has no"),
        ("podSpecOverrides", {}, "cluster.labels or cluster.annotations: this cluster's TrainJob (podSpecOverrides)"),
        ("podSpecOverrides", {"labels": "{}", "annotations": "{}"}, "cluster.node_affinity or cluster.topology: "),
        (
            "podSpecOverrides",
            {"labels": "{}", "annotations": "{}", "node_affinity": "[]", "topology": "null"},
            "cluster.pull_secrets: ",
        ),
    ],
)
def test_what_an_older_server_cannot_say_is_refused_by_the_settings_name(made, shape, settings, message):
    overrides = [f"cluster.{key}={value}" for key, value in settings.items()]
    with pytest.raises(BadInput) as refused:
        made("trainjob", 0, trainjob_schema(shape), *overrides)
    assert str(refused.value).startswith(message)
    assert "update Kubeflow Trainer" in str(refused.value)


def test_the_oldest_shape_carries_what_it_can_say(made):
    overrides = [f"cluster.{key}=null" for key in ("topology", "security")]
    overrides += ["cluster.labels={}", "cluster.annotations={}", "cluster.node_affinity=[]", "cluster.pull_secrets=[]"]
    job, _ = made("trainjob", 0, trainjob_schema("podSpecOverrides"), *overrides)
    (patch,) = job.manifest["spec"]["podSpecOverrides"]
    assert patch["targetJobs"] == [{"name": "node"}]
    assert patch["serviceAccountName"] == "trainer"
    assert "activeDeadlineSeconds" not in job.manifest["spec"]  # came later


def test_a_cluster_without_the_engine_or_with_an_unknown_one_is_named():
    arguments = (asked().to_json(), job_config(), asked().group, OWNER)
    with pytest.raises(WorldFailure, match="this cluster has no TrainJob"):
        trainjob(*arguments, None)
    with pytest.raises(WorldFailure, match="of a version that this launcher does not know"):
        trainjob(*arguments, trainjob_schema("none of them"))


def test_a_tfjobs_policies_agree_with_our_exit_codes(made):
    job, _ = made("tfjob", 0)
    spec = job.manifest["spec"]
    assert spec["runPolicy"] == {
        "activeDeadlineSeconds": 86400, "backoffLimit": 3 * 4, "cleanPodPolicy": "Running",
        "ttlSecondsAfterFinished": 86400,
    }  # fmt: skip
    assert list(spec["tfReplicaSpecs"]) == ["Worker"]
    worker = spec["tfReplicaSpecs"]["Worker"]
    assert (worker["replicas"], worker["restartPolicy"]) == (4, "ExitCode")
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "tensorflow"  # into no other does the operator put TF_CONFIG
    assert {"name": "TRIREME_RESTARTABLE_EXIT_CODE", "value": "138"} in container["env"]
    for kind in ("labels", "annotations"):
        assert worker["template"]["metadata"][kind]["sidecar.istio.io/inject"] == "false"


@pytest.mark.parametrize("settings", [["cluster.security=null", "cluster.shared_memory=null"], []])
def test_a_tfjobs_pods_may_do_what_the_runtimes_pods_may_and_no_more(made, settings):
    job, _ = made("tfjob", 2, None, *settings)
    runtime = yaml.safe_load((REPOSITORY / "manifests" / "tensorflow-distributed.yaml").read_text())
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    theirs = node["template"]["spec"]["template"]["spec"]
    for one in job.manifest["spec"]["tfReplicaSpecs"].values():
        ours = one["template"]["spec"]
        for field in ("automountServiceAccountToken", "enableServiceLinks", "securityContext"):
            assert ours[field] == theirs[field]
        (container,), (their_container,) = ours["containers"], theirs["containers"]
        given = {} if settings else {"runAsUser": 1000, "runAsGroup": 2000, "runAsNonRoot": True}
        assert container["securityContext"] == their_container["securityContext"] | given
        volumes = {one["name"]: one["emptyDir"] for one in ours["volumes"] if "emptyDir" in one}
        mounts = {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"] if one["name"] in volumes}
        size = "1Gi" if settings else "8Gi"
        assert mounts == {"/tmp": {}, "/dev/shm": {"medium": "Memory", "sizeLimit": size}}


def test_only_a_tfjobs_workers_ask_for_accelerators(made):
    job, _ = made("tfjob", 2)
    replicas = job.manifest["spec"]["tfReplicaSpecs"]
    assert {kind: one["replicas"] for kind, one in replicas.items()} == {"Worker": 4, "Chief": 1, "PS": 2}
    for kind, one in replicas.items():
        (container,) = one["template"]["spec"]["containers"]
        asks = "nvidia.com/gpu" in container["resources"]["limits"]
        told = any(variable["name"] == "TRIREME_NUM_ACCELERATORS" for variable in container["env"])
        assert (asks, told) == (kind == "Worker", kind == "Worker")
        assert container["resources"]["limits"]["memory"] == "32Gi"


@pytest.mark.parametrize("launcher", ["trainjob", "tfjob"])
def test_each_gang_scheduler_finds_its_queue_where_it_looks(made, launcher):
    schema = trainjob_schema("runtimePatches")
    job, _ = made(launcher, 0, schema)
    assert job.manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "vision"
    runtime = ["cluster.runtime=mine"] if launcher == "trainjob" else []
    job, _ = made(launcher, 0, schema, "cluster.gang=volcano", *runtime)
    assert "kueue.x-k8s.io/queue-name" not in job.manifest["metadata"]["labels"]
    spec = job.manifest["spec"]
    if launcher == "tfjob":
        assert spec["runPolicy"]["schedulingPolicy"] == {"minAvailable": 4, "queue": "vision"}
        assert spec["tfReplicaSpecs"]["Worker"]["template"]["spec"]["schedulerName"] == "volcano"
    else:
        template = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]
        assert template["metadata"]["annotations"] == {"scheduling.volcano.sh/queue-name": "vision"}
        assert spec["runtimeRef"]["name"] == "mine"


@pytest.mark.parametrize("name", ["d", "digits", "a-very-long-name-of-a-pipeline-that-uses-all-of-its-characters"])
def test_names_fit_into_the_hosts_and_differ_between_runs(name):
    from dataclasses import replace

    first, second = (replace(OWNER, name=name, key=f"{uid}/train-distributed") for uid in ("a", "b"))
    assert job_name(first) == job_name(replace(first))
    assert job_name(first) != job_name(second)
    assert len(f"{job_name(first)}-worker-999") <= 63
    assert len(f"{job_name(first)}-chief-0-0.{job_name(first)}") <= 63  # a coordinator's label
    assert not job_name(first).startswith("-")
    assert "--" not in job_name(first)


def test_the_job_belongs_to_the_run_and_ends_by_itself_in_the_end(made):
    job, _ = made("trainjob", 0, trainjob_schema("runtimePatches"), "cluster.timeout_secs=null")
    (reference,) = job.manifest["metadata"]["ownerReferences"]
    assert (reference["kind"], reference["uid"], reference["controller"]) == ("Workflow", "9f1c", False)
    assert job.manifest["metadata"]["labels"]["pipeline/runid"] == "run-1"
    assert job.manifest["spec"]["activeDeadlineSeconds"] == 7 * 24 * 3600


def test_the_published_shape_is_found_in_the_servers_own_document():
    from fake_kubernetes import FakeKubernetes

    from trainer.launch.trainjob import KIND, TRAINJOBS

    with FakeKubernetes(openapi(trainjob_schema("podTemplateOverrides"))) as server:
        api = server.connect()
        found = api.schema(TRAINJOBS, KIND)
        server.schemas.clear()
        assert api.schema(TRAINJOBS, KIND) is None
        api.close()
    assert "podTemplateOverrides" in found["properties"]["spec"]["properties"]
    assert [one.path for one in server.requests] == [TRAINJOB_API] * 2
