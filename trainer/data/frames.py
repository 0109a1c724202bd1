"""TFRecord files without TensorFlow: bytes as it writes them, and every damage named with its place.

    for record in read_frames(path): ...
    with FrameWriter(path) as writer: writer.write(record)

Format: length (uint64), masked CRC-32C of the length, the record, masked CRC-32C of the record; little-endian.
"""

import hashlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c

_HEAD = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_MASK = 0xA282EAD8
_BUFFER = 4 * 1024**2


class DamagedFile(ValueError):
    """A TFRecord file cannot be read any further."""


class FrameWriter:
    """Writes a TFRecord file, through to the disk at its end.

    Attributes:
        sha256: Digest of the whole file, once it is closed.
        num_bytes: Its size.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._digest, self._pending, self._size = hashlib.sha256(), [], 0
        self.num_bytes, self.sha256 = 0, ""

    def write(self, record: bytes) -> None:
        """Appends one record."""
        length = len(record).to_bytes(8, "little")
        self._pending += (length, _CRC.pack(_masked(length)), record, _CRC.pack(_masked(record)))
        self._size += len(record) + 16
        if self._size >= _BUFFER:
            self._flush()

    def _flush(self) -> None:
        block = b"".join(self._pending)
        self._digest.update(block)
        view = memoryview(block)
        while view:
            view = view[self._file.write(view) :]
        self.num_bytes += len(block)
        self._pending, self._size = [], 0

    def __enter__(self) -> "FrameWriter":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            if kind is None:
                self._flush()
                os.fsync(self._file.fileno())
                self.sha256 = self._digest.hexdigest()
        finally:
            self._file.close()


def read_frames(path: Path) -> Iterator[bytes]:
    """The records of a TFRecord file, each checked.

    Raises:
        DamagedFile: A checksum is wrong, or the file ends within a record; the rest cannot be trusted.
    """
    with path.open("rb", buffering=_BUFFER) as file:
        number = 0
        while head := file.read(_HEAD.size):
            number += 1
            if len(head) < _HEAD.size:
                raise DamagedFile(f"ends within record {number}")
            length, crc = _HEAD.unpack(head)
            if crc != _masked(head[:8]):
                raise DamagedFile(f"the length of record {number} is damaged")
            record, tail = _exactly(file, length), file.read(_CRC.size)
            if record is None or len(tail) < _CRC.size:
                raise DamagedFile(f"ends within record {number}")
            if _CRC.unpack(tail)[0] != _masked(record):
                raise DamagedFile(f"record {number} is damaged")
            yield record


def _exactly(file: Any, length: int) -> bytes | None:
    record = file.read(length)
    return record if len(record) == length else None


def _masked(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF
