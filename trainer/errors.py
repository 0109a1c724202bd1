"""The two kinds of trouble a person meets: what they gave was wrong, or the world failed.

Everything else is a fault of ours and keeps its traceback.
"""

import re

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_NOT_BLESSED = 3
EXIT_NO_RESTART_LEFT = 4
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_PREEMPTED = 143  # 128 + SIGTERM: what a shell reports for a process that SIGTERM ended
_HEADLINES = (
    "Exception encountered when calling",
    "Graph execution error",
    "Detected at node",
    "<stack traces unavailable>",
)


def reason_of(error: BaseException) -> str:
    """What an exception of a library says, as one line.

    Keras puts its reason under a headline, in bold; TensorFlow puts the operation's name around it, and what fails while a
    function is traced under the lines of code that led to it.
    """
    text = str(error)
    if text.startswith("in user code:"):
        text = re.sub(r"(?s).*\n +File \"[^\n]*(\n[^\n]+)?", "", text)
        text = re.sub(rf"(?m)^\s*{type(error).__name__}: ", "", text)
    lines = [
        re.sub(r"\x1b\[\d+m|\{\{function_node .*?\}\} ?| ?\[Op:\w+\]( name: ?)?", "", line).strip()
        for line in text.splitlines()
    ]
    reason = next((line for line in lines if line and not line.startswith(_HEADLINES)), "")
    return type(error).__name__ if not reason or reason.startswith("Arguments received by") else reason


class TriremeError(Exception):
    """A failure that its message explains by itself, so that no traceback is shown."""

    exit_code = EXIT_FAILED


class BadInput(TriremeError, ValueError):
    """Something a person gave cannot work. The message holds the path or file, the value and the rule."""

    exit_code = EXIT_BAD_INPUT


class WorldFailure(TriremeError):
    """Network, disk, a peer or a machine failed. The message says what to do next."""


class NoRestartLeft(WorldFailure):
    """The group was started again as often as it may be; whoever restarts processes must leave it."""

    exit_code = EXIT_NO_RESTART_LEFT


class Preempted(TriremeError):
    """SIGTERM or Ctrl-C came; the state was saved before leaving."""

    exit_code = EXIT_PREEMPTED
