"""One example ↔ the bytes of one record, a `tf.train.Example`.

    encode = Encoder(features)                     # needs no TensorFlow; bytes are the same in every process
    record = finish(encode(values), label_entry("species", 2))
    parse = parser(manifest)                       # inside the graph: records [batch] → (features, labels)

The label is put in last, because the classes of a table are known only when all of it has been read.
"""

import functools
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trainer.data.manifest import Feature, Manifest

_BYTES, _FLOATS, _WHOLE = 1, 2, 3  # fields of the lists in a feature


class Encoder:
    """Encodes the features of an example; the result is the inside of the record's only field.

    Args:
        features: The features by name.
        weight: Name of the number that weighs the example, where there is one.
    """

    def __init__(self, features: Mapping[str, Feature], weight: str | None = None) -> None:
        self._fields = []
        for name in sorted([*features, *([weight] if weight else [])]):
            feature = Feature(kind="number") if name == weight else features[name]
            prefix = None
            if feature.kind in ("image", "number"):  # always as long, so what stands before the values never changes
                width = 4 if feature.kind == "number" else 1
                prefix = _before(
                    name, _FLOATS if feature.kind == "number" else _BYTES, width * math.prod(feature.shape)
                )
            self._fields.append((name, feature.kind, prefix))
        self._fixed = all(prefix is not None for _, _, prefix in self._fields)

    def __call__(self, values: Mapping[str, Any]) -> bytes:
        """Values by name: uint8 arrays, float32 arrays or numbers, text."""
        parts = []
        for name, kind, prefix in self._fields:
            value = values[name]
            if kind == "image":
                parts += (prefix, value.tobytes())
            elif kind == "number":
                parts += (prefix, np.asarray(value, "<f4").tobytes())
            else:
                raw = value.encode()
                parts += (_before(name, _BYTES, len(raw)), raw)
        return b"".join(parts)

    def encode_all(self, columns: Mapping[str, Sequence[Any]]) -> Sequence[bytes | memoryview]:
        """Many examples, column by column: values by name [n, …]."""
        if not self._fixed:
            names = list(columns)
            return [self(dict(zip(names, row, strict=True))) for row in zip(*columns.values(), strict=True)]
        count = len(next(iter(columns.values())))
        if not count:
            return []
        # All records are as long, so each column is one copy.
        pieces = []
        for name, kind, prefix in self._fields:
            values = np.asarray(columns[name], np.uint8 if kind == "image" else "<f4")
            raw = np.ascontiguousarray(values).reshape(count, -1).view(np.uint8)
            pieces += (np.broadcast_to(np.frombuffer(prefix, np.uint8), (count, len(prefix))), raw)
        whole = np.concatenate(pieces, axis=1)
        block, length = memoryview(whole.reshape(-1)), whole.shape[1]
        return [block[start : start + length] for start in range(0, len(block), length)]


def label_entry(name: str, value: int | float) -> bytes:
    """The encoded label: a class index (int) or a number (float)."""
    if isinstance(value, int):
        raw = _varint(value)
        feature = b"\x1a" + _varint(len(raw) + 2) + b"\n" + _varint(len(raw)) + raw
    else:
        raw = struct.pack("<f", value)
        feature = b"\x12" + _varint(len(raw) + 2) + b"\n" + _varint(len(raw)) + raw
    entry = _key(name) + b"\x12" + _varint(len(feature)) + feature
    return b"\n" + _varint(len(entry)) + entry


def finish(features: bytes | memoryview, label: bytes) -> bytes:
    """The record of encoded features and an encoded label."""
    return b"".join((_opening(len(features) + len(label)), features, label))


@functools.lru_cache(1024)  # records are mostly as long as others
def _opening(length: int) -> bytes:
    return b"\n" + _varint(length)


