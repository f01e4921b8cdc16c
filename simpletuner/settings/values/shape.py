"""The shape of a sample, of a bucket and of latents, and how it is written: EDGE or WIDTHxHEIGHT in px, and
WIDTHxHEIGHT@FRAMES for a clip.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

WRITTEN = re.compile(r"(?P<width>[1-9]\d{0,5})(x(?P<height>[1-9]\d{0,5}))?(@(?P<frames>[1-9]\d{0,5}))?", re.ASCII)


class Shape(NamedTuple):
    """Frames, height and width, in px or latent cells, in the order of axes; an image has one frame."""

    frames: int
    height: int
    width: int

    @classmethod
    def of_axes(cls, axes: Sequence[int]) -> Shape:
        """Shape of a tensor's axes after the channels: (height, width), or (frames, height, width)."""
        return cls(*axes) if len(axes) == 3 else cls(1, *axes)

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Return the shape that a word means. Raises ValueError for what is no EDGE and no WIDTHxHEIGHT,
        with @FRAMES or without."""
        if not (found := WRITTEN.fullmatch(text)):
            raise ValueError("write an edge such as 1024, 1216x832, or several sizes, such as 1024x1024,1280x768")
        return cls(int(found["frames"] or 1), int(found["height"] or found["width"]), int(found["width"]))

    def __str__(self) -> str:
        return f"{self.width}x{self.height}" + (f"@{self.frames}" if self.frames > 1 else "")

    @property
    def size(self) -> tuple[int, int]:
        """Width and height, as Pillow takes them."""
        return self.width, self.height

    @property
    def axes(self) -> tuple[int, ...]:
        """Axes of its pixels or latents behind the channels: an image's have none for frames."""
        return tuple(self) if self.frames > 1 else tuple(self[1:])

    @property
    def area(self) -> int:
        return self.height * self.width

    @property
    def pixels(self) -> int:
        """Pixels of all frames, which is what memory and time depend on."""
        return self.frames * self.area

    def in_cells(self, cell: Shape) -> Shape:
        """Return the shape in latent cells, which cover `cell`; the first frame has cells of its own."""
        return Shape((self.frames - 1) // cell.frames + 1, self.height // cell.height, self.width // cell.width)


class SampleShape(NamedTuple):
    """Shape of a sample in px, and of its conditioning; `64x48+64x64` with a reference image."""

    target: Shape
    references: tuple[Shape, ...] = ()
    has_first_frame: bool = False
    has_sound: bool = False

    def __str__(self) -> str:
        given = ["first_frame"] * self.has_first_frame + ["sound"] * self.has_sound
        return "+".join([*map(str, (self.target, *self.references)), *given])

    @property
    def is_given(self) -> bool:
        """True of a sample with images beside its caption."""
        return bool(self.references or self.has_first_frame)

    @property
    def pixels(self) -> int:
        return self.target.pixels + sum(each.pixels for each in self.references)


def normalize_shapes(text: str) -> str:
    """Normalize shapes: no blanks, lower case. Raises ValueError unless they are a list without repeats."""
    words = text.lower().replace(" ", "").split(",")
    shapes = parse_shapes(",".join(words)) if text else []
    if twice := next((shape for shape in shapes if shapes.count(shape) > 1), None):
        raise ValueError(f"{twice} stands there twice: keep one of them")
    return ",".join(words)


def parse_shapes(text: str) -> list[Shape]:
    return [Shape.parse(word) for word in text.split(",")] if text else []
