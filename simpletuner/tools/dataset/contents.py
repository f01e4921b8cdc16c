"""Read the images of a dataset once: those that cannot be decoded, and looks, to find duplicates."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import xxhash
from PIL import Image

from simpletuner.caches.latents import decode_mask, decode_sound
from simpletuner.data.images.images import DECODE_ERRORS, DOUBT, read_rgb
from simpletuner.data.images.sounds import SoundFormat
from simpletuner.data.samples.samples import DatasetSamples, Sample
from simpletuner.system.processes.threads import run_bounded

# Images are decoded no larger than needed for this, where their format allows.
SMALL_PX = 128
COLOURS_PX = 16
# Levels by which compression may change the mean brightness of a part.
NOISE = 2


@dataclass(frozen=True)
class Content:
    """Fingerprints by which an image is compared."""

    checksum: bytes
    gradients: int
    """dHash (64 bits): where brightness falls from left to right in 8 rows of 9 pixels."""
    colours: np.ndarray
    """(16, 16, 3) uint8."""
    doubt: str = ""
    """Remark on its colours."""
    doubt_of_mask: str = ""

    @cached_property
    def contrast(self) -> float:
        """Standard deviation of the colours."""
        return float(self.colours.std(axis=(0, 1)).mean())


@dataclass
class Contents:
    """The images of a dataset by their index; those that cannot be decoded, with the reason."""

    images: dict[int, Content] = field(default_factory=dict)
    damaged: dict[int, str] = field(default_factory=dict)


# Form in which sound is decoded to see whether it can be: that of a model is known once it is opened.
ANY_SOUND = SoundFormat(16000, 2, 24)


def read_contents(samples: DatasetSamples, threads: int, show: Callable[[int], object]) -> Contents:
    contents = Contents()
    read = run_bounded(lambda index: read_content(samples[index]), range(len(samples)), threads, lambda: None)
    for done, (index, future) in enumerate(read, start=1):
        result = future.result()
        if isinstance(result, str):
            contents.damaged[index] = result
        else:
            contents.images[index] = result
        show(done)
    return contents


def read_content(sample: Sample) -> Content | str:
    """Return hashes of an image, or of a clip's first frame, to compare it by; the reason as text if it
    cannot be decoded."""
    try:
        if sample.geometry.clip:
            (image,) = sample.images((SMALL_PX, SMALL_PX), places=[0])
            digest = xxhash.xxh3_128()
            for name in sample.files():
                with sample.storage.open(name) as file:
                    while block := file.read(1 << 20):
                        digest.update(block)
            if sample.has_sound and isinstance(why := decode_sound(sample, ANY_SOUND), str):
                return why
            return content_of(digest.digest(), image)
        with sample.open() as file:
            content = file.read()
        image = read_rgb(io.BytesIO(content), (SMALL_PX, SMALL_PX), sample.geometry.original.size)
        doubt_of_mask = decode_mask(sample.mask, sample.geometry)[1] if sample.mask else ""
        for reference in sample.references:
            next(iter(reference.images((SMALL_PX, SMALL_PX))))
    except DECODE_ERRORS as error:
        return str(error) or type(error).__name__
    return replace(content_of(xxhash.xxh3_128_digest(content), image), doubt_of_mask=doubt_of_mask)


def content_of(checksum: bytes, image: Image.Image) -> Content:
    # Ten lines instead of a dependency: imagehash needs SciPy and PyWavelets, for hashes not used here.
    grey = shrink(image.convert("L"), (9, 8)).astype(np.int16)
    falls = grey[:, :-1] - grey[:, 1:] > NOISE
    gradients = int.from_bytes(np.packbits(falls).tobytes())
    return Content(checksum, gradients, shrink(image, (COLOURS_PX, COLOURS_PX)), image.info.get(DOUBT, ""))


def shrink(image: Image.Image, size: tuple[int, int]) -> np.ndarray:
    # Means of areas, in which the noise of compression cancels.
    return np.asarray(image.resize(size, Image.Resampling.BOX))
