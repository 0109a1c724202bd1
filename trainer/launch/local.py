"""A worker group on one machine: the same command as many processes on loopback.

All processes of one try share a process group that a small guard leads, so that nothing is left behind, whatever ends
the launcher. Threads only wait and read and put what they see in one queue; every decision is made in one place, by
whoever iterates over `watch`.
"""

import contextlib
import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from trainer.cluster import member_name
from trainer.errors import EXIT_DONE, EXIT_PREEMPTED, BadInput
from trainer.launch import NEVER_RESTARTED, GroupResult, MemberFailure, exit_code_of, follow
from trainer.rendezvous import PORT_TAKEN

_NUM_LINES_KEPT = 50
_NUM_PORT_TRIES = 3
_SETTLE_SECS = 5.0  # how long a fault may show after its echo: TensorFlow needs a second or two to shut down
_END_GRACE_SECS = 5.0  # between SIGTERM and SIGKILL for those that a failed or finished group leaves behind
_CLUSTER_VARIABLES = ("TF_CONFIG", "CLUSTER_SPEC", "TRIREME_JOBSET_NAME")

Emit = Callable[[str, str], None]


def run_group(
    command: list[str],
    num_workers: int,
    num_parameter_servers: int = 0,
    *,
    max_restarts: int,
    grace_period_secs: float,
    log_folder: Path,
    emit: Emit,
    environ: Mapping[str, str] | None = None,
) -> GroupResult:
    """Runs one command as a group of processes on this machine and returns how the group ended.

    Without parameter servers there are `num_workers` processes and worker 0 is the chief; with them a chief is added.
    Each has TF_CONFIG set. When one fails the rest is ended and the whole group started again, except that a lost
    worker under parameter servers is started again alone. The command is expected to go on from its last checkpoint.

    Args:
        command: program and arguments, the same for every process.
        num_workers: how many processes train.
        num_parameter_servers: how many hold variables; 0 for synchronous training.
        max_restarts: how many times the group is started again after a failure, and each lost worker alone.
        grace_period_secs: how long the processes may take to save after the first SIGTERM or Ctrl-C.
        log_folder: gets one file a process, such as `worker-0.log`; a restart goes on in the same file.
        emit: is given the name of a process (or `launcher`) and one line of its output, one call at a time.
        environ: the environment of the processes without the cluster's description; None for this process's own.

    Raises:
        BadInput: the program does not exist, or the group has no worker.
    """
    lock = threading.Lock()

    def emit_in_turn(source: str, line: str) -> None:
        with lock:
            emit(source, line)

    launcher = LocalLauncher(
        command,
        num_workers=num_workers,
        num_parameter_servers=num_parameter_servers,
        max_restarts=max_restarts,
        log_folder=log_folder,
        emit=emit_in_turn,
        environ=environ,
    )
    return follow(launcher, emit_in_turn, grace_period_secs=grace_period_secs)


