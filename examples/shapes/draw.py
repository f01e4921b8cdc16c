"""Draw the demo's picture set: one coloured shape on a light background, with its caption in a file beside it.

With --before, pairs: each shape in another colour there, and captions that say which one it gets.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS = {
    "red": (222, 40, 40),
    "green": (30, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (245, 200, 20),
}
TURNS = {  # directions of a shape's corners, in turns from straight up, and how far out each lies
    "circle": [(step / 72, 1.0) for step in range(72)],
    "square": [(step / 4 + 1 / 8, 1.15) for step in range(4)],
    "triangle": [(step / 3, 1.2) for step in range(3)],
}
SIZES_PX = [(64, 64), (96, 64), (64, 96)]
SUPERSAMPLING = 4


def corners(shape: str, centre: tuple[float, float], radius: float) -> list[tuple[float, float]]:
    """Return the outline of a shape as points in pixels."""
    turns = [(2 * math.pi * turn, radius * reach) for turn, reach in TURNS[shape]]
    return [(centre[0] + reach * math.sin(angle), centre[1] - reach * math.cos(angle)) for angle, reach in turns]


def draw(shape: str, colour: str, size_px: tuple[int, int], dice: random.Random) -> Image.Image:
    """Draw one shape, nearly centred, a little varied in place, size and shade."""
    width, height = (side * SUPERSAMPLING for side in size_px)
    short = min(width, height)
    centre = (width / 2 + short * dice.uniform(-0.06, 0.06), height / 2 + short * dice.uniform(-0.06, 0.06))
    background = (dice.randint(236, 250),) * 3
    picture = Image.new("RGB", (width, height), background)
    shade = tuple(min(255, max(0, part + dice.randint(-8, 8))) for part in COLOURS[colour])
    ImageDraw.Draw(picture).polygon(corners(shape, centre, short * dice.uniform(0.27, 0.33)), fill=shade)
    return picture.resize(size_px, Image.Resampling.BOX)


def draw_all(count: int, seed: int) -> Iterator[tuple[str, Image.Image]]:
    """Yield `count` captions with their pictures, every shape, colour and size equally often."""
    dice = random.Random(seed)
    kinds = itertools.cycle(itertools.product(SIZES_PX, TURNS, COLOURS))
    for size_px, shape, colour in itertools.islice(kinds, count):
        yield f"a {colour} {shape}", draw(shape, colour, size_px, dice)


def draw_pairs(count: int, seed: int) -> Iterator[tuple[str, Image.Image, Image.Image]]:
    """Yield `count` captions with a picture before and after, every shape and change of colour equally often."""
    kinds = itertools.cycle((shape, *change) for shape in TURNS for change in itertools.permutations(COLOURS, 2))
    for index, (shape, old, new) in enumerate(itertools.islice(kinds, count)):
        before, after = (draw(shape, colour, (64, 64), random.Random(f"{seed}/{index}")) for colour in (old, new))
        yield f"make it {new}", before, after


def main() -> None:
    """Write the pictures and captions into the folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=252, help="how many; a multiple of 36 is even (default: 252)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--before", type=Path, help="folder for what each picture was before")
    options = parser.parse_args()
    for folder in filter(None, (options.folder, options.before)):
        folder.mkdir(parents=True, exist_ok=True)
    if options.before:
        pictures = []
        for index, (caption, before, after) in enumerate(draw_pairs(options.count, options.seed)):
            before.save(options.before / f"{index:04d}.png")
            pictures.append((caption, after))
    else:
        pictures = draw_all(options.count, options.seed)
    for index, (caption, picture) in enumerate(pictures):
        path = options.folder / f"{index:04d}.png"
        picture.save(path)
        path.with_suffix(".txt").write_text(caption + "\n")


if __name__ == "__main__":
    main()
