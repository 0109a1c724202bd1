"""Storage in plain folders: what the face in `trainer.storage` does when a URI is a path.

A folder appears whole because it is written aside, in the same parent, and renamed. A file changes under
compare-and-swap because its writers hold a lock and replace it by a rename, and because its generation is a digest of
its bytes: the swap succeeds if the file still says what the writer read; an edit by hand is a change like any other.
A killed writer leaves the old state and perhaps something unfinished aside, which writers sweep away after a day.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trainer.errors import BadInput, WorldFailure
from trainer.storage import names
from trainer.storage.errors import Conflict, Denied, NotFound
from trainer.storage.parallel import for_each

NUM_THREADS = 8
_BLOCK_BYTES = 1 << 20
_ABANDONED_AFTER_SECS = 24 * 3600
_COUNTER = names.OURS + "last-number"


def _explained(function):
    """Turn the system's complaints into messages that name the file."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except FileNotFoundError as error:
            raise NotFound(f"{error.filename}: is not there") from error
        except PermissionError as error:
            raise Denied(f"{error.filename}: user {os.getuid()} may not: {error.strerror}") from error
        except OSError as error:
            raise WorldFailure(f"{error.filename or args[0]}: {error.strerror}") from error

    return wrapper


@_explained
def exists(uri: str) -> bool:
    """Say whether there is a file or a folder."""
    return Path(uri).exists()


def check_whole(uri: str) -> None:
    """Say whether there is a folder."""
    if not Path(uri).is_dir():
        raise NotFound(f"{uri}: is not there")


@_explained
def list_names(uri: str) -> list[str]:
    """Return the names of all files, sorted."""
    root = Path(uri)
    if root.is_file():
        raise BadInput(f"{root}: is a file; names are listed of a folder")
    found = []
    for folder, subfolders, files in os.walk(root):
        for name in subfolders:
            if (link := Path(folder, name)).is_symlink() and not name.startswith(names.OURS):
                raise BadInput(f"{link}: is a symbolic link to a folder; put the folder itself there")
        found += [Path(folder, name).relative_to(root).as_posix() for name in files]
    return sorted(name for name in found if not names.is_ours(name))


@_explained
def versions(uri: str) -> dict[str, str]:
    """Return size and time of the last change of all files, by name."""
    if Path(uri).is_file():
        return {}
    found = {name: Path(uri, name).stat() for name in list_names(uri)}
    return {name: f"{stat.st_size}-{stat.st_mtime_ns}" for name, stat in found.items()}


@_explained
def list_folders(uri: str) -> list[str]:
    """Return the names of the folders directly in it, sorted."""
    root = Path(uri)
    if not root.is_dir():
        return []
    return sorted(path.name for path in root.iterdir() if path.is_dir() and not names.is_ours(path.name))


@_explained
def digest(uri: str) -> tuple[int, str]:
    """Return the bytes and the SHA-256 of one file."""
    with Path(uri).open("rb") as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


