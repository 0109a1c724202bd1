"""Storage in buckets: what the face in `trainer.storage` does when a URI begins with `gs://`.

A bucket has no folders and no rename: readers see objects one by one as they come. So a publication is framed by a
marker object. It is written first, saying that the prefix is incomplete, and last, saying that it is complete and
listing every object with size and CRC32C. `stage` refuses the first and holds what it reads against the second, so that
a mixture of two publications, or half of one, can never be taken for the whole.
"""

import hashlib
import json
import random
import shutil
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.errors import BadInput, WorldFailure
from trainer.storage import disk, names, service
from trainer.storage.errors import Conflict, Denied, NotFound
from trainer.storage.parallel import for_each
from trainer.storage.service import NUM_THREADS, Entry

_COUNTER = names.OURS + "last-number"


def exists(uri: str) -> bool:
    """Say whether there is an object, or anything under the prefix; an unfinished publication is not there."""
    bucket, prefix = names.split_uri(uri)
    stated, _ = _read_marker(uri)
    if stated:
        return stated["complete"]
    if prefix and service.find(bucket, prefix):
        return True
    return bool(service.list_entries(bucket, _under(prefix), limit=1))


def check_whole(uri: str) -> None:
    """Hold the objects that are there against the marker."""
    stated, _ = _read_marker(uri)
    if stated is None:
        raise NotFound(f"{uri}: nothing was published there")
    if not stated["complete"]:
        raise WorldFailure(f"{uri}: its publication was never finished")
    there = {entry.name: _measured(entry) for entry in _list(uri)}
    for name, measured in stated["objects"].items():
        if there.get(name) != measured:
            found = "is missing" if name not in there else "is not what was published"
            raise WorldFailure(f"{uri}/{name}: {found}")


def list_names(uri: str) -> list[str]:
    """Return the names of all objects under the prefix, sorted."""
    return sorted(entry.name for entry in _list(uri))


def versions(uri: str) -> dict[str, str]:
    """Return size and checksum of all objects under the prefix, by name."""
    return {entry.name: f"{entry.size}-{entry.crc32c}" for entry in _list(uri)}


def list_folders(uri: str) -> list[str]:
    """Return what stands between the prefix and the next slash, sorted."""
    bucket, prefix = names.split_uri(uri)
    return [name for name in service.list_prefixes(bucket, _under(prefix)) if name and not names.is_ours(name)]


def digest(uri: str) -> tuple[int, str]:
    """Return the bytes and the SHA-256 of one object."""
    bucket, name = names.split_uri(uri)
    entry = service.find(bucket, name)
    if entry is None:
        raise NotFound(f"{uri}: is not there")
    sink = _Digest()
    service.download(bucket, entry, sink)
    return sink.size, sink.sha256.hexdigest()


def stage(uri: str, folder: Path, wanted: Sequence[str] | None) -> None:
    """Download objects into `folder`; a file of the same size and CRC32C is there already."""
    bucket, prefix = names.split_uri(uri)
    entries = _to_stage(uri, wanted)
    by_name = {entry.name: entry for entry in entries}
    chosen = names.checked_names(by_name)
    folder.mkdir(parents=True, exist_ok=True)
    disk.sweep(folder)

    def fetch(name: str) -> None:
        entry = by_name[name]
        target = names.place(folder, name)
        if target.is_file() and not target.is_symlink() and _measure(target) == _measured(entry):
            return
        part = names.aside(folder, "part")
        try:
            with part.open("xb", buffering=0) as file:
                service.download(bucket, entry._replace(name=_under(prefix) + name), _File(file))
            if entry.encoding == "gzip":
                _decompress(part)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    for_each(fetch, chosen, NUM_THREADS)


