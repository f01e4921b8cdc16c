"""The randomness of one sample in one step: a function of (seed, sample, step, occurrence) and of nothing else.

So no rank, thread or batch size can change what a sample is trained with, and a resumed run repeats it bit for bit.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SampleNoise:
    """The random numbers of a sample: float32 noise of the latents' shape, and three uniform numbers in [0, 1).

    `u` becomes the timestep, `caption` chooses one of several captions, `dropout` is compared with the dropout rate.
    """

    noise: np.ndarray
    u: float
    caption: float
    dropout: float


def sample_noise(seed: int, sample_id: str, step: int, occurrence: int, shape: tuple[int, ...]) -> SampleNoise:
    """Return a sample's random numbers. `occurrence` counts its copies in the same global batch: without it in the
    key, the copies of an oversubscribed bucket would be trained with the same noise, which teaches nothing new."""
    # 16 bytes: Philox takes a key of 128 bits as it is, without a seed sequence to hash.
    digest = hashlib.blake2b(f"{seed}/{sample_id}/{step}/{occurrence}".encode(), digest_size=16).digest()
    random = np.random.Generator(np.random.Philox(key=int.from_bytes(digest)))
    u, caption, dropout = random.random(3)
    return SampleNoise(random.standard_normal(shape, dtype=np.float32), float(u), float(caption), float(dropout))