def decode(record: bytes, features: Mapping[str, Feature]) -> dict[str, Any]:
    """The features of one record that this module encoded, without TensorFlow: arrays, numbers and text by name."""
    found: dict[str, Any] = {}
    for _, entry in _parts(next(value for _, value in _parts(record))):
        (_, key), (_, feature) = _parts(entry)
        name = key.decode()
        if name not in features:
            continue
        kind, listed = next(_parts(feature))
        raw = next((value for _, value in _parts(listed)), b"")
        shape = features[name].shape
        if kind == _FLOATS:
            found[name] = np.frombuffer(raw, "<f4").reshape(shape)
        elif features[name].kind == "image":
            found[name] = np.frombuffer(raw, np.uint8).reshape(shape)
        else:
            found[name] = raw.decode()
    return found


class ExampleReader:
    """Reads the examples of one file, which mostly look alike: where the bytes around the values are those of the example
    before, the values are cut out without taking the record apart.

    Args:
        names: The features that are wanted.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._length = -1
        self._fixed: list[tuple[int, int, bytes]] = []
        self._lists: list[tuple[str, int, int, int]] = []

    def __call__(self, record: bytes) -> dict[str, list[Any]]:
        """As `parse_example`, of the wanted features. Raises ValueError."""
        if len(record) != self._length or any(record[a:b] != known for a, b, known in self._fixed):
            return self._taken_apart(record)
        found = {}
        for name, kind, start, end in self._lists:
            raw = record[start:end]
            if kind == _BYTES:
                found[name] = [raw]
            elif kind == _FLOATS:
                found[name] = list(struct.unpack(f"<{len(raw) // 4}f", raw))
            elif raw[-1] < 0x80:
                found[name] = _whole_numbers(raw)
            else:  # the last number does not end here, so this is another layout after all
                return self._taken_apart(record)
        return found

    def read_all(self, records: Sequence[bytes]) -> dict[str, np.ndarray] | None:
        """Many records that all look like the one before: by name bytes [n, length] uint8, or numbers [n, values] float32
        or int64. None where they do not; then read them one by one."""
        if any(len(record) != self._length for record in records):
            return None
        whole = np.frombuffer(b"".join(records), np.uint8).reshape(len(records), -1)
        if any((whole[:, a:b] != np.frombuffer(known, np.uint8)).any() for a, b, known in self._fixed):
            return None
        found = {}
        for name, kind, start, end in self._lists:
            raw = whole[:, start:end]
            if kind == _FLOATS:
                found[name] = np.ascontiguousarray(raw).view("<f4")
            elif kind == _WHOLE:
                if raw.max() >= 0x80:  # numbers of several bytes, which may be cut elsewhere in each record
                    return None
                found[name] = raw.astype(np.int64)
            else:
                found[name] = raw
        return found

    def _taken_apart(self, record: bytes) -> dict[str, list[Any]]:
        found = {name: values for name, values in parse_example(record).items() if name in self._names}
        self._length = -1
        if all(values for values in found.values()):
            self._remember(record, found)
        return found

    def _remember(self, record: bytes, found: dict[str, list[Any]]) -> None:
        """Looks for each list as this module would write it; a record of another form is taken apart every time."""
        lists = []
        for name, values in found.items():
            kind, raw = _packed_list(values)
            whole = _before(name, kind, len(raw)) + raw
            place = record.find(whole)
            if place < 0 or (kind == _BYTES and len(values) != 1):
                return
            end = place + len(whole)
            lists.append((name, kind, end - len(raw), end))
        lists.sort(key=lambda one: one[2])
        edges = [0, *(edge for _, _, start, end in lists for edge in (start, end)), len(record)]
        self._fixed = [(a, b, record[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
        self._lists, self._length = lists, len(record)


def _packed_list(values: list[Any]) -> tuple[int, bytes]:
    if isinstance(values[0], bytes):
        return _BYTES, values[0]
    if isinstance(values[0], float):
        return _FLOATS, struct.pack(f"<{len(values)}f", *values)
    return _WHOLE, b"".join(_varint(value % (1 << 64)) for value in values)


def parse_example(record: bytes) -> dict[str, list[Any]]:
    """Any `tf.Example`, without TensorFlow: the list of each feature (bytes, floats or whole numbers) by name.

    Raises:
        ValueError: It is none.
    """
    found: dict[str, list[Any]] = {}
    try:
        for number, features in _fields(record):
            if number != 1:
                continue
            for _, entry in _fields(features):
                content = dict(_fields(entry))
                listed = list(_fields(content.get(2, b"")))
                found[content.get(1, b"").decode()] = _listed(*listed[-1]) if listed else []
    except (IndexError, TypeError, AttributeError, UnicodeDecodeError, struct.error) as error:
        raise ValueError("is no tf.Example") from error
    return found


def _listed(kind: int, message: bytes) -> list[Any]:
    """The values of a bytes, float or int64 list; packed or not."""
    values: list[Any] = []
    for _, raw in _fields(message):
        if kind == _BYTES:
            values.append(raw)
        elif kind == _FLOATS:
            values += struct.unpack(f"<{len(raw) // 4}f", raw)
        elif isinstance(raw, int):
            values.append(_signed(raw))
        else:
            values += _whole_numbers(raw)
    return values


def _whole_numbers(raw: bytes) -> list[int]:
    values, place = [], 0
    while place < len(raw):
        value, place = _read_varint(raw, place)
        values.append(_signed(value))
    return values


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Field number and content of each field: bytes, or a whole number for a varint."""
    place = 0
    while place < len(message):
        tag, place = _read_varint(message, place)
        kind = tag & 7
        if kind == 0:
            value, place = _read_varint(message, place)
            yield tag >> 3, value
            continue
        length = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            length, place = _read_varint(message, place)
        if length is None or place + length > len(message):
            raise IndexError
        yield tag >> 3, message[place : place + length]
        place += length


