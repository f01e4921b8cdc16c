"""Masks of the loss as grey images, and what in them says something else than a mask."""

from __future__ import annotations

from typing import BinaryIO

import numpy as np
from PIL import Image

from simpletuner.data.images.containers import pixels_only
from simpletuner.data.images.images import DOUBT, open_image, read_rgb, read_stored
from simpletuner.data.images.orientation import turned_upright

ALL_BLACK = "its mask is black where the image is trained: nothing of it counts"
PAINTED = "its mask has an alpha channel: what is transparent does not count, the rest by its grey"
CUT_OUT = "its mask is a picture with an alpha channel, which is taken for the mask"
EDGE_GREY = 16
MOSTLY = 0.9
"""Of the opaque pixels, black or white up to EDGE_GREY: then the grey is the mask, and no picture that was cut out."""


def read_mask_image(file: BinaryIO, smallest: tuple[int, int]) -> Image.Image:
    """Decode a mask to grey, large ones no larger than needed for `smallest`; its doubt is in `info`.

    Programs that remove backgrounds write the picture with an alpha channel, editors white strokes on a transparent
    layer; over white, as images are, all that is transparent would count. Raises one of DECODE_ERRORS.
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
