"""What every source of examples gives, wherever they come from: parts that can be read apart, in chunks of columns.

for part in source.parts:
    for chunk in source.read(part):
        chunk.columns["image"], chunk.labels
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from trainer.data.manifest import Feature
from trainer.errors import BadInput


class Part(NamedTuple):
    """A piece of the source that one process reads from beginning to end."""

    split: str | None
    """The split it belongs to. None: its examples are told apart one by one."""
    place: list[Any]
    """Where it is, as plain data: a range of a split, a file, a row group."""
    num_examples: int | None
    """Examples in it, where that is known before it is read."""
    num_bytes: int
    """About how much there is to read."""


class BadRecord(NamedTuple):
    """A record that cannot be used."""

    file: str
    """Where it stands."""
    row: int
    """Row or record there, from 1; line of a text file. 0: the file as a whole."""
    reason: str
    """What is wrong with it."""

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}: {self.reason}" if self.row else f"{self.file}: {self.reason}"


@dataclass
class Chunk:
    """Some consecutive examples of a part, column by column."""

    columns: dict[str, Sequence[Any]]
    """By feature: uint8 arrays, float32 arrays or numbers, text."""
    labels: Sequence[Any]
    """Class names (text) or numbers (float)."""
    weights: Sequence[float] | None = None
    """What each example's loss is multiplied by."""
    keys: Sequence[str] | None = None
    """What decides the split of each example, where a column does."""
    image_sizes: dict[str, list[str]] = field(default_factory=dict)
    """`height×width` of each image before it was resized."""
    bad: list[BadRecord] = field(default_factory=list)
    """Records that stood among them and cannot be used."""


class Source(Protocol):
    """Where examples come from. Making it looks at the source and refuses what cannot work.

    Attributes:
        features: The inputs by name.
        label_name: Name of the label.
        weight_name: Name of the weight; None where there is none.
        class_names: The classes, where the source knows them before it is read; None where they are found by reading, or
            the label is a number.
        is_classification: Whether labels are class names (text) or numbers.
        parts: Its pieces, in order.
    """

    features: dict[str, Feature]
    label_name: str
    weight_name: str | None
    class_names: list[str] | None
    is_classification: bool
    parts: list[Part]

    def identity(self) -> dict[str, Any]:
        """What changes when the content does, as plain data that is the same on every machine."""

    def description(self) -> dict[str, str | int | None]:
        """Kind, name and version, for the manifest."""

    def read(self, part: Part) -> Iterator[Chunk]:
        """The part's examples, in an order that is always the same."""


def is_text(name: str) -> bool:
    """Whether a name that came from bytes or JSON can be written as UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def plain_names(names: Sequence[str], setting: str) -> dict[str, str]:
    """Feature name by name in the source: letters, digits and underscores, because a signature carries it.

    Raises:
        BadInput: Two names become the same.
    """
    found: dict[str, str] = {}
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")
        if not plain:  # of other alphabets only
            plain = f"x_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        elif not plain[0].isalpha():
            plain = f"x_{plain}"
        for other, taken in found.items():
            if taken == plain:
                raise BadInput(f"{setting}: {name!r} and {other!r} would both be called {plain}; rename one")
        found[name] = plain
    return found
