"""ICC profiles: pixels in Adobe RGB, Display P3, CMYK or a profile of greys become sRGB, as browsers show them."""

from __future__ import annotations

from functools import lru_cache
from io import BytesIO

import numpy as np
from PIL import Image, ImageCms

# Of the pixels that a profile describes, by its colour space.
MODES = {"RGB ": "RGB", "GRAY": "L", "CMYK": "CMYK"}
GREYS = ("1", "L", "LA")
# By how many of 255 levels sRGB profiles of several makers differ from one another.
SAME_LEVELS = 2


def to_srgb(image: Image.Image, profile: bytes) -> Image.Image | None:
    """Return an 8-bit image in sRGB without transparency; None where it is so already, or no profile fits."""
    mode = "CMYK" if image.mode == "CMYK" else "L" if image.mode in GREYS else "RGB"
    transform = transform_of(profile, mode)
    return transform.apply(image.convert(mode)) if transform is not None else None


@lru_cache(maxsize=16)  # a profile of CMYK may have 2 MB; those of one camera are the same
def transform_of(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Return what converts pixels of a mode; None for sRGB, for a damaged profile and for one of another mode."""
    try:
        source = ImageCms.ImageCmsProfile(BytesIO(profile))
        if MODES.get(source.profile.xcolor_space) != mode:  # pyright: ignore[reportAttributeAccessIssue] (Pillow says a file)
            return None
        transform = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
    except (OSError, ImageCms.PyCMSError):
        return None
    return transform if mode != "RGB" or changes_colours(transform) else None


def changes_colours(transform: ImageCms.ImageCmsTransform) -> bool:
    """Return whether a transform of RGB is more than rounding; most profiles in photographs are that of sRGB."""
    # 18 levels per channel with both ends: 5,832 colours stand for 16.7 million.
    levels = np.arange(0, 256, 15, dtype=np.uint8)
    colours = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(len(levels), -1, 3)
    converted = np.asarray(transform.apply(Image.fromarray(colours)))
    return int(np.abs(converted.astype(np.int16) - colours).max()) > SAME_LEVELS
