"""The few questions that a launcher asks a Kubernetes API server, patient with one that is away for a moment.

    api = connect()
    api.call("create the job", lambda: …)                  # WorldFailure says what the server said, and what to do
    Watch(api, "pods", "job-name=x", events).start()       # ("pods", "MODIFIED", {…}) into a queue, for as long as it takes
    Log(api, "x-0", "node", say).start()                   # every line once, across lost connections

Objects are plain dictionaries as the server writes them. The kubernetes package is imported when a connection is made.
"""

import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainer.errors import BadInput, WorldFailure
from trainer.progress import say

PATIENCE_SECS = 1800.0
"""How long an API server may be away, which an upgrade of the control plane makes it for minutes."""

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_READ_SECS = 30.0
_WATCH_SECS = 240  # the server ends a watch after that, so that a connection that died in silence is noticed
_LOG_SILENCE_SECS = 120.0
_RETRIED = (401, 408, 429, 500, 502, 503, 504)  # 401: the token of a pod is renewed every hour
_MOST_WAIT_SECS = 10.0
_SAID_AFTER_SECS = 5.0  # of trouble, so that nobody takes patience for a hang


class Unreachable(WorldFailure):
    """The API server did not answer for as long as anybody would wait."""


class NotFound(WorldFailure):
    """404."""


class Exists(WorldFailure):
    """409: there is one of this name, or the one that was meant has another identity by now."""


class Gone(WorldFailure):
    """410: the server has forgotten the version that a watch was to go on from."""


class Resource(NamedTuple):
    """One kind of object that a namespace holds."""

    group: str
    """Empty: Kubernetes's own."""
    version: str
    plural: str

    def path(self, namespace: str, name: str = "") -> str:
        """Where the server has it."""
        prefix = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        return f"{prefix}/namespaces/{namespace}/{self.plural}" + (f"/{name}" if name else "")


PODS = Resource("", "v1", "pods")
EVENTS = Resource("", "v1", "events")


def connect() -> "Api":
    """The cluster that this process is a pod of; where KUBECONFIG is set, the one that it names.

    Raises:
        WorldFailure: There is neither.
    """
    from kubernetes import client, config

    configuration = client.Configuration()
    configuration.retries = False  # ours know what may be asked twice
    try:
        if file := os.environ.get("KUBECONFIG"):
            config.load_kube_config(file, client_configuration=configuration)
            context = config.list_kube_config_contexts(file)[1]["context"]
            return Api(configuration, context.get("namespace", "default"))
        config.load_incluster_config(client_configuration=configuration)
        return Api(configuration, (_ACCOUNT / "namespace").read_text(encoding="utf-8").strip())
    except (config.ConfigException, OSError) as error:
        raise WorldFailure(
            f"this pod has no account of the cluster ({error}): let its service account be mounted"
            " (automountServiceAccountToken), or set KUBECONFIG"
        ) from None


