"""How many of eight seeds draw what a prompt of `make demo` asks for, as diffusers samples the finished pipeline.

    python benchmarks/demo.py [OUTPUT_DIR] [--image=GRID.png]

Right is an image that has the colour that the prompt names, and whose outline, scaled, overlaps with that of the drawn
shape; `a yellow triangle` is in no caption.
"""

from __future__ import annotations

import argparse
import random
import sys
import tomllib
from functools import cache
from pathlib import Path

import numpy
import torch
from diffusers import StableDiffusionXLPipeline
from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples" / "shapes"))
import draw as shapes  # noqa: E402  # pyright: ignore[reportMissingImports]

SEEDS = 8
LEAST_CHROMA = 60  # of 255, between the strongest and the weakest part of a colour; the background is grey
LEAST_OVERLAP = 0.8  # of intersection and union with the shape as it is drawn; circle and square have 0.79
SIDE_PX = 64  # that masks are scaled to


def mask_of(image: Image.Image) -> numpy.ndarray:
    """Return what is coloured, cut out and scaled to SIDE_PX x SIDE_PX; without a pixel where nothing is."""
    mask = numpy.ptp(numpy.asarray(image.convert("RGB")).astype(float), axis=-1) > LEAST_CHROMA
    cut = Image.fromarray(mask)
    cut = cut.crop(cut.getbbox() or (0, 0, *cut.size))
    return numpy.asarray(cut.convert("L").resize((SIDE_PX, SIDE_PX), Image.Resampling.BILINEAR)) > 127


@cache
def drawn_mask(shape: str) -> numpy.ndarray:
    return mask_of(shapes.draw(shape, "red", (SIDE_PX, SIDE_PX), random.Random(0)))


def judge(image: Image.Image) -> tuple[str, str, float]:
    """Return the nearest colour and shape of an image, and the overlap with that shape, from 0 to 1."""
    mask, pixels = mask_of(image), numpy.asarray(image.convert("RGB")).astype(float)
    coloured = pixels[numpy.ptp(pixels, axis=-1) > LEAST_CHROMA]
    overlaps = {name: (mask & drawn_mask(name)).sum() / (mask | drawn_mask(name)).sum() for name in shapes.TURNS}
    shape = max(overlaps, key=lambda name: overlaps[name])
    mean = coloured.mean(axis=0) if len(coloured) else numpy.zeros(3)
    colour = min(shapes.COLOURS, key=lambda name: numpy.linalg.norm(mean - shapes.COLOURS[name]))
    return colour, shape, float(overlaps[shape])


def is_right(prompt: str, colour: str, shape: str, overlap: float) -> bool:
    return prompt == f"a {colour} {shape}" and overlap >= LEAST_OVERLAP


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, nargs="?", default=ROOT / "demo" / "output")
    parser.add_argument("--image", type=Path, help="write all images, a row for each prompt")
    given = parser.parse_args()
    settings = tomllib.loads((ROOT / "examples" / "shapes" / "demo.toml").read_text(encoding="utf-8"))
    pipeline = StableDiffusionXLPipeline.from_pretrained(given.output / "pipeline")
    pipeline.set_progress_bar_config(disable=True)
    side, prompts = settings["resolution"], settings["validation_prompt"]
    sheet = Image.new("RGB", (side * SEEDS, side * len(prompts)))
    for row, prompt in enumerate(prompts):
        images = pipeline(
            prompt,
            num_images_per_prompt=SEEDS,
            generator=[torch.Generator().manual_seed(seed) for seed in range(SEEDS)],
            num_inference_steps=settings["validation_num_inference_steps"],
            guidance_scale=settings["validation_guidance"],
            height=side,
            width=side,
            return_dict=False,
        )[0]
        found = [judge(image) for image in images]
        for column, image in enumerate(images):
            sheet.paste(image, (column * side, row * side))
        wrong = [
            f"{colour} {shape} {overlap:.2f}"
            for colour, shape, overlap in found
            if not is_right(prompt, colour, shape, overlap)
        ]
        mean = numpy.mean([overlap for _, _, overlap in found])
        print(f"{prompt:20} {SEEDS - len(wrong)} of {SEEDS} right, overlap {mean:.2f}  {', '.join(wrong)}")
    if given.image:
        sheet.save(given.image)


if __name__ == "__main__":
    main()
