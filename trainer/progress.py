"""How long work is shown: a bar on a terminal, plain lines in a log, events for the process that watches.

    with progress("train-model", total=230, unit="step") as bar:
        bar.update(10, "loss 0.31 · 5,120 examples/s")

A task of a local run has no terminal of its own: `trireme run` reads its output. It asks for events (TRIREME_EVENTS=1),
one line each, that begin with `EVENT_PREFIX`, and draws the bar itself.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

EVENT_PREFIX = "::trireme "
TASK_VARIABLE = "TRIREME_TASK"
"""Environment variable: the task that this process, or one that started it, works for; what is shown bears its name."""
_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_BETWEEN_EVENTS = 0.1

_quiet = False


def be_quiet() -> None:
    """From now on this process shows nothing: under several workers the chief speaks for all."""
    global _quiet
    _quiet = True


class Progress:
    """One piece of work that advances; where and how it is shown is decided once, at its start."""

    def __init__(self, task: str, total: int, unit: str) -> None:
        self.task, self.total, self.unit = os.environ.get(TASK_VARIABLE) or task, total, unit
        self.done = 0
        self._shown_at = time.monotonic()
        self._bar = None
        self._events = os.environ.get("TRIREME_EVENTS") == "1"
        if not self._events and not _quiet and sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit),
                TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
            )  # fmt: skip
            self._row = self._bar.add_task(self.task, total=total, note="")
            self._bar.start()

    def update(self, done: int, note: str = "") -> None:
        """`done` of the total are done; the note says what is worth knowing at this moment."""
        self.done = done
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._row, completed=done, note=note)
            return
        pause = _SECONDS_BETWEEN_EVENTS if self._events else _SECONDS_BETWEEN_LINES
        if now - self._shown_at < pause and done < self.total:
            return
        self._shown_at = now
        if _quiet:
            return
        if self._events:
            emit_event(task=self.task, done=done, total=self.total, unit=self.unit, note=note)
        else:
            say(f"{self.task}: {self.unit} {done:,} of {self.total:,}" + (f" · {note}" if note else ""))

    def close(self) -> None:
        """Takes the bar off the screen."""
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def progress(task: str, total: int, unit: str) -> Iterator[Progress]:
    """Shows a piece of work while the block runs, as that of the task unless the environment names another."""
    shown = Progress(task, total, unit)
    try:
        yield shown
    finally:
        shown.close()


def emit_event(**fields: object) -> None:
    """One machine-readable line for the process that watches."""
    # One write: `print` makes two of an unbuffered stream, and another thread's line would come between.
    sys.stdout.write(EVENT_PREFIX + json.dumps(fields, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """One line for a person."""
    if _quiet:
        return
    if os.environ.get("TRIREME_EVENTS") == "1":
        emit_event(say=text)
    else:
        print(text, flush=True)