class Api:
    """One API server and one namespace."""

    def __init__(self, configuration: Any, namespace: str) -> None:
        from kubernetes import client

        self.namespace = namespace
        self._configuration = configuration
        self._client = client.ApiClient(configuration)
        # `delete_now` runs in a signal handler, where the other client's pool may be locked by whom it interrupts.
        self._urgent = client.ApiClient(configuration)
        self.said_after_secs = _SAID_AFTER_SECS
        """Seconds after which a wait for the server is spoken of."""
        self.stopped = threading.Event()
        """Ends every wait of this connection."""

    def close(self) -> None:
        """Ends all waits and closes the connections."""
        self.stopped.set()
        for one in (self._client, self._urgent):
            one.rest_client.pool_manager.clear()
            one.close()

    def call(self, what: str, function: Callable[[], Any], patience_secs: float = PATIENCE_SECS) -> Any:
        """The function's answer, after as many tries as it takes while the server is busy or away.

        Raises:
            NotFound, Exists, Gone: As the server says; the caller knows what it means.
            Unreachable: The server was away longer than `patience_secs`.
            BadInput, WorldFailure: It refuses; the message holds its reason and what to do.
        """
        began, pause, said = time.monotonic(), 0.25, False
        deadline = began + patience_secs
        while True:
            try:
                return function()
            except Exception as error:
                again, wait_secs = self._judge(what, error)
            wait_secs = max(wait_secs, pause)
            if time.monotonic() + wait_secs > deadline or self.stopped.is_set():
                raise Unreachable(f"the Kubernetes API server could not {what} for {patience_secs:.0f} s: {again}")
            if not said and time.monotonic() + wait_secs > began + self.said_after_secs:
                said = True
                say(f"the Kubernetes API server cannot {what} now ({again}); trying for {_minutes(patience_secs)}")
            self.stopped.wait(wait_secs)
            pause = min(pause * 2, _MOST_WAIT_SECS)

    def _judge(self, what: str, error: Exception) -> tuple[str, float]:
        """Why it is worth another try and after how many seconds; raises what it is not worth it for."""
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        if isinstance(error, HTTPError | OSError):
            return f"{type(error).__name__}: {str(error) or 'no answer'}", 0.0
        if not isinstance(error, ApiException):
            raise error
        if error.status in _RETRIED:
            given = str((error.headers or {}).get("Retry-After", ""))
            return f"{error.status} {_message(error)}", min(float(given), 60.0) if given.isdecimal() else 0.0
        raise _explained(what, error, self.namespace) from None

    # Single questions. Each is one request; `call` makes it patient.

    def request(
        self, method: str, path: str, query: dict[str, Any] | None = None, body: Any = None, **options: Any
    ) -> Any:
        """One request through the kubernetes client; its urllib3 response, whose body is not read yet if it streams."""
        options.setdefault("_request_timeout", (5.0, _READ_SECS))
        client = options.pop("client", self._client)
        return client.call_api(
            path,
            method,
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": "application/json"},
            body=body,
            auth_settings=["BearerToken"],
            _preload_content=False,
            _return_http_data_only=True,
            **options,
        )

    def _json(self, *words: Any, **options: Any) -> Any:
        response = self.request(*words, **options)
        try:
            return json.loads(response.data)
        finally:
            response.release_conn()

    def get(self, resource: Resource, name: str, patience_secs: float = PATIENCE_SECS) -> dict[str, Any]:
        """One object by its name."""
        path = resource.path(self.namespace, name)
        return self.call(f"show {resource.plural} {name}", lambda: self._json("GET", path), patience_secs)

    def create(self, resource: Resource, manifest: dict[str, Any]) -> dict[str, Any]:
        """Makes an object; fields that the server does not know are an error and not left out."""
        path, query = resource.path(self.namespace), {"fieldValidation": "Strict"}
        name = manifest["metadata"]["name"]
        return self.call(f"create {resource.plural} {name}", lambda: self._json("POST", path, query, manifest))

    def delete(self, resource: Resource, name: str, uid: str) -> None:
        """Has an object deleted with all that it made; what is gone, or another by now, is no error."""
        body = {"propagationPolicy": "Foreground", "preconditions": {"uid": uid}}
        path = resource.path(self.namespace, name)
        with contextlib.suppress(NotFound, Exists):
            self.call(f"delete {resource.plural} {name}", lambda: self._json("DELETE", path, None, body))

    def delete_now(self, resource: Resource, name: str, uid: str) -> None:
        """One short request and no second try: a task that is cancelled has less than a second left."""
        body = {"propagationPolicy": "Foreground", "preconditions": {"uid": uid}}
        options = {"client": self._urgent, "_request_timeout": (0.5, 1.0)}
        with contextlib.suppress(Exception):  # owner reference and deadline end the job where this cannot
            self._json("DELETE", resource.path(self.namespace, name), None, body, **options)

    def find(self, resource: Resource, query: dict[str, str], patience_secs: float = PATIENCE_SECS) -> dict[str, Any]:
        """The objects that a selector chooses, and the version of the state that they are of."""
        path = resource.path(self.namespace)
        return self.call(f"list {resource.plural}", lambda: self._json("GET", path, query), patience_secs)

    def schema(self, resource: Resource, kind: str) -> dict[str, Any] | None:
        """The OpenAPI schema of one kind as the server publishes it; None where it does not have the kind."""
        path = f"/openapi/v3/apis/{resource.group}/{resource.version}"
        try:
            found = self.call(f"describe {kind}", lambda: self._json("GET", path))
        except NotFound:
            return None
        for name, schema in found.get("components", {}).get("schemas", {}).items():
            kinds = [one.get("kind") for one in schema.get("x-kubernetes-group-version-kind", ())]
            if kind in kinds or name.rpartition(".")[2] == kind:
                return schema
        return None

    def last_lines(self, pod: str, container: str, number: int) -> list[str]:
        """The end of a container's log; empty where it cannot be had any more."""
        path = f"{PODS.path(self.namespace, pod)}/log"
        query = {"container": container, "tailLines": str(number)}

        def ask() -> bytes:
            response = self.request("GET", path, query)
            try:
                return response.data
            finally:
                response.release_conn()

        try:
            text = self.call(f"read the log of {pod}", ask, patience_secs=10.0)
        except (WorldFailure, BadInput):
            return []
        return text.decode("utf-8", "replace").splitlines()


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def _message(error: Any) -> str:
    """What the server says, without the envelope."""
    text = error.body.decode("utf-8", "replace") if isinstance(error.body, bytes) else str(error.body or "")
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return (text.strip().splitlines() or [str(error.reason)])[0][:300]


