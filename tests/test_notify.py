"""Notifications against real local servers: what is sent, that it is tried again, and that nothing of it fails a run."""

import json
import os
import socket
import socketserver
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from kfp import dsl

from components.check_serving import check_serving
from components.decide_training import decide_training
from components.evaluate_model import evaluate_model
from components.fingerprint_data import fingerprint_data
from components.record_outcome import record_outcome
from components.validate_data import validate_data
from trainer import notify, outcome
from trainer.config import NotifyConfig, parse
from trainer.notify import send
from trainer.tasks import prepare_data

FACTS = {
    "name": "tiny",
    "run": "run-1",
    "task": "train-model",
    "error": "out of memory",
    "link": "https://k/#/runs/details/run-1",
}


class Hook:
    """A webhook that answers as it is told."""

    def __init__(self, *statuses: int, location: str = "") -> None:
        self.statuses, self.bodies, self.looked_at = list(statuses), [], 0
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hook.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(hook.statuses.pop(0) if hook.statuses else 200)
                if location:
                    self.send_header("Location", location)
                self.end_headers()

            def do_GET(self) -> None:
                hook.looked_at += 1
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook/secret-path"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Post:
    """A mail server that keeps what it is given."""

    def __init__(self, refusals: int = 0, farewell: bytes = b"221 bye") -> None:
        self.letters: list[str] = []
        post = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                nonlocal refusals
                if refusals:
                    refusals -= 1
                    return
                self.wfile.write(b"220 post\r\n")
                while line := self.rfile.readline().decode().strip().upper():
                    if line == "DATA":
                        self.wfile.write(b"354 go on\r\n")
                        letter = []
                        while (part := self.rfile.readline().decode().rstrip("\r\n")) != ".":
                            letter.append(part)
                        post.letters.append("\n".join(letter))
                    self.wfile.write(farewell + b"\r\n" if line == "QUIT" else b"250 yes\r\n")
                    if line == "QUIT":
                        return

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"smtp://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    close = Hook.close


@pytest.fixture
def open_(request):
    opened = []

    def start(server):
        opened.append(server)
        return server

    yield start
    for server in opened:
        server.close()


def config(*kinds: str, on=("failed", "not_blessed", "promoted", "skipped")) -> NotifyConfig:
    return parse(NotifyConfig, {"on": list(on), "channels": [{"kind": kind, "secret": "s"} for kind in kinds]})


def test_a_webhook_gets_every_fact_and_slack_a_text(open_):
    hook = open_(Hook())
    environ = {"TRIREME_NOTIFY_0_URL": hook.url, "TRIREME_NOTIFY_1_URL": hook.url}
    said = send(config("webhook", "slack"), "failed", FACTS, environ, lambda _: None)
    assert said == ["notification 0 (webhook): sent", "notification 1 (slack): sent"]
    assert hook.bodies[0] == {"event": "failed", **FACTS}
    assert hook.bodies[1]["text"].splitlines() == [
        "tiny failed in train-model: out of memory", "link: https://k/#/runs/details/run-1", "run: run-1",
    ]  # fmt: skip


def test_a_letter_reaches_the_mail_server_after_it_has_hung_up_once(open_):
    post, slept = open_(Post(refusals=1)), []
    environ = {
        "TRIREME_NOTIFY_0_URL": post.url,
        "TRIREME_NOTIFY_0_TO": "a@example.org",
        "TRIREME_NOTIFY_0_FROM": "b@example.org",
    }
    facts = {
        "name": "tiny",
        "run": "run-1",
        "reasons": ["accuracy ≥ 0.9 holds"],
        "metrics": {"accuracy": 0.95},
        "version": 3,
    }
    assert send(config("email"), "promoted", facts, environ, slept.append) == ["notification 0 (email): sent"]
    assert slept == [1.0]
    (letter,) = post.letters
    assert "Subject: tiny promoted a new model" in letter
    assert "To: a@example.org" in letter


@pytest.mark.parametrize("farewell", [b"500 what?", b"421 busy", b"\xff"])
def test_a_letter_that_was_taken_is_not_sent_again_for_a_bad_farewell(open_, farewell):
    post = open_(Post(farewell=farewell))
    lines = {"URL": f"{post.url}\n", "TO": "a@example.org, c@example.org\n", "FROM": "b@example.org\n"}  # as files end
    environ = {f"TRIREME_NOTIFY_0_{key}": value for key, value in lines.items()}
    assert send(config("email"), "failed", FACTS, environ, lambda _: None) == ["notification 0 (email): sent"]
    assert len(post.letters) == 1


