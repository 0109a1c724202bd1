"""Upload, submit and runs, from the command line through kfp's own client to a server."""

import json
import os
import re
import shlex
import signal
from pathlib import Path

import pytest
from fake_kfp import FakeKubeflow
from operating import Operator

from pipelines.targets import access
from trainer import outcome, storage
from trainer.errors import WorldFailure
from trainer.storage import waiting

PAGE = "<!doctype html><html>Sign in</html>"


@pytest.fixture
def operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with FakeKubeflow() as server:
        yield Operator(server, tmp_path, monkeypatch)


def detail(name: str, state: str, error: str | None = None) -> dict:
    times = {"start_time": "2027-01-04T12:00:00Z", "end_time": "2027-01-04T12:00:30Z"}
    return {"display_name": name, "state": state, **times} | ({"error": {"code": 2, "message": error}} if error else {})


def after_submission(operator: Operator, *states) -> None:
    """The next run shows these states, one a look."""
    put = operator.server._put

    def wrapped(store, key, body):
        made = put(store, key, body)
        if key == "run_id":
            operator.server.script(made["run_id"], *states)
        return made

    operator.server._put = wrapped


def test_a_version_is_named_by_its_content_and_uploaded_once(operator: Operator) -> None:
    first = operator("upload", "@")
    assert first.code == 0, first.err
    assert re.search(r"digits: version sha256-[0-9a-f]{16} uploaded", first.out)
    changes = operator.server.changes()
    again = operator("upload", "@")
    assert "is there already" in again.out
    assert operator.server.changes() == changes
    changed = json.loads(operator("upload", "@", "--set", "train.epochs=3", "--json").out)
    assert changed["made"] is True
    assert len(operator.server.versions) == 2
    assert len(operator.server.pipelines) == 1
    assert changed["link"].endswith(f"/#/pipelines/details/{changed['pipeline_id']}/version/{changed['version_id']}")


def test_going_back_to_an_older_content_is_said_because_latest_means_the_newer(operator: Operator) -> None:
    operator("upload", "@")
    operator("upload", "@", "--set", "seed=5")
    assert "another version was uploaded after it" in operator("upload", "@").out


def test_what_is_uploaded_is_what_compiles(operator: Operator, tmp_path: Path) -> None:
    operator("upload", "@", "--copy-to", str(tmp_path / "packages"))
    operator("compile", "@", "-o", str(tmp_path / "compiled.yaml"))
    (version,) = operator.server.versions.values()
    assert version["package"] == (tmp_path / "compiled.yaml").read_text()
    (stored,) = (tmp_path / "packages").rglob("pipeline.yaml")
    assert stored.read_text() == version["package"]
    assert stored.parent.name == version["display_name"]


def test_the_package_is_stored_in_a_bucket_by_its_digest_once(operator: Operator, gcs: str) -> None:
    for _ in range(2):
        said = operator("upload", "@", "--copy-to", f"{gcs}/packages", "--json")
        assert said.code == 0, said.err
    uploaded = json.loads(said.out)
    assert uploaded["copy"] == f"{gcs}/packages/digits/{uploaded['version']}/pipeline.yaml"
    assert storage.exists(uploaded["copy"])


@pytest.mark.parametrize("fault", [{"lost": True}, {"status": 503}, {"status": 503, "done": True}, {"status": 429}])
@pytest.mark.parametrize("path", ["pipelines$", "upload_version", "experiments$", "runs$"])
def test_a_lost_answer_makes_nothing_twice(operator: Operator, path: str, fault: dict) -> None:
    operator.server.fail("POST", path, **fault)
    assert operator("submit", "@").code == 0
    server = operator.server
    assert [len(store) for store in (server.pipelines, server.versions, server.experiments, server.runs)] == [
        1,
        1,
        1,
        1,
    ]