def _explained(what: str, error: Any, namespace: str) -> Exception:
    said = _message(error)
    kinds = {404: NotFound, 409: Exists, 410: Gone}
    if error.status in kinds:
        return kinds[error.status](f"{what}: {said}")
    if error.status == 403 and "cannot " in said:  # the wording of RBAC; a quota or a policy says why in its own words
        return WorldFailure(
            f"{what}: {said}; bind the role of manifests/launcher-rbac.yaml to this account in {namespace}"
        )
    if error.status in (400, 422):
        return BadInput(f"{what}: the cluster refuses it: {said}")
    return WorldFailure(f"{what}: the cluster refuses it ({error.status}): {said}")


class _Reader(threading.Thread):
    """A thread that reads one answer line by line and can be ended from outside while it waits for the next."""

    def __init__(self, api: Api, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._api = api
        self._response: Any = None
        self._ended = threading.Event()

    def end(self) -> None:
        """Breaks off the answer that is being read; no other is asked for."""
        self._ended.set()
        response = self._response
        if response is not None:
            with contextlib.suppress(Exception):  # it may end by itself at this moment
                response.shutdown()

    def _pause(self, seconds: float) -> None:
        self._ended.wait(seconds)

    def _lines(self, path: str, query: dict[str, Any], silence_secs: float) -> Iterator[tuple[bytes, bool]]:
        """The answer's lines, and whether each was ended by a newline."""
        response = self._api.request("GET", path, query, _request_timeout=(5.0, silence_secs))
        self._response = response
        rest = b""
        try:
            if self._ended.is_set():
                return
            for block in response.read_chunked(decode_content=False) if response.chunked else _blocks(response):
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    yield line, True
            if rest:
                yield rest, False
        finally:
            self._response = None
            response.close()


def _blocks(response: Any) -> Iterator[bytes]:
    """An answer without chunks, as it comes."""
    while block := response.read1(1 << 16):
        yield block


class Watch(_Reader):
    """Puts `(source, type, object)` into a queue for every change of what a selector chooses, from now to the end.

    A `LISTED` event carries a whole list and means that what is not in it is gone. It comes first, and again whenever the
    server has forgotten where the watch was (410). A lost connection goes on from the last version seen. What cannot
    be mended comes as `(source, "BROKEN", error)`.
    """

    def __init__(self, api: Api, resource: Resource, selector: dict[str, str], events: "queue.SimpleQueue") -> None:
        super().__init__(api, f"watch {resource.plural}")
        self._resource, self._selector, self._events = resource, selector, events

    def run(self) -> None:
        """Lists, then watches, again and again."""
        source, version, failed_since, pause, said = self._resource.plural, None, None, 0.25, False
        while not self._ended.is_set():
            try:
                if version is None:
                    listed = self._api.find(self._resource, self._selector, PATIENCE_SECS)
                    version = listed["metadata"]["resourceVersion"]
                    self._events.put((source, "LISTED", listed.get("items") or []))
                for kind, found in self._changes(version):
                    version = found["metadata"]["resourceVersion"]
                    if kind != "BOOKMARK":
                        self._events.put((source, kind, found))
                    failed_since, pause, said = None, 0.25, False
            except Gone:
                version = None
            except (BadInput, WorldFailure) as error:
                if not self._ended.is_set():
                    self._events.put((source, "BROKEN", error))
                return
            except _Again as again:
                now = time.monotonic()
                failed_since = failed_since or now
                if now - failed_since > PATIENCE_SECS:
                    self._events.put((source, "BROKEN", Unreachable(f"the watch of {source} failed: {again}")))
                    return
                if not said and now + pause > failed_since + self._api.said_after_secs:
                    said = True
                    say(f"the watch of {source} is broken off ({again}); trying for {_minutes(PATIENCE_SECS)}")
                self._pause(pause)
                pause = min(pause * 2, _MOST_WAIT_SECS)

    def _changes(self, version: str) -> Iterator[tuple[str, dict[str, Any]]]:
        query = {
            **self._selector,
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_SECS),
        }
        path = self._resource.path(self._api.namespace)
        try:
            for line, is_whole in self._lines(path, query, _WATCH_SECS + 30.0):
                if not is_whole:
                    return  # broken off in the middle of an event, which comes again
                event = json.loads(line)
                if event["type"] == "ERROR":
                    code = event["object"].get("code")
                    if code == 410:
                        raise Gone(str(event["object"].get("message")))
                    raise _Again(f"{code} {event['object'].get('message')}")
                yield event["type"], event["object"]
        except WorldFailure:
            raise
        except Exception as error:
            if isinstance(error, _Again) or self._ended.is_set():
                raise _Again(str(error)) from None
            raise _Again(self._api._judge(f"watch {self._resource.plural}", error)[0]) from None


