"""A Kubernetes API server for tests: the paths that the launcher asks, with versions, watches, logs and faults.

    with FakeKubernetes() as server:
        api = server.connect()                           # the launcher's own connection, over HTTP
        server.put("pods", pod("x-node-0-0-a"))          # a change, which watches see
        server.write("x-node-0-0-a", "a line")           # into a pod's log
        server.fail("GET", "/pods$", status=503)         # the next such request
        server.forget()                                  # every watch has to list anew (410)

Whatever manifests/launcher-rbac.yaml does not allow is answered with 403, so every test shows that the role suffices.
A test plays the engine: it puts pods and changes conditions.
"""

import contextlib
import copy
import itertools
import json
import re
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml
from conftest import REPOSITORY

NAMESPACE = "team"
RESOURCES = {"trainjobs": "trainer.kubeflow.org", "tfjobs": "kubeflow.org", "pods": "", "events": ""}
ROLE = REPOSITORY / "manifests" / "launcher-rbac.yaml"
_CREATED = "2026-11-30T12:00:00Z"


def rules():
    """The role's `(group, resource, verb)`s."""
    role = next(one for one in yaml.safe_load_all(ROLE.read_text()) if one["kind"] == "Role")
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@dataclass
class Fault:
    """What happens to the next requests of a method to a path.

    Attributes:
        kind: `status`; `reset` breaks off at once; `lost` carries the request out and then breaks off; `cut` breaks a
            stream off in the middle of its line number `after`.
    """

    method: str
    path: str
    kind: str = "status"
    status: int = 503
    message: str = "later"
    headers: dict = field(default_factory=dict)
    times: int = 1
    after: int = 1


@dataclass
class Request:
    method: str
    path: str
    query: dict
    body: Any
    token: str | None


