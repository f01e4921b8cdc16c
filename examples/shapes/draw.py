"""Draw the demo's picture set: one coloured shape on a light background, with its caption in a file beside it.

A caption that --without names is left out, to ask for it later. With --before, pairs: each shape in another colour
there, and captions that say which one it gets. With --frames, clips of a shape that moves, of which a quarter of all
captions is left out, to ask for these later.
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
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
CLIP_PX = 64
PATH_PX = 32  # from the first frame to the last
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


def draw_all(count: int, seed: int, without: str = "") -> Iterator[tuple[str, Image.Image]]:
    """Yield `count` captions with their pictures, every shape, colour and size equally often."""
    dice = random.Random(seed)
    kinds = [kind for kind in itertools.product(SIZES_PX, TURNS, COLOURS) if caption_of(*kind[1:]) != without]
    for size_px, shape, colour in itertools.islice(itertools.cycle(kinds), count):
        yield caption_of(shape, colour), draw(shape, colour, size_px, dice)


def caption_of(shape: str, colour: str) -> str:
    return f"a {colour} {shape}"


def draw_pairs(count: int, seed: int) -> Iterator[tuple[str, Image.Image, Image.Image]]:
    """Yield `count` captions with a picture before and after, every shape and change of colour equally often."""
    kinds = itertools.cycle((shape, *change) for shape in TURNS for change in itertools.permutations(COLOURS, 2))
    for index, (shape, old, new) in enumerate(itertools.islice(kinds, count)):
        before, after = (draw(shape, colour, (64, 64), random.Random(f"{seed}/{index}")) for colour in (old, new))
        yield f"make it {new}", before, after


def held_out(colour: str, shape: str, direction: str) -> bool:
    """Return whether a clip is never drawn: of each colour and shape one direction, of each direction three."""
    places = [list(names).index(name) for names, name in ((COLOURS, colour), (TURNS, shape), (DIRECTIONS, direction))]
    return sum(places) % 4 == 0


def draw_light(side: int) -> Image.Image:
    """Draw a background that darkens to the right in red and to the bottom in blue."""
    # It says where in the picture a patch is: Wan itself knows only how far patches are from each other. On a plain
    # background 10 of 24 held-out clips went as their captions say after 1500 steps, on this
    # one 23, even with a worse VAE.
    dimmed = [250 - level * 45 // 255 for level in range(256)]
    down = Image.linear_gradient("L").resize((side, side)).point(dimmed)
    across = down.transpose(Image.Transpose.TRANSPOSE)
    return Image.merge("RGB", (across, Image.blend(across, down, 0.5), down))


def draw_clip(shape: str, colour: str, direction: str, frames: int, dice: random.Random) -> list[Image.Image]:
    """Draw a shape that crosses the picture near its centre."""
    side, radius = CLIP_PX * SUPERSAMPLING, SUPERSAMPLING * dice.uniform(10, 12)
    background = draw_light(side)
    shade = tuple(min(255, max(0, part + dice.randint(-8, 8))) for part in COLOURS[colour])
    path = [SUPERSAMPLING * PATH_PX * step for step in DIRECTIONS[direction]]
    middle = [side / 2 + SUPERSAMPLING * dice.uniform(-4, 4) for _ in path]
    drawn = []
    for frame in range(frames):
        centre = [place + step * (frame / (frames - 1) - 0.5) for place, step in zip(middle, path, strict=True)]
        picture = background.copy()
        ImageDraw.Draw(picture).polygon(corners(shape, (centre[0], centre[1]), radius), fill=shade)
        drawn.append(picture.resize((CLIP_PX, CLIP_PX), Image.Resampling.BOX))
    return drawn


def draw_clips(count: int, frames: int, seed: int) -> Iterator[tuple[str, list[Image.Image]]]:
    """Yield `count` captions with their clips, each of those that are not held out equally often."""
    kinds = [kind for kind in itertools.product(COLOURS, TURNS, DIRECTIONS) if not held_out(*kind)]
    for index, (colour, shape, direction) in enumerate(itertools.islice(itertools.cycle(kinds), count)):
        dice = random.Random(f"{seed}/{index}")
        yield f"a {colour} {shape} moves {direction}", draw_clip(shape, colour, direction, frames, dice)


def write_clip(path: Path, frames: list[Image.Image]) -> None:
    import av  # is the extra `video`, which pictures do not need

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=8, options={"crf": "12"})
        stream.width, stream.height = frames[0].size
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode(None))


def main() -> None:
    """Write the pictures or clips and captions into the folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--count",
        type=int,
        default=252,
        help="how many (default: 252); a multiple of 36, or of 33 with --without, is even",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without", default="", help="a caption, such as `a yellow triangle`, that is not drawn")
    parser.add_argument("--before", type=Path, help="folder for what each picture was before")
    parser.add_argument("--frames", type=int, help="of each clip")
    options = parser.parse_args()
    for folder in filter(None, (options.folder, options.before)):
        folder.mkdir(parents=True, exist_ok=True)
    if options.frames:
        for index, (caption, frames) in enumerate(draw_clips(options.count, options.frames, options.seed)):
            write_clip(options.folder / f"{index:04d}.mp4", frames)
            (options.folder / f"{index:04d}.txt").write_text(caption + "\n")
        return
    if options.before:
        pictures = []
        for index, (caption, before, after) in enumerate(draw_pairs(options.count, options.seed)):
            before.save(options.before / f"{index:04d}.png")
            pictures.append((caption, after))
    else:
        pictures = draw_all(options.count, options.seed, options.without)
    for index, (caption, picture) in enumerate(pictures):
        path = options.folder / f"{index:04d}.png"
        picture.save(path)
        path.with_suffix(".txt").write_text(caption + "\n")


if __name__ == "__main__":
    main()