class _Again(Exception):
    """Worth another try from the same version."""


@dataclass
class _Place:
    """How far a log has been read: its last line's moment, and how many lines of that very moment."""

    moment: str = ""
    count: int = 0


class Log(_Reader):
    """Hands on every line of a container's log once, while it runs and what is left when it has ended.

    The server can only be asked for the last so many seconds, so lines come again after a lost connection; they are known
    by their time stamps, which Kubernetes writes with nine digits or fewer.
    """

    def __init__(self, api: Api, pod: str, container: str, say: Callable[[str], None], tail: int | None = None) -> None:
        super().__init__(api, f"log of {pod}")
        self._path = f"{PODS.path(api.namespace, pod)}/log"
        self._query = {"container": container, "timestamps": "true"}
        self._say, self._tail = say, tail
        self.is_over = threading.Event()
        """Set by who knows that the container has ended: what is left of the log is read, and no more is waited for."""
        self._place = _Place()
        self._read_at = time.monotonic()

    def finish(self, timeout_secs: float) -> None:
        """The container has ended: waits until the rest of its log has been handed on."""
        self.is_over.set()
        self.join(timeout_secs)
        self.end()

    def run(self) -> None:
        """Follows the log until it ends or nobody wants it any more."""
        pause = 0.25
        while not self._ended.is_set():
            was_over = self.is_over.is_set()
            try:
                self._read(follow=not was_over)
                if was_over:
                    return
                pause = 0.25
            except Exception as error:
                try:
                    self._api._judge("read a log", error)
                except (NotFound, BadInput, Gone):  # not started yet, or gone
                    if was_over:
                        return
                except WorldFailure as explained:
                    self._say(f"(its log cannot be read: {explained})")
                    return
            if not self.is_over.is_set():
                self.is_over.wait(pause)
                pause = min(pause * 2, _MOST_WAIT_SECS)
            elif was_over:
                self._pause(pause)

    def _read(self, follow: bool) -> None:
        query = dict(self._query)
        if follow:
            query["follow"] = "true"
        if self._place.moment:
            query["sinceSeconds"] = str(int(time.monotonic() - self._read_at) + 10)
        elif self._tail is not None:
            query["tailLines"] = str(self._tail)
        again = _Place()  # a repetition of what was read is left out
        for line, is_whole in self._lines(self._path, query, _LOG_SILENCE_SECS):
            moment, _, text = line.decode("utf-8", "replace").partition(" ")
            if not is_whole and follow:
                return  # perhaps half a line: it comes again
            moment = _padded(moment)
            again = _Place(moment, again.count + 1 if moment == again.moment else 1)
            if (moment, again.count) <= (self._place.moment, self._place.count):
                continue
            self._place = again
            self._read_at = time.monotonic()
            self._say(text)


def _padded(moment: str) -> str:
    """A time stamp with nine digits after the point, so that the later one is also the greater text."""
    whole, _, fraction = moment.rstrip("Z").partition(".")
    return f"{whole}.{fraction:<09}Z"
