"""What a run leaves under its root for those who ask later: the command line, the exit task, the next run.

    note(root, run, "verdict", {"verdict": "blessed", …})      # `<root>/outcomes/<run>/verdict.json`
    read(root, run)                                            # {"verdict": {…}, "pushed": {…}}

Each part is written whole by one task, so that no task has to read what another wrote before it.
"""

import sys
from typing import Any

from trainer import storage
from trainer.errors import TriremeError

PARTS = ("data", "verdict", "pushed", "skipped", "failure", "end")
_FOLDER = "outcomes"


def note(root: str, run: str, part: str, content: dict[str, Any]) -> None:
    """Leaves one part. A run does not fail because this cannot be written: it says so on standard error.

    Args:
        root: Folder or `gs://` prefix of the runs.
        run: The run's identifier.
        part: One of PARTS.
        content: Plain data.
    """
    assert part in PARTS, part
    try:
        storage.write_json(storage.join(root, _FOLDER, run, f"{part}.json"), content)
    except (TriremeError, OSError) as error:
        print(f"warning: what became of the run could not be noted in {root}: {error}", file=sys.stderr)


def withdraw_failure(root: str, run: str, task: str) -> None:
    """Takes back what an earlier try of a task left, now that it has succeeded; else the next failure would get its words."""
    place = storage.join(root, _FOLDER, run, "failure.json")
    try:
        found, _ = storage.read_json(place)
        if isinstance(found, dict) and found.get("task") == task:
            storage.delete_prefix(place)
    except (TriremeError, OSError) as error:
        print(f"warning: {place} could not be taken back: {error}", file=sys.stderr)


def read(root: str, run: str) -> dict[str, dict[str, Any]]:
    """The parts that are there, by name.

    Raises:
        TriremeError: The root cannot be read.
    """
    names = set(storage.list_names(storage.join(root, _FOLDER, run)))
    return {
        part: storage.read_json(storage.join(root, _FOLDER, run, f"{part}.json"))[0]
        for part in PARTS
        if f"{part}.json" in names
    }
