"""The way to a server: where the access comes from, what is repeated, what is explained, and that nothing is betrayed."""

import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from fake_kfp import FakeClock, FakeKubeflow

from pipelines.operation import KubeflowConfig
from pipelines.targets.access import Access, Clock, Missing, Server, find_access
from trainer.errors import BadInput, TriremeError, WorldFailure

HTML = {"Content-Type": "text/html"}
PAGE = "<!doctype html><html><title>Sign in</title></html>"


@pytest.fixture(scope="module")
def fake():
    with FakeKubeflow() as server:
        yield server


@pytest.fixture
def server(fake: FakeKubeflow) -> Server:
    fake.faults.clear()
    fake.requests.clear()
    fake.clock.slept.clear()
    return Server(Access(fake.url, token="secret-token", cookies="session=secret-cookie", timeout_secs=1), _clock(fake))


def _clock(fake: FakeKubeflow) -> Clock:
    return Clock(fake.clock.now, fake.clock.sleep)


def ask(server: Server, attempts: int = 3):
    return server.call("say how it is", lambda client: client.get_kfp_healthz(), attempts=attempts)


def test_flags_come_before_the_configuration_and_that_before_the_environment(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("from-file\n")
    environ = {"TRIREME_KFP_HOST": "http://environment", "TRIREME_KFP_TOKEN": "from-environment"}
    section = KubeflowConfig(host="http://configured/")
    assert find_access(KubeflowConfig(), {}, environ).host == "http://environment"
    assert find_access(section, {}, environ).host == "http://configured"
    found = find_access(section, {"host": "http://flag", "token_file": str(token)}, environ)
    assert (found.host, found.token) == ("http://flag", "from-file")
    assert find_access(section, {}, environ).token == "from-environment"
    for host in ("http://[::1]:65535", "https://kubeflow.example.org:443/pipeline", "http://10.0.0.1:8888"):
        assert find_access(KubeflowConfig(host=host), {}, {}).host == host


def test_a_command_gives_the_token_without_a_shell(tmp_path: Path) -> None:
    section = KubeflowConfig(host="http://h", token_command=[sys.executable, "-c", "print('t$HOME')"])
    assert find_access(section, {}, {}).token == "t$HOME"
    failing = KubeflowConfig(host="http://h", token_command=[sys.executable, "-c", "print('tok'); raise SystemExit(3)"])
    with pytest.raises(BadInput, match=r"token_command = .*must print a token on one line, and ended with 3") as caught:
        find_access(failing, {}, {})
    assert "tok\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "environ", "message"),
    [
        ({}, {}, "no server is named; give --host"),
        ({}, {"TRIREME_KFP_HOST": "kubeflow"}, "must be an address such as https://"),
        ({}, {"TRIREME_KFP_HOST": "http://kubeflow:65536"}, "must be an address such as https://"),
        ({"host": "http://h"}, {"TRIREME_KFP_NAMESPACE": "Team Vision"}, "namespace = Team Vision: must be lower-case"),
        ({}, {"TRIREME_KFP_HOST": "http://kube flow"}, "must be an address such as https://"),
        ({}, {"TRIREME_KFP_HOST": "https://me:secret@h"}, "host: holds a name or a password, which would be shown"),
        ({"host": "http://h", "token_file": "/nowhere"}, {}, "token_file = /nowhere: cannot be read"),
        ({"host": "http://h"}, {"TRIREME_KFP_TOKEN": "to\nken"}, "the token must be one line of plain characters"),
        ({"host": "http://h"}, {"TRIREME_KFP_COOKIES": "sitzung=schlüssel"}, "the cookies must be one line of plain"),
        ({"host": "http://h", "ca_file": "/nowhere"}, {}, "ca_file = /nowhere: there is no such file"),
    ],
)
def test_what_is_missing_is_named(section: dict, environ: dict, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        find_access(KubeflowConfig(**section), {}, environ)


def test_token_and_cookies_reach_the_server_and_no_text(fake: FakeKubeflow, server: Server) -> None:
    ask(server)
    headers = fake.requests[-1].headers
    assert headers["authorization"] == "Bearer secret-token"
    assert headers["Cookie"] == "session=secret-cookie"
    fake.fail("GET", "healthz", status=403, body='{"message": "secret-token of secret-cookie may not"}')
    with pytest.raises(BadInput) as caught:
        ask(server)
    for text in (str(caught.value), repr(server.access)):
        assert "secret" not in text


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ({"status": 401, "times": 9}, BadInput, "does not accept the credentials"),
        ({"status": 403}, BadInput, r"your account may not \(403: upstream"),
        ({"status": 404}, Missing, "it knows no such thing"),
        ({"status": 409}, BadInput, "exists already"),
        ({"status": 400, "body": '{"message": "bad cron\\nmore"}'}, BadInput, r"refuses the request \(400: bad cron\)"),
        ({"status": 429, "times": 9}, WorldFailure, "asked too much"),
        ({"status": 503, "times": 9}, WorldFailure, r"not available \(503: upstream connect error"),
        ({"status": 502, "body": PAGE, "headers": HTML, "times": 9}, WorldFailure, r"not available \(502\)"),
        ({"status": 200, "body": PAGE, "headers": HTML}, BadInput, "a proxy answered with its sign-in page"),
        ({"status": 200, "body": "null"}, BadInput, "what answered is no Kubeflow Pipelines server"),
        ({"status": 200, "body": "[]"}, BadInput, "what answered is no Kubeflow Pipelines server"),
        ({"status": 200, "body": "OK"}, BadInput, "what answered is no Kubeflow Pipelines server"),
        ({"status": 200, "body": '{"runs": ['}, BadInput, "what answered is no Kubeflow Pipelines server"),
        ({"status": 413, "body": PAGE, "headers": HTML}, WorldFailure, r"too large for a proxy on the way \(413\)"),
        ({"status": 200, "body": " "}, BadInput, "what answered is no Kubeflow Pipelines server"),
        ({"status": 302, "headers": {"Location": "/dex/auth"}}, BadInput, "a proxy answered with its sign-in page"),
        ({"hang_secs": 1.2, "times": 1}, WorldFailure, "no answer within 1 s"),
        ({"lost": True, "times": 9}, WorldFailure, "the connection failed"),
    ],
)
def test_every_answer_that_is_none_becomes_one_sentence(
    fake, server: Server, fault: dict, kind: type, message: str
) -> None:
    fake.fail("GET", "healthz", **fault)
    with pytest.raises(kind, match=message) as caught:
        ask(server, attempts=1 if "hang_secs" in fault else 3)
    text = str(caught.value)
    assert text.startswith(f"{fake.url} could not say how it is: ")
    assert "\n" not in text
    assert "<" not in text


