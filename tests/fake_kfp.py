"""A Kubeflow Pipelines server for tests: the v2beta1 endpoints that we use, with state, pages, latency, faults and a scheduler.

    with FakeKubeflow() as server:
        kfp.Client(host=server.url)
        server.fail("POST", "/runs$", status=503)       # the next such request
        server.requests                                  # everything that was asked: method, path, query, body, headers

Answers are shaped as those of the real server: empty lists are left out, errors are `{"error", "code", "message"}`.
"""

import itertools
import json
import re
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

from pipelines.cron import server_moments

START = datetime(2027, 1, 4, 12, 0, tzinfo=UTC)


class FakeClock:
    """A clock that stands still until somebody sleeps; a server's scheduler wakes up with it."""

    def __init__(self, start: datetime = START) -> None:
        self.moment = start
        self.slept: list[float] = []
        self.waking: list[Any] = []

    def now(self) -> datetime:
        return self.moment

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.advance(timedelta(seconds=seconds))

    def advance(self, by: timedelta) -> None:
        end = self.moment + by
        while self.moment < end:
            self.moment = min(end, self.moment + timedelta(minutes=1))
            for wake in self.waking:
                wake()


@dataclass
class Fault:
    method: str
    path: str
    status: int = 503
    body: str = '{"error":"upstream connect error","code":14,"message":"upstream connect error or disconnect"}'
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    times: int = 1
    lost: bool = False
    """The request is carried out and its answer never comes."""
    done: bool = False
    """The request is carried out, and the answer says that it failed, as a proxy does that gives up too early."""
    hang_secs: float = 0.0


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, str]
    body: Any
    headers: dict[str, str]


