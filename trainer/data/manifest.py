"""`manifest.json`: what a prepared dataset says of itself, and the proof that it is whole.

    manifest = read_manifest(folder)          # BadInput if there is none
    verify(folder, manifest)                  # WorldFailure names the first shard that is missing, short or altered

The manifest is written last and the folder is renamed into place, so a folder that has one is whole.
"""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from trainer.config import Section, parse_json
from trainer.errors import BadInput, WorldFailure

FILE_NAME = "manifest.json"
STATISTICS_FILE = "statistics.json"
FORMAT_VERSION = 2

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
    """Examples of each class, in the order of the class names; empty where the label is a number."""
    shards: list[Shard]
    """The files, in reading order."""

    @property
    def num_bytes(self) -> int:
        """Size of all shards: a little more than what the examples take in memory."""
        return sum(shard.num_bytes for shard in self.shards)


Kind = Literal["image", "number", "category", "text"]

_DTYPES = {"image": "uint8", "number": "float32", "category": "string", "text": "string"}


class Feature(Section):
    """One input of the model. Vocabularies are no part of it: a model makes its own from the statistics."""

    kind: Kind
    """`image`: stored as raw bytes, the cheapest layout to read. `number`: NaN where it is missing. `category` and
    `text`: UTF-8, empty where it is missing; a category is looked up as a whole, a text is taken apart."""
    shape: tuple[int, ...] = ()
    """Shape of one example's value: height, width, channels of an image; empty for a single value."""

    @property
    def dtype(self) -> str:
        """`uint8`, `float32` or `string`, by kind."""
        return _DTYPES[self.kind]


class Label(Section):
    """What the model learns to tell."""

    name: str
    """Its name in the source and in the records."""
    class_names: list[str] | None = None
    """The classes, where it is one of several; a label is then an index into this list. None: it is a number."""

    @property
    def task(self) -> Literal["classification", "regression"]:
        """What kind of model the label asks for."""
        return "regression" if self.class_names is None else "classification"


FeatureName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")]


class Manifest(Section):
    """What a prepared dataset says of itself."""

    format_version: Literal[2] = FORMAT_VERSION
    """Changes when the files' layout does."""
    source: dict[str, str | int | None]
    """Kind, name, configuration and version of where the examples came from."""
    features: dict[FeatureName, Feature]
    """The inputs by name. Names are plain words, because the exported model's signature carries them."""
    label: Label
    """What is to be told."""
    weight: FeatureName | None = None
    """Name of the number in each record that multiplies its loss. None: every example weighs the same."""
    splits: dict[str, Split]
    """`train`, `test` and, where there is one, `validation`."""
    statistics_sha256: str
    """Digest of `statistics.json`, which describes every feature in every split."""
    num_skipped: int = 0
    """Bad records that were left out (data.on_bad_record)."""
    digest: str = ""
    """`sha256:` and the digest of everything above, shard digests included: the identity of the content."""

    @property
    def task(self) -> Literal["classification", "regression"]:
        """What kind of model the label asks for."""
        return self.label.task

    @property
    def class_names(self) -> list[str]:
        """The label's classes; empty where it is a number."""
        return self.label.class_names or []

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
    manifest = parse_json(Manifest, read_utf8(file), path=str(file))
    if manifest.digest != manifest.content_digest():
        raise BadInput(f"{file}: was altered (its digest is {manifest.content_digest()}, it says {manifest.digest})")
    return manifest


def read_utf8(file: Path) -> str:
    """A text file's content. Raises BadInput where there is none that can be read."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInput(f"{file}: was altered: it is not UTF-8") from None


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
    _verify_file(folder / STATISTICS_FILE, manifest.statistics_sha256)
    for name in manifest.splits if splits is None else splits:
        verify_shards(folder, manifest.splits[name].shards)


def verify_shards(folder: Path, shards: Sequence[Shard]) -> None:
    """Compares shards with their sizes and digests; raises as `verify` does."""
    for shard in shards:
        file = folder / shard.name
        if not file.is_file():
            raise WorldFailure(f"{file}: is missing; prepare the data again")
        size = file.stat().st_size
        if size != shard.num_bytes:
            raise WorldFailure(f"{file}: has {size} bytes instead of {shard.num_bytes}; prepare the data again")
        _verify_file(file, shard.sha256)


def _verify_file(file: Path, sha256: str) -> None:
    if not file.is_file():
        raise WorldFailure(f"{file}: is missing; prepare the data again")
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256:
        raise WorldFailure(f"{file}: was altered (sha256 {found} instead of {sha256}); prepare the data again")
