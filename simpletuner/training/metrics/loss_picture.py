"""`loss.png`: the loss by step with its running mean, and the held-out losses, drawn by Pillow.

matplotlib would add 0.5 CPU seconds of imports to the end of each run, also to one that a SIGTERM has stopped.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from simpletuner.system.files.atomic import write_file
from simpletuner.training.metrics.charts import HEIGHT, WIDTH, Chart, Style, has_dots, held_out, make_chart, with_mean
from simpletuner.training.metrics.metrics_reader import MetricColumns

CURVE = "loss.png"
SIZE_PX = (960, 540)
FRAME_PX = (76, 48, 936, 480)
"""Left, top, right and bottom of the area of the lines."""
FINER = 2
"""Lines are drawn so many times larger and then reduced: Pillow has no antialiased lines."""
INK, GRID, EDGE = "#333333", "#e4e7eb", "#9aa3ad"
LINES: dict[Style, tuple[str, int]] = {
    "raw": ("#9ecae1", 1),
    "smooth": ("#08519c", 2),
    "held-out": ("#d94801", 2),
    "held-out-ema": ("#238b45", 2),
}
"""Colour and width in px by the style of a curve."""


def draw_loss(columns: MetricColumns, path: Path) -> None:
    """Write the picture, if there is a loss to show."""
    if chart := make_chart("Loss", [*with_mean(columns, "loss"), *held_out(columns)], log=False):
        content = BytesIO()
        drawn(chart).save(content, "PNG")
        write_file(path, content.getvalue())


def drawn(chart: Chart) -> Image.Image:
    """Return a chart on its linear scale with a title, a grid, both axes and a legend."""
    sheet = Image.new("RGB", (SIZE_PX[0] * FINER, SIZE_PX[1] * FINER), "white")
    draw_lines(ImageDraw.Draw(sheet), chart)
    sheet = sheet.resize(SIZE_PX, Image.Resampling.BOX)
    pen = ImageDraw.Draw(sheet)
    font, title = (ImageFont.load_default(size) for size in (15, 19))
    left, top, right, bottom = FRAME_PX
    pen.text((left, top - 14), chart.title, INK, title, anchor="ls")
    for tick in chart.plots[0].ticks:
        pen.text((left - 10, bottom - tick.percent / 100 * (bottom - top)), tick.label, INK, font, anchor="rm")
    for tick in chart.steps:
        pen.text((left + tick.percent / 100 * (right - left), bottom + 10), tick.label, INK, font, anchor="mt")
    pen.text(((left + right) / 2, bottom + 34), "optimizer step", INK, font, anchor="mt")
    for label, style in reversed(chart.legend):  # from the right end of the title's line
        right -= round(font.getlength(label))
        pen.text((right, top - 14), label, INK, font, anchor="ls")
        pen.line((right - 30, top - 19, right - 8, top - 19), LINES[style][0], 3)
        right -= 48
    return sheet


def draw_lines(pen: ImageDraw.ImageDraw, chart: Chart) -> None:
    """Draw the grid and the curves at FINER times their size."""
    left, top, right, bottom = (edge * FINER for edge in FRAME_PX)
    [plot, *_] = chart.plots
    for tick in plot.ticks:
        down = bottom - tick.percent / 100 * (bottom - top)
        pen.line((left, down, right, down), GRID, FINER)
    for tick in chart.steps:
        across = left + tick.percent / 100 * (right - left)
        pen.line((across, top, across, bottom), GRID, FINER)
    pen.line((left, top, left, bottom, right, bottom), EDGE, FINER)
    for style, points in plot.lines:
        colour, width = LINES[style]
        at = [(left + x / WIDTH * (right - left), top + y / HEIGHT * (bottom - top)) for x, y in points.tolist()]
        pen.line(at, colour, width * FINER, joint="curve")
        if has_dots(style, points):
            for x, y in at:
                pen.circle((x, y), 3.5 * FINER, colour)