class Refusal(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class FakeKubeflow:
    """The state, and a server around it on a free port."""

    def __init__(
        self, clock: FakeClock | None = None, token: str | None = None, multi_user: bool = False, tls: Any = None
    ) -> None:
        self.tls = tls
        self.clock = clock or FakeClock()
        self.token, self.multi_user = token, multi_user
        self.pipelines: dict[str, dict] = {}
        self.versions: dict[str, dict] = {}
        self.experiments: dict[str, dict] = {}
        self.runs: dict[str, dict] = {}
        self.recurring: dict[str, dict] = {}
        self.last_slots: dict[str, datetime] = {}
        self.scripts: dict[str, list[dict]] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.page_size_limit = 3
        self._ids = itertools.count(1)
        self._lock = threading.RLock()
        self._clock_ticks = itertools.count()
        self.clock.waking.append(self.schedule)

    # -- for tests ---------------------------------------------------------------------------------------------------
    def fail(self, method: str, path: str, **fields: Any) -> None:
        self.faults.append(Fault(method, path, **fields))

    def asked(self, method: str, path: str) -> list[Request]:
        return [request for request in self.requests if request.method == method and re.search(path, request.path)]

    def changes(self) -> list[tuple[str, str]]:
        return [(request.method, request.path) for request in self.requests if request.method != "GET"]

    def script(self, run_id: str, *states: Any) -> None:
        """Each look at the run shows the next state; a dictionary also sets other fields."""
        self.scripts[run_id] = [state if isinstance(state, dict) else {"state": state} for state in states]

    def add_run(self, **fields: Any) -> dict:
        run = {"run_id": self._id("run"), "state": "PENDING", "created_at": self._now(), "display_name": "", **fields}
        self.runs[run["run_id"]] = run
        return run

    def schedule(self) -> None:
        """What the controller does: starts what is due, at most the newest slot where nothing is made up for."""
        for key, job in list(self.recurring.items()):
            if job["mode"] != "ENABLE":
                continue
            cron = job["trigger"]["cron_schedule"]
            start = _read(cron["start_time"]) if cron.get("start_time") else _read(job["created_at"])
            after = max(self.last_slots.get(key, start), start)
            due = list(itertools.takewhile(lambda slot: slot <= self.clock.now(), server_moments(cron["cron"], after)))
            if cron.get("end_time"):
                due = [slot for slot in due if slot <= _read(cron["end_time"])]
            for slot in due[-1:] if job.get("no_catchup") else due:
                self.last_slots[key] = slot
                self.add_run(
                    display_name=job["display_name"],
                    recurring_run_id=key,
                    experiment_id=job.get("experiment_id"),
                    runtime_config=job.get("runtime_config"),
                    pipeline_version_reference=job.get("pipeline_version_reference"),
                    scheduled_at=slot.isoformat(),
                )

    # -- the server --------------------------------------------------------------------------------------------------
    def __enter__(self) -> "FakeKubeflow":
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                fake._serve(self)

            do_POST = do_DELETE = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # a client that hangs up is part of the tests
        if self.tls:
            self._server.socket = self.tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.url = f"http{'s' if self.tls else ''}://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        parts = urllib.parse.urlsplit(handler.path)
        raw = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        query = dict(urllib.parse.parse_qsl(parts.query))
        body = self._body(handler, raw)
        with self._lock:
            self.requests.append(Request(handler.command, parts.path, query, body, dict(handler.headers)))
            fault = self._fault(handler.command, parts.path)
        if fault and fault.hang_secs:
            time.sleep(fault.hang_secs)
        if fault and not fault.lost and not fault.done:
            _answer(handler, fault.status, fault.body, fault.headers)
            return
        with self._lock:
            try:
                if self.token and handler.headers.get("Authorization") != f"Bearer {self.token}":
                    raise Refusal(401, "Request header error: there is no user identity header.")
                status, content = 200, self._route(handler.command, parts.path, query, body)
            except Refusal as refusal:
                status, content = refusal.status, {"error": str(refusal), "code": 5, "message": str(refusal)}
        if fault and fault.lost:
            handler.close_connection = True
            return
        if fault and fault.done:
            _answer(handler, fault.status, fault.body, fault.headers)
            return
        _answer(handler, status, json.dumps(content), {"Content-Type": "application/json"})

    def _fault(self, method: str, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.method == method and re.search(fault.path, path) and fault.times > 0:
                fault.times -= 1
                return fault
        return None

    def _body(self, handler: BaseHTTPRequestHandler, raw: bytes) -> Any:
        kind = handler.headers.get("Content-Type", "")
        if kind.startswith("multipart/"):
            message = BytesParser().parsebytes(f"Content-Type: {kind}\r\n\r\n".encode() + raw)
            return {
                part.get_param("name", header="content-disposition"): part.get_payload(decode=True).decode()
                for part in message.get_payload()
            }
        return json.loads(raw) if raw else None

    def _route(self, method: str, path: str, query: dict[str, str], body: Any) -> Any:
        if path == "/apis/v1beta1/healthz":
            return {"tag_name": "2.14.0", "multi_user": self.multi_user}
        path = path.removeprefix("/apis/v2beta1/")
        words = path.split("/")
        key, _, verb = words[1].partition(":") if len(words) > 1 else ("", "", "")
        match (method, words[0], len(words)):
            case ("GET", "healthz", 1):
                return {"multi_user": self.multi_user, "pipeline_store": "database"}
            case ("GET", "pipelines", 1):
                return self._page("pipelines", self.pipelines, query)
            case ("POST", "pipelines", 1):
                if any(one["display_name"] == body["display_name"] for one in self.pipelines.values()):
                    raise Refusal(409, f"The name {body['display_name']} already exist. Please specify a new name")
                return self._put(self.pipelines, "pipeline_id", body)
            case ("POST", "pipelines", 2) if key == "upload_version":
                return self._upload(query, body)
            case ("GET", "pipelines", 2):
                return self._get(self.pipelines, key)
            case ("GET", "pipelines", 3):
                found = {k: v for k, v in self.versions.items() if v["pipeline_id"] == key}
                return self._page("pipeline_versions", found, query)
            case ("GET", "pipelines", 4):
                return self._get(self.versions, words[3])
            case ("GET", "experiments", 1):
                return self._page("experiments", self.experiments, query)
            case ("POST", "experiments", 1):
                return self._put(self.experiments, "experiment_id", body)
            case ("GET", "runs", 1):
                return self._page("runs", self.runs, query)
            case ("POST", "runs", 1):
                self._known_version(body)
                return self._put(self.runs, "run_id", {"state": "PENDING", **body})
            case ("GET", "runs", 2):
                run = self._get(self.runs, key)
                if self.scripts.get(key):
                    run.update(self.scripts[key].pop(0))
                return run
            case ("POST", "runs", 2):
                run = self._get(self.runs, key)
                run["state"] = {"terminate": "CANCELED", "retry": "RUNNING"}[verb]
                return {}
            case ("GET", "recurringruns", 1):
                return self._page("recurringRuns", self.recurring, query)
            case ("POST", "recurringruns", 1):
                if len(body["trigger"]["cron_schedule"]["cron"].split()) != 6:
                    raise Refusal(400, "The pipeline schedule cron expression must have six fields")
                self._known_version(body)
                return self._put(self.recurring, "recurring_run_id", {"status": "ENABLED", **body})
            case ("GET", "recurringruns", 2):
                return self._get(self.recurring, key)
            case ("DELETE", "recurringruns", 2):
                self._get(self.recurring, key)
                del self.recurring[key]
                for run in self.runs.values():  # as the real server does: runs in flight die with it
                    if run.get("recurring_run_id") == key and run["state"] in ("PENDING", "RUNNING"):
                        run["state"] = "FAILED"
                        run["killed"] = True
                return {}
            case ("POST", "recurringruns", 2):
                self._get(self.recurring, key)["mode"] = {"enable": "ENABLE", "disable": "DISABLE"}[verb]
                return {}
        raise Refusal(404, "Not Found")

    def _known_version(self, body: dict) -> None:
        reference = body.get("pipeline_version_reference") or {}
        self._get(self.pipelines, reference.get("pipeline_id", ""))
        if reference.get("pipeline_version_id"):
            self._get(self.versions, reference["pipeline_version_id"])

    def _upload(self, query: dict[str, str], body: dict) -> dict:
        self._get(self.pipelines, query["pipelineid"])
        for version in self.versions.values():
            if version["pipeline_id"] == query["pipelineid"] and version["display_name"] == query["name"]:
                raise Refusal(409, f"The pipeline version {query['name']} already exist.")
        documents = list(yaml.safe_load_all(body["uploadfile"]))
        fields = {"pipeline_id": query["pipelineid"], "display_name": query["name"], "package": body["uploadfile"]}
        return self._put(self.versions, "pipeline_version_id", {**fields, "pipeline_spec": documents[0]})

    def _put(self, store: dict[str, dict], key: str, body: dict) -> dict:
        made = {**body, key: self._id(key.removesuffix("_id")), "created_at": self._now()}
        store[made[key]] = made
        return made

    def _get(self, store: dict[str, dict], key: str) -> dict:
        if key not in store:
            raise Refusal(404, f"ResourceNotFoundError: {key} not found")
        return store[key]

    def _page(self, name: str, store: dict[str, dict], query: dict[str, str]) -> dict:
        rows = list(store.values())
        for predicate in json.loads(query.get("filter") or "{}").get("predicates", []):
            assert predicate["operation"] == "EQUALS", predicate
            rows = [row for row in rows if row.get(predicate["key"]) == predicate["stringValue"]]
        for key in ("experiment_id", "namespace"):
            if query.get(key) and name in ("runs", "recurringRuns") and key == "experiment_id":
                rows = [row for row in rows if row.get(key) == query[key]]
        field_name, _, order = (query.get("sort_by") or "created_at").partition(" ")
        rows.sort(key=lambda row: str(row.get(field_name, "")), reverse=order == "desc")
        size = min(int(query.get("page_size") or 10), self.page_size_limit)
        begin = int(query.get("page_token") or 0)
        page: dict[str, Any] = {name: rows[begin : begin + size]} if rows[begin : begin + size] else {}
        if begin + size < len(rows):
            page["next_page_token"] = str(begin + size)
        return page | ({"total_size": len(rows)} if rows else {})

    def _id(self, kind: str) -> str:
        return f"{kind}-{next(self._ids):04d}-{'0' * 8}"

    def _now(self) -> str:
        moment = self.clock.now() + timedelta(microseconds=next(self._clock_ticks))
        return moment.isoformat()


def _read(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def _answer(handler: BaseHTTPRequestHandler, status: int, body: str, headers: dict[str, str]) -> None:
    content = body.encode()
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)
