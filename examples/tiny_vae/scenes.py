"""Random scenes of coloured shapes, still or moving, that the tiny VAEs are trained on."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy
from PIL import Image, ImageDraw

SPEED_PX = 6.0  # standard deviation per frame, at twice the final size

Point = tuple[float, float]
Colour = tuple[int, ...]


def random_colour(dice: random.Random) -> Colour:
    """Any colour; with a probability of a quarter, a light grey."""
    return (dice.randint(225, 255),) * 3 if dice.random() < 0.25 else tuple(dice.randint(0, 255) for _ in "RGB")


def draw_background(dice: random.Random, side_px: int) -> Image.Image:
    """A plain background or a slanted gradient between two colours, at twice the final size."""
    start = numpy.array(random_colour(dice))
    end = start if dice.random() < 0.5 else numpy.array(random_colour(dice))
    ramp = numpy.linspace(0, 1, 2 * side_px)
    slant = dice.random()
    mix = (slant * ramp[:, None] + (1 - slant) * ramp[None, :])[..., None]
    return Image.fromarray((start * (1 - mix) + end * mix).astype(numpy.uint8))


@dataclass(frozen=True)
class Scenes:
    """What is drawn: up to `most` figures, whose corners spread so far, or compact ones on a light background."""

    side_px: int = 64
    frames: int = 1
    most: int = 6
    spread: float = 40  # standard deviation, at twice the final size
    compact: bool = False


@dataclass
class Figure:
    """An ellipse, a box, a polygon or a line, at twice the final size, that moves by `speed` in each frame."""

    points: list[Point]
    colour: Colour
    kind: str
    width: int
    speed: Point = (0, 0)

    def draw(self, brush: ImageDraw.ImageDraw, frame: int) -> None:
        points = [(x + frame * self.speed[0], y + frame * self.speed[1]) for x, y in self.points]
        low, high = (tuple(pick(axis) for axis in zip(*points[:2], strict=True)) for pick in (min, max))
        if self.kind == "ellipse":
            brush.ellipse((low, high), fill=self.colour)
        elif self.kind == "box":
            brush.rectangle((low, high), fill=self.colour)
        elif self.kind == "polygon":
            brush.polygon(points, fill=self.colour)
        else:
            brush.line(points, fill=self.colour, width=self.width)


def random_figure(dice: random.Random, kind: Scenes) -> Figure:
    """Any figure; of those that may move, a quarter stays where it is."""
    points = [
        (dice.gauss(kind.side_px, kind.spread), dice.gauss(kind.side_px, kind.spread))
        for _ in range(dice.randint(3, 5))
    ]
    colour = random_colour(dice)
    shape = dice.choice(["ellipse", "box", "polygon", "line"])
    figure = Figure(points, colour, shape, dice.randint(2, 10) if shape == "line" else 0)
    if kind.frames > 1 and dice.random() < 0.75:
        figure.speed = (dice.gauss(0, SPEED_PX), dice.gauss(0, SPEED_PX))
    return figure


def compact_figure(dice: random.Random, side_px: int) -> Figure:
    """A disc, a box or a triangle of 16 to 28 px that moves."""
    x, y = dice.uniform(0, 2 * side_px), dice.uniform(0, 2 * side_px)
    radius, turn = dice.uniform(16, 28), dice.choice([0, 0, dice.uniform(0, math.tau)])
    kind = dice.choice(["ellipse", "box", "polygon"])
    points = [(x - radius, y - radius), (x + radius, y + radius)]
    if kind == "polygon":
        angles = [turn + math.tau * corner / 3 for corner in range(3)]
        points = [(x + 1.2 * radius * math.sin(angle), y - 1.2 * radius * math.cos(angle)) for angle in angles]
    speed = (dice.gauss(0, SPEED_PX), dice.gauss(0, SPEED_PX)) if dice.random() < 0.75 else (0, 0)
    return Figure(points, tuple(dice.randint(0, 255) for _ in "RGB"), kind, 0, speed)


def light_background(dice: random.Random, side_px: int) -> Image.Image:
    """A gradient of light colours, at twice the final size."""
    corners = [tuple(dice.randint(190, 255) for _ in "RGB") for _ in range(4)]
    small = Image.fromarray(numpy.array(corners, numpy.uint8).reshape(2, 2, 3))
    return small.resize((2 * side_px, 2 * side_px), Image.Resampling.BILINEAR)


def draw_scene(dice: random.Random, kind: Scenes) -> numpy.ndarray:
    """One scene, as uint8 frames x height x width x 3."""
    background = (light_background if kind.compact else draw_background)(dice, kind.side_px)
    count = dice.randint(1, kind.most)
    if kind.compact:
        figures = [compact_figure(dice, kind.side_px) for _ in range(count)]
    else:
        figures = [random_figure(dice, kind) for _ in range(count)]
    drawn = []
    for frame in range(kind.frames):
        image = background.copy()
        for figure in figures:
            figure.draw(ImageDraw.Draw(image), frame - kind.frames // 2)
        drawn.append(numpy.asarray(image.resize((kind.side_px, kind.side_px), Image.Resampling.BOX)))
    return numpy.stack(drawn)
