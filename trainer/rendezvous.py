"""All here, then go: the processes of a group find each other before TensorFlow is started.

TensorFlow's server opens its port only in the strategy's constructor, which blocks in C++ without a word while a peer
is missing. So the peers agree first, on the same ports: every process listens on its own address, asks every other
process until all have answered, and keeps asking the leader (the chief) for the word to go. The leader gives it when
each process has lately said that it misses nobody, and leaves when each has fetched it. Then all close their ports
and TensorFlow may have them. One question is one short connection, so a process may die and come back at any moment.

A port that speaks HTTP/2 is TensorFlow's own server, which greets first: its group is training already.
"""

import hashlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from trainer.cluster import LOST_PEER, ClusterDescription, member_name
from trainer.errors import WorldFailure

PORT_TAKEN = "is taken"
"""These words are in every message about a port in use; the local launcher looks for them and tries other ports."""

_ANSWER_TIMEOUT_SECS = 2.0
_FRESH_SECS = 3.0  # a process that has not asked the leader for so long is not counted as waiting
_PORT_GRACE_SECS = 2.0  # how long a predecessor may take to let go of the port
_REPORT_EVERY_SECS = 10.0
_HTTP2_SETTINGS = b"\x04\x00\x00\x00\x00\x00"  # frame type 4, no flags, stream 0: a server's first words

Task = tuple[str, int]


@dataclass(frozen=True)
class _Asked:
    """What another process last told us of itself."""

    at: float
    instance: str
    where: str
    misses: dict[Task, str]


def wait_for_peers(
    description: ClusterDescription,
    timeout_secs: float,
    *,
    report: Callable[[str], None] | None = None,
) -> None:
    """Returns when every process of the group is there and all know it.

    The processes may start at the same time or minutes apart. A worker or parameter server that comes back alone
    while its chief is training joins at once; an evaluator never waits.

    Args:
        description: who is to come, and who this process is.
        timeout_secs: how long to wait, counted from this call.
        report: is told every ten seconds whom we are waiting for, and why.

    Raises:
        WorldFailure: somebody did not come (named, with address and reason), this process was started twice, or its
            port is in use.
    """
    if description.task_type == "evaluator" or len(description.members) < 2:
        return
    rendezvous = _Rendezvous(description, timeout_secs)
    with rendezvous.listen():
        rendezvous.wait(report or (lambda _: None))


# Who gives up goes on answering for a moment: peers that began a little later would count it among the missing.
_LINGER_SECS = 0.5


