"""What can go wrong in storage, told apart because callers act differently on each."""

from trainer.errors import WorldFailure


class Conflict(WorldFailure):
    """Somebody else changed or took it first. Read again, decide again."""


class NotFound(WorldFailure):
    """The file, object or bucket is not there; trying again will not help."""


class Denied(WorldFailure):
    """The account that asked may not do this, or there is no account; trying again will not help."""
