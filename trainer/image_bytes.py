"""Encoded images → pixels inside the graph of a SavedModel: row by row, so that a bad one spoils no batch.

pixels, ok = decode_images(encoded, shape=(32, 32, 3))

The size that a file claims is read from its header before it is decoded: a JPEG of 2 KB can ask for a gigabyte.
"""

from typing import Any

MOST_PIXELS = 16 * 1024**2


def decode_images(encoded: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Decodes and resizes each row. EXIF rotation is not applied; 16-bit channels keep their upper half.

    Args:
        encoded: JPEG, PNG or BMP files [batch] string.
        shape: Height, width and channels (1 or 3) that are wanted.

    Returns:
        Pixels [batch, *shape] uint8, zeros where a row cannot be decoded or is over `MOST_PIXELS`; `ok` [batch] bool.
    """
    import tensorflow as tf

    count = tf.size(encoded)

    def decode(place: Any, data: Any) -> tuple[Any, Any]:
        return place, _decode_one(data, shape)

    rows = tf.data.Dataset.from_tensor_slices((tf.range(count), encoded))
    rows = rows.map(decode, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).ignore_errors(log_warning=False)
    # A last row that is always there, because an empty dataset has no single element; it is cut off again.
    end = tf.data.Dataset.from_tensors((count, tf.zeros(shape, tf.uint8)))
    places, pixels = rows.concatenate(end).batch(tf.cast(count, tf.int64) + 1).get_single_element()
    pixels = tf.scatter_nd(places[:, tf.newaxis], pixels, tf.concat([[count + 1], shape], axis=0))[:count]
    ok = tf.scatter_nd(places[:, tf.newaxis], tf.ones_like(places), [count + 1])[:count] > 0
    return tf.ensure_shape(pixels, [None, *shape]), ok


def _decode_one(data: Any, shape: tuple[int, ...]) -> Any:
    import tensorflow as tf

    channels = shape[-1]

    def starts_with(magic: bytes) -> Any:
        return tf.equal(tf.strings.substr(data, 0, len(magic)), magic)

    def numbers(first: int, count: int, *, little_endian: bool) -> Any:
        raw = tf.strings.substr(data, first, 4 * count)
        return tf.cast(tf.io.decode_raw(raw, tf.int32, little_endian=little_endian), tf.int64)

    def checked(height: Any, width: Any) -> Any:
        small = (height > 0) & (width > 0) & (height * width <= MOST_PIXELS)
        with tf.control_dependencies([tf.debugging.Assert(small, [height, width])]):
            return tf.identity(data)

    def jpeg() -> Any:
        size = tf.cast(tf.image.extract_jpeg_shape(data), tf.int64)
        safe = checked(size[0], size[1])
        # What Pillow decodes to, bit for bit; the faster method is up to six grey levels away.
        return tf.io.decode_jpeg(safe, channels, dct_method="INTEGER_ACCURATE")

    def png() -> Any:
        size = numbers(16, 2, little_endian=False)
        return tf.io.decode_png(checked(size[1], size[0]), channels)

    def bmp() -> Any:
        size = numbers(18, 2, little_endian=True)
        pixels = tf.io.decode_bmp(checked(tf.abs(size[1]), size[0]))
        found = tf.shape(pixels)[-1]
        colour = tf.cond(found == 1, lambda: tf.image.grayscale_to_rgb(pixels[..., :1]), lambda: pixels[..., :3])
        return tf.image.rgb_to_grayscale(colour) if channels == 1 else colour

    def unknown() -> Any:
        with tf.control_dependencies([tf.debugging.Assert(False, ["neither JPEG nor PNG nor BMP"])]):
            return tf.zeros([1, 1, channels], tf.uint8)

    cases = [(starts_with(b"\xff\xd8\xff"), jpeg), (starts_with(b"\x89PNG\r\n\x1a\n"), png), (starts_with(b"BM"), bmp)]
    pixels = tf.case(cases, default=unknown)
    pixels.set_shape([None, None, channels])
    resized = tf.image.resize(pixels, shape[:2], method="bilinear", antialias=True)
    return tf.cast(tf.clip_by_value(tf.round(resized), 0, 255), tf.uint8)
