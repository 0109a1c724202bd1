"""The launchers through the real Kubernetes client against a recording API server; the tests play the engine."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from conftest import REPOSITORY
from fake_kubernetes import NAMESPACE, FakeKubernetes, rules
from kubernetes_objects import (
    OWNER,
    WORKFLOW,
    asked,
    condition,
    ended,
    job_config,
    openapi,
    pod,
    running,
    trainjob_schema,
    unschedulable,
    waiting,
)

from trainer.errors import BadInput, WorldFailure
from trainer.launch.cluster import ClusterLauncher
from trainer.launch.distributed import check_places, checked_model, is_in_cluster, owner_of, train_on_cluster
from trainer.launch.job import KEY, job_name
from trainer.launch.tfjob import tfjob
from trainer.launch.trainjob import trainjob

NAME = job_name(OWNER)


@pytest.fixture
def server():
    with FakeKubernetes(openapi(trainjob_schema("runtimePatches"))) as server:
        yield server


class Running:
    """A launcher at work in a thread, and what it says."""

    def __init__(self, server, launcher="trainjob", owner=OWNER, max_restarts=3, **group):
        request = asked(**group)
        if launcher == "trainjob":
            self.job = trainjob(
                request.to_json(), job_config(), request.group, owner, trainjob_schema("runtimePatches")
            )
        else:
            self.job = tfjob(request.to_json(), job_config("tfjob"), request.group, owner)
        self.server, self.news, self.lines, self.error, self.later_secs = server, [], [], None, 0.0
        self.launcher = ClusterLauncher(
            self.job,
            server.connect(),
            emit=lambda source, line: self.heard(self.news if source == "launcher" else self.lines, source, line),
            start_timeout_secs=600.0,
            max_restarts=max_restarts,
            clock=lambda: time.monotonic() + self.later_secs,
        )
        self.thread = threading.Thread(target=self.run)

    def heard(self, where, source, line):
        with self.server.changed:
            where.append(line if source in ("launcher", self.job.chief) else f"{source}: {line}")
            self.server.changed.notify_all()

    def run(self):
        try:
            self.launcher.start()
            for line in self.launcher.watch():
                self.heard(self.news, "launcher", line)
        except Exception as error:
            self.error = error

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        if self.thread.is_alive():
            self.launcher.stop(0.0)
        self.thread.join(30.0)
        self.launcher._api.close()
        assert not self.thread.is_alive()
        threads = [*self.launcher._watches, *self.launcher._logs.values()]
        assert not [one.name for one in threads if one.is_alive()]

    def created(self):
        plural = self.job.resource.plural
        return self.server.wait_for(lambda server: server.objects[plural].get(self.job.name))

    def hears(self, text):
        return self.server.wait_for(lambda _: [line for line in [*self.news, *self.lines] if text in line])

    def waits_for_pods(self):
        self.server.wait_for(lambda _: self.launcher._waiting_since is not None)

    def result(self):
        self.thread.join(30.0)
        if self.error is not None:
            raise self.error
        return self.launcher.result()


def all_start(server, number=2, attempt=0):
    for index in range(number):
        server.put("pods", pod(NAME, index, attempt=attempt, **running()))


def finish(server, number=2):
    for index in range(number):
        server.put("pods", pod(NAME, index, **ended(0)))
        server.end_log(f"{NAME}-node-0-{index}-0")
    server.change("trainjobs", NAME, **condition("Complete", "AllJobsCompleted"))


def test_a_job_is_created_watched_and_done_and_the_chiefs_lines_are_shown(server):
    with Running(server) as work:
        created = work.created()
        assert created["metadata"]["ownerReferences"][0]["uid"] == WORKFLOW["uid"]
        all_start(server)
        server.write(f"{NAME}-node-0-0-0", "epoch 1", "epoch 2")
        server.write(f"{NAME}-node-0-1-0", "a worker's own words")
        work.hears("epoch 2")
        work.hears("all 2 pods have started")
        finish(server)
        assert work.result().exit_code == 0
    assert work.lines == ["epoch 1", "epoch 2"]
    assert not server.asked("DELETE", "")
    assert "trainjobs" in server.objects
    assert NAME in server.objects["trainjobs"]  # to be looked at; it goes with its run


def test_the_roles_verbs_are_all_used_and_suffice(server):
    for launcher, plural in (("trainjob", "trainjobs"), ("tfjob", "tfjobs")):
        with Running(server, launcher) as work:
            work.created()
            work.waits_for_pods()
            work.later_secs = 700.0
            assert work.result().exit_code == 1  # it has asked for events and deleted the job
        work = Running(server, launcher)
        server.put(plural, work.job.manifest | {"status": condition("Failed")})
        with work:  # reads what is there, deletes it and starts anew
            work.hears("created")
    server.put("pods", {"metadata": {"name": "own", "ownerReferences": [WORKFLOW]}})
    api = server.connect()
    owner_of(api, "digits", "task", {"KFP_POD_NAME": "own"})
    api.last_lines("own", "node", 5)
    api.close()
    assert server.used == rules()


@pytest.mark.parametrize("kind", ["reset", "lost", "status"])
def test_a_create_whose_answer_is_lost_makes_one_job(server, kind):
    server.fail("POST", "/trainjobs$", kind=kind, status=500)
    with Running(server) as work:
        work.created()
        all_start(server)
        work.hears("all 2 pods have started")
        finish(server)
        assert work.result().exit_code == 0
    assert len(server.asked("POST", "/trainjobs$")) == 2


def test_a_busy_server_is_asked_again_after_as_long_as_it_says(server):
    server.fail("POST", "/trainjobs$", status=429, headers={"Retry-After": "1"})
    began = time.monotonic()
    with Running(server) as work:
        work.created()
        assert time.monotonic() - began >= 1.0
        finish(server)
        assert work.result().exit_code == 0


@pytest.mark.parametrize("kind", ["cut", "reset", "status"])
def test_a_watch_goes_on_where_it_was_after_a_lost_connection(server, kind):
    with Running(server) as work:
        work.created()
        server.fail("GET", "/pods$", kind=kind, times=2)
        all_start(server)
        work.hears("all 2 pods have started")
        finish(server)
        assert work.result().exit_code == 0


def test_a_watch_that_the_server_has_forgotten_lists_anew_and_misses_nothing(server):
    with Running(server) as work:
        work.created()
        all_start(server)
        work.hears("all 2 pods have started")
        lists = len([one for one in server.asked("GET", "/pods$") if "watch" not in one.query])
        with server.changed:  # what happens before anybody looks again is in the list only
            server.forget()
            server.objects["pods"].clear()
            server.objects["trainjobs"][NAME].update(status=condition("Complete"))
        assert work.result().exit_code == 0
    assert len([one for one in server.asked("GET", "/pods$") if "watch" not in one.query]) > lists


def test_a_log_is_shown_once_across_lost_connections_and_to_its_last_line(server):
    name = f"{NAME}-node-0-0-0"
    with Running(server) as work:
        work.created()
        server.fail("GET", "/log$", kind="cut", after=3)
        server.fail("GET", "/log$", kind="reset")
        server.write(name, "same", "same", "same", at="2026-11-30T12:00:00.5Z")
        all_start(server)
        server.write(name, "same", at="2026-11-30T12:00:00.5Z")
        server.write(name, "later", at="2026-11-30T12:00:00.51Z")
        work.hears("later")
        server.write(name, "without an end", newline=False)
        finish(server)
        assert work.result().exit_code == 0
    assert work.lines == ["same"] * 4 + ["later", "without an end"]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (
            unschedulable("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."),
            "worker 1 cannot be scheduled: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        ),
        (
            waiting("ImagePullBackOff", 'Back-off pulling image "example/trireme:1"'),
            'worker 1 cannot pull its image example/trireme:1: ImagePullBackOff: Back-off pulling image "example/tri',
        ),
        (
            waiting("CreateContainerConfigError", 'secret "wandb" not found'),
            'worker 1 cannot be started: CreateContainerConfigError: secret "wandb" not found',
        ),
    ],
)
def test_a_pod_that_does_not_start_in_time_ends_the_job_with_the_clusters_own_reason(server, status, said):
    with Running(server) as work:
        work.created()
        server.put("pods", pod(NAME, 0, **running()))
        server.put("pods", pod(NAME, 1, **status))
        work.hears(said)
        work.later_secs = 601.0
        result = work.result()
    assert result.exit_code == 1
    assert str(result.first_failure).startswith(said)
    assert "(after 600 s, cluster.start_timeout_secs)" in str(result.first_failure)
    assert not server.objects["trainjobs"]
    assert not server.objects["pods"]


def test_an_image_name_that_cannot_be_is_not_waited_for(server):
    with Running(server) as work:
        work.created()
        server.put("pods", pod(NAME, 0, **waiting("InvalidImageName", "couldn't parse image name")))
        result = work.result()
    assert result.exit_code == 2
    assert "InvalidImageName: couldn't parse image name" in str(result.first_failure)


@pytest.mark.parametrize("maker", [NAME, f"{NAME}-node-0"])
def test_pods_that_are_never_made_are_explained_by_the_events(server, maker):
    warning = {"metadata": {"name": "e"}, "type": "Warning", "involvedObject": {"name": maker},
               "reason": "FailedCreate", "message": "exceeded quota: gpus"}  # fmt: skip
    server.put("events", warning)
    with Running(server) as work:
        work.created()
        work.waits_for_pods()
        work.later_secs = 11.0
        work.hears("exceeded quota")  # long before the time is over
        work.later_secs = 601.0
        result = work.result()
    assert str(result.first_failure) == (
        f"TrainJob {NAME} FailedCreate: exceeded quota: gpus (after 600 s, cluster.start_timeout_secs)"
    )


def test_a_queue_may_take_as_long_as_it_likes(server):
    with Running(server) as work:
        created = work.created()
        server.put("pods", pod(NAME, 0, **unschedulable("a node is being made")))
        work.hears("a node is being made")  # and the time runs
        server.put("trainjobs", created | {"spec": created["spec"] | {"suspend": True}})
        work.hears("waits for its queue")
        work.later_secs = 86400.0
        server.put("trainjobs", created | {"spec": created["spec"] | {"suspend": False}})
        work.hears("has been admitted")
        time.sleep(0.6)  # the launcher has looked
        all_start(server)
        finish(server)
        assert work.result().exit_code == 0


def fail_pod(server, index, code, moment, *lines, attempt=0, **options):
    name = f"{NAME}-node-0-{index}-{attempt}"
    server.write(name, *lines)
    server.end_log(name)
    server.put("pods", pod(NAME, index, attempt=attempt, **ended(code, moment, **options)))


def test_the_first_workers_own_fault_is_the_error_and_not_its_peers_echo(server):
    with Running(server, num_workers=3) as work:
        work.created()
        all_start(server, 3)
        echo = "trainer: worker 0 lost its peer: worker 1 (host:2222) has died or stopped answering."
        fail_pod(server, 0, 1, "2026-11-30T12:00:03Z", "Traceback", echo)
        fail_pod(server, 1, 2, "2026-11-30T12:00:05Z", "step 3", "trainer: train.epochs = 0: must be at least 1")
        server.change("trainjobs", NAME, **condition("Failed", "FailedJobs"))
        result = work.result()
    assert (result.exit_code, result.first_failure.member) == (2, "worker 1")
    assert result.first_failure.last_lines[-1] == "trainer: train.epochs = 0: must be at least 1"
    assert "worker 1: step 3" in work.lines  # beside the chief's


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (ended(137, reason="OOMKilled"), "worker 1 was ended because it used more memory than cluster.memory allows"),
        (ended(137), "worker 1 was ended by SIGKILL"),
        (ended(139), "worker 1 was ended by SIGSEGV"),
        (ended(143), "worker 1 ended with exit code 143"),
        ({"phase": "Failed", "reason": "Evicted", "message": "low on disk"}, "worker 1 was removed by the cluster: low on"),
        (
            {"phase": "Failed", "conditions": [{"type": "DisruptionTarget", "status": "True",
             "reason": "PreemptionByScheduler", "message": "a greater one"}]},
            "worker 1 was removed by the cluster: PreemptionByScheduler: a greater one",
        ),
    ],
)  # fmt: skip
def test_how_a_pod_ended_is_told_in_the_clusters_words(server, status, said):
    with Running(server) as work:
        work.created()
        all_start(server)
        server.put("pods", pod(NAME, 1, **status))
        work.hears(said)
        server.change("trainjobs", NAME, **condition("Failed", "FailedJobs"))
        assert str(work.result().first_failure).startswith(said)


def test_a_group_that_its_engine_starts_again_is_followed_into_the_next_try(server):
    with Running(server) as work:
        work.created()
        all_start(server)
        server.write(f"{NAME}-node-0-0-0", "first try")
        work.hears("first try")
        fail_pod(server, 1, 137, "2026-11-30T12:00:03Z", "killed here")
        work.hears("worker 1 was ended by SIGKILL")
        for index in range(2):
            server.remove("pods", f"{NAME}-node-0-{index}-0")
        all_start(server, attempt=1)
        server.write(f"{NAME}-node-0-0-1", "second try")
        work.hears("the whole group is started again (1 of 3)")
        work.hears("second try")
        server.end_log(f"{NAME}-node-0-0-0")
        server.end_log(f"{NAME}-node-0-0-1")
        server.change("trainjobs", NAME, **condition("Complete"))
        result = work.result()
    assert (result.exit_code, result.restarts, result.first_failure) == (0, 1, None)
    assert work.lines == ["first try", "second try"]


def test_a_tfjobs_process_is_not_started_again_more_often_than_it_may(server):
    with Running(server, "tfjob", max_restarts=1) as work:
        work.created()
        for number in range(2):
            name = f"{NAME}-worker-1"
            found = pod(NAME, 1, engine="tfjob", **ended(138, container="tensorflow"))
            found["metadata"]["uid"] = f"try-{number}"
            server.write(name, f"trainer: disk full {number}")
            server.put("pods", found)
            work.hears("worker 1 ended with exit code 1")
            server.remove("pods", name)
        result = work.result()
    assert (result.exit_code, result.restarts) == (1, 1)
    assert result.first_failure.last_lines == ("trainer: disk full 0", "trainer: disk full 1")
    assert not server.objects["tfjobs"]


def test_a_job_that_took_too_long_says_which_setting_ended_it(server):
    with Running(server) as work:
        work.created()
        server.change("trainjobs", NAME, **condition("Failed", "DeadlineExceeded", "exceeded its deadline"))
        result = work.result()
    assert result.exit_code == 1
    assert "took longer than it may (cluster.timeout_secs)" in str(result.first_failure)


def test_a_job_that_somebody_deleted_is_a_failure(server):
    with Running(server) as work:
        work.created()
        all_start(server)
        work.hears("all 2 pods have started")
        server.remove("trainjobs", NAME)
        result = work.result()
    assert (result.exit_code, str(result.first_failure)) == (
        1,
        f"TrainJob {NAME} was deleted by somebody; run again to start it anew",
    )


# Retries of the task, and other runs.


def test_a_retry_goes_on_with_the_job_that_its_first_try_started(server):
    first = Running(server)
    first.launcher.start()  # and then its pod is lost
    first.launcher._api.close()
    all_start(server)
    server.write(f"{NAME}-node-0-0-0", *(f"line {number}" for number in range(100)))
    with Running(server) as work:
        work.hears("of an earlier try: going on with it")
        work.hears("line 99")
        finish(server)
        assert work.result().exit_code == 0
    assert len(server.asked("POST", "/trainjobs$")) == 2
    assert len(server.objects["trainjobs"]) == 1
    assert len(work.lines) == 20  # the first try has shown the others


def test_a_retry_finds_a_job_that_was_done_meanwhile(server):
    first = Running(server)
    first.launcher.start()
    first.launcher._api.close()
    server.change("trainjobs", NAME, **condition("Complete"))
    with Running(server) as work:
        assert work.result().exit_code == 0


def test_a_retry_after_a_failure_deletes_exactly_that_job_and_starts_anew(server):
    first = Running(server)
    first.launcher.start()
    first.launcher._api.close()
    server.change("trainjobs", NAME, **condition("Failed"))
    uid = server.objects["trainjobs"][NAME]["metadata"]["uid"]
    server.lingering.add(NAME)  # its pods take a while
    with Running(server) as work:
        server.wait_for(lambda server: server.objects["trainjobs"][NAME]["metadata"].get("deletionTimestamp"))
        (deletion,) = server.asked("DELETE", "/trainjobs/")
        assert deletion.body == {"propagationPolicy": "Foreground", "preconditions": {"uid": uid}}
        server.lingering.clear()
        server.remove("trainjobs", NAME)
        assert work.created()["metadata"]["uid"] != uid
        finish(server)
        assert work.result().exit_code == 0


def test_a_job_of_the_name_that_is_not_ours_is_left_alone(server):
    other = Running(server).job.manifest
    server.put("trainjobs", other | {"metadata": other["metadata"] | {"annotations": {KEY: "another"}}})
    work = Running(server)
    with work, pytest.raises(WorldFailure, match="is there already and is not this run's"):
        work.result()
    assert not server.asked("DELETE", "")


def test_an_earlier_try_that_runs_with_other_settings_is_left_alone(server):
    first = Running(server, num_workers=3)
    first.launcher.start()
    first.launcher._api.close()
    work = Running(server)
    with work, pytest.raises(WorldFailure, match="runs with other settings; delete it, then retry"):
        work.result()
    assert not server.asked("DELETE", "")


def test_two_runs_of_one_pipeline_have_a_job_each(server):
    with Running(server) as one, Running(server, owner=replace(OWNER, key="another/train-distributed")) as other:
        assert one.created()["metadata"]["name"] != other.created()["metadata"]["name"]


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


# What the cluster refuses.


def test_a_missing_right_is_named_with_its_remedy(server):
    server._allowed.discard(("trainer.kubeflow.org", "trainjobs", "create"))
    work = Running(server)
    with work, pytest.raises(WorldFailure, match=r"cannot create resource .*launcher-rbac.yaml"):
        work.result()


def test_a_right_that_is_missing_later_ends_the_job(server):
    server._allowed.discard(("", "pods", "watch"))
    work = Running(server)
    with work, pytest.raises(WorldFailure, match="cannot watch resource"):
        work.result()
    assert not server.objects["trainjobs"]


def test_what_a_webhook_refuses_is_bad_input_in_its_own_words(server):
    server.admit = lambda plural, body: 'spec.runtimeRef: ClusterTrainingRuntime "tensorflow-distributed" not found'
    work = Running(server)
    with work, pytest.raises(BadInput, match='ClusterTrainingRuntime "tensorflow-distributed" not found'):
        work.result()


# Leaving.


def test_told_to_leave_the_job_is_deleted_at_once_and_its_pods_are_waited_for(server):
    with Running(server) as work:
        uid = work.created()["metadata"]["uid"]
        all_start(server)
        work.hears("all 2 pods have started")
        server.lingering.add(NAME)
        began = time.monotonic()
        work.launcher.stop(30.0)
        assert server.asked("DELETE", "/trainjobs/")[0].body["preconditions"] == {"uid": uid}
        assert time.monotonic() - began < 1.0
        work.hears("told to leave")
        assert work.thread.is_alive()
        server.remove("trainjobs", NAME)
        result = work.result()
    assert (result.exit_code, result.first_failure) == (143, None)


def test_told_to_leave_while_the_server_hangs_nothing_is_waited_for(server):
    with Running(server) as work:
        work.created()
        with server.changed:  # every answer waits for this
            began = time.monotonic()
            work.launcher.stop(0.0)
            assert time.monotonic() - began < 2.5
        server.remove("trainjobs", NAME)
        assert work.result().exit_code == 143


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
