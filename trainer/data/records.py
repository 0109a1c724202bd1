"""One example ↔ the bytes of one record, a `tf.train.Example`.

    encode = Encoder(features)                     # needs no TensorFlow; bytes are the same in every process
    record = finish(encode(values), label_entry("species", 2))
    parse = parser(manifest)                       # inside the graph: records [batch] → (features, labels)

The label is put in last, because the classes of a table are known only when all of it has been read.
"""

import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from trainer.data.manifest import Feature, Manifest

_FLOATS = 2  # field of a float list in a feature


class Encoder:
    """Encodes the features of an example; the result is the inside of the record's only field.

    Args:
        features: The features by name.
        weight: Name of the number that weighs the example, where there is one.
    """

    def __init__(self, features: Mapping[str, Feature], weight: str | None = None) -> None:
        names = sorted([*features, *([weight] if weight else [])])
        self._fields = [(name, _key(name), name != weight and features[name].kind != "number") for name in names]

    def __call__(self, values: Mapping[str, Any]) -> bytes:
        """Values by name: uint8 arrays, float32 arrays or numbers, text."""
        parts = []
        for name, key, as_bytes in self._fields:
            value = values[name]
            if as_bytes:
                raw = value.encode() if isinstance(value, str) else value.tobytes()
                listed = b"\n" + _varint(len(raw)) + raw
                feature = b"\n" + _varint(len(listed)) + listed
            else:
                raw = np.asarray(value, "<f4").tobytes()
                listed = b"\n" + _varint(len(raw)) + raw
                feature = b"\x12" + _varint(len(listed)) + listed
            entry = key + b"\x12" + _varint(len(feature)) + feature
            parts.append(b"\n" + _varint(len(entry)) + entry)
        return b"".join(parts)


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


def finish(features: bytes, label: bytes) -> bytes:
    """The record of encoded features and an encoded label."""
    return b"\n" + _varint(len(features) + len(label)) + features + label


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
        if kind == 1:
            values.append(raw)
        elif kind == _FLOATS:
            values += struct.unpack(f"<{len(raw) // 4}f", raw)
        elif isinstance(raw, int):
            values.append(_signed(raw))
        else:
            place = 0
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
