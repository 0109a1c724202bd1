"""Encoded images → pixels: the one decoding of the project, in preparation and inside the graph of a SavedModel.

    pixels, sizes, ok = decode_images(encoded, shape=(32, 32, 3))     # row by row: a bad one spoils no batch

JPEG, PNG, BMP (8, 24 or 32 bits, not compressed) and still WebP files are read; whatever else is not an image here. One rule
for every place: a JPEG is turned as its EXIF orientation says; what is transparent is laid on black; of 16 bits a channel
the upper eight are kept; CMYK becomes RGB; colour becomes grey by the weights of ITU-R BT.601. The size that a file claims is
read from its header before it is decoded: a JPEG of 2 KB can ask for a gigabyte.
"""

from collections.abc import Callable
from typing import Any

MOST_PIXELS = 32 * 1024**2
TOO_LARGE = f"has more than {MOST_PIXELS:,} pixels"
UNKNOWN = "is no JPEG, PNG, BMP or WebP file"
ANIMATED = "is an animated WebP"

_TURNED = 0x0112  # EXIF's tag of the orientation


def decode_images(encoded: Any, shape: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """Decodes and resizes each row.

    Args:
        encoded: Image files [batch] string.
        shape: Height, width and channels (1 or 3) that are wanted.

    Returns:
        Pixels [batch, *shape] uint8, height and width before resizing [batch, 2] int32, and whether the row could be
        decoded [batch] bool; where it could not, and where it is over `MOST_PIXELS`, the others are zeros.
    """
    import tensorflow as tf

    count = tf.size(encoded)

    def decode(place: Any, data: Any) -> tuple[Any, Any, Any]:
        pixels, size = decode_image(data, tf.constant(shape[:2]), shape[-1])
        return place, tf.ensure_shape(pixels, shape), size

    rows = tf.data.Dataset.from_tensor_slices((tf.range(count), encoded))
    rows = rows.map(decode, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).ignore_errors(log_warning=False)
    # A last row that is always there, because an empty dataset has no single element; it is cut off again.
    end = tf.data.Dataset.from_tensors((count, tf.zeros(shape, tf.uint8), tf.zeros([2], tf.int32)))
    places, *found = rows.concatenate(end).batch(tf.cast(count, tf.int64) + 1).get_single_element()

    def in_place(values: Any) -> Any:
        spread = tf.scatter_nd(places[:, tf.newaxis], values, [count + 1, *values.shape[1:]])
        return tf.ensure_shape(spread[:count], [None, *values.shape[1:]])

    pixels, sizes, ok = map(in_place, [*found, tf.ones_like(places)])
    return pixels, sizes, ok > 0


def decode_image(data: Any, size: Any, channels: int) -> tuple[Any, Any]:
    """Decodes one image. An InvalidArgumentError says that it cannot be.

    Args:
        data: An image file [] string.
        size: Height and width to resize to [2] int32; zeros keep the image's own.
        channels: 1 for grey, 3 for colour.

    Returns:
        Pixels [height, width, channels] uint8; height and width before resizing [2] int32, as a person sees them.
    """
    import tensorflow as tf

    kinds = [(b"\xff\xd8\xff", _jpeg), (b"\x89PNG\r\n\x1a\n", _png), (b"BM", _bmp), (b"RIFF", _webp)]
    pixels, turned = _first_of(
        [(tf.strings.substr(data, 0, len(magic)) == magic, lambda f=f: f(data)) for magic, f in kinds],
        lambda: (_refused(UNKNOWN, tf.zeros([1, 1, 3], tf.uint8)), 1),
    )
    pixels.set_shape([None, None, 3])
    on_its_side = turned >= 5
    stored = tf.shape(pixels)[:2]
    own = tf.cond(on_its_side, lambda: stored[::-1], lambda: stored)
    target = tf.where(size > 0, size, own)
    target = tf.cond(on_its_side, lambda: target[::-1], lambda: target)
    pixels = tf.cond(tf.reduce_all(target == stored), lambda: pixels, lambda: _resized(pixels, target))
    return _grey(_upright(pixels, turned)) if channels == 1 else _upright(pixels, turned), own


def _jpeg(data: Any) -> tuple[Any, Any]:
    import tensorflow as tf

    size = tf.cast(tf.image.extract_jpeg_shape(data), tf.int64)
    # What Pillow decodes to, bit for bit; the faster method is up to six grey levels away.
    pixels = tf.io.decode_jpeg(_checked(data, size[0], size[1]), 3, dct_method="INTEGER_ACCURATE")
    return pixels, _jpeg_orientation(data)


def _png(data: Any) -> tuple[Any, Any]:
    import tensorflow as tf

    height, width = _number(data, 20, 4, big=True), _number(data, 16, 4, big=True)
    pixels = tf.io.decode_png(_checked(data, height, width), 4)
    # The decoder fills in opacity where a file has none, but as the largest number of the file's own bits.
    largest = tf.bitwise.left_shift(1, tf.cast(tf.minimum(_number(data, 24, 1), 8), tf.int32)) - 1
    filled = tf.reduce_all(tf.cast(pixels[..., 3], tf.int32) == largest)
    return tf.cond(filled, lambda: pixels[..., :3], lambda: _on_black(pixels)), 1


def _bmp(data: Any) -> tuple[Any, Any]:
    import tensorflow as tf

    header, bits = _number(data, 14, 4), _number(data, 28, 2)
    plain = (header >= 40) & (_number(data, 30, 4) == 0)  # neither run lengths nor masks
    height = _number(data, 22, 4)
    height = tf.minimum(height, 2**32 - height)  # negative where the first row is the uppermost
    safe = _checked(data, height, _number(data, 18, 4))

    def from_palette() -> Any:
        used = _number(data, 46, 4)
        length = tf.cast(tf.where(used == 0, tf.constant(256, tf.int64), used), tf.int32)
        palette = tf.strings.substr(data, tf.cast(14 + header, tf.int32), 4 * length)
        blue_first = tf.reshape(tf.io.decode_raw(palette, tf.uint8), [-1, 4])
        return tf.gather(blue_first[:, 2::-1], tf.cast(tf.io.decode_bmp(safe)[..., 0], tf.int32))

    pixels = _first_of(
        [
            (plain & (bits == 8), from_palette),
            (plain & (bits == 24), lambda: tf.io.decode_bmp(safe, 3)),
            (plain & (bits == 32), lambda: tf.io.decode_bmp(safe, 4)[..., :3]),
        ],
        lambda: _refused(UNKNOWN, tf.zeros([1, 1, 3], tf.uint8)),
    )
    return pixels, 1


def _webp(data: Any) -> tuple[Any, Any]:
    """The three forms of a WebP file keep their size in different places (RFC 9649)."""
    import tensorflow as tf

    def lossy() -> tuple[Any, Any]:
        return _number(data, 28, 2) & 0x3FFF, _number(data, 26, 2) & 0x3FFF

    def lossless() -> tuple[Any, Any]:
        packed = _number(data, 21, 4)
        return tf.bitwise.right_shift(packed, tf.constant(14, tf.int64)) % 0x4000 + 1, packed % 0x4000 + 1

    def extended() -> tuple[Any, Any]:
        still = tf.raw_ops.Assert(condition=_number(data, 20, 1) & 2 == 0, data=[ANIMATED])
        with tf.control_dependencies([still]):
            return _number(data, 27, 3) + 1, _number(data, 24, 3) + 1

    form = tf.strings.substr(data, 8, 8)
    nothing = tf.zeros([], tf.int64)
    height, width = _first_of(
        [(form == b"WEBPVP8 ", lossy), (form == b"WEBPVP8L", lossless), (form == b"WEBPVP8X", extended)],
        lambda: (_refused(UNKNOWN, nothing), nothing),
    )
    pixels = tf.io.decode_webp(_checked(data, height, width))[0]
    return tf.cond(tf.shape(pixels)[-1] == 4, lambda: _on_black(pixels), lambda: pixels[..., :3]), 1


def _jpeg_orientation(data: Any) -> Any:
    """EXIF's orientation, 1 to 8 [] int32; 1 where there is none. JPEG's segments follow one another from byte 2 on."""
    import tensorflow as tf

    last = tf.strings.length(data) - 10

    def marker(place: Any) -> Any:
        return tf.strings.substr(data, tf.minimum(place, last), 2)

    def is_exif(place: Any) -> Any:
        return (marker(place) == b"\xff\xe1") & (tf.strings.substr(data, tf.minimum(place, last) + 4, 6) == b"Exif\0\0")

    def is_another(place: Any) -> Any:
        starts = tf.strings.substr(marker(place), 0, 1) == b"\xff"
        return (place <= last) & starts & (marker(place) != b"\xff\xda") & ~is_exif(place)

    def following(place: Any) -> Any:
        return place + 2 + tf.cast(_number(data, place + 2, 2, big=True), tf.int32)

    def searched() -> Any:
        # Real files have a handful of segments before EXIF's; one of a million tiny ones must not cost a minute.
        place = tf.while_loop(is_another, lambda place: [following(place)], [tf.constant(2)], maximum_iterations=100)[0]
        found = (place <= last) & is_exif(place)
        return tf.cond(found, lambda: _tiff_orientation(tf.strings.substr(data, place + 10, 65_536)), lambda: 1)

    # The search doubles the time of a small image, and most hold nothing to be found.
    somewhere = tf.strings.regex_full_match(data, r"\C*Exif\x00\x00\C*")
    return tf.cond(somewhere, searched, lambda: 1)


def _tiff_orientation(segment: Any) -> Any:
    """The orientation in EXIF's first directory, whose entries have 12 bytes: tag, type, count and value."""
    import tensorflow as tf

    raw = tf.pad(tf.cast(tf.io.decode_raw(segment, tf.uint8), tf.int32), [[0, 8]])
    big = tf.strings.substr(segment, 0, 1) == b"M"

    def number(values: Any) -> Any:
        """Two bytes at a time [..., 2] → [...]."""
        return tf.where(big, 256 * values[..., 0] + values[..., 1], 256 * values[..., 1] + values[..., 0])

    start = tf.where(big, number(raw[6:8]), number(raw[4:6]))  # nothing stands beyond 64 KB
    start = tf.minimum(start, tf.size(raw) - 2)
    entries = raw[start + 2 : start + 2 + 12 * number(raw[start : start + 2])]
    entries = tf.reshape(entries[: tf.size(entries) // 12 * 12], [-1, 12])
    values = number(entries[:, 8:10])
    turned = tf.boolean_mask(values, (number(entries[:, :2]) == _TURNED) & (values >= 1) & (values <= 8))
    return tf.concat([turned, [1]], axis=0)[0]


def _upright(pixels: Any, turned: Any) -> Any:
    """Undoes EXIF's orientation: 2 to 4 are mirrored, 5 to 8 lie on their side."""
    import tensorflow as tf

    def undone() -> Any:
        standing = tf.cond(turned >= 5, lambda: tf.transpose(pixels, [1, 0, 2]), lambda: pixels)
        down = tf.where(tf.reduce_any(turned == [3, 4, 7, 8]), -1, 1)
        across = tf.where(tf.reduce_any(turned == [2, 3, 6, 7]), -1, 1)
        return standing[::down, ::across]

    return tf.cond(turned == 1, lambda: pixels, undone)


def _on_black(pixels: Any) -> Any:
    """Red, green, blue and opacity [height, width, 4] uint8 → [height, width, 3] uint8."""
    import tensorflow as tf

    colour, opacity = pixels[..., :3], pixels[..., 3:]

    return tf.cast((tf.cast(colour, tf.uint16) * tf.cast(opacity, tf.uint16) + 127) // 255, tf.uint8)


def _grey(pixels: Any) -> Any:
    import tensorflow as tf

    weighted = tf.cast(pixels, tf.int32) * [19_595, 38_470, 7_471]  # 0.299, 0.587, 0.114 of 65,536
    return tf.cast((tf.reduce_sum(weighted, axis=-1, keepdims=True) + 32_768) // 65_536, tf.uint8)


def _resized(pixels: Any, size: Any) -> Any:
    import tensorflow as tf

    resized = tf.image.resize(pixels, size, method="bilinear", antialias=True)
    return tf.cast(tf.clip_by_value(tf.round(resized), 0, 255), tf.uint8)


def _checked(data: Any, height: Any, width: Any) -> Any:
    import tensorflow as tf

    small = (height > 0) & (width > 0) & (height * width <= MOST_PIXELS)
    small = tf.raw_ops.Assert(condition=small, data=[TOO_LARGE])
    with tf.control_dependencies([small]):
        return tf.identity(data)


def _first_of(cases: list[tuple[Any, Callable]], otherwise: Callable) -> Any:
    """`tf.case` as one operation: nested conditions take twice the time, which is felt with small images."""
    import tensorflow as tf

    place = tf.argmax(tf.cast(tf.stack([*(condition for condition, _ in cases), True]), tf.int32), output_type=tf.int32)
    return tf.switch_case(place, [*(branch for _, branch in cases), otherwise])


def _refused(reason: str, instead: Any) -> Any:
    import tensorflow as tf

    with tf.control_dependencies([tf.raw_ops.Assert(condition=False, data=[reason])]):
        return tf.identity(instead)


def _number(data: Any, first: Any, count: int, *, big: bool = False) -> Any:
    """The unsigned number in `count` bytes from `first` on [] int64."""
    import tensorflow as tf

    raw = tf.cast(tf.io.decode_raw(tf.strings.substr(data, first, count), tf.uint8), tf.int64)
    places = range(count)[::-1] if big else range(count)
    return tf.reduce_sum(raw * [256**place for place in places])
