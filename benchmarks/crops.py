"""How much of images is cropped away: each side of a bucket rounded by itself, and the least crop among its neighbours.

The first is what version 0.1.0 did and the original does. Over aspects from 0.4 to 2.5, equally spaced in their
logarithm.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from interleaved import print_table

from simpletuner.data.batch_sampler import DATA_VERSION
from simpletuner.data.datasets import ImageDataset
from simpletuner.data.geometry import Size, bucket_size, cropped_share

RESOLUTIONS, ALIGNMENT_PX, LONG_PX = (512, 768, 1024, 1536), 64, 4000
SMALLEST, LARGEST, SHAPES = 0.4, 2.5, 2001


def sizes() -> list[Size]:
    """Return images of every aspect."""
    aspects = [SMALLEST * (LARGEST / SMALLEST) ** (number / (SHAPES - 1)) for number in range(SHAPES)]
    return [(round(LONG_PX * min(1, aspect)), round(LONG_PX * min(1, 1 / aspect))) for aspect in aspects]


def row(resolution: int) -> list[str]:
    """Return the figures of one resolution."""
    dataset = ImageDataset(
        id="any",
        instance_data_dir=Path(),
        resolution=resolution,
        minimum_aspect_ratio=None,
        maximum_aspect_ratio=None,
    )
    buckets = {
        version: [bucket_size(dataset, size, ALIGNMENT_PX, version) for size in sizes()]
        for version in (1, DATA_VERSION)
    }
    crops = {
        version: [cropped_share(size, bucket) for size, bucket in zip(sizes(), found, strict=True)]
        for version, found in buckets.items()
    }
    means = [f"{statistics.mean(crop):.1%}" for crop in crops.values()]
    most = " -> ".join(f"{statistics.quantiles(crop, n=20)[-1]:.1%}" for crop in crops.values())
    moved = statistics.mean(one != two for one, two in zip(*buckets.values(), strict=True))
    return [str(resolution), *means, most, f"{moved:.0%}"]


def main() -> None:
    """Print the table of docs/data.md."""
    columns = ["resolution", "each side rounded", "least crop", "95 % of images lose at most", "another bucket"]
    print_table(f"cropped away, alignment {ALIGNMENT_PX} px", columns, [row(each) for each in RESOLUTIONS])


if __name__ == "__main__":
    main()
