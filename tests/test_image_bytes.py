"""One decoding: the same file gives the same pixels in preparation and in what serves, and they are the right ones."""

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from trainer.config import DataConfig, Splits
from trainer.data.manifest import read_manifest
from trainer.data.pictures import decode_all
from trainer.data.prepare import prepare
from trainer.data.reading import load_split
from trainer.image_bytes import ANIMATED, TOO_LARGE, UNKNOWN

HEIGHT, WIDTH = 36, 48
_random = np.random.default_rng(0)
COLOUR = Image.fromarray(_random.integers(0, 256, (7, 9, 3), np.uint8)).resize(
    (WIDTH, HEIGHT), Image.Resampling.BICUBIC
)
CLEAR = COLOUR.convert("RGBA")
CLEAR.putalpha(Image.fromarray(_random.integers(0, 256, (HEIGHT, WIDTH), np.uint8)))


def encoded(image, kind, **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def turned(orientation, *, big=False, before=b""):
    """A JPEG that says how its camera was held, after other segments."""
    exif = Image.Exif()
    exif.endian = ">" if big else "<"
    exif[0x0112] = orientation
    exif[0x010E] = "told by a camera"
    jpeg = encoded(COLOUR, "JPEG", exif=exif)
    return jpeg[:2] + before + jpeg[2:]


COMMENT = b"\xff\xfe\x00\x0a" + b"comment!"
FILES = {
    "JPEG": encoded(COLOUR, "JPEG"),
    "progressive JPEG": encoded(COLOUR, "JPEG", progressive=True),
    "grey JPEG": encoded(COLOUR.convert("L"), "JPEG"),
    "CMYK JPEG": encoded(COLOUR.convert("CMYK"), "JPEG"),
    "PNG": encoded(COLOUR, "PNG"),
    "grey PNG": encoded(COLOUR.convert("L"), "PNG"),
    "one-bit PNG": encoded(COLOUR.convert("1"), "PNG"),
    "PNG with opacity": encoded(CLEAR, "PNG"),
    "grey PNG with opacity": encoded(CLEAR.convert("LA"), "PNG"),
    "PNG with a transparent colour": encoded(COLOUR, "PNG", transparency=COLOUR.getpixel((3, 3))),
    "PNG with a palette": encoded(COLOUR.quantize(200), "PNG"),
    "PNG with a palette of 4 bits": encoded(COLOUR.quantize(16), "PNG"),
    "PNG with a transparent entry": encoded(COLOUR.quantize(3), "PNG", transparency=1),
    "BMP": encoded(COLOUR, "BMP"),
    "grey BMP": encoded(COLOUR.convert("L"), "BMP"),
    "BMP with a palette": encoded(COLOUR.quantize(7), "BMP"),
    "BMP of 32 bits": encoded(CLEAR, "BMP"),
    "WebP": encoded(COLOUR, "WEBP"),
    "lossless WebP": encoded(COLOUR, "WEBP", lossless=True),
    "WebP with opacity": encoded(CLEAR, "WEBP"),
    "lossless WebP with opacity": encoded(CLEAR, "WEBP", lossless=True),
    **{f"JPEG turned {way}": turned(way) for way in range(1, 9)},
    "JPEG turned, told the other way round": turned(6, big=True),
    "JPEG turned, after a comment": turned(6, before=COMMENT),
}  # fmt: skip


def by_pillow(data, channels):
    """What people see, by another decoder: upright, laid on black."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (0, 0, 0, 255)), image)
    pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    return pixels.reshape(*pixels.shape[:2], channels)


@pytest.mark.parametrize("channels", [1, 3])
def test_every_kind_of_file_is_decoded_to_the_bit_as_pillow_decodes_it(channels):
    for upright in (True, False):
        names = [name for name in FILES if (by_pillow(FILES[name], 3).shape[0] == HEIGHT) == upright]
        wanted = [by_pillow(FILES[name], channels) for name in names]
        pixels, sizes, faults = decode_all([FILES[name] for name in names], wanted[0].shape, resize=False)
        assert not faults
        assert set(sizes) == {f"{HEIGHT}×{WIDTH}" if upright else f"{WIDTH}×{HEIGHT}"}
        differing = [name for name, a, b in zip(names, pixels, wanted, strict=True) if not np.array_equal(a, b)]
        assert not differing


def test_of_16_bits_the_upper_eight_are_kept():
    deep = (np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH) * 37 % 65_536).astype(np.uint16)
    pixels, _, faults = decode_all([encoded(Image.fromarray(deep), "PNG")], (HEIGHT, WIDTH, 1), resize=False)
    assert not faults
    np.testing.assert_array_equal(pixels[0, ..., 0], deep >> 8)


def test_a_turned_photograph_is_resized_as_if_it_had_been_upright():
    upright = encoded(COLOUR.transpose(Image.Transpose.ROTATE_270), "PNG")
    exif = Image.Exif()
    exif[0x0112] = 6
    lying = encoded(COLOUR, "JPEG", exif=exif, quality=100, subsampling=0)
    (one, other), _, _ = decode_all([upright, lying], (20, 10, 3), resize=True)
    assert np.abs(one.astype(int) - other).max() <= 4  # JPEG's own loss


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", UNKNOWN),
        (b"\xff\xd8", UNKNOWN),
        (b"BM", "is not a readable image"),
        (b"RIFF\0\0\0\0WAVEfmt ", UNKNOWN),
        (encoded(COLOUR, "GIF"), UNKNOWN),
        (encoded(COLOUR, "TIFF"), UNKNOWN),
        (encoded(COLOUR.convert("1"), "BMP"), UNKNOWN),
        (encoded(COLOUR, "WEBP", save_all=True, append_images=[CLEAR]), ANIMATED),
        *((data[: len(data) // 2], "is not a readable image") for data in (FILES["JPEG"], FILES["PNG"], FILES["WebP"])),
        (FILES["PNG"][:16] + b"\0\0\x80\0" * 2 + FILES["PNG"][24:], TOO_LARGE),
        (FILES["BMP"][:18] + b"\0\0\x80\0" * 2 + FILES["BMP"][26:], TOO_LARGE),
        (FILES["lossless WebP"][:21] + b"\xff\xff\xff\x0f" + FILES["lossless WebP"][25:], TOO_LARGE),
        (FILES["WebP"][:26] + b"\xff\x3f\xff\x3f" + FILES["WebP"][30:], TOO_LARGE),
    ],
)
def test_what_is_not_read_is_named_and_harms_no_other(data, fault):
    good = FILES["PNG"]
    pixels, _, faults = decode_all([good, data, good], (HEIGHT, WIDTH, 3), resize=True)
    assert faults == {1: fault}
    assert (pixels[[0, 2]] == np.asarray(COLOUR)).all()


def test_exif_that_makes_no_sense_turns_nothing():
    whole = turned(6)
    start = whole.index(b"Exif\0\0") + 6
    directory = whole[: start + 4] + b"\xff\xff\xff\xff" + whole[start + 8 :]
    many = whole[: start + 8] + b"\xff\xff" + whole[start + 10 :]
    segments = whole[:2] + COMMENT * 100 + whole[2:]
    value = whole.replace((0x0112).to_bytes(2, "little"), b"\xff\x7f", 1)
    _, sizes, faults = decode_all([directory, segments, value], (HEIGHT, WIDTH, 3), resize=False)
    assert not faults
    assert set(sizes) == {f"{HEIGHT}×{WIDTH}"}
    _, sizes, _ = decode_all([many], (WIDTH, HEIGHT, 3), resize=False)  # what can be read of it is
    assert sizes == [f"{WIDTH}×{HEIGHT}"]


def test_preparation_and_serving_see_the_same_pixels_in_the_same_file(tmp_path):
    """A model that answers its input, exported: what it is sent as files, and what was prepared from the same files."""
    import keras
    import tensorflow as tf

    from trainer.export import export_model, reference_examples

    shape = (16, 12, 3)
    for place, (name, data) in enumerate(FILES.items()):
        for split in ("train", "test"):
            file = tmp_path / "in" / split / ("even", "odd")[place % 2] / f"{place:02d}-{name}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
    config = DataConfig(
        source="image_folder", path=str(tmp_path / "in"), image_size=shape[:2],
        splits=Splits(train="train", validation=None, test="test"),
    )  # fmt: skip
    prepare(config, 7, tmp_path / "examples")
    manifest = read_manifest(tmp_path / "examples")
    image = keras.Input(shape, dtype="uint8", name="image")
    answers = keras.layers.Flatten()(keras.layers.Rescaling(1 / 64)(image))
    model = keras.Model({"image": image}, answers)
    manifest = manifest.model_copy(update={"label": manifest.label.model_copy(update={"class_names": ["c"] * 576})})
    reference = reference_examples(tmp_path / "examples", manifest)
    export_model(model, manifest, reference, tmp_path / "model")
    loaded = tf.saved_model.load(str(tmp_path / "model" / "saved_model"))
    served = loaded.signatures["image_bytes"](image=tf.constant(list(FILES.values()), tf.string))
    assert served["ok"].numpy().all()
    prepared = load_split(tmp_path / "examples", manifest, "test")[0]["image"]
    logits = tf.reshape(tf.cast(prepared, tf.float32) / 64, [len(prepared), -1])
    wanted = tf.nn.softmax(logits).numpy()
    for name, row in zip(FILES, served["probabilities"].numpy(), strict=True):  # one grey level is 2e-5
        assert np.abs(wanted - row).max(axis=1).min() < 1e-7, name
