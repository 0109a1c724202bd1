"""SIGTERM ends a command as Ctrl-C does: by an exception, so that whoever waits can say what goes on without them."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from trainer.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED


class Stopped(KeyboardInterrupt):
    """A signal came."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raises `Stopped` at SIGTERM. A process that was started to ignore it, and a thread, which gets none, stay as they are."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _stop(number: int, _: Any) -> None:
    signal.signal(number, signal.SIG_DFL)  # the second one ends the process at once
    raise Stopped(number)


def ended_by(interrupt: KeyboardInterrupt) -> tuple[str, int]:
    """What to say of it, and the exit code that a shell would give."""
    if isinstance(interrupt, Stopped) and interrupt.number == signal.SIGTERM:
        return "ended by SIGTERM", EXIT_PREEMPTED
    return "interrupted", EXIT_INTERRUPTED
