"""Read image files: sizes from headers only, pixels in any mode that cameras and web pages produce, and loss
masks.

Files are binary streams that can seek, so a store need not be a folder. Masks become grey images, with a
remark on content that is unusual for a mask.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from threading import Lock
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from simpletuner.data.images.colours import Colours, of_boxes, of_exif, of_tiff, to_srgb
from simpletuner.data.images.containers import StoredImage, pixels_only, read_container
from simpletuner.data.images.image_formats import INSTALL, PILLOW_FORMATS, PLUGIN_FORMAT, is_heif, register_plugin
from simpletuner.data.images.orientation import TAG, UPRIGHT, turned_upright

DECODE_ERRORS = (OSError, SyntaxError, ValueError, RuntimeError, EOFError, Image.DecompressionBombError)
"""Exceptions of Pillow and its plugins for a file that is no image, cut short or absurdly large."""

# 1.6 GB while it is decoded; JPEGs are decoded at an eighth of their sides, and take 25 MB.
MAX_PIXELS = 400_000_000
PILLOW_MAX_PIXELS = {"WEBP": 178_956_970}
"""Pixel limits of Pillow decoders with a limit of their own, one for the whole process."""
# Pixel count of a large image: it is decoded alone, and shrunk before the conversion of its colours, which
# takes up to four times its memory.
LARGE_PIXELS = 1 << 26
STRIP_PIXELS = 1 << 22
ONE_LARGE_IMAGE = Lock()

ONE_CHANNEL = ("1", "L", "LA", "I", "I;16", "I;16B", "F")
"""Pillow's modes of greys."""

# White of grey images beyond 8 bits, and the largest value of 12 bits, which then is 6 % of white.
WHITE, DARK = 65535, 4095

DOUBT = "simpletuner_doubt"
"""Key of what may be wrong about the colours, in the `info` of a decoded image."""


@dataclass(frozen=True)
class ImageHeader:
    """Facts from an image's or video's header: upright (width, height) as displayed."""

    size: tuple[int, int]
    animated: bool = False
    frames: int = 1
    fps: float = 0
    """0 for an image."""
    has_sound: bool = False
    """True of a video with a sound track that can be decoded."""


def read_header(file: BinaryIO) -> ImageHeader:
    """Read an image's header. Raises one of DECODE_ERRORS."""
    stored = read_stored(file)
    return ImageHeader(stored.size, stored.animated)


def read_stored(file: BinaryIO) -> StoredImage:
    """Read an image's storage, as `read_rgb` decodes it. Raises one of DECODE_ERRORS, also for its size."""
    if (found := read_container(file)) is None:
        with open_image(file) as image:
            is_animated = getattr(image, "is_animated", False)
            found = StoredImage(image.size, read_orientation(image), is_animated, image.format or "")
    width, height = found.stored
    if width * height > (limit := PILLOW_MAX_PIXELS.get(found.image_format, MAX_PIXELS)):
        of_format = f" of a {found.image_format} file" if limit != MAX_PIXELS else ""
        raise ValueError(
            f"has {width:,} x {height:,} px, {width * height / 1e6:,.0f} megapixels; at most {limit / 1e6:,.0f} are "
            f"read{of_format}: make it smaller"
        )
    return found


def open_image(file: BinaryIO) -> Image.Image:
    """Open an image by its content, whatever its name says. Raises one of DECODE_ERRORS.

    Pillow would try 40 more plugins by content; EPS, for one, starts Ghostscript whatever the file's name.
    Plugins are called without Image.open, whose pixel limit is one for the process and prints a Python
    warning.
    """
    file.seek(0)
    head = file.read(16)
    is_heic = is_heif(head)
    has_plugin = is_heic and register_plugin()
    Image.init()  # it imports the plugins once
    for name in (*PILLOW_FORMATS, *([PLUGIN_FORMAT] if has_plugin else [])):
        factory, accept = Image.OPEN.get(name, (None, None))
        if factory and (not accept or accept(head) is True):
            file.seek(0)
            try:
                return factory(file, "")
            except (SyntaxError, IndexError, TypeError, struct.error):  # as Image.open: the next plugin
                continue
    lacks_plugin = is_heic and not has_plugin
    raise UnidentifiedImageError(
        f"is HEIC: {INSTALL}" if lacks_plugin else "is not an image in a known format, or is damaged"
    )