class _Rendezvous:
    def __init__(self, description: ClusterDescription, timeout_secs: float) -> None:
        self.description = description
        self.me: Task = (description.task_type, description.task_index)
        self.members = description.members
        self.leads = self.me == description.leader
        self.instance = secrets.token_hex(8)
        self.where = f"process {os.getpid()} on {socket.gethostname()}"
        layout = json.dumps([(*task, address) for task, address in self.members.items()])
        self.digest = hashlib.sha256(layout.encode()).hexdigest()[:16]
        self.timeout_secs = timeout_secs
        self.deadline = time.monotonic() + timeout_secs
        # Many questions to one leader are spread out: 512 workers ask it 200 times a second together.
        self.pause_secs = max(0.1, len(self.members) / 200)
        self.lock = threading.Lock()
        self.reasons: dict[Task, str] = {task: "has not been asked yet" for task in self.members if task != self.me}
        self.asked: dict[Task, dict[str, _Asked]] = {}
        self.fetched: set[Task] = set()
        self.serving: set[Task] = set()  # under parameter servers: those whose TensorFlow server runs already
        self.go = False
        self.leader_waits_for: list[str] = []
        self.fault: str | None = None

    def name(self, task: Task) -> str:
        return f"{member_name(*task)} ({self.members[task]})"

    def listen(self) -> "_Listener":
        """Takes this process's own port, or says who has it."""
        host, port = _split(self.members[self.me])
        give_up = time.monotonic() + min(_PORT_GRACE_SECS, self.timeout_secs)
        while True:
            try:
                return _Listener(port, self.answer)
            except OSError as error:
                if time.monotonic() >= give_up:
                    raise self._port_failure(host, port, error) from None
                time.sleep(0.2)

    def _port_failure(self, host: str, port: int, error: OSError) -> WorldFailure:
        reply = _ask(host, port, self._introduction())
        name = self.name(self.me)
        if isinstance(reply, dict) and reply.get("task") == list(self.me) and reply.get("digest") == self.digest:
            return WorldFailure(f"{name} was started twice: {reply.get('where')} holds its address. End one of them.")
        if reply is _TENSORFLOW:
            who = "by a TensorFlow server: this process was started twice, or an earlier run has not ended"
        else:
            who = f"by another program ({error.strerror or error})"
        return WorldFailure(f"{name}: port {port} {PORT_TAKEN} {who}. End it, or give this process another port.")

    def _introduction(self) -> dict[str, object]:
        return {"task": list(self.me), "instance": self.instance, "where": self.where, "digest": self.digest}

    def answer(self, question: dict) -> dict[str, object]:
        """Answers one question of another process (in a thread of the listener)."""
        reply = self._introduction()
        task = _task_of(question.get("task"))
        if not self.leads or task not in self.members or question.get("digest") != self.digest:
            return reply
        now = time.monotonic()
        misses = {missed: str(reason) for given, reason in question["misses"] if (missed := _task_of(given))}
        seen = _Asked(now, str(question.get("instance")), str(question.get("where")), misses)
        with self.lock:
            fresh = {key: old for key, old in self.asked.get(task, {}).items() if now - old.at < _FRESH_SECS}
            self.asked[task] = fresh | {seen.instance: seen}
            if self.go:
                self.fetched.add(task)
            return reply | {"go": self.go, "waits_for": self._waiting(now)}

    def _waiting(self, now: float) -> list[str]:
        """Returns whom the leader waits for, each with the reason; the caller holds the lock."""
        waiting = [f"{self.name(task)}: {reason}" for task, reason in self.reasons.items()]
        for task in self.members:
            if task == self.me or task in self.reasons or task in self.serving:
                continue
            fresh = [old for old in self.asked.get(task, {}).values() if now - old.at < _FRESH_SECS]
            if not fresh:
                waiting.append(f"{self.name(task)}: answers, but has not asked for the start")
            elif len(fresh) > 1:
                waiting.append(f"{self.name(task)}: was started twice, {' and '.join(old.where for old in fresh)}")
            else:
                # Whom we miss too is named once, by us; what only this one misses is a broken way between the two.
                for missed in fresh[0].misses.keys() - self.reasons.keys() & self.members.keys():
                    waiting.append(f"{self.name(task)}: misses {self.name(missed)}, {fresh[0].misses[missed]}")
        return waiting

    def probe(self, task: Task) -> None:
        """Asks one process once and notes what came back (in a thread of the pool)."""
        host, port = _split(self.members[task])
        leader = task == self.description.leader
        question = self._introduction()
        if leader:
            with self.lock:
                question["misses"] = [[list(missed), reason] for missed, reason in self.reasons.items()]
        reply = _ask(host, port, question)
        with self.lock:
            if isinstance(reply, dict):
                if reply.get("task") != list(task):
                    reason = f"its address answers as {reply.get('task')}; the descriptions of the cluster differ"
                elif reply.get("digest") != self.digest:
                    reason = f"is there with another description of the cluster ({reply.get('where')})"
                elif task == self.me:
                    if reply.get("instance") != self.instance:
                        self.fault = (
                            f"{self.name(task)} was started twice: here and as {reply.get('where')}. End one of them."
                        )
                    return
                else:
                    self.reasons.pop(task, None)
                    if leader:
                        self.leader_waits_for = list(reply.get("waits_for", ()))
                        self.go = bool(reply.get("go"))
                    return
            elif reply is _TENSORFLOW and task != self.me:
                # The leader has left for TensorFlow. Ours is the same start if we lacked nobody (its answer was lost);
                # under parameter servers we are a lone process that comes back to a group at work.
                if leader and (self.description.parameter_servers or not self.reasons):
                    self.go = True
                    return
                if not leader and self.description.parameter_servers:  # it came back alone, before us
                    self.reasons.pop(task, None)
                    self.serving.add(task)
                    return
                reason = "its port is TensorFlow's already: an earlier group is still training there"
            else:
                reason = str(reply)
            if task != self.me:
                self.reasons[task] = reason

    def wait(self, report: Callable[[str], None]) -> None:
        next_report = time.monotonic() + _REPORT_EVERY_SECS
        with ThreadPoolExecutor(max_workers=min(32, len(self.members)), thread_name_prefix="rendezvous") as pool:
            while True:
                with self.lock:
                    to_ask = [*self.reasons, self.me]
                    if not self.leads and self.description.leader not in to_ask:
                        to_ask.append(self.description.leader)
                # The main thread never blocks in a connection, so that a signal is handled at once.
                for answer in [pool.submit(self.probe, task) for task in to_ask]:
                    answer.result()
                now = time.monotonic()
                with self.lock:
                    waiting = self._waiting(now) if self.leads else self._misses()
                    if self.fault:
                        raise WorldFailure(self.fault)
                    if self.leads and not waiting:
                        self.go = True
                    if self.go and (not self.leads or not self._not_fetched()):
                        return
                if now >= self.deadline:
                    failure = self._timed_out(waiting)
                    time.sleep(max(_LINGER_SECS, 3 * self.pause_secs))
                    raise failure
                if now >= next_report:
                    report(f"{self.description.name} waits for {'; '.join(waiting)}")
                    next_report = now + _REPORT_EVERY_SECS
                time.sleep(self.pause_secs)

    def _not_fetched(self) -> list[Task]:
        return [task for task in self.members if task != self.me and task not in self.fetched | self.serving]

    def _misses(self) -> list[str]:
        """Returns whom a follower waits for: those it misses itself, else those that the leader names."""
        own = [f"{self.name(task)}: {reason}" for task, reason in self.reasons.items()]
        return own or self.leader_waits_for or [f"{self.name(self.description.leader)}: has not given the start"]

    def _timed_out(self, waiting: list[str]) -> WorldFailure:
        if self.leads and self.go:
            waiting = [f"{self.name(task)}: left while the group was starting" for task in self._not_fetched()]
        return WorldFailure(
            f"{self.description.name} {LOST_PEER} before the start: within {self.timeout_secs:g} s "
            f"{len(waiting)} of {len(self.members)} processes did not come. {'; '.join(waiting)}. Look at its log or "
            f"pod: it may be unscheduled, still pull its image, or have ended. The limit is cluster.start_timeout_secs."
        )