class FakeKubernetes:
    """The objects, their history, and a server around them on a free port."""

    def __init__(self, schemas=None):
        self.objects = {plural: {} for plural in RESOURCES}
        self.schemas = schemas or {}
        """Path of an API group → its OpenAPI document."""
        self.history = []
        self.forgotten = 0
        self.logs = {}
        self.requests = []
        self.faults = []
        self.used = set()
        self.lingering = set()
        """Names of objects whose deletion a finalizer holds up."""
        self.admit = lambda plural, body: None
        """A webhook: what it returns is the reason of a refusal."""
        self.changed = threading.Condition()
        self._versions = itertools.count(1)
        self._uids = itertools.count(1)
        self._allowed = rules()
        self.is_open = True

    def __enter__(self):
        self.server = _Server(("127.0.0.1", 0), _Handler)
        self.server.fake = self
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(self, *_):
        with self.changed:
            self.is_open = False
            self.changed.notify_all()
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def connect(self):
        from kubernetes import client

        from trainer.launch.cluster_api import Api

        configuration = client.Configuration(host=self.url)
        configuration.retries = False
        return Api(configuration, NAMESPACE)

    def kubeconfig(self, file):
        """A file that names this server, for a process of its own."""
        content = {
            "apiVersion": "v1", "kind": "Config", "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "fake", "user": {"token": "a-token"}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake", "namespace": NAMESPACE}}],
        }  # fmt: skip
        file.write_text(yaml.safe_dump(content))
        return file

    # -- for tests and for whoever plays the engine -------------------------------------------------------------------
    def fail(self, method, path, **fields):
        self.faults.append(Fault(method, path, **fields))

    def put(self, plural, found):
        """Adds or changes an object; what is left out of a change stays."""
        with self.changed:
            found = copy.deepcopy(found)
            name = found["metadata"]["name"]
            there = self.objects[plural].get(name)
            found["metadata"].setdefault("uid", there["metadata"]["uid"] if there else f"uid-{next(self._uids)}")
            found["metadata"].setdefault("creationTimestamp", _CREATED)
            self._note(plural, "MODIFIED" if there else "ADDED", found)
            self.objects[plural][name] = found
            return found

    def change(self, plural, name, **status):
        """Changes fields of an object's status."""
        with self.changed:
            found = copy.deepcopy(self.objects[plural][name])
            found.setdefault("status", {}).update(status)
            return self.put(plural, found)

    def remove(self, plural, name):
        with self.changed:
            found = self.objects[plural].pop(name)
            self._note(plural, "DELETED", found)

    def forget(self):
        """Drops the history: a watch from any version so far gets 410."""
        with self.changed:
            self.forgotten = next(self._versions)
            self.history.clear()
            self.changed.notify_all()

    def write(self, pod, *lines, at=None, newline=True):
        """Appends lines to a pod's log, all of one moment if one is given."""
        with self.changed:
            log = self.logs.setdefault(pod, {"lines": [], "ended": False})
            for line in lines:
                log["lines"].append((at or _moment(), time.monotonic(), line, newline))
            self.changed.notify_all()

    def end_log(self, pod):
        with self.changed:
            self.logs.setdefault(pod, {"lines": [], "ended": False})["ended"] = True
            self.changed.notify_all()

    def asked(self, method, path):
        return [one for one in self.requests if one.method == method and re.search(path, one.path)]

    def wait_for(self, condition, timeout_secs=20.0):
        """Waits until the condition holds of this server."""
        deadline = time.monotonic() + timeout_secs
        with self.changed:
            while not (found := condition(self)):
                assert time.monotonic() < deadline, [(one.method, one.path) for one in self.requests]
                self.changed.wait(0.05)
            return found

    def _note(self, plural, kind, found):
        found["metadata"]["resourceVersion"] = str(next(self._versions))
        self.history.append((int(found["metadata"]["resourceVersion"]), plural, kind, copy.deepcopy(found)))
        self.changed.notify_all()

    # -- requests ------------------------------------------------------------------------------------------------------
    def take_fault(self, method, path):
        with self.changed:
            for fault in self.faults:
                if fault.times > 0 and fault.method == method and re.search(fault.path, path):
                    fault.times -= 1
                    return fault
        return None

    def allows(self, group, resource, verb):
        self.used.add((group, resource, verb))
        return (group, resource, verb) in self._allowed

    def create(self, plural, body):
        with self.changed:
            name = body["metadata"]["name"]
            if name in self.objects[plural]:
                return 409, _status(409, "AlreadyExists", f'{plural} "{name}" already exists')
            if reason := self.admit(plural, body):
                return 422, _status(422, "Invalid", reason)
            return 201, self.put(plural, body)

    def delete(self, plural, name, body):
        with self.changed:
            found = self.objects[plural].get(name)
            if found is None:
                return 404, _status(404, "NotFound", f'{plural} "{name}" not found')
            wanted = ((body or {}).get("preconditions") or {}).get("uid")
            if wanted not in (None, found["metadata"]["uid"]):
                return 409, _status(409, "Conflict", "Precondition failed: UID in precondition")
            if name in self.lingering:
                found["metadata"]["deletionTimestamp"] = _CREATED
                return 200, self.put(plural, found)
            self.remove(plural, name)
            for pod in [one for one in self.objects["pods"] if one.startswith(name)]:
                self.remove("pods", pod)
                self.end_log(pod)
            return 200, _status(200, "", "")

    def select(self, plural, query):
        labels = dict(one.split("=") for one in query.get("labelSelector", "").split(",") if one)
        fields = dict(one.split("=") for one in query.get("fieldSelector", "").split(",") if one)

        def matches(found):
            own = found["metadata"].get("labels") or {}
            return all(own.get(key) == value for key, value in labels.items()) and all(
                _field(found, path) == value for path, value in fields.items()
            )

        return matches


def _field(found, path):
    for part in path.split("."):
        found = found.get(part, {})
    return found


def _moment():
    now = time.time_ns()
    fraction = f"{now % 10**9:09d}".rstrip("0")  # as Go writes it
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now // 10**9)) + (f".{fraction}" if fraction else "") + "Z"


def _status(code, reason, message):
    kind = "Success" if code < 300 else "Failure"
    return {"kind": "Status", "apiVersion": "v1", "status": kind, "code": code, "reason": reason, "message": message}


