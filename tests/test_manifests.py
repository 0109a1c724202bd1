"""The manifests say what Kubernetes takes, and agree with the exit codes, the settings and the objects that they meet."""

import pytest
import yaml
from conftest import REPOSITORY
from kubernetes_objects import OWNER, asked, job_config, published_schema, trainjob_schema, violations
from pods import expand_trainjob

from trainer.cluster import DEFAULT_PORT
from trainer.config import GroupConfig
from trainer.errors import EXIT_BAD_INPUT, EXIT_NO_RESTART_LEFT
from trainer.launch.tfjob import tfjob
from trainer.launch.trainjob import trainjob

RUNTIMES = ("tensorflow-distributed", "tensorflow-parameter-server")


def manifest(name):
    return yaml.safe_load((REPOSITORY / "manifests" / f"{name}.yaml").read_text())


def job_of(runtime):
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return job["template"]["spec"]


@pytest.mark.parametrize("name", RUNTIMES)
def test_a_runtime_fits_the_published_schema(name):
    runtime = manifest(name)
    assert list(violations(published_schema(runtime["kind"]), runtime)) == []
    runtime["spec"]["template"]["spec"]["replicatedJob"] = []
    assert any("replicatedJob" in one for one in violations(published_schema(runtime["kind"]), runtime))


@pytest.mark.parametrize("name", RUNTIMES)
def test_a_runtime_restarts_whole_sets_as_often_as_a_configuration_may_say_and_never_what_cannot_work(name):
    runtime = manifest(name)
    job, policy = job_of(runtime), runtime["spec"]["template"]["spec"]["failurePolicy"]
    assert (job["backoffLimit"], job["template"]["spec"]["restartPolicy"]) == (0, "Never")
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [EXIT_BAD_INPUT, EXIT_NO_RESTART_LEFT]
    assert policy["rules"] == [
        {"name": "noRestart", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    ]
    highest = next(one.le for one in GroupConfig.model_fields["max_restarts"].metadata if hasattr(one, "le"))
    assert policy["maxRestarts"] == highest


@pytest.mark.parametrize("name", RUNTIMES)
def test_a_pod_may_do_nothing_but_train(name):
    spec = job_of(manifest(name))["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert not spec["automountServiceAccountToken"]
    allowed = container["securityContext"]
    assert allowed["capabilities"] == {"drop": ["ALL"]}
    assert (allowed["allowPrivilegeEscalation"], allowed["readOnlyRootFilesystem"]) == (False, True)
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/tmp", "/dev/shm"}
    assert {volume["name"] for volume in spec["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}


def test_both_runtimes_differ_in_the_chief_who_ends_the_others_only():
    one, other = map(manifest, RUNTIMES)
    assert job_of(other).pop("successPolicy") == {"rules": [{"succeededIndexes": "0"}]}
    for runtime in (one, other):
        runtime["metadata"].pop("name")
        runtime["spec"].pop("mlPolicy")
        job_of(runtime).pop("completions")
        job_of(runtime).pop("parallelism")
    assert one == other


@pytest.mark.parametrize("engine", ["trainjob", "tfjob"])
def test_the_network_policy_lets_the_pods_of_a_job_reach_one_another_and_nobody_else(engine):
    policy = manifest("network-policy")["spec"]
    request = asked(num_parameter_servers=1)
    if engine == "trainjob":
        config = job_config(runtime=RUNTIMES[1])
        job = trainjob(request.to_json(), config, request.group, OWNER, trainjob_schema("runtimePatches"))
        jobset = expand_trainjob(job.manifest, manifest(RUNTIMES[1]))
        templates = [jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]]
    else:
        job = tfjob(request.to_json(), job_config("tfjob"), request.group, OWNER)
        templates = [one["template"] for one in job.manifest["spec"]["tfReplicaSpecs"].values()]
    selected = policy["podSelector"]["matchLabels"]
    for template in templates:
        assert selected.items() <= template["metadata"]["labels"].items()
    (rule,) = policy["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": selected}}]
    assert rule["ports"] == [{"protocol": "TCP", "port": DEFAULT_PORT}]
