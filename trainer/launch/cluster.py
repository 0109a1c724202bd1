"""A group of processes as one job of a Kubernetes cluster, whichever engine runs it.

    launcher = ClusterLauncher(job, connect(), emit=print_line, start_timeout_secs=600, max_restarts=3)
    follow(launcher, print_line, grace_period_secs=30)

The `Launcher` of trainer.launch for `trainjob` and `tfjob`. Threads only watch and read and put what they see into one queue;
every decision is made by whoever iterates over `watch`. The engine starts pods again; the launcher says what happens, ends
what cannot come to anything, and finds whose fault it was.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, WorldFailure
from trainer.launch import GroupResult, MemberFailure, exit_code_of
from trainer.launch import pods as of
from trainer.launch.cluster_api import EVENTS, PODS, Api, Exists, Log, NotFound, Unreachable, Watch
from trainer.launch.job import KEY, SPEC, Job, State

_NUM_LINES = 50
_MOST_FAILED_LOGS = 16  # of a failed group; the others' only echo
_EVENTS_EVERY_SECS = 15.0
_QUIET_SECS = 10.0  # after which a pod that says nothing is asked after in the events
_DELETED_WITHIN_SECS = 600.0
_POLL_SECS = 0.5
_LAST_PODS_SECS = 5.0
_LOG_ENDS_WITHIN_SECS = 15.0
_ADOPTED_LINES = 20

Emit = Callable[[str, str], None]


class ClusterLauncher:
    """Starts, watches and ends one job.

    Args:
        job: What is to run.
        api: The cluster; closed when the watch ends.
        emit: Is given the name of a process and a line of its log, from a thread of its own.
        start_timeout_secs: How long the pods may take to start, from when the job is not held back by a queue.
        max_restarts: How often a process may be started again, where the engine does not count.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        job: Job,
        api: Api,
        *,
        emit: Emit,
        start_timeout_secs: float,
        max_restarts: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job, self._api, self._emit, self._clock = job, api, emit, clock
        self._start_timeout_secs, self._max_restarts = start_timeout_secs, max_restarts
        self._events: queue.SimpleQueue[tuple[str, str, Any]] = queue.SimpleQueue()
        self._watches: list[Watch] = []
        self._logs: dict[str, Log] = {}  # by the pod's uid
        self._pods: dict[str, dict[str, Any]] = {}  # by uid; also those that are gone
        self._gone: set[str] = set()
        self._failures: dict[str, tuple[int, str, MemberFailure]] = {}  # by uid: attempt, moment, failure
        self._uid: str | None = None
        self._adopted = self._had_started = self._was_suspended = False
        self._waiting_since: float | None = None
        self._asked_events_at = -math.inf
        self._said: dict[str, str] = {}
        self._attempt = 0
        self._stop_lock = threading.Lock()
        self._stopped_at: float | None = None
        self._grace_period_secs = 0.0
        self._result: GroupResult | None = None

    # The face.

    def start(self) -> None:
        """Creates the job, or takes up the one that an earlier try of the same task created.

        Raises:
            WorldFailure: Another's job has the name, or the cluster does not let us.
            BadInput: The cluster refuses the job.
        """
        deadline, meta = time.monotonic() + _DELETED_WITHIN_SECS, self._job.manifest["metadata"]
        while self._stopped_at is None:
            try:
                self._uid = of.uid_of(self._api.create(self._job.resource, self._job.manifest))
                self._emit("launcher", f"created {self._job.title}")
                return
            except NotFound as error:
                raise WorldFailure(f"{error}: this cluster has no {self._job.manifest['kind']}") from None
            except Exists:
                pass
            try:
                found = self._api.get(self._job.resource, self._job.name)
            except NotFound:
                continue  # gone in this moment
            notes = found["metadata"].get("annotations") or {}
            if notes.get(KEY) != meta["annotations"][KEY]:
                raise WorldFailure(f"{self._job.title}: is there already and is not this run's; delete it or rename it")
            state, same = self._job.state_of(found), notes.get(SPEC) == meta["annotations"][SPEC]
            if not of.is_leaving(found):
                if same and state.kind != "failed":
                    self._uid, self._adopted = of.uid_of(found), True
                    self._emit("launcher", f"{self._job.title} is there already, of an earlier try: going on with it")
                    return
                if state.kind in ("active", "suspended"):
                    raise WorldFailure(
                        f"{self._job.title}: an earlier try of this task runs with other settings; delete it, then retry"
                    )
                self._emit("launcher", f"{self._job.title} of an earlier try has ended: deleting it, to start anew")
                self._api.delete(self._job.resource, self._job.name, of.uid_of(found))
            if time.monotonic() > deadline:
                raise WorldFailure(
                    f"{self._job.title}: an earlier try is not deleted after {_DELETED_WITHIN_SECS:.0f} s; see its"
                    " finalizers and pods"
                )
            self._api.stopped.wait(_POLL_SECS)

    def watch(self) -> Iterator[str]:
        """Yields what happens until the job has ended. Closed early, it deletes the job."""
        resource, select = self._job.resource, {"fieldSelector": f"metadata.name={self._job.name}"}
        if self._uid is None:  # told to leave before there was anything
            self._result = GroupResult(exit_code=EXIT_PREEMPTED)
            return
        self._watches = [
            Watch(self._api, resource, select, self._events),
            Watch(self._api, PODS, {"labelSelector": self._job.pod_selector}, self._events),
        ]
        for one in self._watches:
            one.start()
        if self._stopped_at is not None:  # it came while the job was being created
            self._api.delete_now(resource, self._job.name, self._uid)
        delete = True
        try:
            while self._result is None:
                yield from self._take(self._next_event())
                if self._result is None:
                    yield from self._look()
            delete = False
        except Unreachable:
            delete = False  # the training goes on; a retry of this task takes it up
            raise
        finally:
            if delete:
                self._api.delete_now(resource, self._job.name, self._uid)
            self._end_threads()

    def logs(self, member: str) -> list[str]:
        """Returns the newest lines of one process's log."""
        pod = self._newest(member)
        return self._api.last_lines(of.name_of(pod), self._job.container, _NUM_LINES) if pod else []

    def result(self) -> GroupResult:
        """Returns how the group ended."""
        if self._result is None:
            raise RuntimeError("the group has not ended: iterate over watch() first")
        return self._result

    def stop(self, grace_period_secs: float) -> None:
        """Deletes the job at once, whose pods then save within their own grace period; waits for them in `watch`."""
        if not self._stop_lock.acquire(blocking=False):
            return  # a second signal while the first one's request is under way
        self._grace_period_secs = grace_period_secs
        if self._uid is not None:
            self._api.delete_now(self._job.resource, self._job.name, self._uid)
        if self._stopped_at is None:
            self._stopped_at = self._clock()
        self._events.put(("launcher", "STOP", None))
        self._stop_lock.release()

    def discard(self) -> None:
        """Deletes the job and all that it made, so that a retry of the task starts it anew."""
        if self._uid is not None:
            self._api.delete(self._job.resource, self._job.name, self._uid)

    # One event.

    def _next_event(self) -> tuple[str, str, Any] | None:
        try:
            return self._events.get(timeout=_POLL_SECS)
        except queue.Empty:
            return None

    def _take(self, event: tuple[str, str, Any] | None) -> Iterator[str]:
        if event is None:
            return
        source, kind, found = event
        if kind == "BROKEN":
            raise found
        if kind == "STOP":
            yield f"told to leave: {self._job.title} is being deleted; its pods save as they go"
        elif source == PODS.plural:
            yield from self._take_pods(kind, found)
        elif kind == "LISTED":
            mine = [one for one in found if of.uid_of(one) == self._uid]
            yield from self._take_job(mine[0]) if mine else self._job_is_gone()
        elif of.uid_of(found) == self._uid:
            yield from self._job_is_gone() if kind == "DELETED" else self._take_job(found)

    def _take_job(self, found: dict[str, Any]) -> Iterator[str]:
        if self._stopped_at is not None:
            return
        state = self._job.state_of(found)
        if state.kind == "suspended" and not self._was_suspended:
            yield f"{self._job.title} waits for its queue to admit it"
        elif state.kind == "active" and self._was_suspended:
            yield f"{self._job.title} has been admitted"
        self._was_suspended = state.kind == "suspended"
        if state.kind == "done":
            yield from self._take_late_pods(lambda: self._adopted or bool(self._logs))
            self._finish_logs()
            self._result = GroupResult(exit_code=EXIT_DONE, restarts=self._attempt)
        elif state.kind == "failed":
            yield from self._fail(state)

    def _job_is_gone(self) -> Iterator[str]:
        if self._stopped_at is None:
            failure = MemberFailure(
                member=self._job.title, reason="was deleted by somebody; run again to start it anew"
            )
            yield str(failure)
            self._result = GroupResult(exit_code=EXIT_FAILED, restarts=self._attempt, first_failure=failure)
        else:
            self._finish_logs()
            self._result = GroupResult(exit_code=EXIT_PREEMPTED, restarts=self._attempt)

    def _take_pods(self, kind: str, found: Any) -> Iterator[str]:
        if kind == "LISTED":
            there = {of.uid_of(pod) for pod in found}
            for uid in self._pods.keys() - there - self._gone:
                yield from self._take_pods("DELETED", self._pods[uid])
            for pod in found:
                yield from self._take_pods("MODIFIED", pod)
            return
        uid, member = of.uid_of(found), self._job.member_of(found)
        if member is None:
            return
        self._pods[uid] = found
        if kind == "DELETED":
            self._gone.add(uid)
        attempt = self._job.attempt_of(found) if self._job.attempt_of else 0
        if attempt > self._attempt:
            self._attempt = attempt
            self._waiting_since, self._had_started = None, False
            yield f"the whole group is started again ({attempt} of {self._max_restarts})"
        if member == self._job.chief and of.has_started(found, self._job.container):
            self._show_log(uid, of.name_of(found), member)
        if uid in self._logs and (kind == "DELETED" or of.ended_at(found, self._job.container)):
            self._logs[uid].is_over.set()
        failure = of.failure_of(found, self._job.container, member)
        if failure is None and kind == "DELETED" and self._is_missed(found, attempt):
            failure = MemberFailure(member=member, reason="was deleted before it had ended")
        if failure is not None and uid not in self._failures and self._stopped_at is None:
            yield from self._take_failure(uid, attempt, failure)

    def _is_missed(self, pod: dict[str, Any], attempt: int) -> bool:
        """Whether a deleted pod is a failure: an engine deletes those that are left when one fails or the chief is done."""
        if of.phase_of(pod) not in ("Pending", "Running"):
            return False
        chief = self._newest(self._job.chief)
        if chief is not None and of.phase_of(chief) == "Succeeded":
            return False
        return not any(one == attempt for one, _, _ in self._failures.values())

    def _take_failure(self, uid: str, attempt: int, failure: MemberFailure) -> Iterator[str]:
        lines = ()
        if uid not in self._gone and len(self._failures) < _MOST_FAILED_LOGS:
            # Now: an engine that starts the group again deletes its pods, and with them what they said.
            lines = tuple(self._api.last_lines(of.name_of(self._pods[uid]), self._job.container, _NUM_LINES))
        failure = MemberFailure(
            member=failure.member, exit_code=failure.exit_code, signal=failure.signal, reason=failure.reason,
            last_lines=lines,
        )  # fmt: skip
        moment = of.ended_at(self._pods[uid], self._job.container) or "~"
        self._failures[uid] = (attempt, moment, failure)
        yield str(failure)
        if self._job.attempt_of is not None:
            return
        times = sum(one.member == failure.member for _, _, one in self._failures.values())
        self._attempt = max(self._attempt, min(times, self._max_restarts))
        if times > self._max_restarts:
            yield f"{failure.member} was started again {self._max_restarts} times (cluster.max_restarts): ending the job"
            self.discard()
            self._conclude(failure)

    # What nobody sends an event about.

    def _look(self) -> Iterator[str]:
        now = self._clock()
        if self._stopped_at is not None:
            if now - self._stopped_at > self._grace_period_secs + _QUIET_SECS:
                self._result = GroupResult(exit_code=EXIT_PREEMPTED, restarts=self._attempt)
            return
        if self._was_suspended:
            self._waiting_since = None
            return
        newest = {self._job.member_of(pod): pod for pod in self._pods_of_attempt() if of.uid_of(pod) not in self._gone}
        late = {member: pod for member, pod in newest.items() if not of.has_started(pod, self._job.container)}
        if len(newest) >= self._job.num_pods and not late:
            if not self._had_started:
                self._had_started = True
                yield f"all {self._job.num_pods} pods have started"
            self._waiting_since = None
            return
        if self._had_started and self._job.attempt_of is None:
            return  # one pod was started again alone: its fellows wait for it, or go on without it
        if self._waiting_since is None:
            self._waiting_since = now
        waited_secs = now - self._waiting_since
        reasons = {member: of.why_waiting(pod) for member, pod in late.items()}
        for member, why in sorted((str(member), why) for member, why in reasons.items() if why):
            if self._said.get(member) != why.text:
                self._said[member] = why.text
                yield f"{member} {why.text}"
            if why.is_hopeless:
                yield from self._give_up(member, why.text, EXIT_BAD_INPUT)
                return
        if waited_secs > _QUIET_SECS and now - self._asked_events_at > _EVENTS_EVERY_SECS:
            self._asked_events_at = now
            yield from self._tell_events(newest, late, reasons)
        if waited_secs > self._start_timeout_secs:
            yield from self._time_is_over(newest, late, reasons)

    def _tell_events(self, newest: dict, late: dict, reasons: dict) -> Iterator[str]:
        """What the cluster warns of: for pods that say nothing themselves, and where pods are missing."""
        silent = [(str(member), of.name_of(pod)) for member, pod in late.items() if reasons[member] is None]
        makers = list(self._job.makers) if len(newest) < self._job.num_pods else []
        for who, name in [*((self._job.title, name) for name in makers), *sorted(silent)[:_MOST_FAILED_LOGS]]:
            text = self._last_warning(name)
            if text and self._said.get(who) != text:
                self._said[who] = text
                yield f"{who}: {text}"

    def _last_warning(self, name: str) -> str | None:
        query = {"fieldSelector": f"involvedObject.name={name},type=Warning"}
        try:
            found = self._api.find(EVENTS, query, patience_secs=5.0).get("items") or []
        except WorldFailure:
            return None  # they would only explain
        newest = max(found, key=lambda one: one.get("lastTimestamp") or one.get("eventTime") or "", default=None)
        return f"{newest.get('reason')}: {newest.get('message')}" if newest else None

    def _time_is_over(self, newest: dict, late: dict, reasons: dict) -> Iterator[str]:
        yield from self._tell_events(newest, late, reasons)
        told = [member for member in late if reasons[member]] or list(late) or [None]
        member = str(told[0]) if told[0] is not None else self._job.title
        why = reasons[told[0]].text if told[0] is not None and reasons[told[0]] else self._said.get(member)
        missing = self._job.num_pods - len(newest)
        if why is None:
            why = f"made {len(newest)} of {self._job.num_pods} pods" if missing else "has not started; nothing says why"
        waited = f"(after {self._start_timeout_secs:g} s, cluster.start_timeout_secs)"
        yield from self._give_up(member, f"{why} {waited}", EXIT_FAILED)

    def _give_up(self, member: str, why: str, exit_code: int) -> Iterator[str]:
        failure = MemberFailure(member=member, reason=why)
        yield f"{failure}: ending the job"
        self.discard()
        self._result = GroupResult(exit_code=exit_code, restarts=self._attempt, first_failure=failure)

    # The end.

    def _fail(self, state: State) -> Iterator[str]:
        """Whose fault it was: the first to fail of the last try, echoes of others' faults aside."""
        if "DeadlineExceeded" in state.text:
            why = f"took longer than it may (cluster.timeout_secs): {state.text}"
            self._conclude(MemberFailure(member=self._job.title, reason=why))
            return
        # All that is known may be echoes, whose cause is about to be told.
        yield from self._take_late_pods(lambda: not all(one.is_echo for one in self._last_failures()))
        failed = self._last_failures()
        if failed:
            self._conclude(next((one for one in failed if not one.is_echo), failed[0]))
            return
        for name in self._job.makers:
            if (text := self._last_warning(name)) and text not in state.text:
                state = state._replace(text=f"{state.text}; {text}")
        self._conclude(MemberFailure(member=self._job.title, reason=f"failed: {state.text or 'it does not say why'}"))

    def _take_late_pods(self, are_enough: Callable[[], bool]) -> Iterator[str]:
        """What pods say, which may come a moment after what the job says of itself."""
        deadline = time.monotonic() + _LAST_PODS_SECS
        while not are_enough() and time.monotonic() < deadline:
            event = self._next_event()
            if event is not None and event[0] == PODS.plural:
                yield from self._take(event)

    def _last_failures(self) -> list[MemberFailure]:
        last = max((attempt for attempt, _, _ in self._failures.values()), default=0)
        found = [one for one in self._failures.values() if one[0] == last]
        return [failure for _, _, failure in sorted(found, key=lambda one: one[1])]

    def _conclude(self, failure: MemberFailure) -> None:
        self._finish_logs()
        if failure.member != self._job.chief:
            for line in failure.last_lines:
                self._emit(failure.member, line)
        code = exit_code_of(failure)
        self._result = GroupResult(exit_code=code, restarts=self._attempt, first_failure=failure)

    # Pods and their logs.

    def _pods_of_attempt(self) -> list[dict[str, Any]]:
        """The pods of the present try, the older of one process before the newer."""
        attempt_of = self._job.attempt_of
        return [pod for pod in self._pods.values() if attempt_of is None or attempt_of(pod) == self._attempt]

    def _newest(self, member: str) -> dict[str, Any] | None:
        found = [pod for uid, pod in self._pods.items() if uid not in self._gone and self._job.member_of(pod) == member]
        return found[-1] if found else None

    def _show_log(self, uid: str, pod: str, member: str) -> None:
        if uid in self._logs:
            return
        tail = _ADOPTED_LINES if self._adopted and not self._logs else None  # an earlier try has shown the rest
        self._logs[uid] = Log(self._api, pod, self._job.container, lambda line: self._emit(member, line), tail)
        self._logs[uid].start()

    def _finish_logs(self) -> None:
        for one in self._logs.values():
            one.finish(_LOG_ENDS_WITHIN_SECS)

    def _end_threads(self) -> None:
        threads = [*self._watches, *self._logs.values()]
        for one in threads:
            one.end()
        self._api.stopped.set()
        for one in threads:
            if one.is_alive():
                one.join(timeout=5.0)