@pytest.mark.parametrize("path", ["pipelines$", "upload_version", "experiments$"])
def test_what_somebody_else_made_at_the_same_moment_is_taken(operator: Operator, path: str) -> None:
    operator.server.fail("POST", path, status=409, body='{"message": "already exist"}', done=True)
    said = operator("submit", "@")
    assert said.code == 0, said.err
    stores = (operator.server.pipelines, operator.server.versions, operator.server.experiments, operator.server.runs)
    assert [len(store) for store in stores] == [1, 1, 1, 1]


def test_overrides_of_a_step_are_arguments_of_the_version_that_is_there(operator: Operator) -> None:
    operator("submit", "@")
    operator("submit", "@", "--set", "train.epochs=3", "--set", "seed=4")
    assert len(operator.server.versions) == 1
    plain, changed = operator.server.runs.values()
    assert plain["runtime_config"].get("parameters", {}) == {}
    parameters = changed["runtime_config"]["parameters"]
    assert sorted(parameters) == ["seed", "train"]
    assert json.loads(parameters["train"])["epochs"] == 3
    assert parameters["seed"] == 4


def test_another_image_is_another_version(operator: Operator) -> None:
    operator("submit", "@")
    operator("submit", "@", "--set", "cluster.image=trireme:0.2.0")
    assert len(operator.server.versions) == 2


def test_a_run_needs_a_root_and_gets_its_places_from_it(operator: Operator) -> None:
    operator.config.write_text(f"name: digits\nkubeflow: {{host: '{operator.server.url}'}}\n")
    refused = operator("submit", "@")
    assert refused.code == 2
    assert "cluster.pipeline_root = null" in refused.err
    operator("submit", "@", "--root", "gs://bucket/trireme")
    (run,) = operator.server.runs.values()
    assert run["runtime_config"]["parameters"] == {
        "root": "gs://bucket/trireme",
        "registry": "gs://bucket/trireme/models",
    }
    assert run["runtime_config"]["pipeline_root"] == "gs://bucket/trireme/artifacts"


def test_waiting_shows_tasks_and_ends_with_the_verdict(operator: Operator) -> None:
    working = {"state": "RUNNING", "run_details": {"task_details": [
        detail("root", "RUNNING"), detail("prepare-data-driver", "SUCCEEDED"), detail("prepare-data", "RUNNING")]}}  # fmt: skip
    done = {"state": "SUCCEEDED", "run_details": {"task_details": [
        detail("prepare-data", "SUCCEEDED"), detail("train-model", "SUCCEEDED")]}}  # fmt: skip
    after_submission(operator, "PENDING", working, working, done)
    original = outcome.read
    verdict = {"verdict": "not_blessed", "reasons": ["accuracy ≥ 0.5 does not hold"], "metrics": {"accuracy": 0.4}}
    outcome.note(f"{operator.folder}/root", "run-0004-00000000", "verdict", verdict)
    assert original(f"{operator.folder}/root", "run-0004-00000000")
    said = operator("submit", "@", "--wait")
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert [line.split() for line in lines[2:5]] == [
        ["prepare-data", "running"], ["prepare-data", "succeeded"], ["train-model", "succeeded"],
    ]  # fmt: skip
    assert "verdict       not_blessed" in said.out
    assert "accuracy ≥ 0.5 does not hold" in said.out
    after_submission(operator, "SUCCEEDED")
    assert operator("submit", "@", "--wait", "--fail-unless-blessed").code == 3


@pytest.mark.parametrize(("state", "code"), [("SUCCEEDED", 0), ("FAILED", 1), ("CANCELED", 130)])
def test_waiting_ends_as_the_run_did(operator: Operator, state: str, code: int) -> None:
    failed = {"state": state, "run_details": {"task_details": [detail("train-model", "FAILED", "boom\nat line 3")]}}
    after_submission(operator, "RUNNING", failed if state == "FAILED" else state)
    said = operator("submit", "@", "--wait")
    assert said.code == code
    if state == "FAILED":
        assert "state         failed: train-model: boom\n" in said.out


