"""Pixels become `data:` pictures: exact PNGs for small ones, thumbnails in WebP for large ones."""

from __future__ import annotations

import base64
import binascii
import io
import struct
import zlib
from collections.abc import Sequence

LARGEST_EXACT_SIDE = 64  # pixels; up to here a PNG is small, and every pixel is shown as the model saw it
THUMBNAIL_SIDE = 160  # pixels: sharp at the size shown on the page, 3 kB a picture
_COLOUR_TYPES = {1: (0, "L"), 2: (4, "LA"), 3: (2, "RGB"), 4: (6, "RGBA")}  # channels: PNG's number, Pillow's mode


def photograph(image: dict) -> tuple[str, int]:
    """Returns a picture of one example.

    Args:
        image: `shape`, [height, width] or [height, width, channels] with 1 to 4 channels, and `pixels_base64`, its raw
            uint8 values in that order.

    Returns:
        The picture as a `data:` URL, and the longest side of the original in pixels.

    Raises:
        ValueError: the bytes are not base64, or there are more or fewer of them than the shape says.
    """
    shape = [int(size) for size in image["shape"]]
    if len(shape) == 2:
        shape.append(1)
    if len(shape) != 3 or shape[2] not in _COLOUR_TYPES or min(shape) < 1:
        raise ValueError(f"a picture of shape {shape} cannot be shown")
    height, width, channels = shape
    try:
        pixels = base64.b64decode(image["pixels_base64"], validate=True)
    except (binascii.Error, TypeError) as error:
        raise ValueError("the pixels are not base64") from error
    if len(pixels) != height * width * channels:
        raise ValueError(f"{len(pixels)} bytes for a picture of shape {shape}")
    colour_type, mode = _COLOUR_TYPES[channels]
    if max(height, width) <= LARGEST_EXACT_SIDE:
        return data_url("png", png(pixels, width, height, colour_type, bits=8 * channels)), max(height, width)
    return data_url("webp", _thumbnail(pixels, width, height, mode)), max(height, width)


def indexed_png(rows: Sequence[bytes | bytearray], palette: list[tuple[int, int, int, int]]) -> bytes:
    """Returns a PNG of at most 16 colours, four bits a pixel.

    Args:
        rows: One bytes-like object a line, one palette index a byte.
        palette: Red, green, blue, alpha, each 0 to 255.
    """
    width = len(rows[0])
    packed = bytearray()
    for row in rows:
        padded = row + b"\0" * (width % 2)
        packed += bytes(left << 4 | right for left, right in zip(padded[::2], padded[1::2], strict=True))
    colours = _chunk(b"PLTE", b"".join(bytes(colour[:3]) for colour in palette))
    alphas = _chunk(b"tRNS", bytes(colour[3] for colour in palette))
    return png(bytes(packed), width, len(rows), colour_type=3, bits=4, extra=colours + alphas)


def png(pixels: bytes, width: int, height: int, colour_type: int, bits: int, extra: bytes = b"") -> bytes:
    """Returns a PNG (W3C Portable Network Graphics, third edition) of lines of `bits` bits a pixel."""
    stride = (width * bits + 7) // 8
    depth = bits if colour_type == 3 else 8
    lines = b"".join(b"\0" + pixels[start : start + stride] for start in range(0, stride * height, stride))
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + extra + _chunk(b"IDAT", zlib.compress(lines, 9)) + _chunk(b"IEND", b"")


def data_url(kind: str, content: bytes) -> str:
    """Returns the picture as a URL that holds it, so that the page needs no other file."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def _thumbnail(pixels: bytes, width: int, height: int, mode: str) -> bytes:
    from PIL import Image  # only pages with large pictures pay for it

    picture = Image.frombytes(mode, (width, height), pixels)
    if mode == "LA":
        picture = picture.convert("RGBA")
    picture.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    file = io.BytesIO()
    picture.save(file, "WEBP", quality=80)
    return file.getvalue()
