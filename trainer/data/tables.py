"""Examples out of tables: CSV, TSV, JSON lines and Parquet.

What a column holds is told from the first rows, or said by `data.kinds`: where 19 of 20 values are numbers it is a column of
numbers, words that seldom repeat and stand in sentences are texts, everything else is a category. A value that does not fit
its column makes its row a bad one.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config import DataConfig, suggestion
from trainer.data.files import SourceFile, content_identity, describe_files, find_files
from trainer.data.manifest import Feature, Kind
from trainer.data.pictures import decode_columns, first_size
from trainer.data.rows import Row, column_names, num_groups, pieces, read_rows
from trainer.data.source import BadRecord, Chunk, Part, plain_names
from trainer.data.window import Days
from trainer.errors import BadInput
from trainer.progress import say

_CHUNK = 512
_PIECE_BYTES = 32 * 1024**2
_MOST_PIECES = 64  # of a file, because every shard looks into every part
_IMAGE_CHUNK = 64  # files as they are, which may be large
_SAMPLE_ROWS = 10_000
_MOST_CLASS_NUMBERS = 20  # a label of whole numbers with at most so many values is taken for classes
_FEWEST_WORDS = 3
_NEARLY_ALL = 0.95


class TableSource:
    """The rows of table files that all have the same columns.

    Args:
        config: The data section.
        local: Where the files of a bucket were staged.

    Raises:
        BadInput: There is no file, or a column does not exist or cannot be used.
    """

    class_names = None

    def __init__(self, config: DataConfig, local: Path | None) -> None:
        self._config, self._form = config, config.source
        self._files, self._days = find_files(config, local), Days(config)
        self._missing = frozenset(config.missing_values if config.source in ("csv", "tsv") else ())
        sampled, known = self._first_columns()
        self._choose(known)
        sample = self._sample(sampled, known)
        self._kinds = {key: self._kind(key, sample[key]) for key in self._inputs.values()}
        self.features = {
            name: Feature(kind=self._kinds[key], shape=self._shape(sampled, key, sample[key]))
            for name, key in self._inputs.items()
        }
        self.is_classification = self._decide(sample[self._label])
        self.parts = list(self._cut())

    def identity(self) -> dict[str, Any]:
        """Name and digest of every file, and the days of the rows."""
        return {**self.description(), "files": content_identity(self._files), **self._days.identity()}

    def description(self) -> dict[str, str | int | None]:
        """Kind and names, for the manifest."""
        return describe_files(self._config, self._files)

    def read(self, part: Part) -> Iterator[Chunk]:
        """The rows of a piece of a file, as values."""
        place, some = part.place
        file = self._files[place]
        rows = read_rows(file.path, self._form, self._columns, some)
        has_images = "image" in self._kinds.values()
        while chunk := list(islice(rows, _IMAGE_CHUNK if has_images else _CHUNK)):
            yield self._chunk(file, chunk)

    def _chunk(self, file: SourceFile, rows: list[Row]) -> Chunk:
        kept: list[list[Any]] = []
        numbers = []
        bad = []
        day = self._columns.index(self._days.column) if self._days.column else None
        for row in rows:
            if row.fault is not None:
                bad.append(BadRecord(file.name, row.number, row.fault))
                continue
            try:
                if day is not None and not self._days.wants(row.values[day]):
                    continue
                kept.append(self._values(file, row.values))
            except ValueError as error:
                bad.append(BadRecord(file.name, row.number, str(error)))
                continue
            numbers.append(row.number)
        columns = list(zip(*kept, strict=True)) if kept else [()] * len(self._columns)
        by_key: dict[str, Sequence[Any]] = dict(zip(self._columns, columns, strict=True))
        shapes = {key: self.features[name].shape for name, key in self._inputs.items() if self._kinds[key] == "image"}
        sizes: dict[str, list[str]] = {key: [] for key in shapes}
        if shapes and kept:
            files = {key: by_key[key] for key in shapes}
            pixels, sizes, faults = decode_columns(files, shapes, resize=self._config.image_size is not None)
            bad = sorted(
                [*bad, *(BadRecord(file.name, numbers[row], fault) for row, fault in faults.items())], key=_row
            )
            good = [row for row in range(len(kept)) if row not in faults]
            by_key = {key: [values[row] for row in good] for key, values in (by_key | pixels).items()}
            sizes = {key: [listed[row] for row in good] for key, listed in sizes.items()}
        return Chunk(
            {
                name: np.array(by_key[key], np.float32) if self._kinds[key] == "number" else by_key[key]
                for name, key in self._inputs.items()
            },
            by_key[self._label],
            by_key[self._config.weight_key] if self._config.weight_key else None,
            by_key[self._config.splits.by] if self._config.splits.by else None,
            {self._plain[key]: listed for key, listed in sizes.items()},
            bad,
        )

    def _values(self, file: SourceFile, raw: Sequence[Any]) -> list[Any]:
        found = []
        for key, value in zip(self._columns, raw, strict=True):
            if isinstance(value, str) and value in self._missing:
                value = None
            if key == self._label:
                found.append(self._label_value(value))
            elif key == self._config.weight_key:
                weight = _number(key, value)
                if not weight >= 0:
                    raise ValueError(f"the weight {key} is {'missing' if math.isnan(weight) else weight}")
                found.append(weight)
            elif key == self._config.splits.by and key not in self._kinds:
                if value is None:
                    raise ValueError(f"{key}, which decides the split, is missing")
                found.append(_text(key, value))
            elif key == self._days.column and key not in self._kinds:
                found.append(None)
            elif self._kinds[key] == "number":
                found.append(_number(key, value))
            elif self._kinds[key] == "image":
                found.append(_image_file(file, key, value))
            else:
                found.append(_text(key, value))
        return found

    def _label_value(self, value: Any) -> Any:
        found = _text(self._label, value) if self.is_classification else _number(self._label, value)
        if found == "" or found != found:
            raise ValueError(f"the label {self._label} is missing")
        return found

    def _first_columns(self) -> tuple[SourceFile, list[str]]:
        for file in self._files:
            if names := column_names(file.path, self._form):
                return file, names
        for file in self._files:
            for row in read_rows(file.path, self._form, []):
                if row.number:
                    rule = row.fault or "names no columns"
                    raise BadInput(f"{file.path}, row {row.number}: {rule}, and no row has columns; one object a line")
        raise BadInput(f"data.path = {json.dumps(self._config.path)}: every file is empty")

    def _choose(self, known: list[str]) -> None:
        config = self._config
        day = self._days.column
        others = [key for key in (config.label_key, config.weight_key, config.splits.by, day) if key is not None]
        inputs = config.input_keys if config.input_keys is not None else [key for key in known if key not in others]
        for setting, keys in (
            ("label_key", [config.label_key]),
            ("weight_key", [config.weight_key]),
            ("splits.by", [config.splits.by]),
            ("window.column", [day]),
            ("input_keys", inputs),
        ):
            for key in keys:
                if key is not None and key not in known:
                    hint = suggestion(key, known) or f" (columns: {', '.join(known[:30])})"
                    if len(known) == 1 and (found := re.search(r"[;,|\t]", known[0])):
                        wanted = {"csv": "commas", "tsv": "tabs"}.get(self._form, "other names")
                        hint = f": {found[0]!r} separates the names in {json.dumps(known[0])}, and {self._form} wants {wanted}"
                    raise BadInput(f"data.{setting} = {json.dumps(key)}: there is no such column{hint}")
        for key in config.kinds:
            if key not in inputs:
                raise BadInput(f"data.kinds.{key}: is no input (inputs: {', '.join(inputs)})")
        if not inputs:
            raise BadInput("data.input_keys: there is no column besides the label")
        self._columns = list(dict.fromkeys([*inputs, *others]))
        weights = [config.weight_key] if config.weight_key else []
        self._plain = plain_names(list(dict.fromkeys([*inputs, config.label_key, *weights])), "data.input_keys")
        self._inputs = {self._plain[key]: key for key in inputs}
        self._label = config.label_key
        self.label_name = self._plain[config.label_key]
        self.weight_name = self._plain[config.weight_key] if config.weight_key else None

    def _sample(self, file: SourceFile, known: list[str]) -> dict[str, list[Any]]:
        rows = islice(read_rows(file.path, self._form, self._columns), _SAMPLE_ROWS)
        good = [row.values for row in rows if row.values is not None]
        missing = self._missing
        columns = zip(*good, strict=True) if good else ([] for _ in self._columns)
        return {
            key: [value for value in values if value is not None and not (value.__class__ is str and value in missing)]
            if key not in self._config.kinds or self._config.kinds[key] != "image"
            else list(values)
            for key, values in zip(self._columns, columns, strict=True)
        }

    def _kind(self, key: str, sample: list[Any]) -> Kind:
        if wanted := self._config.kinds.get(key):
            return wanted
        plain = [value for value in sample if not isinstance(value, (bytes, dict, list))]
        if not _nearly_all(plain, sample):
            raise BadInput(
                f"data.input_keys = {json.dumps(key)}: holds lists, mappings or bytes; leave it out, or set"
                f" data.kinds.{key} to image if it holds image files"
            )
        sample = plain
        if not sample or any(isinstance(value, bool) for value in sample):
            return "category"
        if _nearly_all([value for value in sample if _is_number(value)], sample):
            return "number"
        words = sum(len(str(value).split()) for value in sample) / len(sample)
        seldom = len(set(map(str, sample))) > len(sample) / 2
        return "text" if seldom and words >= _FEWEST_WORDS else "category"

    def _shape(self, file: SourceFile, key: str, sample: list[Any]) -> tuple[int, ...]:
        if self._kinds[key] != "image":
            return ()
        channels = self._config.image_channels or 3
        if self._config.image_size:
            return (*self._config.image_size, channels)
        size = first_size(_image_files(file, key, sample[:100]))
        if size is None:
            raise BadInput(f"data.kinds.{key} = image: none of the first rows holds an image that can be decoded")
        return (*size, channels)

    def _decide(self, sample: list[Any]) -> bool:
        """Whether the label is a class: said by `data.task`, or told from its values."""
        task = self._config.task
        numbers = [float(value) for value in sample if _is_number(value) and not isinstance(value, bool)]
        if task is not None:
            return task == "classification"
        if not numbers or not _nearly_all(numbers, sample):
            return True
        whole = all(value.is_integer() for value in numbers)
        is_class = whole and len(set(numbers)) <= _MOST_CLASS_NUMBERS
        if whole:
            say(
                f"the label {self._label} holds whole numbers, {len(set(numbers))} different ones in the first rows: taken"
                f" for {'classes' if is_class else 'a number'} (data.task decides otherwise)"
            )
        return is_class

    def _cut(self) -> Iterator[Part]:
        for place, file in enumerate(self._files):
            size = file.path.stat().st_size
            if self._form != "parquet":
                for piece in pieces(file.path, self._form, max(_PIECE_BYTES, size // _MOST_PIECES)):
                    yield Part(file.split, [place, piece], None, piece.end - piece.start)
                continue
            groups = num_groups(file.path)
            if not groups:
                yield Part(file.split, [place, None], 0, size)
            for group, num_rows in enumerate(groups):
                wanted = None if self._days.column else num_rows  # of some rows the day is known once they are read
                yield Part(file.split, [place, group], wanted, size // len(groups))


def _image_files(file: SourceFile, key: str, values: Sequence[Any]) -> Iterator[bytes]:
    for value in values:
        try:
            found = _image_file(file, key, value)
        except ValueError:
            continue
        yield found


def _image_file(file: SourceFile, key: str, value: Any) -> bytes:
    """The image file that a value is or names."""
    if isinstance(value, dict):  # as datasets of pictures in Parquet have it
        value = value.get("bytes")
    if isinstance(value, str):
        folder = file.path.parent
        picture = folder / value
        if not picture.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{key} = {json.dumps(value)} leads out of the table's folder")
        try:
            value = picture.read_bytes()
        except (OSError, ValueError):
            raise ValueError(f"{key} = {json.dumps(value)} cannot be read") from None
    if not isinstance(value, bytes):
        raise ValueError(f"the image {key} is missing")
    return value


def _row(record: BadRecord) -> int:
    return record.row


def _nearly_all(some: list[Any], of: list[Any]) -> bool:
    return len(some) >= _NEARLY_ALL * len(of)


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(_number("", value))
    except ValueError:
        return False


def _number(key: str, value: Any) -> float:
    """A finite number, or NaN where it is missing."""
    if value is None:
        return math.nan
    if isinstance(value, (bytes, dict, list)) or (isinstance(value, str) and "_" in value):
        raise ValueError(f"{key} = {_short(value)} is not a number")
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{key} = {_short(value)} is not a number") from None
    if math.isnan(found) and not isinstance(value, str):
        return math.nan  # Parquet's own way to say that it is missing
    if not math.isfinite(found):
        raise ValueError(f"{key} = {_short(value)} is not a finite number")
    if abs(found) > 3.4e38:
        raise ValueError(f"{key} = {_short(value)} is too large for float32")
    return found


def _text(key: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return "" if math.isnan(value) else str(int(value)) if value.is_integer() else repr(value)
    if isinstance(value, (bytes, dict, list)):
        raise ValueError(f"{key} = {_short(value)} is not a single value")
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{key} is not valid Unicode") from None
    return text


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
