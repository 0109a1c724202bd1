"""What can go wrong in storage, told apart because callers act differently on each."""

import re

from trainer.errors import WorldFailure


class Conflict(WorldFailure):
    """Somebody else changed or took it first. Read again, decide again."""


class NotFound(WorldFailure):
    """The file, object or bucket is not there; trying again will not help."""


class Denied(WorldFailure):
    """The account that asked may not do this, or there is no account; trying again will not help."""


def unreachable(error: BaseException) -> str | None:
    """Who could not be reached and why, in a few words of what requests says in many; None of another error."""
    from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

    cause: object = error
    while not isinstance(cause, NewConnectionError | ConnectTimeoutError):
        inner = [getattr(cause, "reason", None), *getattr(cause, "args", ())]
        cause = next((one for one in inner if isinstance(one, Exception)), None)
        if cause is None:
            return None
    host = re.search(r"host='([^']*)', port=(\d+)", str(error))
    reason = str(cause).rpartition(": ")[2] or type(cause).__name__
    return f"no connection to {host[1]}:{host[2]}: {reason}" if host else reason