class _Broken(Exception):
    pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def handle_any(self):
        fake = self.server.fake
        address = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(address.query))
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length) or b"null")
        with fake.changed:
            fake.requests.append(Request(self.command, address.path, query, body, self.headers.get("Authorization")))
            fake.changed.notify_all()
        self.fault = fake.take_fault(self.command, address.path)
        try:
            if self.fault and self.fault.kind == "reset":
                raise _Broken
            if self.fault and self.fault.kind == "status":
                text = _status(self.fault.status, "", self.fault.message)
                self.answer(self.fault.status, text, self.fault.headers)
            else:
                self.serve(fake, address.path, query, body)
        except (_Broken, OSError):
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(2)

    do_GET = do_POST = do_DELETE = do_PATCH = do_PUT = handle_any

    def serve(self, fake, path, query, body):
        if path in fake.schemas:
            return self.answer(200, fake.schemas[path])
        found = re.fullmatch(rf"(?:/api/v1|/apis/([^/]+)/[^/]+)/namespaces/{NAMESPACE}/(\w+)(?:/([^/]+))?(/log)?", path)
        if not found or RESOURCES.get(found[2]) != (found[1] or ""):
            return self.answer(404, _status(404, "NotFound", "the server could not find the requested resource"))
        group, plural, name, log = found[1] or "", found[2], found[3], found[4]
        verb = {"POST": "create", "DELETE": "delete", "PATCH": "patch", "PUT": "update"}.get(self.command)
        verb = verb or ("get" if name else "watch" if query.get("watch") == "true" else "list")
        resource = f"{plural}/log" if log else plural
        if not fake.allows(group, resource, verb):
            where = f'cannot {verb} resource "{resource}" in API group "{group}" in the namespace "{NAMESPACE}"'
            return self.answer(403, _status(403, "Forbidden", f'User "system:serviceaccount:{NAMESPACE}:x" {where}'))
        if verb == "create":
            assert query.get("fieldValidation") == "Strict"
            return self.answer(*fake.create(plural, body))
        if verb == "delete":
            return self.answer(*fake.delete(plural, name, body))
        if log:
            return self.send_log(fake, name, query)
        if name:
            one = fake.objects[plural].get(name)
            missing = _status(404, "NotFound", f'{plural} "{name}" not found')
            return self.answer(200, one) if one else self.answer(404, missing)
        matches = fake.select(plural, query)
        if verb == "watch":
            return self.send_changes(fake, plural, matches, query)
        with fake.changed:
            items = [copy.deepcopy(one) for one in fake.objects[plural].values() if matches(one)]
            version = str(max((number for number, *_ in fake.history), default=fake.forgotten))
        return self.answer(200, {"kind": "List", "metadata": {"resourceVersion": version}, "items": items})

    def answer(self, status, content, headers=None):
        if self.fault and self.fault.kind == "lost":
            raise _Broken
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    # Streams, in chunks as the real server sends them.

    def begin_stream(self):
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.num_lines = 0

    def send_line(self, data):
        self.num_lines += 1
        cut = self.fault is not None and self.fault.kind == "cut" and self.num_lines >= self.fault.after
        if cut:
            data = data[: len(data) // 2]
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()
        if cut:
            raise _Broken

    def end_stream(self):
        self.wfile.write(b"0\r\n\r\n")

    def send_changes(self, fake, plural, matches, query):
        self.begin_stream()
        seen, deadline = int(query["resourceVersion"]), time.monotonic() + float(query["timeoutSeconds"])
        while fake.is_open and time.monotonic() < deadline:
            with fake.changed:
                if seen < fake.forgotten:
                    gone = {"type": "ERROR", "object": _status(410, "Expired", "too old resource version")}
                    self.send_line(json.dumps(gone).encode() + b"\n")
                    break
                news = [one for one in fake.history if one[0] > seen and one[1] == plural]
                if not news:
                    fake.changed.wait(0.2)
            for version, _, kind, found in news:
                seen = version
                if matches(found):
                    self.send_line(json.dumps({"type": kind, "object": found}).encode() + b"\n")
        self.end_stream()

    def send_log(self, fake, pod, query):
        log = fake.logs.get(pod)
        if log is None:
            self.answer(400, _status(400, "BadRequest", f'container in pod "{pod}" is waiting to start'))
            return
        assert query["container"] in ("node", "tensorflow")
        self.begin_stream()
        first = 0
        if "tailLines" in query:
            first = max(0, len(log["lines"]) - int(query["tailLines"]))
        since = time.monotonic() - float(query["sinceSeconds"]) if "sinceSeconds" in query else 0.0
        while fake.is_open:
            with fake.changed:
                lines, ended = log["lines"][first:], log["ended"]
                if not lines and not ended and query.get("follow") == "true":
                    fake.changed.wait(0.2)
                    continue
            first += len(lines)
            for moment, written, text, newline in lines:
                if written >= since:
                    stamp = f"{moment} " if query.get("timestamps") == "true" else ""
                    self.send_line(f"{stamp}{text}{chr(10) if newline else ''}".encode())
            if query.get("follow") != "true" or (ended and first == len(log["lines"])):
                break
        self.end_stream()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request, client_address):
        pass  # clients break off; that is what this is for