@_explained
def stage(uri: str, folder: Path, wanted: Sequence[str] | None) -> None:
    """Copy files into `folder`; a file of the same size and time is there already."""
    source = Path(uri)
    if not source.is_dir():
        raise NotFound(f"{source}: no such folder to stage from")
    chosen = names.checked_names(list_names(uri) if wanted is None else wanted)
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    if source.resolve() == folder.resolve():
        return

    def copy(name: str) -> None:
        target = names.place(folder, name)
        stat = (source / name).stat()
        if target.is_file() and not target.is_symlink():
            staged = target.stat()
            if (staged.st_size, staged.st_mtime_ns) == (stat.st_size, stat.st_mtime_ns):
                return
        part = names.aside(folder, "part")
        try:
            shutil.copyfile(source / name, part)
            if part.stat().st_size != stat.st_size:
                raise WorldFailure(f"{source / name}: changed while it was staged; stage it again when it is at rest")
            os.utime(part, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    for_each(copy, chosen, NUM_THREADS)


@_explained
def publish(source: Path, uri: str, also: Mapping[str, bytes]) -> None:
    """Copy aside, then rename."""
    target = Path(uri)
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep(target.parent)
    new = names.aside(target.parent, "new")
    try:
        _copy_to_rest(source, new, also)
        try:
            if new.is_dir():
                new.rename(target)  # refused by the system if there is a file, or a folder that is not empty
            else:
                os.link(new, target)  # a rename would replace what is there
        except OSError as error:
            if not target.exists():
                raise
            if not _same(new, target):
                raise Conflict(
                    f"{target}: is there already and holds something else; publish under a new name"
                ) from error
        _sync(target.parent)
    finally:
        _remove(new)


@_explained
def publish_numbered(source: Path, uri: str, also: Mapping[str, bytes]) -> int:
    """Copy aside, then take the next number and rename under one lock."""
    root = Path(uri)
    root.mkdir(parents=True, exist_ok=True)
    sweep(root)
    new = names.aside(root, "new")
    counter = root / _COUNTER
    try:
        _copy_to_rest(source, new, also)
        with _locked(counter):
            used = [int(name) for name in list_folders(uri) if is_number(name)]
            if counter.exists():  # remembers numbers whose folders are gone
                used.append(int(counter.read_text()))
            number = max(used, default=0) + 1
            # First the rename, then the counter: killed in between, the folder itself tells that the number is taken.
            new.rename(root / str(number))
            _sync(root)
            _replace(counter, str(number).encode())
        return number
    finally:
        _remove(new)


@_explained
def read_bytes(uri: str) -> tuple[bytes | None, int]:
    """Return the content and its generation, `(None, 0)` if there is no file."""
    try:
        data = Path(uri).read_bytes()
    except FileNotFoundError:
        return None, 0
    return data, _generation(data)


@_explained
def write_bytes(uri: str, data: bytes, if_generation: int | None) -> int:
    """Replace the content under the lock, if it is the expected one."""
    path = Path(uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        found = read_bytes(uri)[1]
        if if_generation is not None and found != if_generation:
            raise Conflict(f"{path}: changed meanwhile (generation {found}, expected {if_generation})")
        _replace(path, data)
    return _generation(data)


@_explained
def delete_prefix(uri: str) -> None:
    """Rename out of sight, then delete."""
    target = Path(uri)
    if target.is_symlink() or not target.exists():
        target.unlink(missing_ok=True)
        return
    old = names.aside(target.parent, "old")
    with contextlib.suppress(FileNotFoundError):  # somebody else was quicker
        target.rename(old)  # gone at once for every reader
        _remove(old)


def is_number(name: str) -> bool:
    """Say whether a folder's name is a version's number, as TF Serving writes them."""
    return name.isascii() and name.isdecimal() and not name.startswith("0")


def sweep(parent: Path, now: float | None = None) -> None:
    """Remove what killed writers left aside in `parent` more than a day ago. `now` is in seconds since 1970."""
    oldest = (time.time() if now is None else now) - _ABANDONED_AFTER_SECS
    for kind in ("part", "new", "old"):
        for path in parent.glob(f"{names.OURS}{'?' * 16}.{kind}"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < oldest:
                    _remove(path)


def _generation(data: bytes) -> int:
    """A version of the content: the same bytes are the same generation. Never 0, which means that there is no file."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8]) | 1


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of `path`. The lock file stays: to remove it would let two writers lock two different files."""
    lock = path.with_name(f"{names.OURS}{path.name.removeprefix(names.OURS)}.lock")
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the kernel drops it if we die
        yield


def _replace(path: Path, data: bytes) -> None:
    """Replace a file whose lock we hold; because we hold it, one fixed name aside is enough and nothing piles up."""
    new = path.with_name(f"{names.OURS}{path.name.removeprefix(names.OURS)}.next")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    _sync(path.parent)


def _copy_to_rest(source: Path, new: Path, also: Mapping[str, bytes]) -> None:
    """Write `source` and the extra files to `new` so that they outlive a power cut."""
    if source.is_file():
        shutil.copyfile(source, new)
        _sync(new)
        return

    new.mkdir()

    def write(name: str) -> None:
        target = names.place(new, name)
        if name in also:
            target.write_bytes(also[name])
        else:
            shutil.copyfile(source / name, target)
        _sync(target)

    for_each(write, [*list_names(str(source)), *also], NUM_THREADS)
    for folder, _, _ in os.walk(new):
        _sync(Path(folder))


def _same(one: Path, other: Path) -> bool:
    """Say whether two files, or two folders, hold the same."""
    if not (one.is_dir() and other.is_dir()):
        return one.is_file() and other.is_file() and digest(str(one)) == digest(str(other))
    listed = list_names(str(one))
    return listed == list_names(str(other)) and all(
        digest(str(one / name)) == digest(str(other / name)) for name in listed
    )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
