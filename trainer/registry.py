"""The registry of models: numbered versions, one champion, and every change of champion on record.

    <base>/<name>/<version>/       as TF Serving expects: saved_model.pb, variables/, …, model.keras, record.json
    <base>/<name>/champion.json    which version is champion, how it came to that, and which versions were deleted

The layout is the same on disk and in a bucket. A version never changes after it appeared. The champion changes only by
a compare-and-swap of the one pointer file, so all promotions, rollbacks and deletions stand in one order, and a crash
between any two operations leaves the old or the new state.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainer import storage
from trainer.errors import BadInput, WorldFailure
from trainer.storage import Conflict, NotFound
from trainer.storage.parallel import for_each

__all__ = ["Broken", "BrokenRecord", "Conflict", "Registry", "Version"]

RECORD = "record.json"
POINTER = "champion.json"
_NUM_THREADS = 8
_EMPTY = {"champion": None, "history": [], "retired": []}


@dataclass(frozen=True)
class Version:
    """One published model.

    Attributes:
        number: From 1 on; greater is later.
        uri: The folder or prefix of its files.
        record: What its publisher said of it, with `files` (name → `bytes`, `sha256`) and `digest`, one SHA-256 of that
            table.
    """

    number: int
    uri: str
    record: dict[str, Any]


@dataclass(frozen=True)
class Broken:
    """What stands under a version's number and is none, because its record is missing or cannot be read.

    Attributes:
        number: As of a version.
        uri: The folder or prefix of its files.
        reason: What is wrong, beginning with the file's name.
    """

    number: int
    uri: str
    reason: str


class BrokenRecord(WorldFailure):
    """A version's `record.json` is not what a publisher wrote."""


