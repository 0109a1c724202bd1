"""Has the source changed? A digest of names, sizes and versions of its files, without reading them.

    fingerprint("gs://bucket/flowers/*.csv")      # "sha256:…"

It is a parameter of the preparation, because Kubeflow's cache knows the address of the data and not its content. In a bucket
an object's checksum counts; on disk the time of its last change does, so that a copy may be prepared once more.
"""

import hashlib
import json
import re
from pathlib import Path

from trainer import storage
from trainer.config import DataConfig, DataWindow
from trainer.data.window import is_wanted

_WILDCARD = re.compile(r"[*?\[]|\{date\}")


def source_of(config: DataConfig) -> str | None:
    """Where files are whose content may change under the same address. None: the data section fixes the content.

    A builder of TensorFlow Datasets has a version, which fixes what it makes; a folder with prepared builders may be
    prepared anew.
    """
    if config.path is not None:
        return config.path
    if config.data_dir is not None:
        return f"{config.data_dir.rstrip('/')}/{config.name.partition(':')[0]}"
    return None


def fingerprint(source: str, window: DataWindow | None = None) -> str:
    """The digest of everything under a folder or prefix, of one file, or of the files of a pattern; also of nothing.

    With a window, the pattern has a `{date}`, and the files of its days count.
    """
    return digest_of(wanted_files(source, window))


def digest_of(files: dict[str, str]) -> str:
    """The digest of what `wanted_files` found."""
    return f"sha256:{hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()}"


def wanted_files(source: str, window: DataWindow | None = None) -> dict[str, str]:
    """The files of a source by name, each with a text that changes when its content does."""
    if not storage.is_remote(source):
        source = str(Path(source).expanduser())
        if Path(source).is_file():
            stat = Path(source).stat()
            return {Path(source).name: f"{stat.st_size}-{stat.st_mtime_ns}"}
    folder, pattern = _split(source)
    found = {
        name: version
        for name, version in storage.versions(folder).items()
        if pattern is None or is_wanted(name, pattern, window)
    }
    if not found and pattern is None and storage.is_remote(source):  # one object of a bucket
        folder, _, name = source.rstrip("/").rpartition("/")
        found = {key: version for key, version in storage.versions(folder).items() if key == name}
    return found


def is_seen(source: str) -> bool:
    """Whether this machine sees the folder of a source; of a bucket that is asked for when it is read."""
    return storage.is_remote(source) or Path(_split(source)[0]).expanduser().exists()


def _split(source: str) -> tuple[str, str | None]:
    """The folder before the first wildcard, and the pattern inside it."""
    match = _WILDCARD.search(source)
    if match is None:
        return source.rstrip("/") or "/", None
    folder, _, pattern = source[: match.start()].rpartition("/")
    return folder or ".", pattern + source[match.start() :]