@pytest.mark.parametrize(
    ("kind", "url", "to"),
    [
        ("webhook", "http://secret-path:port/", "a@b"),
        ("webhook", "http://[secret-path/", "a@b"),
        ("webhook", "http://127.0.0.1/secret path", "a@b"),
        ("email", "smtp://secret-path:port", "a@b"),
        ("email", "smtp://127.0.0.1:9", "secret-path\na@b"),
    ],
)
def test_an_address_that_cannot_be_read_is_said_and_not_tried_again(kind, url, to):
    environ = {"TRIREME_NOTIFY_0_URL": url, "TRIREME_NOTIFY_0_TO": to, "TRIREME_NOTIFY_0_FROM": "a@b"}
    slept: list[float] = []
    (sentence,) = send(config(kind), "failed", FACTS, environ, slept.append)
    assert sentence == f"notification 0 ({kind}): its address, `to` or `from` cannot be read; not sent"
    assert slept == []


def test_a_server_that_fails_is_tried_again_and_one_that_refuses_is_not(open_):
    slept: list[float] = []
    failing, refusing = open_(Hook(503, 429)), open_(Hook(404))
    assert send(config("webhook"), "failed", FACTS, {"TRIREME_NOTIFY_0_URL": failing.url}, slept.append)[0].endswith(
        "sent"
    )
    assert (len(failing.bodies), slept) == (3, [1.0, 2.0])
    said = send(config("webhook"), "failed", FACTS, {"TRIREME_NOTIFY_0_URL": refusing.url}, slept.append)
    assert said == ["notification 0 (webhook): it answered 404; not sent"]
    assert len(refusing.bodies) == 1


def test_a_message_that_is_led_to_a_sign_in_page_does_not_pass_for_sent(open_):
    elsewhere = open_(Hook())
    proxy = open_(Hook(302, location=elsewhere.url))
    said = send(config("slack"), "failed", FACTS, {"TRIREME_NOTIFY_0_URL": proxy.url}, lambda _: None)
    assert said == ["notification 0 (slack): it answered 302; not sent"]
    assert (elsewhere.bodies, elsewhere.looked_at) == ([], 0)


def test_the_log_says_why_a_message_did_not_arrive(open_, monkeypatch):
    def said_of(kind: str, url: str) -> str:
        environ = {"TRIREME_NOTIFY_0_URL": url, "TRIREME_NOTIFY_0_TO": "a@b", "TRIREME_NOTIFY_0_FROM": "a@b"}
        return send(config(kind), "failed", FACTS, environ, lambda _: None)[0].partition(": ")[2]

    monkeypatch.setattr(notify, "_TIMEOUT_SECS", 0.2)
    assert said_of("webhook", open_(Hook(503, 503, 503, 503)).url) == "not sent after 4 tries (it answered 503)"
    assert said_of("webhook", "http://127.0.0.1:9/x") == "not sent after 4 tries (Connection refused)"
    assert said_of("email", "smtp://127.0.0.1:9") == "not sent after 4 tries (Connection refused)"
    assert said_of("email", open_(Post(refusals=9)).url) == "not sent after 4 tries (the mail server hung up)"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert said_of("email", f"smtp://127.0.0.1:{port}") == "not sent after 4 tries (no answer within 0 s)"
        assert said_of("webhook", f"http://127.0.0.1:{port}/x") == "not sent after 4 tries (no answer within 0 s)"


@pytest.mark.parametrize(
    ("kind", "url"),
    [
        ("webhook", "http://127.0.0.1:9/secret-path"),
        ("webhook", "file:///etc/secret-path"),
        ("slack", "nonsense secret-path"),
        ("webhook", ""),
        ("email", "smtp://user:secret-path@127.0.0.1:9"),
        ("email", "http://secret-path"),
    ],
)
def test_whatever_goes_wrong_is_one_sentence_without_the_address(kind, url):
    environ = {"TRIREME_NOTIFY_0_URL": url, "TRIREME_NOTIFY_0_TO": "a@b", "TRIREME_NOTIFY_0_FROM": "a@b"}
    (sentence,) = send(config(kind), "failed", FACTS, environ, lambda _: None)
    assert "sent" in sentence
    assert not sentence.endswith(": sent")
    assert "secret-path" not in sentence


def test_a_password_never_goes_in_the_clear(open_):
    post = open_(Post())
    environ = {"TRIREME_NOTIFY_0_URL": post.url.replace("//", "//user:password@"), "TRIREME_NOTIFY_0_TO": "a@b",
               "TRIREME_NOTIFY_0_FROM": "a@b"}  # fmt: skip
    (sentence,) = send(config("email"), "failed", FACTS, environ, lambda _: None)
    assert "the password would go in the clear; not sent" in sentence
    assert post.letters == []


