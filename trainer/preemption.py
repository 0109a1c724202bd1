"""SIGTERM and Ctrl-C: saved first, then left.

    with StopSignals() as stop:
        ...                         # nothing is worth saving yet: a signal raises Preempted here
        stop.defer()
        while stop.asked is None:   # from here on it is only remembered
            ...

A second signal ends the process at once. TensorFlow takes SIGTERM for itself when a multi-worker strategy is made, and
then nothing happens at all: `take_back` puts ours in its place.
"""

import os
import signal
import threading
from typing import Any

from trainer.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, Preempted

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Collects SIGTERM and SIGINT while the block runs. Does nothing outside the main thread, where Python has no signals.

    Attributes:
        asked: Name of the signal that came, or None.
    """

    def __init__(self) -> None:
        self.asked: str | None = None
        self._deferred = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def take_back(self) -> None:
        """Installs the handlers again, after somebody else may have installed theirs."""
        for number in self._before:
            signal.signal(number, self._handle)

    def defer(self) -> None:
        """From now on there is something to save: a signal is remembered instead of raised."""
        self._deferred = True

    def _handle(self, number: int, _: Any) -> None:
        if self.asked is not None:  # at once: not even Python's own clearing up, which may wait for a peer
            os._exit(EXIT_PREEMPTED if number == signal.SIGTERM else EXIT_INTERRUPTED)
        self.asked = signal.Signals(number).name
        if not self._deferred:
            raise Preempted(f"{self.asked} before the first step: there was nothing to save; the next run begins anew")