def publish(source: Path, uri: str, also: Mapping[str, bytes]) -> None:
    """Frame the upload between a marker that says incomplete and one that says complete."""
    bucket, prefix = names.split_uri(uri)
    if source.is_file():
        _publish_file(bucket, prefix, source)
        return
    contents: dict[str, Path | bytes] = {name: source / name for name in disk.list_names(str(source))} | dict(also)
    marker = _kept(uri, names.MARKER)

    stated, generation = _read_marker(uri)
    if stated and stated["complete"]:
        measured = dict(zip(contents, for_each(_measure, contents.values(), NUM_THREADS), strict=True))
        if stated["objects"] == measured:
            return
        raise Conflict(f"{uri}: is published already and holds something else; publish under a new name")
    there = {entry.name: entry for entry in _list(uri)}
    same = {name for name in set(there) & set(contents) if _measured(there[name]) == _measure(contents[name])}
    if not generation and same != set(there):
        raise Conflict(f"{uri}: holds objects that were not published with trireme; publish under a new name")

    # From here on the place is ours, until somebody else takes it over: then the last write below fails.
    generation = write_bytes(marker, _marker(False, {}), generation)

    def put(name: str) -> Entry:
        if name in same:
            return there[name]
        content, replaced = contents[name], there[name].generation if name in there else 0
        if isinstance(content, Path):
            return service.upload(bucket, _under(prefix) + name, content, replaced)
        generation = service.write(bucket, _under(prefix) + name, content, replaced)
        return Entry(name, len(content), service.crc32c(content), generation)

    for_each(lambda name: service.delete(bucket, _under(prefix) + name), set(there) - set(contents), NUM_THREADS)
    in_any_order, announcing = names.in_closing_order(contents)
    arrived = for_each(put, in_any_order, NUM_THREADS) + [put(name) for name in announcing]
    objects = dict(zip([*in_any_order, *announcing], map(_measured, arrived), strict=True))
    write_bytes(marker, _marker(True, objects), generation)


def publish_numbered(source: Path, uri: str, also: Mapping[str, bytes]) -> int:
    """Take the next number from a counter by compare-and-swap, then publish under it."""
    counter = _kept(uri, _COUNTER)
    while True:
        last, generation = read_bytes(counter)
        used = [int(name) for name in list_folders(uri) if disk.is_number(name)]
        number = max([*used, int(last or 0)], default=0) + 1
        try:
            write_bytes(counter, str(number).encode(), generation)
            break
        except Conflict:
            time.sleep(random.uniform(0, 0.1))  # noqa: S311 - spreads load, guards nothing
    publish(source, names.join(uri, str(number)), also)
    return number


def read_bytes(uri: str) -> tuple[bytes | None, int]:
    """Return the content and its generation, `(None, 0)` if there is no object."""
    return service.read(*_object(uri))


def write_bytes(uri: str, data: bytes, if_generation: int | None) -> int:
    """Write the object, if its generation is the expected one."""
    bucket, name = _object(uri)
    return service.write(bucket, name, data, if_generation)


def delete_prefix(uri: str) -> None:
    """Say in the marker that it is incomplete, delete what announces the rest, the rest, and the marker last."""
    bucket, prefix = names.split_uri(uri)
    stated, _ = _read_marker(uri)
    if stated and stated["complete"]:
        write_bytes(_kept(uri, names.MARKER), _marker(False, {}), None)
    there = [entry.name.removeprefix(_under(prefix)) for entry in service.list_entries(bucket, _under(prefix))]
    announcing = [name for name in reversed(names.ANNOUNCING) if name in there]
    ours = [name for name in there if names.is_ours(name)]
    for name in announcing:
        service.delete(bucket, _under(prefix) + name)
    for some in (set(there) - {*announcing, *ours}, ours):
        for_each(lambda name: service.delete(bucket, _under(prefix) + name), some, NUM_THREADS)
    service.delete(bucket, prefix)


class _File:
    """A file on disk as a place to download to."""

    def __init__(self, file):
        self._file = file

    def write(self, block: bytes) -> None:
        left = memoryview(block)
        while left:  # an unbuffered file may take less than it is given
            left = left[self._file.write(left) :]

    def restart(self) -> None:
        self._file.seek(0)
        self._file.truncate()


class _Digest:
    """A digest as a place to download to."""

    def __init__(self):
        self.restart()

    def write(self, block: bytes) -> None:
        self.size += len(block)
        self.sha256.update(block)

    def restart(self) -> None:
        self.size, self.sha256 = 0, hashlib.sha256()


