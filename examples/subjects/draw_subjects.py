"""Draw pictures for a LoRA of two subjects: those of its base model, six of each subject, and write prompts.

The base model knows circles, squares and triangles in four colours, and knows them without a colour, too. The subjects
are one circle and one square, in colours that it has never seen.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "shapes"))
import draw as shapes  # pyright: ignore[reportMissingImports]
from PIL import Image

SUBJECTS = {"a sks circle": ("circle", "purple"), "a ohwx square": ("square", "cyan")}
COLOURS = {"purple": (150, 40, 190), "cyan": (30, 190, 200)}
SIZE_PX = (64, 64)
ASKED = (*SUBJECTS, "a red circle", "a blue circle", "a green square", "a yellow square", "a red triangle")
SEEDS = 6
PLAIN = 3
"""Of so many pictures of the base model one has no colour in its caption."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=144, help="pictures of the base model")
    parser.add_argument("--subject_count", type=int, default=6, help="pictures of each subject")
    given = parser.parse_args()
    shapes.COLOURS.update(COLOURS)
    dice, known = random.Random(0), [name for name in shapes.COLOURS if name not in COLOURS]
    kinds = [(shape, colour) for shape in shapes.TURNS for colour in known]
    for number in range(given.count):
        shape, colour = kinds[number % len(kinds)]
        caption = f"a {shape}" if dice.randrange(PLAIN) == 0 else f"a {colour} {shape}"
        write(given.folder / "base", number, caption, shapes.draw(shape, colour, SIZE_PX, dice))
    for caption, (shape, colour) in SUBJECTS.items():
        for number in range(given.subject_count):
            write(given.folder / caption.split()[1], number, caption, shapes.draw(shape, colour, SIZE_PX, dice))
    lines = (json.dumps({"prompt": prompt, "seed": seed}) for prompt in ASKED for seed in range(SEEDS))
    (given.folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def palette() -> dict[str, tuple[int, int, int]]:
    """Return all colours that are drawn, by name."""
    return {**shapes.COLOURS, **COLOURS}


def colour_asked(prompt: str) -> str:
    """Return the colour that a prompt asks for: by its word, or by its subject."""
    return SUBJECTS[prompt][1] if prompt in SUBJECTS else prompt.split()[1]


def write(folder: Path, number: int, caption: str, picture: Image.Image) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    picture.save(folder / f"{number:04d}.png")
    (folder / f"{number:04d}.txt").write_text(caption + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
