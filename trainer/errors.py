"""The two kinds of trouble a person meets: what they gave was wrong, or the world failed.

Everything else is a fault of ours and keeps its traceback.
"""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_NOT_BLESSED = 3
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_PREEMPTED = 143  # 128 + SIGTERM: what a shell reports for a process that SIGTERM ended


class TriremeError(Exception):
    """A failure that its message explains by itself, so that no traceback is shown."""

    exit_code = EXIT_FAILED


class BadInput(TriremeError, ValueError):
    """Something a person gave cannot work. The message holds the path or file, the value and the rule."""

    exit_code = EXIT_BAD_INPUT


class WorldFailure(TriremeError):
    """Network, disk, a peer or a machine failed. The message says what to do next."""


class Preempted(TriremeError):
    """SIGTERM or Ctrl-C came; the state was saved before leaving."""

    exit_code = EXIT_PREEMPTED
