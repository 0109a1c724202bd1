"""Has the source changed? A digest of names, sizes and versions of its files, without reading them.

    fingerprint("gs://bucket/flowers/*.csv")      # "sha256:…"

It is a parameter of the preparation, because Kubeflow's cache knows the address of the data and not its content. In a bucket
an object's checksum counts; on disk the time of its last change does, so that a copy may be prepared once more.
"""

import fnmatch
import hashlib
import json
import re

from trainer import storage

_WILDCARD = re.compile(r"[*?\[]")


def fingerprint(source: str) -> str:
    """The digest of everything under a folder or prefix, of one file, or of the files of a pattern; also of nothing."""
    folder, pattern = _split(source)
    found = {
        name: version
        for name, version in storage.versions(folder).items()
        if pattern is None or fnmatch.fnmatchcase(name, pattern)
    }
    if not found and pattern is None and "/" in source.rstrip("/"):  # one file
        folder, _, name = source.rstrip("/").rpartition("/")
        found = {key: version for key, version in storage.versions(folder or "/").items() if key == name}
    return f"sha256:{hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()}"


def _split(source: str) -> tuple[str, str | None]:
    """The folder before the first wildcard, and the pattern inside it."""
    match = _WILDCARD.search(source)
    if match is None:
        return source.rstrip("/") or "/", None
    folder, _, pattern = source[: match.start()].rpartition("/")
    return folder or ".", pattern + source[match.start() :]
