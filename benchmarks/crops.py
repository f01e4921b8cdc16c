"""How much of images is cropped away: each side of a bucket rounded by itself, and the least crop among its neighbours.

The first is the plainest rule. Over aspects from 0.4 to 2.5, equally spaced in their
logarithm.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from interleaved import print_table

from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.images.geometry import bucket_sizes, cropped_shares, round_to_multiples

RESOLUTIONS, ALIGNMENT_PX, LONG_PX = (512, 768, 1024, 1536), 64, 4000
SMALLEST, LARGEST, SHAPES = 0.4, 2.5, 2001


def sizes() -> np.ndarray:
    """Return images of every aspect."""
    aspects = SMALLEST * (LARGEST / SMALLEST) ** (np.arange(SHAPES) / (SHAPES - 1))
    sides = np.stack([np.minimum(1, aspects), np.minimum(1, 1 / aspects)], axis=1)
    return np.rint(LONG_PX * sides).astype(np.int64)


def row(resolution: int) -> list[str]:
    """Return the figures of one resolution."""
    dataset = LocalImages(
        id="any",
        instance_data_dir=Path(),
        resolution=resolution,
        minimum_aspect_ratio=None,
        maximum_aspect_ratio=None,
    )
    aspects = np.divide(*sizes().T)
    ideal = resolution * np.stack([np.sqrt(aspects), 1 / np.sqrt(aspects)], axis=1)
    rounded, least = round_to_multiples(ideal, ALIGNMENT_PX), bucket_sizes(dataset, sizes(), ALIGNMENT_PX)
    crops = [cropped_shares(sizes(), buckets) for buckets in (rounded, least)]
    means = [f"{crop.mean():.1%}" for crop in crops]
    most = " -> ".join(f"{np.quantile(crop, 0.95):.1%}" for crop in crops)
    moved = (rounded != least).any(axis=1).mean()
    return [str(resolution), *means, most, f"{moved:.0%}"]


def main() -> None:
    """Print the table of docs/data.md."""
    columns = ["resolution", "each side rounded", "least crop", "95 % of images lose at most", "another bucket"]
    print_table(f"cropped away, alignment {ALIGNMENT_PX} px", columns, [row(each) for each in RESOLUTIONS])


if __name__ == "__main__":
    main()
