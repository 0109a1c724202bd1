"""The launching task: what it hands on, whose run it is, and when it takes a model for one."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from conftest import REPOSITORY
from fake_kubernetes import NAMESPACE, FakeKubernetes
from kubernetes_objects import WORKFLOW, asked, condition, ended, job_config, openapi, pod, trainjob_schema

from trainer.errors import BadInput, WorldFailure
from trainer.launch.distributed import check_places, checked_model, is_in_cluster, owner_of, train_on_cluster


@pytest.fixture
def server():
    with FakeKubernetes(openapi(trainjob_schema("runtimePatches"))) as server:
        yield server


def test_the_run_is_found_by_the_tasks_own_pod(server):
    labels = {"pipeline/runid": "run-9"}
    server.put("pods", {"metadata": {"name": "own", "ownerReferences": [WORKFLOW], "labels": labels}})
    api = server.connect()
    owner = owner_of(api, "digits", "train-distributed", {"KFP_POD_NAME": "own"})
    with pytest.raises(WorldFailure, match="own pod other is not in team"):
        owner_of(api, "digits", "train-distributed", {"KFP_POD_NAME": "other"})
    api.close()
    assert owner.key == "9f1c/train-distributed"
    assert owner.labels["pipeline/runid"] == "run-9"
    assert owner.reference == {**WORKFLOW, "controller": False, "blockOwnerDeletion": False}


TASK = """
import sys
from types import SimpleNamespace
from trainer import tasks
train, group, root, examples, model = sys.argv[1:]
artifact = SimpleNamespace(uri=model, path="/nowhere/model", metadata={})
tasks.train_distributed(train, group, 7, "digits", root, examples, artifact)
print("metadata", sorted(artifact.metadata))
"""


@contextlib.contextmanager
def task(server, gcs, tmp_path):
    """The task as its pod runs it, in a process of its own."""
    from trainer import storage

    server.put("pods", {"metadata": {"name": "own", "ownerReferences": [WORKFLOW]}})
    storage.write_json(f"{gcs}/examples/manifest.json", {"digest": "sha256:data"})
    request = asked()
    words = [request.train.to_json(), request.group.to_json(), f"{gcs}/root"]
    environ = {**os.environ, "KUBECONFIG": str(server.kubeconfig(tmp_path / "kubeconfig")), "KFP_POD_NAME": "own"}
    environ |= {"TRIREME_JOB": job_config().to_json()}
    environ.pop("TRIREME_RUN_DIR", None)
    with subprocess.Popen(
        [sys.executable, "-c", TASK, *words, f"{gcs}/examples", f"{gcs}/model"],
        cwd=REPOSITORY, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def publish_model(gcs, folder, digest="sha256:data"):
    from trainer import storage

    (folder / "saved_model").mkdir(parents=True)
    (folder / "saved_model" / "saved_model.pb").write_text("a graph")
    (folder / "model.keras").write_text("a model")
    summary = {"num_parameters": 3, "epochs": 2, "data_digest": digest}
    (folder / "train.json").write_text(json.dumps(summary))
    storage.publish(folder, f"{gcs}/model")


def first_job(server):
    return server.wait_for(lambda server: list(server.objects["trainjobs"]), timeout_secs=200.0)[0]


def test_the_task_hands_on_places_and_neither_data_nor_model(server, gcs, tmp_path):
    with task(server, gcs, tmp_path) as process:
        name = first_job(server)
        request = json.loads(server.objects["trainjobs"][name]["spec"]["trainer"]["args"][0])
        assert request["examples"] == f"{gcs}/examples"
        assert request["model"] == f"{gcs}/model"
        assert request["checkpoints"].startswith(f"{gcs}/root/checkpoints/digits/")
        publish_model(gcs, tmp_path / "model")
        server.change("trainjobs", name, **condition("Complete"))
        out, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert {one.token for one in server.requests} == {"Bearer a-token"}
    assert "'data_digest', 'epochs', 'framework', 'model', 'num_parameters'" in out
    assert not list(tmp_path.rglob("*.tfrecord"))


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ("nothing", "nothing was published there"),
        ("half", "model/model.keras: is missing"),
        ("another", "holds a model of the data sha256:other, and this run's is sha256:data"),
    ],
)
def test_a_model_that_is_not_there_whole_and_of_this_data_is_not_taken_for_one(gcs, tmp_path, left, said):
    from trainer.storage import service

    if left != "nothing":
        publish_model(gcs, tmp_path / "model", "sha256:other" if left == "another" else "sha256:data")
    if left == "half":
        service.delete(gcs.removeprefix("gs://"), "model/model.keras")
    with pytest.raises(WorldFailure, match=said):
        checked_model(f"{gcs}/model", "sha256:data")


def test_a_job_that_is_done_and_left_no_model_is_deleted_so_that_a_retry_starts_anew(
    server, gcs, tmp_path, monkeypatch
):
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig")))
    monkeypatch.setenv("KFP_POD_NAME", "own")
    server.put("pods", {"metadata": {"name": "own", "ownerReferences": [WORKFLOW]}})
    request = asked().model_copy(update={"model": f"{gcs}/model"})
    raised = []

    def train():
        try:
            train_on_cluster(request, job_config(), "digits", "train-distributed", "sha256:data")
        except WorldFailure as error:
            raised.append(str(error))

    thread = threading.Thread(target=train)
    thread.start()
    name = first_job(server)
    server.put("pods", pod(name, 0, **ended(0)))
    server.end_log(f"{name}-node-0-0-0")
    server.change("trainjobs", name, **condition("Complete"))
    thread.join(30.0)
    assert raised == [f"{gcs}/model: nothing was published there"]
    assert not server.objects["trainjobs"]


def test_places_that_no_pod_can_reach_are_refused_before_anything_is_asked():
    places = {"examples": "gs://bucket/examples", "model": "minio://mlpipeline/v2/artifacts/model"}
    with pytest.raises(BadInput, match=r"^model = minio://.*: the pods of a job can read and write gs:// only"):
        check_places(places)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"KFP_POD_NAME": "own", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, True),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBECONFIG": "/home/me/.kube/config"}, False),  # a notebook
        ({"KFP_POD_NAME": "own", "TRIREME_RUN_DIR": "/tmp/run"}, False),  # `trireme run` inside a task
        ({}, False),
    ],
)
def test_only_a_tasks_own_pod_launches_a_job(environ, expected):
    assert is_in_cluster(environ) == expected


def test_a_task_that_is_cancelled_deletes_its_job_before_anything_else(server, gcs, tmp_path):
    with task(server, gcs, tmp_path) as process:
        first_job(server)
        server.wait_for(lambda server: server.asked("GET", "/pods$"))
        server.lingering.update(server.objects["trainjobs"])
        asked_before = len(server.requests)
        sent = time.monotonic()
        process.send_signal(signal.SIGTERM)
        server.wait_for(lambda server: server.asked("DELETE", "/trainjobs/"))
        assert time.monotonic() - sent < 1.0
        after = [(one.method, one.path) for one in server.requests[asked_before:] if "watch" not in one.query]
        assert after[0][0] == "DELETE"
        process.kill()  # as Kubernetes does
    assert f"/namespaces/{NAMESPACE}/" in after[0][1]