def _parts(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Field number and content of each length-delimited field."""
    place = 0
    while place < len(message):
        tag, place = _read_varint(message, place)
        length, place = _read_varint(message, place)
        yield tag >> 3, message[place : place + length]
        place += length


def _read_varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place


def parser(manifest: Manifest) -> Callable[[Any], tuple[Any, ...]]:
    """A function, for use inside a graph, from serialized records [batch] string to batches.

    It returns (features, labels) or, where the dataset has weights, (features, labels, weights): features by name
    [batch, *shape] uint8, float32 or string; labels [batch] int32 (class index) or float32; weights [batch] float32.
    """
    import tensorflow as tf

    wanted = {}
    for name, feature in manifest.features.items():
        if feature.kind == "number":
            wanted[name] = tf.io.FixedLenFeature(feature.shape, tf.float32)
        else:
            wanted[name] = tf.io.FixedLenFeature([], tf.string)
    label = manifest.label.name
    is_class = manifest.task == "classification"
    wanted[label] = tf.io.FixedLenFeature([], tf.int64 if is_class else tf.float32)
    if manifest.weight:
        wanted[manifest.weight] = tf.io.FixedLenFeature([], tf.float32)

    def parse(records: Any) -> tuple[Any, ...]:
        parsed = tf.io.parse_example(records, wanted)
        features = {}
        for name, feature in manifest.features.items():
            value = parsed[name]
            if feature.kind == "image":
                value = tf.reshape(tf.io.decode_raw(value, tf.uint8), [-1, *feature.shape])
            features[name] = value
        labels = tf.cast(parsed[label], tf.int32) if is_class else parsed[label]
        return (features, labels, parsed[manifest.weight]) if manifest.weight else (features, labels)

    return parse


def _before(name: str, kind: int, length: int) -> bytes:
    """Everything of a feature's entry that stands before its one bytes value, or its packed floats."""
    inner = b"\n" + _varint(length)
    feature = bytes([kind << 3 | 2]) + _varint(len(inner) + length) + inner
    entry = _key(name) + b"\x12" + _varint(len(feature) + length) + feature
    return b"\n" + _varint(len(entry) + length) + entry


def _key(name: str) -> bytes:
    raw = name.encode()
    return b"\n" + _varint(len(raw)) + raw


def _varint(value: int) -> bytes:
    if value < 0x80:
        return _SMALL[value]
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


_SMALL = [bytes([value]) for value in range(0x80)]
