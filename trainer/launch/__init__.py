"""Starts one training as many processes: the face that the local and the Kubernetes launchers share.

A launcher knows how to `start` a group, `watch` it to its end, show its `logs`, give its `result` and `stop` it.
`follow` drives any of them and turns SIGTERM and Ctrl-C into a stop with time for a checkpoint.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from trainer.cluster import ECHOES
from trainer.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_NO_RESTART_LEFT, EXIT_NOT_BLESSED

NEVER_RESTARTED = (EXIT_BAD_INPUT, EXIT_NOT_BLESSED, EXIT_NO_RESTART_LEFT)
"""Exit codes after which nothing is started again, mostly because a second try would only repeat them."""


@dataclass(frozen=True, kw_only=True)
class MemberFailure:
    """How one process of a group failed.

    Attributes:
        member: its name, such as `worker 1`.
        exit_code: what it ended with; None when a signal ended it or it did not end by itself.
        signal: number of the signal that ended it, or None.
        reason: what ended it in somebody else's words, such as a cluster's, which then stand for the number.
        last_lines: the end of its log, at most 50 lines, the newest last.
    """

    member: str
    exit_code: int | None = None
    signal: int | None = None
    reason: str | None = None
    last_lines: tuple[str, ...] = ()

    @property
    def is_echo(self) -> bool:
        """Whether the process died of a peer's fault: its log ends with a broken collective and not with its own error.

        What counts is the last exception that the log shows, if there is one, for TensorFlow prints about lost peers
        also while a process with a fault of its own shuts down.
        """
        if self.reason is not None or (self.signal is not None and self.signal != signal.SIGABRT):
            return False
        raised = [i for i, line in enumerate(self.last_lines) if _is_exception(line)]
        told = self.last_lines[raised[-1] :] if raised else self.last_lines
        if raised and not _is_tensorflow_error(told[0]):
            told = told[:1]
        return any(words in line for line in told for words in ECHOES)

    def __str__(self) -> str:
        if self.reason is not None:
            return f"{self.member} {self.reason}"
        if self.signal is not None:
            hint = ", which is what the kernel does when memory runs out" if self.signal == signal.SIGKILL else ""
            return f"{self.member} was ended by {signal.Signals(self.signal).name}{hint}"
        if self.exit_code is None:
            return f"{self.member} stopped answering"
        return f"{self.member} ended with exit code {self.exit_code}"


def _is_exception(line: str) -> bool:
    """Whether a line begins like a traceback's last one: `package.SomeError: text` or `SomeError`."""
    name = line.split(":", 1)[0]
    return name.replace(".", "").isidentifier() and name.endswith(("Error", "Exception", "Failure", "Interrupt"))


def _is_tensorflow_error(line: str) -> bool:
    return line.startswith("tensorflow.") or "errors_impl." in line.split(":", 1)[0]


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """How a group ended.

    Attributes:
        exit_code: 0 done, 2 bad input, 143 preempted, else the failing process's own or 1.
        restarts: how many times the whole group was started again.
        first_failure: what ended the last try: the process whose fault it was, not the peers' echo. None when the
            group was done.
    """

    exit_code: int
    restarts: int = 0
    first_failure: MemberFailure | None = None


def exit_code_of(failure: MemberFailure) -> int:
    """Returns the exit code that a group ends with for one member's failure."""
    return failure.exit_code if failure.exit_code else EXIT_FAILED


class Launcher(Protocol):
    """One group of processes, wherever they run. Each is used once."""

    def start(self) -> None:
        """Starts the group, or adopts the one that an earlier try of the same task started."""

    def watch(self) -> Iterator[str]:
        """Yields what a person should know, as it happens, and ends with the group.

        Closing the iterator early ends the group at once.
        """

    def logs(self, member: str) -> list[str]:
        """Returns the newest lines of one process's log; lines are also handed on as they come."""

    def result(self) -> GroupResult:
        """Returns how the group ended, once `watch` has."""

    def stop(self, grace_period_secs: float) -> None:
        """Asks the group to save and leave, and ends what is left of it after the grace period. Safe in a handler."""


def follow(launcher: Launcher, emit: Callable[[str, str], None], *, grace_period_secs: float) -> GroupResult:
    """Starts a group, says what happens to it, and returns how it ended.

    The first SIGTERM or Ctrl-C lets the group save its checkpoint, the second ends it at once. Signals are handled
    when called from the main thread; elsewhere they are left alone.

    Args:
        launcher: what starts the group.
        emit: is given a source and a line.
        grace_period_secs: how long a checkpoint may take after the first signal.
    """
    asked = False

    def ask(number: int, _frame: object) -> None:
        nonlocal asked
        launcher.stop(0.0 if asked else grace_period_secs)
        asked = True

    with _handled(ask), contextlib.closing(_started(launcher)) as news:
        for text in news:
            emit("launcher", text)
    return launcher.result()


def _started(launcher: Launcher) -> Iterator[str]:
    launcher.start()
    yield from launcher.watch()


@contextlib.contextmanager
def _handled(handler: Callable[[int, object], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, one in former.items():
            signal.signal(number, one)