def read_orientation(image: Image.Image) -> int:
    # Pillow has done it for TIFF, and its plugin for HEIC.
    value = image.getexif().get(TAG, 1) if image.format == "WEBP" or "exif" in image.info else 1
    return value if value in UPRIGHT else 1


def read_rgb(file: BinaryIO, smallest: tuple[int, int], size: tuple[int, int] | None = None) -> Image.Image:
    """Decode an image to upright RGB; large ones are decoded no larger than needed for `smallest` (width,
    height) px.

    Raises ValueError where the image does not have the `size` for which its bucket and crop were chosen.
    """
    header = read_stored(file)
    if size and header.size != size:
        raise ValueError("has {}x{} px, not {}x{}: the table is wrong, or the file changed".format(*header.size, *size))
    pixels, colours = pixels_only(file)
    with open_image(pixels) as image:
        if not image.info.get("icc_profile"):
            colours = colours if image.format in ("JPEG", "MPO", "PNG") else other_colours(image, file)
            profile = colours.grey_profile if image.mode in ONE_CHANNEL else colours.profile
            image.info |= {"icc_profile": profile} if profile else {}
        # The larger side twice: draft works on the stored image, whose sides may be swapped afterwards.
        edge = max(smallest)
        image.draft("RGB", (edge, edge))
        if image.width * image.height > LARGE_PIXELS:
            with ONE_LARGE_IMAGE:
                decoded = reduced(image, min(image.size) // (3 * edge))
        else:
            image.load()
            decoded = image
        doubt = doubt_about_scale(decoded) or colours.doubt
        rgb = to_rgb(turned_upright(decoded, header.orientation))
        rgb.info[DOUBT] = doubt
        return rgb


def other_colours(image: Image.Image, file: BinaryIO) -> Colours:
    """Colours of formats that Pillow reads from the whole file."""
    if image.format == "TIFF":
        return of_tiff(getattr(image, "tag_v2", {}), file)
    found = of_boxes(file) if image.format in ("AVIF", "HEIF") else Colours()
    return found if found != Colours() else of_exif(image.info.get("exif") or b"")


def reduced(image: Image.Image, factor: int) -> Image.Image:
    """Decode an image and shrink it by a whole number, strip by strip, in the colours of its profile."""
    image.load()
    if factor < 2:
        return image
    rows = max(STRIP_PIXELS // image.width // factor, 1) * factor
    small = None
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        part = averageable(strip).reduce(factor)
        if small is None:
            small = Image.new(part.mode, (part.width, -(-image.height // factor)))
            small.info = {key: value for key, value in image.info.items() if key == "icc_profile"}
        small.paste(part, (0, top // factor))
    assert small is not None
    return small


def averageable(image: Image.Image) -> Image.Image:
    """Return an image in a mode whose values may be averaged."""
    if "transparency" in image.info or image.mode == "PA":
        return image.convert("RGBA")
    return image.convert({"P": "RGB", "1": "L", "I;16": "I", "I;16B": "I"}.get(image.mode, image.mode))


def doubt_about_scale(image: Image.Image) -> str:
    """Doubt about the scale of 16-bit grey values; empty if 65535 occurs as white.

    Files do not say how many of their 16 or 32 bits are used, so microscopes and scanners of 12 bits write
    white as 4095.
    """
    if image.mode == "F" and (count := int((~np.isfinite(np.asarray(image))).sum())):
        return f"{count:,} of its values are no numbers or infinite: taken for black, or for the largest number"
    if not image.mode.startswith("I"):
        return ""
    top = int(np.asarray(image).max())
    return (
        ""
        if top == 0 or DARK < top <= WHITE
        else f"its largest grey value is {top:,}, and white is taken to be {WHITE:,}"
    )


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert grey, 16-bit, palette, CMYK and transparent images to 8-bit sRGB, transparency over white."""
    profile = image.info.get("icc_profile")
    if image.mode.startswith("I") or image.mode == "F":
        # Pillow clips 16-bit values at 255 instead of scaling them: nearly every pixel would be white.
        values = np.asarray(image, dtype=np.float64)
        # One NaN would be the maximum, and all others black.
        top = (
            WHITE if image.mode.startswith("I") else max(float(values.max(initial=0, where=np.isfinite(values))), 1e-9)
        )
        values = np.nan_to_num(values, nan=0, posinf=top, neginf=0)
        image = Image.fromarray(np.clip(values / top * 255, 0, 255).round().astype(np.uint8))
    is_transparent = image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info
    layered = image.convert("RGBA") if is_transparent else None
    converted = to_srgb(image, profile) if profile else None
    if layered is None:
        return converted or image.convert("RGB")
    if converted is not None:
        converted.putalpha(layered.getchannel("A"))
    return Image.alpha_composite(Image.new("RGBA", layered.size, "white"), converted or layered).convert("RGB")


def resize_and_crop(
    image: Image.Image, resized: tuple[int, int], crop_left_top: tuple[int, int], target: tuple[int, int]
) -> np.ndarray:
    """Return pixels (height, width, 3), float32 in [-1, 1]; every argument in px, width first."""
    return np.asarray(cropped(image, resized, crop_left_top, target), dtype=np.float32) / 127.5 - 1.0


def cropped(
    image: Image.Image, resized: tuple[int, int], crop_left_top: tuple[int, int], target: tuple[int, int]
) -> Image.Image:
    left, top = crop_left_top
    # From 3.0 on the result can hardly be told from resizing in one step, by Pillow's documentation.
    whole = image.resize(resized, Image.Resampling.LANCZOS, reducing_gap=3.0) if image.size != resized else image
    return whole.crop((left, top, left + target[0], top + target[1]))


ALL_BLACK = "its mask is black where the image is trained: nothing of it counts"
PAINTED = "its mask has an alpha channel: what is transparent does not count, the rest by its grey"
CUT_OUT = "its mask is a picture with an alpha channel, which is taken for the mask"
EDGE_GREY = 16
# Share of opaque pixels in black or white (up to EDGE_GREY) that makes the grey the mask; otherwise the alpha
# channel is.
MOSTLY = 0.9


def read_mask_image(file: BinaryIO, smallest: tuple[int, int]) -> Image.Image:
    """Decode a mask to grey, large ones no larger than needed for `smallest`; its doubt is in `info`.

    Programs that remove backgrounds write the picture with an alpha channel, editors white strokes on a
    transparent layer; over white, as images are, all that is transparent would count. Raises one of
    DECODE_ERRORS.
    """
    over_white = read_rgb(file, smallest)
    grey, alpha = over_white.convert("L"), read_alpha(file)
    if alpha is None or alpha.getextrema() == (255, 255):
        grey.info[DOUBT] = over_white.info[DOUBT]
        return grey
    opacity = np.asarray(alpha.resize(grey.size, Image.Resampling.BOX), np.int16)
    values = np.asarray(grey, np.int16)
    opaque = values[opacity > 127]
    is_painted = ((opaque < EDGE_GREY) | (opaque > 255 - EDGE_GREY)).mean() > MOSTLY if opaque.size else True
    mask = np.clip(values + opacity - 255, 0, 255) if is_painted else opacity  # over black
    found = Image.fromarray(mask.astype(np.uint8))
    found.info[DOUBT] = PAINTED if is_painted else CUT_OUT
    return found


def read_alpha(file: BinaryIO) -> Image.Image | None:
    """Return the alpha channel of an image, upright; None where it has none."""
    orientation = read_stored(file).orientation
    pixels, _ = pixels_only(file)
    with open_image(pixels) as image:
        if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
            return None
        return turned_upright(image.convert("RGBA").getchannel("A"), orientation)