class _Listener:
    """Answers questions on one port until it is closed."""

    def __init__(self, port: int, answer: Callable[[dict], dict]) -> None:
        # All interfaces, like TensorFlow's own server: what is taken for it must be found taken here.
        if socket.has_dualstack_ipv6():
            server = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=512)
        else:
            server = socket.create_server(("", port), backlog=512)
        self._server, self._answer, self._closed = server, answer, False
        self._thread = threading.Thread(target=self._serve, name="rendezvous-listener", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with ThreadPoolExecutor(max_workers=16, thread_name_prefix="rendezvous-answer") as pool:
            while not self._closed:
                try:
                    connection, _ = self._server.accept()
                except OSError:
                    return
                pool.submit(self._serve_one, connection)

    def _serve_one(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(_ANSWER_TIMEOUT_SECS)
            try:
                question = json.loads(_read_line(connection))
                connection.sendall(json.dumps(self._answer(question)).encode() + b"\n")
            except (OSError, ValueError, AttributeError, TypeError, KeyError):
                return  # a port scanner, a health check, or a peer that died while asking: not our affair

    def __enter__(self) -> "_Listener":
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._server.shutdown(socket.SHUT_RDWR)  # wakes accept(); close() alone would not
        self._server.close()
        self._thread.join()


class _TensorFlowServer:
    """The answer of a port that is TensorFlow's already."""


_TENSORFLOW = _TensorFlowServer()


def _ask(host: str, port: int, question: dict) -> dict | _TensorFlowServer | str:
    """Asks one question; returns the answer, or in words why there is none."""
    try:
        with socket.create_connection((host, port), timeout=_ANSWER_TIMEOUT_SECS) as connection:
            connection.sendall(json.dumps(question).encode() + b"\n")
            line = _read_line(connection)
    except socket.gaierror:
        return "its name does not resolve"
    except ConnectionRefusedError:
        return "nothing listens on its port"
    except TimeoutError:
        return f"no answer within {_ANSWER_TIMEOUT_SECS:g} s"
    except OSError as error:
        return f"cannot be reached ({error.strerror or error})"
    if line[3:9] == _HTTP2_SETTINGS:
        return _TENSORFLOW
    try:
        reply = json.loads(line)
    except ValueError:
        reply = None
    return reply if isinstance(reply, dict) else "its port belongs to another program"


def _read_line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) < 1 << 20 and line[3:9] != _HTTP2_SETTINGS:
        piece = connection.recv(65536)
        if not piece:
            break
        line += piece
    return line


def _task_of(given: object) -> Task | None:
    match given:
        case [str(kind), int(index)]:
            return kind, index
    return None


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