class Registry:
    """The versions of one model, on disk or in a bucket.

    Args:
        base: A folder or `gs://bucket/prefix` that holds a folder for each model.
        name: The model's name: letters, digits, `.`, `_` and `-`.
        now: Gives the time that is put on record.

    Raises:
        BadInput: The name or the base cannot be used.
    """

    def __init__(self, base: str | Path, name: str, now: Callable[[], datetime] = lambda: datetime.now(UTC)):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
            raise BadInput(f"registry name {name!a}: must be letters, digits, `.`, `_` and `-`, at most 128")
        self.name = name
        self.uri = storage.join(base, name)
        self._pointer = storage.join(self.uri, POINTER)
        self._now = now

    def versions(self) -> list[Version]:
        """Return all versions that are published whole and not deleted, the oldest first; a broken one is left out."""
        return [version for version in self.survey() if isinstance(version, Version)]

    def survey(self) -> list[Version | Broken]:
        """Return what stands under the versions' numbers and is not deleted, the oldest first, broken or not."""
        retired = self._read()[0]["retired"]
        numbers = [number for number in self._numbers() if number not in retired]
        return [found for found in for_each(self._look, numbers, _NUM_THREADS) if found]

    def version(self, number: int) -> Version:
        """Return one version.

        Raises:
            BadInput: There is no such version.
            BrokenRecord: Its record is missing or cannot be read.
        """
        found = None if number in self._read()[0]["retired"] else self._load(number)
        if found is None:
            raise BadInput(f"{self.uri}: has no version {number}")
        return found

    def champion(self) -> Version | None:
        """Return the champion, or None before the first promotion.

        Raises:
            WorldFailure: The pointer names a version that is not there, or whose record is broken (`BrokenRecord`).
        """
        number = self.champion_number()
        if number is None:
            return None
        way_out = "promote another, roll back or restore it"
        try:
            found = self._load(number)
        except BrokenRecord as error:
            raise BrokenRecord(f"{error}; version {number} is the champion: {way_out}") from error
        if found is None:
            raise WorldFailure(f"{self._pointer}: the champion, version {number}, is not there; {way_out}")
        return found

    def champion_number(self) -> int | None:
        """Return what the pointer names, be it there or not; None before the first promotion."""
        return self._read()[0]["champion"]

    def history(self) -> list[dict[str, Any]]:
        """Return every promotion and rollback in order: `id`, `action`, `version`, `previous`, `reason`, `time`."""
        return self._read()[0]["history"]

    def publish(self, folder: str | Path, record: dict[str, Any]) -> Version:
        """Publish the files of a model as the next version; it appears whole or not at all.

        Args:
            folder: What an export left: `saved_model.pb` and all that belongs to it.
            record: What is known of the model. It is stored with the digests of the files.

        Raises:
            BadInput: The folder is empty, or holds a `record.json`, or the record says `files` or `digest` itself.
            ValueError: The record holds an infinity or NaN.
            WorldFailure: The disk or the service failed; nothing was published.
        """
        if taken := {"files", "digest"} & set(record):
            raise BadInput(f"record: {sorted(taken)} is filled in by the registry")
        names = storage.list_names(folder)
        digests = for_each(lambda name: storage.digest(storage.join(folder, name)), names, _NUM_THREADS)
        files = {name: {"bytes": size, "sha256": sha256} for name, (size, sha256) in zip(names, digests, strict=True)}
        record = {**record, "files": files, "digest": _digest(files)}
        text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        number = storage.publish_numbered(folder, self.uri, also={RECORD: text.encode()})
        return Version(number, self._at(number), json.loads(text))

    def promote(self, version: int, expected_champion: int | None, reason: str, *, verified: bool = False) -> Version:
        """Make a version the champion, if the champion is still the one it was judged against.

        Args:
            version: The number of the new champion.
            expected_champion: The number of the champion it was compared with; None if there was none.
            reason: Goes on record.
            verified: Whether every file of the version is read again first: it may have lain there for long.

        Raises:
            Conflict: Another champion was made meanwhile: judge again, against that one.
            BadInput: There is no such version, or it is the champion already.
            WorldFailure: A file of it is not as it was published, or its record is broken (`BrokenRecord`).
        """
        event_id = secrets.token_hex(8)
        while True:
            state, generation = self._read()
            if any(event["id"] == event_id for event in state["history"]):
                return self.version(version)  # it had landed, and only the answer was lost
            if state["champion"] != expected_champion:
                raise Conflict(
                    f"{self._pointer}: the champion is now {state['champion']}, not {expected_champion}; "
                    f"judge version {version} again against it"
                )
            if version == state["champion"]:
                raise BadInput(f"{self.uri}: version {version} is the champion already")
            promoted = None if version in state["retired"] else self._usable(version)
            if promoted is None:
                raise BadInput(f"{self.uri}: has no version {version} to promote")
            if verified:
                self._need_unchanged(promoted)
            try:
                self._write(self._moved(state, "promote", version, reason, event_id), generation)
            except Conflict:
                continue  # it may have been another change that left the champion as it was: look again
            return promoted

    def rollback(self, reason: str) -> Version:
        """Take back the last promotion that still stands: its predecessor is champion again. This is put on record.

        Raises:
            BadInput: There was no champion before this one.
            Conflict: The champion changed meanwhile: look again before you roll back.
            WorldFailure: The predecessor was deleted by hand, or a file of it is not as it was published.
        """
        state, generation = self._read()
        standing = _standing(state["history"])
        if len(standing) < 2:
            raise BadInput(f"{self.uri}: there is no earlier champion to roll back to")
        restored = self._usable(standing[-2])
        if restored is None:
            raise WorldFailure(f"{self.uri}: version {standing[-2]} is not there any more; promote another one")
        self._need_unchanged(restored)
        self._write(self._moved(state, "rollback", restored.number, reason, secrets.token_hex(8)), generation)
        return restored

    def verify(self, version: int | None = None) -> list[str]:
        """Read every file again and compare it with the record; return a sentence for each thing that differs.

        Args:
            version: One version; None means all, and whatever stands there under a version's number.

        Raises:
            BadInput: There is no such version.
        """
        retired = self._read()[0]["retired"]
        numbers = [number for number in self._numbers() if number not in retired and version in (None, number)]
        # In a bucket a killed publisher leaves objects that are not a version; on disk it leaves nothing.
        numbers = [number for number in numbers if storage.exists(self._at(number))]
        if version is not None and not numbers:
            raise BadInput(f"{self.uri}: has no version {version}")
        return [finding for number in numbers for finding in self._findings(number)]

    def fetch(self, version: int, folder: str | Path) -> Path:
        """Return a local folder with the version's files.

        On disk this is the version's own folder: do not write into it. From a bucket they are staged into `folder`.

        Raises:
            BadInput: There is no such version.
        """
        found = self.version(version)
        return storage.stage(found.uri, folder) if storage.is_remote(found.uri) else Path(found.uri)

    def retain(self, keep_newest: int) -> list[int]:
        """Delete versions but for the newest and all that ever were champion; return the numbers of the deleted.

        Args:
            keep_newest: How many of the newest to keep, at least 1. Whose record is broken is neither counted nor deleted.

        Raises:
            BadInput: `keep_newest` is less than 1.
        """
        if keep_newest < 1:
            raise BadInput(f"keep_newest {keep_newest}: must be at least 1")
        while True:
            state, generation = self._read()
            there = [version.number for version in self.versions()]
            crowned = {number for event in state["history"] for number in (event["version"], event["previous"])}
            chosen = [number for number in there[:-keep_newest] if number not in crowned]
            retired = sorted({*state["retired"], *chosen})
            if retired == state["retired"]:
                break
            try:
                # First the pointer says that they are gone, so that nobody can promote what is about to be deleted.
                self._write({**state, "retired": retired}, generation)
            except Conflict:
                continue
            break
        # What an earlier, killed call had retired and not yet deleted is among them.
        leftover = [number for number in self._numbers() if number in retired]
        for number in leftover:
            storage.delete_prefix(self._at(number))
        return chosen

    def _at(self, number: int) -> str:
        return storage.join(self.uri, str(number))

    def _numbers(self) -> list[int]:
        return sorted(int(name) for name in storage.list_folders(self.uri) if re.fullmatch(r"[1-9][0-9]*", name))

    def _usable(self, number: int) -> Version | None:
        try:
            return self._load(number)
        except BrokenRecord as error:
            raise BrokenRecord(f"{error}; restore it, or promote another one") from error

    def _look(self, number: int) -> Version | Broken | None:
        try:
            return self._load(number)
        except BrokenRecord as error:  # the others are looked at all the same
            return Broken(number, self._at(number), str(error).removeprefix(f"{self._at(number)}/"))

    def _findings(self, number: int) -> list[str]:
        found = self._look(number)
        if isinstance(found, Broken):
            return [f"version {number}: {found.reason}"]
        return _differences(found) if found else []

    def _need_unchanged(self, version: Version) -> None:
        if found := _differences(version):
            more = f", and {len(found) - 1} more" if len(found) > 1 else ""
            raise WorldFailure(f"{self.uri}: {found[0]}{more}: restore it, or promote another one")

    def _load(self, number: int) -> Version | None:
        if not storage.exists(self._at(number)):
            return None  # in a bucket the record alone may be there before its publication is complete
        uri = storage.join(self._at(number), RECORD)
        try:
            record, generation = storage.read_json(uri)
        except BadInput as error:
            raise BrokenRecord(str(error)) from error
        if not generation:
            raise BrokenRecord(f"{uri}: is missing, so it is no version, and yet TensorFlow Serving would serve it")
        if fault := _fault(record):
            raise BrokenRecord(f"{uri}: {fault}")
        return Version(number, self._at(number), record)

    def _read(self) -> tuple[dict[str, Any], int]:
        state, generation = storage.read_json(self._pointer)
        if not generation:
            return _EMPTY, 0
        if not isinstance(state, dict) or set(state) != set(_EMPTY):
            raise BadInput(
                f"{self._pointer}: must have exactly {sorted(_EMPTY)}; restore it from its history or a backup"
            )
        return state, generation

    def _write(self, state: dict[str, Any], generation: int) -> None:
        storage.write_json(self._pointer, state, if_generation=generation)

    def _moved(self, state: dict[str, Any], action: str, number: int, reason: str, event_id: str) -> dict[str, Any]:
        event = {
            "id": event_id,
            "action": action,
            "version": number,
            "previous": state["champion"],
            "reason": reason,
            "time": self._now().isoformat(timespec="milliseconds"),
        }
        return {**state, "champion": number, "history": [*state["history"], event]}