def test_waiting_survives_a_server_that_goes_away_for_minutes(operator: Operator) -> None:
    after_submission(operator, "RUNNING", "RUNNING", "SUCCEEDED")
    operator.server.fail("GET", "runs/", status=503, times=5)
    operator.server.fail("GET", "runs/", lost=True, times=6)
    assert operator("submit", "@", "--wait").code == 0
    assert sum(operator.server.clock.slept) > 120


def test_runs_are_listed_newest_first_over_pages_with_their_verdicts(operator: Operator) -> None:
    for _ in range(5):
        operator("submit", "@")
    newest = list(operator.server.runs)[-1]
    outcome.note(f"{operator.folder}/root", newest, "verdict", {"verdict": "blessed", "metrics": {"accuracy": 0.98}})
    outcome.note(f"{operator.folder}/root", newest, "pushed", {"version": 4, "uri": "x"})
    rows = json.loads(operator("runs", "list", "@", "-n", "4", "--json").out)
    assert [row["run_id"] for row in rows] == list(operator.server.runs)[:0:-1]
    assert (rows[0]["verdict"], rows[0]["version"], rows[1]["verdict"]) == ("blessed", 4, None)
    assert "blessed      accuracy 0.9800" in operator("runs", "list", "@").out
    shown = operator("runs", "show", "@", "latest").out
    assert "promoted as version 4" in shown
    assert f"/#/runs/details/{newest}" in shown