def end(tmp_path, state: str, error: str = "", notify: NotifyConfig | None = None) -> None:
    status = dsl.PipelineTaskFinalStatus(
        state=state, pipeline_job_resource_name="j", pipeline_task_name="t", error_code=1, error_message=error
    )
    artifact = dsl.Artifact(uri=str(tmp_path / "outcome"))
    record_outcome.python_func("tiny", str(tmp_path), "run-1", notify.to_json() if notify else "", status, artifact)


@pytest.mark.parametrize(
    ("state", "parts", "event"),
    [
        ("FAILED", {}, "failed"),
        ("SUCCEEDED", {"verdict": {"verdict": "not_blessed", "reasons": ["too low"]}}, "not_blessed"),
        ("SUCCEEDED", {"verdict": {"verdict": "blessed"}, "pushed": {"version": 7}}, "promoted"),
        ("SUCCEEDED", {"skipped": {"reason": "same data"}}, "skipped"),
        ("CANCELED", {}, None),
    ],
)
def test_the_exit_task_sends_one_message_on_what_became_of_the_run(open_, tmp_path, monkeypatch, state, parts, event):
    hook = open_(Hook())
    monkeypatch.setenv("TRIREME_NOTIFY_0_URL", hook.url)
    for part, content in parts.items():
        outcome.note(str(tmp_path), "run-1", part, content)
    end(tmp_path, state, "it broke", config("webhook").model_copy(update={"run_link": "https://k/"}))
    assert [body["event"] for body in hook.bodies] == ([event] if event else [])
    if event == "promoted":
        assert hook.bodies[0]["version"] == 7
    if event:
        assert hook.bodies[0]["link"] == "https://k/#/runs/details/run-1"


def test_only_what_is_asked_for_is_told(open_, tmp_path, monkeypatch):
    hook = open_(Hook())
    monkeypatch.setenv("TRIREME_NOTIFY_0_URL", hook.url)
    end(tmp_path, "FAILED", "it broke", config("webhook", on=["promoted"]))
    assert hook.bodies == []


def test_the_first_error_line_of_the_task_that_failed_reaches_the_message(open_, tmp_path, monkeypatch):
    hook = open_(Hook())
    monkeypatch.setenv("TRIREME_NOTIFY_0_URL", hook.url)
    monkeypatch.setenv("TRIREME_RUN", "run-1")
    with pytest.raises(SystemExit):
        prepare_data('{"name": 3}', 7, str(tmp_path), "", None)
    end(tmp_path, "FAILED", "pod failed", config("webhook"))
    (body,) = hook.bodies
    assert body["task"] == "prepare-data"
    assert body["error"].startswith("data.name = 3: must be text")


@pytest.mark.parametrize(
    ("component", "words"),
    [
        (evaluate_model, ["{}", "tiny", "registry", "ROOT", "run-1", *[None] * 5]),
        (check_serving, ["{}", "ROOT", "run-1", None, None]),
        (validate_data, ["{", "", "tiny", "registry", "ROOT", "run-1", None, None, None]),
        (fingerprint_data, ['{"days": 3}', 7, "ROOT", "code", "run-1", ""]),
        (decide_training, ["[]", "tiny", "registry", "ROOT", "run-1", None, None]),
    ],
)
def test_whichever_task_fails_leaves_its_first_error_line(tmp_path, component, words):
    with pytest.raises(SystemExit):
        component.python_func(*(str(tmp_path) if word == "ROOT" else word for word in words))
    left = outcome.read(str(tmp_path), "run-1")["failure"]
    assert left["task"] == component.name
    assert left["error"]


def test_a_failure_that_a_later_try_of_the_task_mended_is_not_told(tmp_path):
    (tmp_path / "a.csv").write_text("x,label\n1,a\n")
    data = {"source": "csv", "path": str(tmp_path / "a.csv"), "label_key": "label",
            "splits": {"train": "80%", "validation": "10%", "test": "10%"}}  # fmt: skip
    root = str(tmp_path / "root")
    with pytest.raises(SystemExit):
        fingerprint_data.python_func("{", 7, root, "code", "run-1", "")
    outcome.withdraw_failure(root, "run-1", "train-model")  # another task's success takes nothing back
    assert outcome.read(root, "run-1")["failure"]["task"] == "fingerprint-data"
    fingerprint_data.python_func(json.dumps(data), 7, root, "code", "run-1", "")
    assert "failure" not in outcome.read(root, "run-1")


def test_a_run_does_not_fail_because_nobody_can_be_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRIREME_NOTIFY_0_URL", "http://127.0.0.1:9/secret-path")
    monkeypatch.setattr("time.sleep", lambda _: None)
    end(tmp_path, "FAILED", "it broke", config("webhook"))
    assert "secret-path" not in "".join(capsys.readouterr())
    assert os.path.exists(tmp_path / "outcome")  # noqa: PTH110
