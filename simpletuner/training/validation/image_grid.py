"""The grid of a round of validation: prompts above, images below one another, with text in any script.

Letters are DejaVu Sans, which matplotlib brings, and installed fonts for those that it lacks.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from simpletuner.runs.images import ImageInfo, read_rgb

# Sizes of the bitmaps in colour fonts, which have no other: Noto's, Apple's, and older ones of Noto's.
BITMAP_SIZES_PX = (109, 160, 136)

BREAKABLE = re.compile(r"\s+|[\u2e80-\u9fff\uac00-\ud7af\uff00-\uffef]|[^\s\u2e80-\u9fff\uac00-\ud7af\uff00-\uffef]+")
"""Blanks, words, and characters of scripts without blanks, between which lines may break."""

MAX_LINES = 100
EMOJI = 0x1F000
"""First code point of the blocks of emoji."""


class Typesetter:
    """Measure, wrap and draw texts at one size; each character by the first font that has it."""

    def __init__(self, texts: Iterable[str], size_px: int) -> None:
        self.size_px, self.line_px = size_px, round(size_px * 1.3)
        characters = {character for text in texts for character in visible(text)}
        self.faces = [(open_face(path, size_px), glyphs) for path, glyphs in fonts_for(frozenset(characters))]

    def wrapped(self, text: str, width_px: float) -> list[str]:
        """Return the lines of a text; words that are wider than a line are broken. At most MAX_LINES."""
        lines = [""]
        for piece in BREAKABLE.findall(visible(text)):
            for part in [piece] if self.length(piece) <= width_px else piece:
                if lines[-1] and self.length(lines[-1] + part.rstrip()) > width_px:
                    lines.append("")
                lines[-1] += part if lines[-1] or part.strip() else ""
        return [*lines[:MAX_LINES], *(["…"] if len(lines) > MAX_LINES else [])]

    def length(self, text: str) -> float:
        """Return the width of a line in px."""
        return sum(width for _, _, width in self._runs(text))

    def draw_lines(self, sheet: Image.Image, left: float, top: float, lines: Iterable[str], fill: str) -> None:
        for number, line in enumerate(lines):
            self._draw(sheet, left, top + number * self.line_px, line, fill)

    def _draw(self, sheet: Image.Image, left: float, top: float, text: str, fill: str) -> None:
        pen, baseline = ImageDraw.Draw(sheet), round(top + self.size_px)
        for font, run, width in self._runs(text):
            if font.size == self.size_px:
                pen.text((left, baseline), run, fill, font, anchor="ls", embedded_color=True)
            else:
                scale = self.size_px / font.size
                glyphs = Image.new("RGBA", (max(1, round(width / scale)), round(font.size * 1.4)))
                ImageDraw.Draw(glyphs).text((0, font.size * 1.1), run, font=font, anchor="ls", embedded_color=True)
                size = (max(1, round(width)), max(1, round(glyphs.height * scale)))
                small = glyphs.resize(size, Image.Resampling.BOX)
                sheet.paste(small, (round(left), round(baseline - self.size_px * 1.1)), small)
            left += width

    def _runs(self, text: str) -> Iterator[tuple[ImageFont.FreeTypeFont, str, float]]:
        """Yield (font, characters, width in px) of the parts of a line that one font draws."""
        for number, characters in groupby(text, self._face_of):
            font, run = self.faces[number][0], "".join(characters)
            yield font, run, font.getlength(run) * self.size_px / font.size

    def _face_of(self, character: str) -> int:
        return next((number for number, (_, glyphs) in enumerate(self.faces) if ord(character) in glyphs), 0)


def visible(text: str) -> str:
    """Text on one line, without characters that only change others (joiners, variation selectors)."""
    kept = (" " if character.isspace() else character for character in text)
    return "".join(
        each for each in kept if unicodedata.category(each) not in ("Cc", "Cf") and each not in "\ufe0e\ufe0f"
    )


def open_face(path: Path, size_px: int) -> ImageFont.FreeTypeFont:
    for size in (size_px, *BITMAP_SIZES_PX):
        try:
            return ImageFont.truetype(path, size)
        except OSError:  # FreeType: invalid pixel size
            continue
    raise OSError(f"{path} has no bitmaps of {BITMAP_SIZES_PX} px")


@cache
def fonts_for(characters: frozenset[str]) -> list[tuple[Path, frozenset[int]]]:
    """Fonts that have these characters together, with those of each; the first has the missing ones."""
    import matplotlib

    default = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    wanted = {ord(character) for character in characters}
    coloured = (
        [path for path in installed_fonts() if "emoji" in path.name.lower()] if max(wanted, default=0) > EMOJI else []
    )
    # An emoji of DejaVu's is an outline, those of a colour font are what people expect.
    fonts = [(path, frozenset(code for code in glyphs_of(path) if code >= EMOJI)) for path in coloured]
    fonts.insert(0, (default, glyphs_of(default).difference(*(emoji for _, emoji in fonts))))
    others = [path for path in installed_fonts() if path not in (default, *coloured)]
    while wanted := wanted.difference(*(glyphs for _, glyphs in fonts)):
        best = max(others, key=lambda path: (len(wanted & glyphs_of(path)), is_plain(path)), default=default)
        if not wanted & glyphs_of(best):
            break
        fonts.append((best, glyphs_of(best)))
    return fonts


def is_plain(path: Path) -> bool:
    name = path.stem.lower()
    return "sans" in name and not any(style in name for style in ("bold", "oblique", "italic", "mono", "condensed"))


@cache
def installed_fonts() -> list[Path]:
    from matplotlib.font_manager import findSystemFonts

    return sorted(map(Path, findSystemFonts()))


@cache
def glyphs_of(path: Path) -> frozenset[int]:
    """Return the characters that a font has; of a collection its first font; none where it cannot be read."""
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(str(path)).get_charmap())
    except (OSError, RuntimeError):  # RuntimeError: FreeType's, of a damaged file
        return frozenset()


GAP = 8
EMPTY = "(empty prompt)"
# Smaller images are enlarged by a whole factor, up to about this.
MIN_WIDTH_PX = 192
# Of the grid; further prompts follow in a band below.
MAX_WIDTH_PX = 8192

Cell = tuple[Path, ImageInfo]


@dataclass(frozen=True)
class Column:
    """Images of one prompt, and the lines above and under them, as wide as its widest image."""

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
    # Letters grow with the images: a large grid is shown smaller.
    infos = [info for column in columns for _, info in column]
    size = max(13, min(map(column_width, columns)) // 40)
    notes = [line for info in infos for line in info.captions()]
    return Typesetter([EMPTY, *(info.prompt for info in infos)], size), Typesetter(notes, round(size * 0.85))


def lay_out(cells: Sequence[Cell], large: Typesetter, small: Typesetter) -> Column:
    width = column_width(cells)
    notes = [[line for text in info.captions() for line in small.wrapped(text, width)] for _, info in cells]
    return Column(cells, width, large.wrapped(cells[0][1].prompt.strip() or EMPTY, width), notes)
