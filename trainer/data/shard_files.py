"""Where the shards of a prepared dataset are: in its folder, or still in a bucket; and how they come from there.

bring(uri, folder, manifest, names)                # bucket → folder, each file once a machine
leave_in_bucket(folder, uri)                       # from now on the bucket's objects are the shards
files = shard_files(folder, manifest, "train")     # what TensorFlow reads, checked
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer import storage
from trainer.data.manifest import Manifest, Shard, verify, verify_shards
from trainer.errors import BadInput, WorldFailure
from trainer.progress import say

CACHE_DIR = "TRIREME_CACHE_DIR"
"""Environment variable: folder of what was brought from buckets. Not set: `trireme` in the user's folder of caches."""

_PLACE_FILE = "shards.json"
_THREADS = 8
_KEPT_SECS = 30 * 24 * 3600


def shard_files(folder: Path, manifest: Manifest, split: str, num_examples: int | None = None) -> list[str]:
    """The files of a split as TensorFlow opens them: paths, or `gs://` URIs where the shards were left in a bucket.

    Files here are compared with their digests. Of objects in a bucket the sizes are compared; TensorFlow checks each
    record as it reads it.

    Args:
        folder: The prepared dataset.
        manifest: Its manifest.
        split: Which split.
        num_examples: Only the first shards, as many as hold so many examples. None: all.

    Raises:
        WorldFailure: A shard is missing or damaged, or TensorFlow cannot read the bucket.
    """
    shards = _first(manifest.splits[split].shards, num_examples)
    uri = _place(folder)
    if uri is None:
        verify_shards(folder, shards)
        return [str(folder / shard.name) for shard in shards]
    verify(folder, manifest, [])
    _look(uri, shards)
    return [storage.join(uri, shard.name) for shard in shards]


def shard_paths(folder: Path, manifest: Manifest, split: str) -> list[str]:
    """What `shard_files` gives, without a look at them."""
    where = _place(folder) or str(folder)
    return [f"{where}/{shard.name}" for shard in manifest.splits[split].shards]


def leave_in_bucket(folder: Path, uri: str) -> None:
    """Notes in a dataset's folder that its shards are not there but under a prefix.

    Raises:
        BadInput: The place is no bucket.
        WorldFailure: Storage is an emulator.
    """
    if not storage.is_remote(uri):
        raise BadInput(
            f"train.read_shards = streamed: the prepared data is in {uri}, which is no bucket; give a pipeline root that"
            " begins with gs:// (cluster.pipeline_root, --root)"
        )
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        raise WorldFailure(
            "train.read_shards = streamed: TensorFlow reads Google Cloud Storage itself and knows nothing of"
            " STORAGE_EMULATOR_HOST; set train.read_shards to staged"
        )
    (folder / _PLACE_FILE).write_text(json.dumps({"uri": uri}) + "\n", encoding="utf-8")


def without_shards(source: Path, folder: Path, manifest: Manifest) -> None:
    """Copies a dataset's folder but for its shards."""
    shards = {shard.name for split in manifest.splits.values() for shard in split.shards}
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.name not in shards and file.name != _PLACE_FILE:
            shutil.copy2(file, folder / file.name)


def bring(uri: str, folder: Path, manifest: Manifest, names: Sequence[str]) -> None:
    """Brings files of a dataset from a bucket into a folder, through a cache that knows it by its digest.

    What was brought once, into whatever folder and from whatever bucket, is not brought again; what a killed process had
    brought is not either.

    Args:
        uri: The dataset's prefix.
        folder: Where the files go, as links where the file system allows it; it is made if it is not there.
        manifest: The dataset's manifest.
        names: The files: shards, and others.

    Raises:
        NotFound, Denied, WorldFailure: As `storage.stage` says.
    """
    names = [name for name in names if name != _PLACE_FILE]  # no stranger says where our shards are
    kept = cache_folder() / manifest.digest.removeprefix("sha256:")
    kept.mkdir(parents=True, exist_ok=True)
    shards = {shard.name: shard for split in manifest.splits.values() for shard in split.shards}
    with locked(kept.with_name(f".{kept.name}.lock"), "waiting for another process that brings the same data"):
        # Whatever is no shard has no digest in the manifest; storage compares it with the bucket.
        missing = [name for name in names if name not in shards or not _is_whole(kept / name, shards[name])]
        if missing:
            storage.stage(uri, kept, missing)
    os.utime(kept)
    _forget_unused(kept.parent)
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        link_file(kept / name, folder / name)
    brought = [shards[name].num_bytes for name in missing if name in shards]
    say(
        f"staged {len(brought)} shards, {sum(brought) / 1e6:,.1f} MB;"
        f" {sum(name in shards for name in names) - len(brought)} were here already"
    )


def _forget_unused(cache: Path) -> None:
    """Removes datasets that nothing asked for in `_KEPT_SECS`; links to their files elsewhere stay good."""
    for kept in cache.iterdir():
        lock = kept.with_name(f".{kept.name}.lock")
        if kept.name.startswith(".") or time.time() - kept.stat().st_mtime < _KEPT_SECS:
            continue
        with lock.open("a") as held, suppress(BlockingIOError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(kept, ignore_errors=True)


def cache_folder() -> Path:
    """Folder of what was brought from buckets; it may be removed at any time when no training runs."""
    given = os.environ.get(CACHE_DIR)
    folder = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "trireme"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        if given:
            raise
    if not os.access(folder, os.W_OK):  # a container whose user has no home
        folder = Path(tempfile.gettempdir()) / f"trireme-cache-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder / "datasets"


def link_file(source: Path, target: Path) -> None:
    """`target` becomes `source` under another name, or a copy where the file system has no such links."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@contextmanager
def locked(file: Path, waiting: str) -> Iterator[None]:
    """One process at a time for the block; the lock ends with its process.

    Args:
        file: The lock.
        waiting: Said where another one has it.
    """
    with file.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(waiting)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _first(shards: Sequence[Shard], num_examples: int | None) -> list[Shard]:
    if num_examples is None:
        return list(shards)
    found: list[Shard] = []
    for shard in shards:
        if sum(one.num_examples for one in found) >= num_examples:
            break
        found.append(shard)
    return found


def _place(folder: Path) -> str | None:
    file = folder / _PLACE_FILE
    return json.loads(file.read_text(encoding="utf-8"))["uri"] if file.is_file() else None


def _look(uri: str, shards: Sequence[Shard]) -> None:
    """Asks TensorFlow's own reader for the size of each object, so that what it lacks is said before training."""
    import tensorflow as tf

    def size(shard: Shard) -> int:
        return tf.io.gfile.stat(storage.join(uri, shard.name)).length

    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            sizes = list(pool.map(size, shards))
    except tf.errors.OpError as error:
        raise WorldFailure(
            f"{uri}: TensorFlow cannot read it: {str(error.message).strip()}. The account needs roles/storage.objectViewer;"
            " with train.read_shards = staged the shards are brought here first"
        ) from error
    for shard, found in zip(shards, sizes, strict=True):
        if found != shard.num_bytes:
            raise WorldFailure(
                f"{uri}/{shard.name}: has {found} bytes instead of {shard.num_bytes}; prepare the data again"
            )


def _is_whole(file: Path, shard: Shard) -> bool:
    if not file.is_file() or file.stat().st_size != shard.num_bytes:
        return False
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == shard.sha256