def _standing(history: list[dict[str, Any]]) -> list[int]:
    """Return the champions that were promoted and not rolled back, the present one last."""
    standing: list[int] = []
    for event in history:
        if event["action"] == "promote":
            standing.append(event["version"])
        else:
            standing.pop()
    return standing


def _digest(files: dict[str, dict[str, Any]]) -> str:
    """Return one SHA-256 for a table of files, whatever the order in which they were listed."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _fault(record: Any) -> str | None:
    """What keeps a record from being read, so that nobody meets it halfway through."""
    if not isinstance(record, dict):
        return "must hold an object"
    if missing := [name for name in ("files", "digest") if name not in record]:
        return f"has no {' and no '.join(missing)}"
    files = record["files"]
    if not isinstance(files, dict) or not all(
        isinstance(file, dict) and isinstance(file.get("bytes"), int) and isinstance(file.get("sha256"), str)
        for file in files.values()
    ):
        return "files must give `bytes` and `sha256` of each file"
    if not isinstance(record["digest"], str):
        return "digest must be a text"
    for name in ("metrics", "intervals", "verdict"):
        if not isinstance(record.get(name) or {}, dict):
            return f"{name} must be an object"
    if not all(value is None or isinstance(value, int | float) for value in (record.get("metrics") or {}).values()):
        return "metrics must be numbers"
    return None


def _differences(version: Version) -> list[str]:
    files = version.record["files"]
    if _digest(files) != version.record["digest"]:
        return [f"version {version.number}: {RECORD}: its table of files is not the one that was published"]

    def check(name: str) -> str | None:
        try:
            size, sha256 = storage.digest(storage.join(version.uri, name))
        except NotFound:
            return f"version {version.number}: {name}: is missing"
        if (size, sha256) == (files[name]["bytes"], files[name]["sha256"]):
            return None
        return (
            f"version {version.number}: {name}: differs: recorded {files[name]['bytes']} bytes, sha256 "
            f"{files[name]['sha256'][:12]}…; found {size} bytes, {sha256[:12]}…"
        )

    found = for_each(check, sorted(files), _NUM_THREADS)
    strangers = sorted(set(storage.list_names(version.uri)) - {RECORD, *files})
    return [finding for finding in found if finding] + [
        f"version {version.number}: {name}: was not published with it" for name in strangers
    ]
