"""Measure what a LoRA of two subjects has learned, and what it changed beside: colours of the shapes in its validation.

For each prompt: in how many images the colour is that of the prompt, its mean distance to it, and how far the images
are from those of the base model with the same seed, all in levels of 255.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import draw_subjects
import numpy
from PIL import Image

LEAST_CHROMA = 60  # between the strongest and the weakest part of a colour; the background is grey
SCALE = 2


def read(path: Path) -> numpy.ndarray:
    return numpy.asarray(Image.open(path).convert("RGB")).astype(float)


def colour_of(image: numpy.ndarray) -> numpy.ndarray:
    """Return the mean colour of what is coloured."""
    mask = numpy.ptp(image, axis=-1) > LEAST_CHROMA
    return image[mask].mean(axis=0) if mask.any() else numpy.full(3, 255.0)


def measure(folder: Path) -> dict[str, list[tuple[str, float, float]]]:
    """Return by prompt, for each seed: the nearest colour, the distance to that asked for, and to the base's image."""
    palette = {name: numpy.array(each, float) for name, each in draw_subjects.palette().items()}
    found = defaultdict(list)
    for path in sorted(folder.glob("trained-*.png")):
        info = json.loads(Image.open(path).text["simpletuner"])
        image, base = read(path), read(path.with_name(path.name.replace("trained", "base")))
        own = colour_of(image)
        nearest = min(palette, key=lambda name: float(numpy.linalg.norm(palette[name] - own)))
        away = numpy.linalg.norm(palette[draw_subjects.colour_asked(info["prompt"])] - own)
        found[info["prompt"]].append((nearest, float(away), float(numpy.abs(image - base).mean())))
    return found


def main() -> None:
    """Print a line for each prompt of the last validation of a run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("outputs", type=Path, nargs="+", help="output_dir of each run")
    parser.add_argument("--picture", type=Path, help="write one image of each prompt: base model, then each run")
    given = parser.parse_args()
    folders = [max((each / "validation").glob("step-*")) for each in given.outputs]
    for folder in folders:
        print(folder)
        for prompt, seeds in measure(folder).items():
            right = sum(name == draw_subjects.colour_asked(prompt) for name, _, _ in seeds)
            away, moved = (numpy.mean([each[place] for each in seeds]) for place in (1, 2))
            said = f"{right} of {len(seeds)} right, {away:5.1f} away from it, {moved:5.1f} from the base model"
            print(f"  {prompt:18} {said}")
    if given.picture:
        compose(folders).save(given.picture)


def compose(folders: list[Path]) -> Image.Image:
    """Return one image of each prompt, in a row for the base model and one for each run."""
    numbers = range(0, len(draw_subjects.ASKED) * draw_subjects.SEEDS, draw_subjects.SEEDS)
    rows = [(folders[0], "base"), *((folder, "trained") for folder in folders)]
    side, gap = draw_subjects.SIZE_PX[0] * SCALE, 4
    sheet = Image.new("RGB", ((side + gap) * len(numbers) - gap, (side + gap) * len(rows) - gap), "white")
    for top, (folder, weights) in enumerate(rows):
        for left, number in enumerate(numbers):
            image = Image.open(folder / f"{weights}-{number:02d}.png").convert("RGB")
            sheet.paste(image.resize((side, side), Image.Resampling.BICUBIC), (left * (side + gap), top * (side + gap)))
    return sheet


if __name__ == "__main__":
    main()