class LocalLauncher:
    """The `Launcher` for one machine; `run_group` is the short way to it and explains the arguments."""

    def __init__(
        self,
        command: list[str],
        *,
        num_workers: int,
        num_parameter_servers: int = 0,
        max_restarts: int,
        log_folder: Path,
        emit: Emit,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        if num_workers < 1:
            raise BadInput(f"num_workers = {num_workers}: must be at least 1")
        if not command or shutil.which(command[0]) is None:
            raise BadInput(f"command = {command}: there is no such program on this machine")
        self._command = list(command)
        self._max_restarts = max_restarts
        self._log_folder = log_folder
        self._emit = emit
        self._environ = dict(os.environ if environ is None else environ)
        for variable in _CLUSTER_VARIABLES:
            self._environ.pop(variable, None)
        self._environ.setdefault("PYTHONUNBUFFERED", "1")
        chief = [("chief", 0)] if num_parameter_servers else []
        workers = [("worker", i) for i in range(num_workers)]
        self._tasks = chief + workers + [("ps", i) for i in range(num_parameter_servers)]
        self._has_servers = num_parameter_servers > 0
        self._events: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        self._members: list[_Member] = []
        self._guard: subprocess.Popen | None = None
        self._stopping = self._at_once = False  # set by `stop`, maybe in a signal handler
        self._result: GroupResult | None = None

    def start(self) -> None:
        """Makes the log folder and starts the first try."""
        self._log_folder.mkdir(parents=True, exist_ok=True)
        for task in self._tasks:
            self._log_path(task).unlink(missing_ok=True)
        self._start_all()

    def logs(self, member: str) -> list[str]:
        """Returns the newest lines of one process."""
        return next((list(one.lines) for one in self._members if one.name == member), [])

    def result(self) -> GroupResult:
        """Returns how the group ended."""
        if self._result is None:
            raise RuntimeError("the group has not ended: iterate over watch() first")
        return self._result

    def stop(self, grace_period_secs: float) -> None:
        """Asks the group to save and leave; with 0 ends it at once."""
        self._stopping = True
        self._at_once |= grace_period_secs <= 0
        self._events.put(("stop", grace_period_secs))

    def watch(self) -> Iterator[str]:
        """Yields what happens until the group has ended, restarts included."""
        restarts = port_tries = 0
        try:
            while True:
                failure = yield from self._watch_one_try()
                if failure is None:
                    self._kill_all(_END_GRACE_SECS)
                    self._result = GroupResult(exit_code=EXIT_DONE, restarts=restarts)
                    return
                port_was_taken = self._end_try(failure)
                if self._stopping:
                    own = failure.exit_code != EXIT_PREEMPTED
                    self._result = GroupResult(
                        exit_code=EXIT_PREEMPTED, restarts=restarts, first_failure=failure if own else None
                    )
                    return
                exit_code = exit_code_of(failure)
                if exit_code in NEVER_RESTARTED:
                    why_not = "a restart would only repeat it"
                elif port_was_taken and port_tries < _NUM_PORT_TRIES:
                    port_tries += 1
                    yield f"{failure}: a port was taken meanwhile; starting again on other ports"
                    why_not = None
                elif restarts < self._max_restarts:
                    restarts += 1
                    yield f"{failure}; starting the whole group again ({restarts} of {self._max_restarts})"
                    why_not = None
                else:
                    why_not = f"no restart is left (cluster.max_restarts is {self._max_restarts})"
                if why_not:
                    yield f"{failure}; {why_not}"
                    self._result = GroupResult(exit_code=exit_code, restarts=restarts, first_failure=failure)
                    return
                self._start_all()
        finally:
            self._kill_all()

    # One try: start, decide, end.

    def _start_all(self) -> None:
        self._addresses = dict(zip(self._tasks, _free_addresses(len(self._tasks)), strict=True))
        guard = Path(__file__).with_name("guard.py")
        # The guard leads the group before there is any member: a member is in it before its program starts.
        self._guard = subprocess.Popen([sys.executable, "-I", "-S", str(guard)], stdin=subprocess.PIPE, process_group=0)
        self._members = []
        try:
            for task in self._tasks:
                self._members.append(self._start_one(task))
        except BaseException:
            self._kill_all()
            raise

    def _start_one(self, task: tuple[str, int]) -> "_Member":
        environ = dict(self._environ)
        if len(self._tasks) > 1:
            cluster: dict[str, list[str]] = {}
            for (kind, _), address in self._addresses.items():
                cluster.setdefault(kind, []).append(address)
            environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": task[0], "index": task[1]}})
        assert self._guard is not None
        return _Member(task, self._command, environ, self._guard.pid, self._log_path(task), self._emit, self._events)

    def _log_path(self, task: tuple[str, int]) -> Path:
        return self._log_folder / ("chief.log" if task[0] == "chief" else f"{task[0]}-{task[1]}.log")

    def _watch_one_try(self) -> Iterator[str]:
        """Yields news and returns None when the group is done, else the failure that ended this try."""
        lost_alone: dict[tuple[str, int], int] = {}
        echoes: list[MemberFailure] = []
        last_lost: MemberFailure | None = None
        deadline: float | None = None  # of the grace period, or of the time for a fault to show after its echo
        told_to_leave = False  # by SIGTERM
        while True:
            try:
                wait_secs = None if deadline is None else max(0.0, deadline - time.monotonic())
                event, *details = self._events.get(timeout=wait_secs)
            except queue.Empty:
                event, details = "deadline", []
            if event == "broken":
                raise details[0]
            if event == "deadline":
                if not told_to_leave:
                    return self._why_all_lost_a_peer(echoes, last_lost)
                late = self._alive(self._who_saves())
                yield f"{', '.join(member.name for member in late)} did not leave in time and is ended by SIGKILL"
                return MemberFailure(member=late[0].name, last_lines=tuple(late[0].lines))
            if event == "stop":
                if details[0] <= 0:
                    yield "told to leave at once"
                    return MemberFailure(member="launcher", exit_code=EXIT_PREEMPTED)
                if not told_to_leave:
                    told_to_leave, deadline = True, time.monotonic() + details[0]
                    yield f"told to leave: the group has {details[0]:g} s to save"
                    for member in self._alive(self._who_saves()):
                        member.send(signal.SIGTERM)
                    if not self._alive(self._who_saves()):
                        return self._how_it_left()
                continue
            member: _Member = details[0]
            if member not in self._members:
                continue  # of an earlier try
            member.is_counted = True
            failure = member.failure()
            if told_to_leave:
                if not self._alive(self._who_saves()):
                    return self._how_it_left()
                continue
            if failure is None:
                if not self._alive(self._who_decides()):
                    # Whoever failed of his own was returned below when it happened, so there are echoes at most.
                    return self._why_all_lost_a_peer(echoes, last_lost) if echoes else None
                continue
            kind = member.task[0]
            if self._has_servers and kind == "worker" and failure.exit_code not in NEVER_RESTARTED:
                last_lost = failure
                count = lost_alone[member.task] = lost_alone.get(member.task, 0) + 1
                if count <= self._max_restarts:
                    yield f"{failure}; starting it again alone ({count} of {self._max_restarts}), the others go on"
                    self._members[self._members.index(member)] = self._start_one(member.task)
                    continue
                if any(other.task[0] == "worker" for other in self._alive(self._members)):
                    yield f"{failure}; it was started again {self._max_restarts} times: going on without it"
                    continue
                return failure
            if not failure.is_echo:
                return failure
            echoes.append(failure)
            if not self._alive(self._members):
                return self._why_all_lost_a_peer(echoes, last_lost)
            deadline = deadline or time.monotonic() + _SETTLE_SECS

    def _alive(self, members: "list[_Member]") -> "list[_Member]":
        # Not `exit_code is None`: an end whose event is still in the queue has yet to be judged.
        return [member for member in members if not member.is_counted]

    def _who_decides(self) -> "list[_Member]":
        """Those whose end is the group's: the chief, or without one every worker. Parameter servers never end."""
        return [member for member in self._members if member.task[0] == "chief"] or self._members

    # Under parameter servers only the chief saves, and reads the variables from servers that must still be there.
    _who_saves = _who_decides

    def _why_all_lost_a_peer(self, echoes: list[MemberFailure], last_lost: MemberFailure | None) -> MemberFailure:
        """Picks the culprit when all that is known are echoes of its fault.

        A worker lost a moment ago; else one that lives though the others have given it up, the one that they name;
        else whoever failed first.
        """
        if last_lost:
            return last_lost
        said = "\n".join(line for echo in echoes for line in echo.last_lines)
        mentions: dict[_Member, int] = {}
        for member in self._alive(self._members):
            kind, index = member.task
            named = rf"/job:{kind}/(?:replica:\d+/)?task:{index}\b|\b{member.name}\b"
            mentions[member] = len(re.findall(named, said))
        suspect = max(mentions, key=lambda member: mentions[member], default=None)
        if suspect is None or (self._has_servers and not mentions[suspect]):
            return echoes[0]
        return MemberFailure(member=suspect.name, last_lines=tuple(suspect.lines))

    def _how_it_left(self) -> MemberFailure | None:
        """Returns None when everything was done all the same, else what to report after SIGTERM."""
        failures = [failure for member in self._who_saves() if (failure := member.failure())]
        own = [one for one in failures if one.exit_code != EXIT_PREEMPTED and one.signal != signal.SIGTERM]
        real = [one for one in own if not one.is_echo] or own
        if real:
            return real[0]
        return MemberFailure(member=failures[0].member, exit_code=EXIT_PREEMPTED) if failures else None

    def _end_try(self, failure: MemberFailure) -> bool:
        """Ends what is left of a failed try; returns whether a port that was taken is the cause."""
        is_frozen = failure.exit_code is None and failure.signal is None  # and would not hear SIGTERM
        self._kill_all(0.0 if self._stopping or is_frozen else _END_GRACE_SECS)
        said = "\n".join(failure.last_lines)
        ports = [address.rpartition(":")[2] for address in self._addresses.values()]
        words = ["Address already in use", "Could not start gRPC server"]
        words += [f"port {port} {PORT_TAKEN}" for port in ports]
        return any(one in said for one in words) or any(
            not _can_listen(address) for address in self._addresses.values()
        )

    def _kill_all(self, grace_secs: float = 0.0) -> None:
        """SIGTERM, then SIGKILL to the whole process group, grandchildren and guard included; waits for the end."""
        guard, self._guard = self._guard, None
        if guard is None:
            return
        if grace_secs:
            for member in self._members:
                member.send(signal.SIGTERM)
            deadline = time.monotonic() + grace_secs
            while (
                any(one.exit_code is None for one in self._members)
                and time.monotonic() < deadline
                and not self._at_once
            ):
                time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says EPERM for a group of zombies
            os.killpg(guard.pid, signal.SIGKILL)
        for member in self._members:
            member.finish()
        guard.wait()
        assert guard.stdin is not None
        guard.stdin.close()


class _Member:
    """One process, a thread that reads its lines and a thread that waits for its end."""

    def __init__(
        self,
        task: tuple[str, int],
        command: list[str],
        environ: dict[str, str],
        process_group: int,
        log_path: Path,
        emit: Emit,
        events: "queue.SimpleQueue[tuple]",
    ) -> None:
        self.task = task
        self.name = member_name(*task)
        self.lines: deque[str] = deque(maxlen=_NUM_LINES_KEPT)
        self.exit_code: int | None = None  # set by the waiting thread
        self.is_counted = False  # set by who decides, once the end has been judged
        self._emit, self._events, self._log_path = emit, events, log_path
        self._process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            process_group=process_group,
        )
        self._reader = threading.Thread(target=self._read, name=f"read {self.name}", daemon=True)
        self._waiter = threading.Thread(target=self._wait, name=f"wait for {self.name}", daemon=True)
        self._reader.start()
        self._waiter.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        deliver: Callable[[str], None] | None = None
        with self._process.stdout, contextlib.ExitStack() as stack:
            try:
                deliver = self._to_log_and_caller(stack)
            except Exception as error:
                self._events.put(("broken", error))
            # A line is cut at 64 KiB, lest a program without newlines fill the memory.
            while line := self._process.stdout.readline(1 << 16):
                line = line.rstrip("\n")
                self.lines.append(line)
                if deliver is None:
                    continue  # a full pipe would freeze the process before the group is ended
                try:
                    deliver(line)
                except Exception as error:
                    deliver = None
                    self._events.put(("broken", error))

    def _to_log_and_caller(self, stack: contextlib.ExitStack) -> Callable[[str], None]:
        log = stack.enter_context(self._log_path.open("a", encoding="utf-8"))
        if log.tell():
            log.write("--- started again ---\n")

        def deliver(line: str) -> None:
            log.write(line + "\n")
            log.flush()
            self._emit(self.name, line)

        return deliver

    def _wait(self) -> None:
        exit_code = self._process.wait()
        # The last lines say why; a grandchild that holds the pipe open must not hold us up.
        self._reader.join(timeout=1.0)
        self.exit_code = exit_code
        self._events.put(("exited", self))

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def finish(self) -> None:
        """Waits for the threads after the process group was killed."""
        self._waiter.join()
        self._reader.join()

    def failure(self) -> MemberFailure | None:
        """Returns how the process failed; None while it runs or when it ended with 0."""
        if not self.exit_code:
            return None
        lines = tuple(self.lines)
        if self.exit_code < 0:
            return MemberFailure(member=self.name, signal=-self.exit_code, last_lines=lines)
        return MemberFailure(member=self.name, exit_code=self.exit_code, last_lines=lines)


def _free_addresses(number: int) -> list[str]:
    """Returns loopback addresses whose ports were free a moment ago; all differ, for they are held at once."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]


def _can_listen(address: str) -> bool:
    try:
        socket.create_server(("", int(address.rpartition(":")[2]))).close()
    except OSError:
        return False
    return True
