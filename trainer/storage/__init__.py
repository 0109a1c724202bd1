"""One face over plain folders and object storage: stage, publish, and small JSON files under compare-and-swap.

A URI is a path or `gs://bucket/prefix`. This package is the only room that talks to object storage; it loads Google's
client only when a `gs://` URI comes, because start-up time is a promise.

    stage(uri, folder)            a prefix → a local folder
    publish(folder, uri)          a local folder → a prefix, whole or not at all
    read_json, write_json         a value and its generation; a write can demand that nobody wrote meanwhile

A published folder never changes: publish under a new name, then move a pointer with `write_json`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer.errors import BadInput
from trainer.storage import disk, names
from trainer.storage.errors import Conflict, Denied, NotFound
from trainer.storage.names import checked_name, is_remote, join
from trainer.storage.waiting import patience

__all__ = [
    "Conflict",
    "Denied",
    "NotFound",
    "check_whole",
    "checked_name",
    "delete_prefix",
    "digest",
    "exists",
    "is_remote",
    "join",
    "list_folders",
    "list_names",
    "patience",
    "publish",
    "publish_numbered",
    "read_json",
    "stage",
    "versions",
    "write_json",
]


def _side(uri: str | Path) -> tuple[ModuleType, str]:
    """Return the module that serves `uri`, and the URI as text."""
    if not is_remote(uri):
        return disk, str(uri)
    from trainer.storage import bucket

    return bucket, str(uri)


def exists(uri: str | Path) -> bool:
    """Say whether there is a file, an object, a folder, or anything under this prefix.

    A publication that is not finished is not there.
    """
    side, uri = _side(uri)
    return side.exists(uri)


def check_whole(uri: str | Path) -> None:
    """Hold what is under `uri` now against what was published there; nothing is read.

    In a folder, which appears by a rename, to be there is to be whole.

    Raises:
        NotFound: Nothing was published there.
        WorldFailure: The publication was never finished, or an object of it is missing or another one by now.
    """
    side, uri = _side(uri)
    side.check_whole(uri)


def list_names(uri: str | Path) -> list[str]:
    """Return the names of all files under `uri`, relative to it, sorted; empty if there is nothing.

    Raises:
        BadInput: `uri` is a file, or a folder in it is a symbolic link.
    """
    side, uri = _side(uri)
    return side.list_names(uri)


def versions(uri: str | Path) -> dict[str, str]:
    """Return what `list_names` does, each name with a text that changes when the file's content does.

    Nothing is read: in a bucket it is made of size and checksum, on disk of size and time of the last change.
    """
    side, uri = _side(uri)
    return side.versions(uri)


def list_folders(uri: str | Path) -> list[str]:
    """Return the names of the folders directly under `uri`, sorted; empty if there are none."""
    side, uri = _side(uri)
    return side.list_folders(uri)


def digest(uri: str | Path) -> tuple[int, str]:
    """Read one whole file or object; return its size in bytes and its SHA-256 in hexadecimal.

    Raises:
        NotFound: It is not there.
    """
    side, uri = _side(uri)
    return side.digest(uri)


def stage(uri: str | Path, folder: str | Path, names: Sequence[str] | None = None) -> Path:
    """Bring the files under `uri` into a local folder, in parallel, and return the folder.

    Each file is written under another name, checked and renamed, so that the folder never holds half a file. Files that
    are there already and are the same are not brought again: a killed staging goes on where it was. Other files in the
    folder stay.

    Args:
        uri: A prefix or folder. If it was published by `publish`, it must have been published whole, and what comes
            must be what was published; any other prefix is taken as it is.
        folder: A local folder; it is made if it is not there.
        names: Only these, relative to `uri`; None means all.

    Raises:
        NotFound: There is nothing under `uri`, or one of the names is missing.
        BadInput: A name could lead out of the folder.
        Denied: The account may not read it.
        WorldFailure: The service failed until the deadline, or a publication was never finished.
    """
    side, uri = _side(uri)
    folder = _local(folder)
    side.stage(uri, folder, names)
    return folder


def publish(folder: str | Path, uri: str | Path, also: Mapping[str, bytes] | None = None) -> None:
    """Copy a local folder to a place where nothing is yet; it appears whole or not at all.

    In a folder this is a rename. In a bucket the objects go first, `saved_model.pb`, `record.json` and `manifest.json`
    after all others, and last a marker that says what belongs to the publication: `stage` refuses a prefix whose marker
    says that it was never finished. To publish the same again does nothing; after a crash it goes on where it was.

    Args:
        folder: A local folder, or one file, which becomes the one file or object `uri`.
        uri: Where to. Readers find it there or find nothing.
        also: Small files that are published with the folder but are not in it: name to content.

    Raises:
        Conflict: Something else is published there, or another publisher took the place.
        BadInput: The folder is empty or missing, or has a name that cannot be published.
        Denied: The account may not write there.
        WorldFailure: The service failed until the deadline, or the disk did.
    """
    side, uri = _side(uri)
    side.publish(*_publishable(folder, uri, also or {}))


def publish_numbered(folder: str | Path, uri: str | Path, also: Mapping[str, bytes] | None = None) -> int:
    """Publish a local folder as `uri/N` and return N: one more than the greatest number ever used there.

    Two publishers never get the same number, and a number whose folder was deleted is not used again. On disk a killed
    publisher takes no number; in a bucket it has taken one, which then stays unused.

    Raises:
        BadInput, Denied, WorldFailure: As `publish` does.
    """
    side, uri = _side(uri)
    if not Path(folder).is_dir():
        raise BadInput(f"{folder}: is not a folder; only a folder can be published under a number")
    return side.publish_numbered(*_publishable(folder, uri, also or {}))


def read_json(uri: str | Path) -> tuple[Any, int]:
    """Return the value in a JSON file or object, and its generation, for `write_json`.

    What is not there is `(None, 0)`.

    Raises:
        BadInput: It is not JSON.
    """
    side, uri = _side(uri)
    data, generation = side.read_bytes(uri)
    if data is None:
        return None, 0
    try:
        return json.loads(data), generation
    except ValueError as error:  # of JSON and of UTF-8
        raise BadInput(f"{uri}: is not JSON: {error}") from error


def write_json(uri: str | Path, value: Any, if_generation: int | None = None) -> int:
    """Write a value as JSON at once and whole; return the new generation.

    Args:
        uri: A file or object.
        value: What `json` can write, without infinities and NaN.
        if_generation: Write only if the present generation is this; 0 means that there must be nothing. None writes
            over whatever is there.

    Raises:
        Conflict: Another writer was first; nothing was written.
        ValueError: The value holds an infinity or NaN.
    """
    side, uri = _side(uri)
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return side.write_bytes(uri, text.encode(), if_generation)


def delete_prefix(uri: str | Path) -> None:
    """Delete a file, an object, or all that is under `uri`; what is not there is no error.

    In a folder it is gone at once; in a bucket its marker first says that it is incomplete, so that no reader takes a
    part for the whole.

    Raises:
        BadInput: `uri` is a whole bucket or the root folder.
    """
    side, uri = _side(uri)
    whole = not names.split_uri(uri)[1] if is_remote(uri) else Path(uri).resolve() == Path(Path(uri).resolve().anchor)
    if whole:
        raise BadInput(f"{uri}: refused: this is the whole of a bucket or a disk")
    side.delete_prefix(uri)


def _local(folder: str | Path) -> Path:
    if is_remote(folder):
        raise BadInput(f"{folder}: is not a local folder")
    return Path(folder)


def _publishable(folder: str | Path, uri: str, also: Mapping[str, bytes]) -> tuple[Path, str, Mapping[str, bytes]]:
    source = _local(folder)
    if source.is_file():
        if also:
            raise BadInput(f"{source}: is one file; nothing can be published with it")
        return source, uri, also
    listed = disk.list_names(str(source))
    if not listed:
        raise BadInput(f"{source}: {'is empty' if source.is_dir() else 'no such folder'}; there is nothing to publish")
    if both := sorted(set(listed) & set(also)):
        raise BadInput(f"{source / both[0]}: refused: a file of this name is added when the folder is published")
    names.checked_names([*listed, *also])
    return source, uri, also
