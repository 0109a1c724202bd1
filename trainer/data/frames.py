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
_BUFFER = 1024**2


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
        self._length, self._head = -1, b""
        self.num_bytes, self.sha256 = 0, ""

    def write(self, record: bytes) -> None:
        """Appends one record."""
        length = len(record)
        if length != self._length:  # records are mostly as long as the one before
            raw = length.to_bytes(8, "little")
            self._length, self._head = length, raw + _CRC.pack(_masked(raw))
        self._pending += (self._head, record, _CRC.pack(_masked(record)))
        self._size += length + 16
        if self._size >= _BUFFER:
            self._flush()

    def _flush(self) -> None:
        block = b"".join(self._pending)
        self._digest.update(block)
        write_all(self._file, block)
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


def write_all(file: Any, block: bytes) -> None:
    """Writes to an unbuffered file, which may take less at a time than it is given."""
    view = memoryview(block)
    while view:
        view = view[file.write(view) :]


def read_frames(path: Path) -> Iterator[bytes]:
    """The records of a TFRecord file, each checked.

    Raises:
        DamagedFile: A checksum is wrong, or the file ends within a record; the rest cannot be trusted.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        block, place, number, known = b"", 0, 0, b""
        while True:
            number += 1
            if len(block) - place < _HEAD.size:
                block, place = _filled(file, block[place:], _HEAD.size), 0
                if not block:
                    return
                if len(block) < _HEAD.size:
                    raise DamagedFile(f"ends within record {number}")
            start = place + _HEAD.size
            head = block[place:start]
            length, crc = _HEAD.unpack(head)
            if head != known:  # records are mostly as long as the one before
                if crc != _masked(head[:8]):
                    raise DamagedFile(f"the length of record {number} is damaged")
                if length > size:  # said before so much memory is asked for
                    raise DamagedFile(f"ends within record {number}")
                known = head
            whole = _HEAD.size + length + _CRC.size
            if len(block) - place < whole:
                block, place, start = _filled(file, block[place:], whole), 0, _HEAD.size
                if len(block) < whole:
                    raise DamagedFile(f"ends within record {number}")
            end = start + length
            record = block[start:end]
            if _CRC.unpack_from(block, end)[0] != _masked(record):
                raise DamagedFile(f"record {number} is damaged")
            yield record
            place = end + _CRC.size


def _filled(file: Any, rest: bytes, wanted: int) -> bytes:
    """The rest of a block and what follows it: at least `wanted` bytes, fewer only at the file's end."""
    pieces, missing = [rest], max(_BUFFER, wanted - len(rest))
    while missing and (piece := file.read(missing)):
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


def _masked(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF
