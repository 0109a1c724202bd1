"""How long a service that does not answer is waited for."""

from collections.abc import Iterator
from contextlib import contextmanager

deadline_secs = 120.0
"""Without progress."""


@contextmanager
def patience(secs: float) -> Iterator[None]:
    """While the block runs, object storage is given up after `secs` without progress: for when a person waits."""
    global deadline_secs
    before, deadline_secs = deadline_secs, secs
    try:
        yield
    finally:
        deadline_secs = before