def test_a_bucket_that_does_not_answer_is_asked_once_and_the_runs_are_told_all_the_same(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        operator("submit", "@")
    asked = []

    def read(root: str, run: str) -> dict:
        asked.append((root, waiting.deadline_secs))
        raise WorldFailure("no connection")

    monkeypatch.setattr(outcome, "read", read)
    said = operator("runs", "list", "@")
    assert said.code == 0
    assert len(said.out.splitlines()) == 3
    assert said.err == "trireme: verdicts and metrics cannot be read: no connection\n"
    assert asked == [(f"{operator.folder}/root", 5.0)]


@pytest.mark.parametrize(
    ("number", "words", "code"),
    [(signal.SIGINT, "interrupted", 130), (signal.SIGTERM, "ended by SIGTERM", 143)],
)
def test_who_stops_waiting_is_told_that_the_run_goes_on_and_how_to_stop_it(
    operator: Operator, monkeypatch: pytest.MonkeyPatch, number: int, words: str, code: int
) -> None:
    def stop_me(*_: object) -> None:
        if number == signal.SIGINT:  # not sent: what runs in the background was started to ignore it
            raise KeyboardInterrupt
        os.kill(os.getpid(), number)

    clock = access.Clock(operator.server.clock.now, stop_me)
    monkeypatch.setattr(access, "system_clock", lambda: clock)
    flags = ("--host", operator.server.url, "--experiment", "my own", "--set", "seed=5")
    said = operator("submit", "@", "--wait", *flags)
    (run,) = operator.server.runs.values()
    assert said.code == code, said
    goes_on, watch, stop, end = said.err.splitlines()
    assert goes_on == (
        f"trireme: {run['display_name']} ({run['run_id']}) goes on on the server:"
        f" {operator.server.url}/#/runs/details/{run['run_id']}"
    )
    assert end == f"trireme: {words}"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    watch = shlex.split(watch.partition("trireme: to watch it again: trireme ")[2])
    stop = shlex.split(stop.partition("trireme: to stop it:        trireme ")[2])
    assert watch[:4] == ["runs", "watch", str(operator.config), run["run_id"]]
    assert all(flag in watch for flag in flags)
    assert operator(*watch).code == code  # whose wait is stopped in the same way
    assert run["state"] == "PENDING"
    assert operator(*stop).code == 0
    assert run["state"] == "CANCELED"
    assert operator(*watch).code == 130  # as a run that was cancelled ends


def test_who_is_stopped_before_the_server_answered_is_told_where_to_look(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator("upload", "@")
    operator.server.fail("POST", "/runs$", lost=True)
    operator.server.fail("GET", "/runs$")
    clock = access.Clock(operator.server.clock.now, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(access, "system_clock", lambda: clock)
    said = operator("submit", "@")
    assert said.code == 143
    assert said.err.splitlines()[0].endswith(
        f"a run may have started already; this tells: trireme runs list {operator.config}"
    )


def test_cancel_and_retry_do_what_the_state_allows(operator: Operator) -> None:
    operator("submit", "@")
    (run,) = operator.server.runs.values()
    assert "is being cancelled" in operator("runs", "cancel", "@", "latest").out
    assert run["state"] == "CANCELED"
    assert "had ended already: CANCELED" in operator("runs", "cancel", "@", run["run_id"][:8]).out
    operator.server.fail("POST", ":retry", lost=True)
    assert operator("runs", "retry", "@", "latest").code == 0
    assert run["state"] == "RUNNING"
    assert len(operator.server.asked("POST", ":retry")) == 1
    refused = operator("runs", "retry", "@", "latest")
    assert refused.code == 2
    assert "is RUNNING; only a run that failed or was cancelled" in refused.err


def test_a_run_that_is_not_there_or_not_one_is_said(operator: Operator) -> None:
    assert "no runs in digits" in operator("runs", "list", "@").out
    assert "there is no such run" in operator("runs", "show", "@", "latest").err
    operator("submit", "@")
    operator("submit", "@")
    assert "2 runs begin so" in operator("runs", "show", "@", "digits").err


def test_a_namespace_is_asked_for_everywhere(operator: Operator) -> None:
    operator("submit", "@", "--namespace", "team-a")
    assert [one["namespace"] for one in operator.server.pipelines.values()] == ["team-a"]
    assert [one["namespace"] for one in operator.server.experiments.values()] == ["team-a"]
    lists = [
        one
        for one in operator.server.requests
        if one.method == "GET" and one.path.endswith(("pipelines", "experiments"))
    ]
    assert lists
    assert {one.query.get("namespace") for one in lists} == {"team-a"}


def test_no_secret_shows_in_output_errors_or_what_is_uploaded(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIREME_KFP_TOKEN", "very-secret-token")
    monkeypatch.setenv("TRIREME_KFP_COOKIES", "session=very-secret-cookie")
    said = [operator("submit", "@"), operator("runs", "list", "@", "--json")]
    for status in (401, 403, 503):
        operator.server.fail("GET", "pipelines$", status=status, times=9, body='{"message": "very-secret-token"}')
        said.append(operator("upload", "@"))
        operator.server.faults.clear()
    operator.server.fail("GET", "pipelines$", status=200, body=PAGE, headers={"Content-Type": "text/html"})
    said.append(operator("upload", "@"))
    assert [one.code for one in said[2:]] == [2, 2, 1, 2]
    stored = json.dumps([operator.server.versions, operator.server.runs])
    assert "very-secret" not in "".join(one.out + one.err for one in said) + stored


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["submit", "@", "--root", ""], "--root: is empty; give it a value, or leave it out if it is optional"),
        (["submit", "@", "--experiment", ""], "--experiment: is empty"),
        (["upload", "@", "--copy-to", ""], "--copy-to: is empty"),
        (["upload", "@", "--token-command", ""], "--token-command: is empty"),
        (["submit", "@", "--root", "somewhere"], "root = somewhere: must be a bucket"),
        (["submit", "@", "--root", "s3://bucket/x"], "root = s3://bucket/x: must be a bucket, such as gs://"),
        (["submit", "@", "--root", "gs://"], "root = gs://: must be a bucket"),
        (
            ["submit", "@", "--set", "cluster.pipeline_root=minio://b/x"],
            "must be a folder, or gs:// with a bucket's name after it; no other",
        ),
        (["upload", "@", "--copy-to", "gs:/bucket/x"], "'gs:/bucket/x': storage knows plain folders and gs:// only"),
    ],
)
def test_a_place_that_is_empty_or_misspelt_is_not_taken_for_another(operator, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    said = operator(*words)
    assert (said.code, message in said.err) == (2, True), said.err
    assert not (tmp_path / "gs:").exists()
    assert operator.server.runs == {}
