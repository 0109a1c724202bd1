"""`manifest.json`: what a prepared dataset says of itself, and the proof that it is whole.

    manifest = read_manifest(folder)          # BadInput if there is none
    verify(folder, manifest)                  # WorldFailure names the first shard that is missing, short or altered

The manifest is written last and the folder is renamed into place, so a folder that has one is whole.
"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from trainer.config import Section, parse_json
from trainer.errors import BadInput, WorldFailure

FILE_NAME = "manifest.json"
FORMAT_VERSION = 1

_SHARD_NAME = re.compile(r"[A-Za-z0-9_]+-\d{5}-of-\d{5}\.tfrecord")


class Shard(Section):
    """One TFRecord file."""

    name: Annotated[str, Field(pattern=rf"^{_SHARD_NAME.pattern}$")]
    """File name inside the dataset's folder; never a path."""
    num_examples: int
    """Records in the file."""
    num_bytes: int
    """Size of the file."""
    sha256: str
    """Digest of the file, in hexadecimal."""


class Split(Section):
    """One split and its shards."""

    num_examples: int
    """Examples over all shards."""
    label_counts: list[int]
    """Examples of each class, in the order of the class names."""
    shards: list[Shard]
    """The files, in reading order."""


class ImageFeature(Section):
    """Images of one size, stored as raw bytes: the cheapest layout to read."""

    shape: tuple[int, int, int]
    """Height, width, channels."""
    dtype: Literal["uint8"] = "uint8"
    """Type of one value."""


class Manifest(Section):
    """What a prepared dataset says of itself."""

    format_version: Literal[1] = FORMAT_VERSION
    """Changes when the files' layout does."""
    source: dict[str, str | int | None]
    """Kind, name, configuration and version of where the examples came from."""
    image: ImageFeature
    """The input."""
    class_names: list[str]
    """The label's classes; a label is an index into this list."""
    splits: dict[str, Split]
    """`train`, `test` and, where there is one, `validation`."""
    digest: str = ""
    """`sha256:` and the digest of everything above, shard digests included: the identity of the content."""

    def content_digest(self) -> str:
        """The digest that `digest` must hold."""
        body = self.model_dump(mode="json", exclude={"digest"})
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared dataset.

    Raises:
        BadInput: The folder holds none, or it does not agree with its own digest.
    """
    file = folder / FILE_NAME
    if not file.is_file():
        raise BadInput(f"{folder}: holds no {FILE_NAME}, so it is not a prepared dataset")
    manifest = parse_json(Manifest, file.read_text(encoding="utf-8"), path=str(file))
    if manifest.digest != manifest.content_digest():
        raise BadInput(f"{file}: was altered (its digest is {manifest.content_digest()}, it says {manifest.digest})")
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Writes the manifest with its digest filled in, through to the disk, and returns it."""
    manifest = manifest.model_copy(update={"digest": manifest.content_digest()})
    with (folder / FILE_NAME).open("w", encoding="utf-8") as file:
        file.write(json.dumps(manifest.model_dump(mode="json"), indent=1, sort_keys=True, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return manifest


def verify(folder: Path, manifest: Manifest, splits: list[str] | None = None) -> None:
    """Compares each shard of the named splits (None: all) with its size and digest.

    Raises:
        WorldFailure: Names the first shard that is missing, short or altered.
    """
    for name in manifest.splits if splits is None else splits:
        for shard in manifest.splits[name].shards:
            file = folder / shard.name
            if not file.is_file():
                raise WorldFailure(f"{file}: is missing; prepare the data again")
            size = file.stat().st_size
            if size != shard.num_bytes:
                raise WorldFailure(f"{file}: has {size} bytes instead of {shard.num_bytes}; prepare the data again")
            with file.open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
            if found != shard.sha256:
                raise WorldFailure(
                    f"{file}: was altered (sha256 {found} instead of {shard.sha256}); prepare the data again"
                )
