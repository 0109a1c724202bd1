"""Image files of a source → pixels, as the exported model will decode them when it is asked.

pixels, sizes, faults = decode_all(files, shape=(32, 32, 3), resize=True)
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from trainer.image_bytes import ANIMATED, TOO_LARGE, UNKNOWN, decode_image, decode_images


class BadImage(ValueError):
    """Data that is not an image we can use; the message says why."""


def decode_all(
    files: Sequence[bytes], shape: tuple[int, ...], *, resize: bool
) -> tuple[np.ndarray, list[str], dict[int, str]]:
    """Decodes images by the rules of `trainer.image_bytes`.

    Args:
        files: JPEG, PNG, BMP and WebP files.
        shape: Height, width and channels (1 or 3).
        resize: Whether images of another size are resized, smoothly, or faulty.

    Returns:
        Pixels [files, *shape] uint8; `height×width` of each before it was resized; faults by place. Where a file is
        faulty, the others mean nothing.
    """
    import tensorflow as tf

    found = _all_compiled(tuple(shape))(tf.constant(list(files), tf.string))
    pixels, sizes, ok = (values.numpy() for values in found)
    faults = {int(place): _fault(files[place]) for place in np.flatnonzero(~ok)}
    if not resize:
        for place in np.flatnonzero(ok & (sizes != shape[:2]).any(axis=1)).tolist():
            height, width = sizes[place]
            faults[place] = f"has {height}×{width} pixels, not {shape[0]}×{shape[1]}; set data.image_size"
    return pixels, [f"{height}×{width}" for height, width in sizes], faults


def decode_columns(
    columns: Mapping[str, Sequence[bytes]], shapes: Mapping[str, tuple[int, ...]], *, resize: bool
) -> tuple[dict[str, np.ndarray], dict[str, list[str]], dict[int, str]]:
    """Decodes the image columns of some rows, as `decode_all` does.

    Args:
        columns: Image files by column.
        shapes: Height, width and channels by column.
        resize: Whether images of another size are resized or faulty.

    Returns:
        Pixels and sizes by column, and faults by row, each with its column's name in front.
    """
    pixels, sizes, faults = {}, {}, {}
    for name, files in columns.items():
        pixels[name], sizes[name], found = decode_all(files, shapes[name], resize=resize)
        faults |= {row: f"{name} {fault}" for row, fault in found.items() if row not in faults}
    return pixels, sizes, faults


def first_size(files: Iterable[bytes]) -> tuple[int, int] | None:
    """Height and width of the first image that can be decoded."""
    for data in files:
        try:
            return _size(data)
        except BadImage:
            continue
    return None


def _fault(data: bytes) -> str:
    try:
        _size(data)
    except BadImage as error:
        return str(error)
    raise AssertionError("an image that is decoded alone was not decoded among others")


def _size(data: bytes) -> tuple[int, int]:
    import tensorflow as tf

    try:
        height, width = _compiled()(tf.constant(data)).numpy().tolist()
    except tf.errors.InvalidArgumentError as error:
        known = [reason for reason in (TOO_LARGE, UNKNOWN, ANIMATED) if reason in error.message]
        raise BadImage(known[0] if known else "is not a readable image") from None
    return height, width


@cache
def _compiled() -> Any:
    import tensorflow as tf

    def size(data: Any) -> Any:
        pixels, own = decode_image(data, tf.constant([0, 0]), 3)
        with tf.control_dependencies([pixels]):
            return tf.identity(own)

    return tf.function(size, input_signature=[tf.TensorSpec([], tf.string)], autograph=False)


@cache
def _all_compiled(shape: tuple[int, ...]) -> Any:
    import tensorflow as tf

    return tf.function(
        lambda files: decode_images(files, shape), input_signature=[tf.TensorSpec([None], tf.string)], autograph=False
    )