def test_reading_is_tried_again_with_growing_pauses(fake: FakeKubeflow, server: Server) -> None:
    fake.fail("GET", "healthz", status=503, times=2)
    assert ask(server).multi_user is False
    assert len(fake.requests) == 3
    first, second = fake.clock.slept
    assert 0.7 < first < 1.3 < second < 2.6


def test_the_pause_that_the_server_asks_for_is_kept(fake: FakeKubeflow, server: Server) -> None:
    fake.fail("GET", "healthz", status=429, headers={"Retry-After": "7", "Content-Type": "application/json"})
    ask(server)
    assert fake.clock.slept == [7.0]


def test_a_page_for_people_is_never_taken_for_an_empty_list(fake: FakeKubeflow, server: Server) -> None:
    fake.fail("GET", "pipelines", status=200, body=PAGE, headers=HTML)
    with pytest.raises(BadInput, match="sign-in page"):
        server.call("list", lambda client: client.list_pipelines())


@pytest.mark.parametrize("fault", [{"lost": True}, {"status": 503}, {"status": 504, "done": True}, {"status": 429}])
def test_making_happens_once_whether_the_answer_or_the_request_is_lost(fake, server: Server, fault: dict) -> None:
    import kfp_server_api as api

    name = f"once-{fault}"
    fake.fail("POST", "experiments$", **fault)

    def find():
        listed = server.call("list", lambda client: client.list_experiments(page_size=100)).experiments or []
        return next((one.experiment_id for one in listed if one.display_name == name), None)

    body = api.V2beta1Experiment(display_name=name)
    made = server.make(
        "make it",
        lambda client: client._experiment_api.experiment_service_create_experiment(experiment=body).experiment_id,
        find,
    )
    assert [key for key, one in fake.experiments.items() if one["display_name"] == name] == [made]


def test_an_expired_token_is_renewed_once() -> None:
    with FakeKubeflow(token="new") as fake:
        old, new = Access(fake.url, token="old"), Access(fake.url, token="new")
        assert ask(Server(old, _clock(fake), renew=lambda: new)).multi_user is False
        with pytest.raises(BadInput, match="401"):
            ask(Server(old, _clock(fake), renew=lambda: old))


def test_nothing_that_listens_and_no_such_host_say_what_to_check() -> None:
    clock = FakeClock()
    for host, message in (("http://127.0.0.1:9", "port-forward"), ("http://nowhere.invalid", "name of the host")):
        with pytest.raises(TriremeError, match=message):
            ask(Server(Access(host), Clock(clock.now, clock.sleep)), attempts=2)


def test_a_client_certificate_opens_what_is_closed_without_one(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("no openssl program")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(certificate)
    with FakeKubeflow(tls=context) as fake:
        assert fake.url.startswith("https://")
        closed = Access(fake.url, ca_file=str(certificate))
        opened = Access(fake.url, None, None, None, str(certificate), str(certificate), str(key))
        assert ask(Server(opened, _clock(fake))).multi_user is False
        with pytest.raises(TriremeError):
            ask(Server(closed, _clock(fake)), attempts=1)
        with pytest.raises(BadInput, match="certificate is not trusted"):
            ask(Server(Access(fake.url), _clock(fake)), attempts=1)
