"""The grid of a round of validation: prompts above, images below one another, each with how it was made under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from simpletuner.training.images.fonts import Typesetter
from simpletuner.training.images.image_files import ImageInfo, read_rgb

GAP = 8
EMPTY = "(empty prompt)"
# Smaller images are enlarged by a whole factor, up to about this.
MIN_WIDTH_PX = 192
# Of the grid; further prompts follow in a band below.
MAX_WIDTH_PX = 8192

Cell = tuple[Path, ImageInfo]


@dataclass(frozen=True)
class Column:
    """The images of one prompt, and the lines above and under them, which have the width of its widest image."""

    cells: Sequence[Cell]
    width: int
    prompt: list[str]
    notes: list[list[str]]

    def height(self, row: int, line_px: int) -> int:
        """Return the height of an image and the lines under it in px; 0 where there is none."""
        if row >= len(self.cells):
            return 0
        return shown_size(self.cells[row][1])[1] + len(self.notes[row]) * line_px + GAP


def grid(columns: Sequence[Sequence[Cell]]) -> Image.Image:
    """Lay out the images of each prompt in a column under it, on white."""
    bands = [draw_band(part) for part in split_columns(columns)]
    sheet = Image.new("RGB", (max(band.width for band in bands), sum(band.height for band in bands)), "white")
    top = 0
    for band in bands:
        sheet.paste(band, (0, top))
        top += band.height
    return sheet


def split_columns(columns: Sequence[Sequence[Cell]]) -> list[list[Sequence[Cell]]]:
    """Split columns into bands that are not too wide."""
    bands: list[list[Sequence[Cell]]] = []
    width = MAX_WIDTH_PX
    for column in columns:
        own = column_width(column) + GAP
        if width + own > MAX_WIDTH_PX:
            bands.append([])
            width = GAP
        bands[-1].append(column)
        width += own
    return bands


def column_width(column: Sequence[Cell]) -> int:
    return max(shown_size(info)[0] for _, info in column)


def shown_size(info: ImageInfo) -> tuple[int, int]:
    scale = max(1, MIN_WIDTH_PX // info.png_width)
    return info.png_width * scale, info.height * scale


def draw_band(bands: Sequence[Sequence[Cell]]) -> Image.Image:
    large, small = typesetters(bands)
    columns = [lay_out(cells, large, small) for cells in bands]
    rows = range(max(len(column.cells) for column in columns))
    heights = [max(column.height(row, small.line_px) for column in columns) for row in rows]
    head = max(len(column.prompt) for column in columns) * large.line_px + 2 * GAP
    width = sum(column.width + GAP for column in columns)
    sheet = Image.new("RGB", (GAP + width, head + sum(heights)), "white")
    left = GAP
    for column in columns:
        large.draw_lines(sheet, left, GAP / 2, column.prompt, "black")
        top = head
        for (path, info), notes, height in zip(column.cells, column.notes, heights, strict=False):
            size = shown_size(info)
            # The factor is whole, so the pixels of small images stay sharp squares.
            sheet.paste(read_rgb(path).resize(size, Image.Resampling.NEAREST), (left, top))
            small.draw_lines(sheet, left, top + size[1], notes, "#666666")
            top += height
        left += column.width + GAP
    return sheet


def typesetters(columns: Sequence[Sequence[Cell]]) -> tuple[Typesetter, Typesetter]:
    """Return what draws prompts and notes. Letters grow with the images, since a large grid is shown smaller."""
    infos = [info for column in columns for _, info in column]
    size = max(13, min(map(column_width, columns)) // 40)
    notes = [line for info in infos for line in info.captions()]
    return Typesetter([EMPTY, *(info.prompt for info in infos)], size), Typesetter(notes, round(size * 0.85))


def lay_out(cells: Sequence[Cell], large: Typesetter, small: Typesetter) -> Column:
    width = column_width(cells)
    notes = [[line for text in info.captions() for line in small.wrapped(text, width)] for _, info in cells]
    return Column(cells, width, large.wrapped(cells[0][1].prompt.strip() or EMPTY, width), notes)
