"""TFRecord files of `tf.Example`, with the features that `data.record_features` describes."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config import DataConfig, RecordFeature
from trainer.data.files import content_identity, describe_files, find_files
from trainer.data.frames import DamagedFile, read_frames
from trainer.data.manifest import Feature, Kind
from trainer.data.pictures import decode_columns
from trainer.data.records import ExampleReader
from trainer.data.source import BadRecord, Chunk, Part, plain_names
from trainer.data.window import Days
from trainer.errors import BadInput

_CHUNK = 256
_DTYPES = {"bytes": np.uint8, "float32": "<f4", "int64": np.int64}


class TfrecordSource:
    """Files of `tf.Example`, one part a file.

    Args:
        config: The data section.
        local: Where the files of a bucket were staged.

    Raises:
        BadInput: There are no files, or a feature cannot be used as it is described.
    """

    class_names = None

    def __init__(self, config: DataConfig, local: Path | None) -> None:
        self._config, self._spec = config, config.record_features
        self._files, self._days = find_files(config, local), Days(config)
        others = {config.label_key, config.weight_key, config.splits.by, self._days.column}
        inputs = config.input_keys or [name for name in self._spec if name not in others]
        if not inputs:
            raise BadInput("data.record_features: holds nothing but the label; an input is needed")
        weights = [config.weight_key] if config.weight_key else []
        plain = plain_names([*inputs, config.label_key, *weights], "data.record_features")
        self._inputs = {plain[key]: key for key in inputs}
        self._names = {key: plain[key] for key in inputs}
        self.label_name = plain[config.label_key]
        self.weight_name = plain[config.weight_key] if config.weight_key else None
        self.features = {name: self._feature(key) for name, key in self._inputs.items()}
        if config.weight_key and self._spec[config.weight_key].type == "bytes":
            raise BadInput(f"data.weight_key = {json.dumps(config.weight_key)}: is not a number")
        label = self._spec[config.label_key]
        if label.shape:
            raise BadInput(f"data.record_features.{config.label_key}.shape = {list(label.shape)}: a label is one value")
        self.is_classification = config.task == "classification" or (config.task is None and label.type != "float32")
        if not self.is_classification and label.type == "bytes":
            raise BadInput(f"data.task = {json.dumps(config.task)}: the label {config.label_key} is not a number")
        self._used = dict.fromkeys(
            [*inputs, *[key for key in (config.label_key, config.weight_key, config.splits.by) if key]]
        )
        self._dtypes = {key: np.dtype(_DTYPES[self._spec[key].type]) for key in self._used}
        self._is_plain = not (config.splits.by or self._days.column) and all(self._plain(key) for key in self._used)
        self.parts = [
            Part(file.split, [place], None, file.path.stat().st_size) for place, file in enumerate(self._files)
        ]

    def identity(self) -> dict[str, Any]:
        """Name and digest of every file, and the days of the records."""
        return {**self.description(), "files": content_identity(self._files), **self._days.identity()}

    def description(self) -> dict[str, str | int | None]:
        """Kind and names, for the manifest."""
        return describe_files(self._config, self._files)

    def read(self, part: Part) -> Iterator[Chunk]:
        """The records of a file, as values."""
        file = self._files[part.place[0]]
        self._reader = ExampleReader([*self._used, *([self._days.column] if self._days.column else [])])
        rows: list[tuple[int, bytes]] = []
        number = 0
        damage = None
        try:
            for number, record in enumerate(read_frames(file.path), 1):
                rows.append((number, record))
                if len(rows) == _CHUNK:
                    yield self._chunk(file.name, rows)
                    rows = []
        except DamagedFile as error:
            damage = BadRecord(file.name, number + 1, f"{error}; nothing after it can be read")
        chunk = self._chunk(file.name, rows)
        if damage:
            chunk.bad.append(damage)
        elif number == 0:
            chunk.bad.append(BadRecord(file.name, 0, "holds no records"))
        yield chunk

    def _chunk(self, name: str, rows: list[tuple[int, bytes]]) -> Chunk:
        """Turns records into columns, leaving out those that have a value that is bad."""
        if self._is_plain and (chunk := self._all_alike([record for _, record in rows])) is not None:
            return chunk
        kept: list[tuple[int, dict[str, Any]]] = []
        bad = []
        read, day = self._reader, self._days.column
        for number, record in rows:
            try:
                example = read(record)
                if day is not None:
                    raw = self._raw(day, example.get(day, []))
                    if not self._days.wants(raw if isinstance(raw, bytes) else raw.item()):
                        continue
                found = {key: self._value(key, self._raw(key, example.get(key, []))) for key in self._used}
            except ValueError as error:
                bad.append(BadRecord(name, number, str(error)))
                continue
            kept.append((number, found))
        numbers = [number for number, _ in kept]
        values = {key: [found[key] for _, found in kept] for key in self._used}
        shapes = {key: self.features[name].shape for key, name in self._names.items() if self._is_image(name)}
        sizes = {key: [f"{shape[0]}×{shape[1]}"] * len(kept) for key, shape in shapes.items()}
        encoded = {key: values[key] for key in shapes if self._spec[key].encoded}
        if encoded and kept:
            pixels, found_sizes, faults = decode_columns(encoded, shapes, resize=True)
            bad += [BadRecord(name, numbers[row], fault) for row, fault in faults.items()]
            rows = [row for row in range(len(kept)) if row not in faults]
            values = {key: [listed[row] for row in rows] for key, listed in (values | pixels).items()}
            sizes = {key: [listed[row] for row in rows] for key, listed in (sizes | found_sizes).items()}
        config = self._config
        return Chunk(
            {name: _packed(values[key], self.features[name].kind) for name, key in self._inputs.items()},
            values[config.label_key],
            values[config.weight_key] if config.weight_key else None,
            [str(value) for value in values[config.splits.by]] if config.splits.by else None,
            {self._names[key]: listed for key, listed in sizes.items()},
            sorted(bad, key=lambda record: record.row),
        )

    def _plain(self, key: str) -> bool:
        """Whether a feature's values are as long in every record."""
        spec = self._spec[key]
        if key in (self._config.label_key, self._config.weight_key):
            return spec.type != "bytes"
        return spec.type != "bytes" or (_kind(key, spec, self._config) == "image" and not spec.encoded)

    def _all_alike(self, records: list[bytes]) -> Chunk | None:
        """Columns of records that look alike and hold nothing bad, all at once. None where one might."""
        config, count = self._config, len(records)
        found = self._reader.read_all(records) if records else None
        if found is None or {key: values.dtype for key, values in found.items()} != self._dtypes:
            return None
        columns: dict[str, Any] = {}
        for name, key in self._inputs.items():
            feature, values = self.features[name], found[key]
            if feature.kind not in ("image", "number") or values.shape[1] != math.prod(feature.shape):
                return None
            if feature.kind == "number":
                values = values.astype(np.float32)
                if np.isinf(values).any():
                    return None
            columns[name] = values.reshape(count, *feature.shape)
        labels, weights = found[config.label_key], found[config.weight_key] if config.weight_key else None
        for values in (labels, weights):
            if values is not None and (values.shape[1] != 1 or not np.isfinite(values).all()):
                return None
        if weights is not None and (weights < 0).any():
            return None
        spec = self._spec[config.label_key]
        known = {
            value: _label(config.label_key, np.array(value), spec, self.is_classification)
            for value in set(labels[:, 0].tolist())
        }
        sizes = {name: [f"{f.shape[0]}×{f.shape[1]}"] * count for name, f in self.features.items() if f.kind == "image"}
        return Chunk(
            columns,
            [known[value] for value in labels[:, 0].tolist()],
            None if weights is None else weights[:, 0].tolist(),
            image_sizes=sizes,
        )

    def _raw(self, key: str, listed: list[Any]) -> Any:
        """The value of a feature: bytes, or an array of its shape."""
        spec = self._spec[key]
        kind = {"bytes": bytes, "float32": float, "int64": int}[spec.type]
        wanted = 1 if spec.type == "bytes" else math.prod(spec.shape)
        if len(listed) != wanted or not isinstance(listed[0], kind):
            have = f"{len(listed)} of {type(listed[0]).__name__}" if listed else "none"
            raise ValueError(f"{key} should hold {wanted} of {spec.type}, and holds {have}")
        return listed[0] if spec.type == "bytes" else np.array(listed).reshape(spec.shape)

    def _is_image(self, name: str) -> bool:
        return self.features[name].kind == "image"

    def _value(self, key: str, raw: Any) -> Any:
        spec, config = self._spec[key], self._config
        if key == config.label_key:
            return _label(key, raw, spec, self.is_classification)
        if key == config.weight_key and not 0 <= raw.item() < math.inf:
            raise ValueError(f"the weight {key} is {raw.item()}")
        if key in (config.weight_key, config.splits.by):
            return _text(key, raw) if spec.type == "bytes" else raw.item()
        kind = _kind(key, spec, config)
        if kind == "image":
            return self._image(key, raw, spec)
        if kind == "number":
            if np.isinf(raw).any():
                raise ValueError(f"{key} is not finite")
            return raw
        return _text(key, raw) if spec.type == "bytes" else str(raw.item())

    def _image(self, key: str, raw: bytes, spec: RecordFeature) -> Any:
        """Pixels, or the file as it is: files are decoded many at a time."""
        if spec.encoded:
            return raw
        shape = self.features[self._names[key]].shape
        if len(raw) != math.prod(shape):
            raise ValueError(f"{key} has {len(raw)} bytes, and {list(shape)} needs {math.prod(shape)}")
        return np.frombuffer(raw, np.uint8).reshape(shape)

    def _feature(self, key: str) -> Feature:
        spec, config = self._spec[key], self._config
        kind = _kind(key, spec, config)
        path = f"data.record_features.{key}"
        if kind == "image":
            if spec.type != "bytes":
                raise BadInput(f"{path}.type = {json.dumps(spec.type)}: an image is bytes")
            shape = spec.shape
            if spec.encoded and config.image_size:
                shape = (*config.image_size, config.image_channels or (shape[-1] if len(shape) == 3 else 3))
            if len(shape) != 3 or (shape[-1] not in (1, 3) and spec.encoded):
                raise BadInput(f"{path}.shape = {list(shape)}: an image needs height, width and channels")
            return Feature(kind="image", shape=shape)
        if kind == "number" and spec.type != "bytes":
            return Feature(kind="number", shape=spec.shape)
        if kind != "number" and not spec.shape:
            return Feature(kind=kind)
        raise BadInput(f"{path}: {spec.type} {list(spec.shape)} cannot be taken for a {kind}")


def _kind(key: str, spec: RecordFeature, config: DataConfig) -> Kind:
    return config.kinds.get(key, "category" if spec.type == "bytes" else "number")


def _label(key: str, raw: Any, spec: RecordFeature, is_class: bool) -> Any:
    if is_class and raw == b"":
        raise ValueError(f"the label {key} is missing")
    if is_class:
        return (
            _text(key, raw) if spec.type == "bytes" else str(raw.item()) if spec.type == "int64" else f"{raw.item():g}"
        )
    value = float(raw)
    if not np.isfinite(value):
        raise ValueError(f"the label {key} is not finite")
    return value


def _text(key: str, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{key} is not UTF-8") from None


def _packed(values: list[Any], kind: Kind) -> Any:
    return np.array(values, np.float32) if kind == "number" else values
