"""The randomness of one sample in one step: it depends on (seed, sample, step) and on nothing else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SampleNoise:
    """What is drawn for a sample: noise of the latents' shape, and three uniform numbers in [0, 1)."""

    noise: np.ndarray
    time: float
    caption: float
    dropout: float


def sample_noise(seed: int, sample_id: str, step: int, occurrence: int, shape: tuple[int, ...]) -> SampleNoise:
    """Return the draw of a sample; `occurrence` tells repeats of it within one global batch apart."""
    digest = hashlib.blake2b(f"{seed}/{sample_id}/{step}/{occurrence}".encode(), digest_size=16).digest()
    random = np.random.Generator(np.random.Philox(key=int.from_bytes(digest)))
    time, caption, dropout = random.random(3)
    return SampleNoise(random.standard_normal(shape, dtype=np.float32), float(time), float(caption), float(dropout))
