"""Encoded image files → pixels of one size, checked before they are unpacked.

pixels, size = decode(data, size=(32, 32), channels=3)
"""

import io
import warnings
from typing import Any

import numpy as np

_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP")
_MOST_PIXELS = 64 * 1024**2  # a file of 2 KB can claim 13,000 × 13,000


class BadImage(ValueError):
    """Data that is not an image we can use; the message says why."""


def decode(data: bytes, size: tuple[int, int] | None, channels: int) -> tuple[np.ndarray, tuple[int, int]]:
    """Decodes one image; its EXIF rotation is applied, transparency is laid on black.

    Args:
        data: A JPEG, PNG, GIF (first picture), BMP or WebP file.
        size: Height and width to resize to, smoothly. None: its own.
        channels: 1 for grey, 3 for colour.

    Returns:
        Pixels [height, width, channels] uint8, and height and width before resizing.

    Raises:
        BadImage: It cannot be decoded, or is too large.
    """
    from PIL import Image, ImageOps

    try:
        with _opened(data) as image:
            if image.width * image.height > _MOST_PIXELS:
                raise BadImage(f"has more than {_MOST_PIXELS:,} pixels")
            image = ImageOps.exif_transpose(image)
            before = (image.height, image.width)
            if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, (0, 0, 0, 255)), image)
            elif image.mode.startswith("I") or image.mode == "F":
                raise BadImage(f"has pixels of mode {image.mode}, and 8 bits a channel are needed")
            image = image.convert("L" if channels == 1 else "RGB")
            if size is not None and before != tuple(size):
                image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
            pixels = np.asarray(image, np.uint8)
    except BadImage:
        raise
    except Exception:  # a decoder meets anything in a damaged file, and its words hold addresses of this process
        raise BadImage("is not a readable image") from None
    return pixels.reshape(*pixels.shape[:2], channels), before


def _opened(data: bytes) -> Any:
    """The image with its header read. Pillow's own opinion of large images is not asked: ours is stricter."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            return Image.open(io.BytesIO(data), formats=_FORMATS)
        except Image.DecompressionBombError:
            raise BadImage(f"has more than {_MOST_PIXELS:,} pixels") from None
