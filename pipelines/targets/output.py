"""What a local run's tasks print: all of it into one log a task, the parts for people onto the screen.

kfp's local runner writes everything to standard output. `TaskOutput` stands in its place, learns from kfp's own lines
which task is running, and passes on what tasks say (events of `trainer.progress`) to a display: bars on a terminal, lines
in a log.
"""

import contextlib
import io
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from trainer.progress import EVENT_PREFIX

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_STARTED = re.compile(r"INFO - Executing task '([\w-]+)'")
_ENDED = re.compile(r"(?:INFO|ERROR) - Task '([\w-]+)' finished with status (\w+)")


class TaskOutput(io.TextIOBase):
    """A text stream that files and shows what kfp's local runner and its tasks print.

    Attributes:
        task: The task that is running, or ran last.
        seconds: Wall time by task, from its start to its end.
        starting: Is told the name of each task before it starts, and may raise KeyboardInterrupt.
    """

    def __init__(self, logs: Path, display: "Display") -> None:
        self.task: str | None = None
        self.seconds: dict[str, float] = {}
        self.starting: Callable[[str], None] = lambda task: None
        self._logs, self._display = logs, display
        self._rest = ""
        self._log: BinaryIO | None = None
        self._began = 0.0

    def writable(self) -> bool:
        """A stream for `print`."""
        return True

    def write(self, text: str) -> int:
        """Takes text in pieces of any size."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._line(_ANSI.sub("", line))
        return len(text)

    def close(self) -> None:
        """Files what is left and takes the display off the screen."""
        if self._rest:
            self._line(_ANSI.sub("", self._rest))
            self._rest = ""
        if self._log is not None:
            self._log.close()
            self._log = None
        self._display.close()
        super().close()

    def _line(self, line: str) -> None:
        if match := _STARTED.search(line):
            self._start(match[1])
        elif match := _ENDED.search(line):
            self.seconds[match[1]] = round(time.monotonic() - self._began, 3)
            self._display.ended(match[1], match[2] == "SUCCESS", self.seconds[match[1]])
        stripped = line.strip()
        if stripped.startswith(EVENT_PREFIX.strip()):
            self._event(stripped[len(EVENT_PREFIX) :])
        else:
            self._file(line)

    def _start(self, task: str) -> None:
        self.starting(task)
        self.task, self._began = task, time.monotonic()
        if self._log is not None:
            self._log.close()
            self._log = None
        with contextlib.suppress(OSError):
            self._log = (self._logs / f"{task}.log").open("ab", buffering=0)
        self._display.started(task)

    def _file(self, line: str) -> None:
        """Adds a line to the task's log; a disk that is full takes no line and does not end the run by that."""
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.write(f"{line}\n".encode())

    def _event(self, text: str) -> None:
        try:
            event = json.loads(text)
        except ValueError:  # two processes wrote over one another
            return
        self._file(
            event.get("say") or f"{event.get('unit')} {event.get('done')} of {event.get('total')} {event.get('note')}"
        )
        if "say" in event:
            self._display.said(self.task or "", event["say"])
        else:
            self._display.advanced(event)


class Display:
    """Plain lines, for a log. Progress is shown at most every few seconds."""

    _SECONDS_BETWEEN_LINES = 5.0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown_at = time.monotonic()

    def started(self, task: str) -> None:
        """A task begins."""
        self._print(f"{task} …")

    def said(self, task: str, text: str) -> None:
        """A task says something."""
        self._print(f"{task}: {text}")

    def advanced(self, event: dict[str, Any]) -> None:
        """A task's work advances: `task`, `done`, `total`, `unit`, `note`."""
        now = time.monotonic()
        if now - self._shown_at >= self._SECONDS_BETWEEN_LINES:
            self._print(f"{event['task']}: {event['unit']} {event['done']:,} of {event['total']:,} · {event['note']}")

    def ended(self, task: str, succeeded: bool, seconds: float) -> None:
        """A task ended."""
        self._print(f"{task} {'done' if succeeded else 'FAILED'} in {seconds:.1f} s")

    def close(self) -> None:
        """Nothing more will come."""

    def _print(self, text: str) -> None:
        self._shown_at = time.monotonic()
        print(text, file=self._stream, flush=True)


class TerminalDisplay(Display):
    """A bar for the running task, with what is said above it."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        super().__init__(stream)
        self._console = Console(file=stream, highlight=False)
        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(), console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._row: Any = None
        self._progress.start()

    def started(self, task: str) -> None:
        """A task begins."""
        self._row = self._progress.add_task(task, total=None, note="")

    def said(self, task: str, text: str) -> None:
        """A task says something."""
        self._console.print(f"  [dim]{task}[/dim]  ", end="")
        self._console.print(text, markup=False, style="dim" if text.startswith("epoch ") else None)

    def advanced(self, event: dict[str, Any]) -> None:
        """A task's work advances."""
        if self._row is not None:
            note = f"{event['done']:,}/{event['total']:,} {event['unit']} {event['note']}"
            self._progress.update(self._row, completed=event["done"], total=event["total"], note=note)

    def ended(self, task: str, succeeded: bool, seconds: float) -> None:
        """A task ended."""
        if self._row is not None:
            self._progress.remove_task(self._row)
            self._row = None
        mark = "[green]✓[/green]" if succeeded else "[red]✗[/red]"
        self._console.print(f"{mark} {task:<16} {seconds:7.1f} s")

    def close(self) -> None:
        """Takes the bar off the screen."""
        self._progress.stop()