def _under(prefix: str) -> str:
    return prefix + "/" if prefix else ""


def _kept(uri: str, name: str) -> str:
    """Return the URI of a bookkeeping object under `uri`; `join` refuses such names to everybody else."""
    return f"{names.join(uri)}/{name}"


def _object(uri: str) -> tuple[str, str]:
    bucket, name = names.split_uri(uri)
    if not name:
        raise BadInput(f"{uri}: names a bucket, not an object in it")
    return bucket, name


def _list(uri: str) -> list[Entry]:
    """List a prefix, names relative to it, without our bookkeeping and the empty objects that stand for folders."""
    bucket, prefix = names.split_uri(uri)
    found = [
        entry._replace(name=entry.name.removeprefix(_under(prefix)))
        for entry in service.list_entries(bucket, _under(prefix))
    ]
    return [entry for entry in found if entry.name and not entry.name.endswith("/") and not names.is_ours(entry.name)]


def _to_stage(uri: str, wanted: Sequence[str] | None) -> list[Entry]:
    """Return the entries to stage: from the marker if there is one, else as they are in the bucket now."""
    bucket, prefix = names.split_uri(uri)
    try:
        stated, _ = _read_marker(uri)
    except Denied:  # the service says so of a missing object too, to an account that may not list
        stated = None
    if stated:
        if not stated["complete"]:
            raise WorldFailure(
                f"{uri}: its publication was never finished; publish it again, or wait if it is under way"
            )
        objects = stated["objects"]
        if missing := sorted(set(wanted or ()) - set(objects)):
            names.checked_name(missing[0])
            raise NotFound(f"{uri}: was published without {missing[0]}")
        return [Entry(name, objects[name]["bytes"], objects[name]["crc32c"], None) for name in wanted or objects]
    if wanted is None:
        found = _list(uri)
        if not found:
            raise NotFound(f"{uri}: there is nothing to stage under this prefix")
        return found

    def look(name: str) -> Entry:
        entry = service.find(bucket, _under(prefix) + names.checked_name(name))
        if entry is None:
            raise NotFound(f"gs://{bucket}/{_under(prefix)}{name}: is not there")
        return entry._replace(name=name)

    return for_each(look, wanted, NUM_THREADS)


def _publish_file(bucket: str, name: str, source: Path) -> None:
    there = service.find(bucket, name)
    if there is None:
        service.upload(bucket, name, source, 0)
    elif _measured(there) != _measure(source):
        raise Conflict(f"gs://{bucket}/{name}: is there already and holds something else")


def _measure(content: Path | bytes) -> dict[str, Any]:
    size = content.stat().st_size if isinstance(content, Path) else len(content)
    return {"bytes": size, "crc32c": service.crc32c(content)}


def _measured(entry: Entry) -> dict[str, Any]:
    return {"bytes": entry.size, "crc32c": entry.crc32c}


def _marker(complete: bool, objects: dict[str, Any]) -> bytes:
    return json.dumps({"complete": complete, "objects": objects}, sort_keys=True).encode()


def _read_marker(uri: str) -> tuple[dict[str, Any] | None, int]:
    """Return what the marker states, None if there is none."""
    place = _kept(uri, names.MARKER)
    data, generation = read_bytes(place)
    if data is None:
        return None, 0
    try:
        stated = json.loads(data)
        for name, measured in stated["objects"].items():
            names.checked_name(name)
            if not (isinstance(measured["bytes"], int) and isinstance(measured["crc32c"], str)):
                raise TypeError(name)
        return {"complete": bool(stated["complete"]), "objects": stated["objects"]}, generation
    except BadInput:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{place}: is damaged: it must list the objects of the publication") from error


def _decompress(part: Path) -> None:
    """Replace a gzip file by what it holds: a person who uploaded it compressed means the file itself."""
    import gzip

    plain = names.aside(part.parent, "part")
    try:
        with gzip.open(part) as packed, plain.open("xb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
        plain.replace(part)
    except (OSError, EOFError, zlib.error) as error:
        raise WorldFailure(f"{part}: the service says that it is gzip, and it is not") from error
    finally:
        plain.unlink(missing_ok=True)
