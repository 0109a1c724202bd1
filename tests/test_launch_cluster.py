"""The launchers through the real Kubernetes client against a recording API server; the tests play the engine."""

import threading
import time
from dataclasses import replace

import pytest
from fake_kubernetes import FakeKubernetes, rules
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
from trainer.launch.distributed import owner_of
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


# What the cluster refuses.


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("POST", "/trainjobs$", "the Kubernetes API server cannot create trainjobs digits-"),
        ("GET", "/pods$", "the watch of pods is broken off"),
    ],
)
def test_a_server_that_is_away_is_spoken_of_once_and_waited_for(server, capsys, method, path, said):
    if method == "GET":
        server.fail(method, path, kind="cut", after=99)  # the list, which is no stream to be cut
    server.fail(method, path, times=4)
    work = Running(server)
    work.launcher._api.said_after_secs = 0.5
    with work:
        work.created()
        all_start(server)
        server.wait_for(lambda server: not any(fault.times for fault in server.faults))
        finish(server)
        assert work.result().exit_code == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(said)
    assert line.endswith(" (503 later); trying for 30 min")


@pytest.mark.parametrize(
    "message",
    [
        "exceeded quota: team, requested: count/trainjobs.trainer.kubeflow.org=1, used: 4, limited: 4",
        'admission webhook "validation.gatekeeper.sh" denied the request: images must come from our registry',
    ],
)
def test_what_a_quota_or_a_policy_forbids_is_told_in_its_own_words_and_not_as_a_missing_right(server, message):
    server.fail("POST", "/trainjobs$", status=403, message=message)
    work = Running(server)
    with work, pytest.raises(WorldFailure) as refused:
        work.result()
    assert str(refused.value) == f"create trainjobs {NAME}: the cluster refuses it (403): {message}"


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
