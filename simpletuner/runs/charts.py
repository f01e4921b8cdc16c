"""Charts of metrics as lines and ticks, of one run or several, for inline SVG in pages and for `loss.png`.

Pillow draws `loss.png`: matplotlib would add 0.5 CPU seconds of imports to the end of each run, also to one
that a SIGTERM has stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from simpletuner.runs.metrics import HELD_OUT, LEVEL_OF, LEVELS, WINDOW_SHARE, MetricColumns, thin_out, window_of
from simpletuner.system.files.atomic import write_file

# Coordinates of a chart, not of the screen: the browser scales the lines, and labels are HTML above them, so
# that both fit any width. Whole numbers take a third of the time to format.
WIDTH, HEIGHT = 6000, 2000
COLUMNS = 600
"""Parts of the width, in each of which the least and the greatest point of a curve are drawn."""

Style = Literal["raw", "smooth", "held-out", "held-out-ema", "run-1", "run-2", "run-3", "run-4", "run-5", "run-6"]
"""The class of a path; those of several runs in one chart are numbered."""
Scale = Literal["linear", "log"]


@dataclass(frozen=True)
class Curve:
    """A line of a chart: its label, and (points,) steps and values."""

    label: str
    style: Style
    steps: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Tick:
    """A label of an axis, and its position: percent of the axis from its lower end."""

    label: str
    percent: float


@dataclass(frozen=True)
class Plot:
    """A chart: ticks of its vertical axis, and per curve its style and (points, 2) whole coordinates."""

    scale: Scale
    ticks: list[Tick]
    lines: list[tuple[Style, np.ndarray]]

    @property
    def paths(self) -> list[tuple[str, str]]:
        """The `d` of SVG paths with their classes."""
        return [path for style, points in self.lines for path in paths_of(points, style)]


@dataclass(frozen=True)
class Chart:
    """A chart on one scale or on two; `readout` is (percent of the width, text) of points to point at."""

    title: str
    legend: list[tuple[str, Style]]
    steps: list[Tick]
    plots: list[Plot]
    readout: list[tuple[float, str]]


def make_charts(columns: MetricColumns, smoothing: float = WINDOW_SHARE) -> list[Chart]:
    """Chart for each metric that a run has written; `smoothing` is the share of points in a running mean."""
    # One after another: the curves of a million steps are 40 MB for each metric.
    charts = [
        make_chart("Loss", with_mean(columns, "loss", smoothing), log=True),
        make_chart("Loss on held-out images", held_out(columns), log=True),
        make_chart("Loss on held-out images, by noise level", by_level(columns), log=True),
        make_chart("Learning rate", [Curve("learning rate", "smooth", *columns.finite("learning_rate"))], log=False),
        make_chart("Gradient norm, before clipping", with_mean(columns, "grad_norm", smoothing), log=True),
        make_chart("Samples per second", with_mean(columns, "samples_per_second", smoothing), log=False),
    ]
    return [chart for chart in charts if chart is not None]


def held_out(columns: MetricColumns) -> list[Curve]:
    return [
        Curve("held-out images", "held-out", *columns.finite("eval_loss")),
        Curve("held-out images, EMA", "held-out-ema", *columns.finite("eval_loss_ema")),
    ]


def by_level(columns: MetricColumns) -> list[Curve]:
    """Return the held-out loss of each range of noise levels, of trained weights, else of the average."""
    for name in HELD_OUT:
        for count in range(LEVELS, 1, -1):
            names = [LEVEL_OF.format(name, number, count) for number in range(1, count + 1)]
            if not columns.column(names[0]).points:
                continue
            labels = {1: "1 (least noise)", count: f"{count} (most noise)"}
            return [
                Curve(labels.get(number, str(number)), style, *columns.finite(each))
                for number, each, style in zip(range(1, count + 1), names, STYLES, strict=False)
            ]
    return []


def with_mean(columns: MetricColumns, name: str, smoothing: float = WINDOW_SHARE) -> list[Curve]:
    """Return a metric of each step and its running mean; without `smoothing` the steps alone."""
    steps, values = columns.finite(name)
    raw = Curve("each step", "raw", steps, values)
    if not smoothing or len(steps) < window_of(len(steps), smoothing):
        return [raw]
    window, means = columns.smoothed(name, smoothing)
    return [raw, Curve(f"mean of {window:,} steps around each", "smooth", steps, means)]


def make_chart(title: str, curves: Sequence[Curve], log: bool) -> Chart | None:
    """Return a chart of the curves that have points; None where none has."""
    if not (curves := [curve for curve in curves if len(curve.steps)]):
        return None
    low, high = (extreme([bound(curve.steps) for curve in curves]) for bound, extreme in ((np.min, min), (np.max, max)))
    across = scaled(float(low), float(high), WIDTH)
    plots = [make_plot("linear", curves, across)]
    if log and all((curve.values > 0).all() for curve in curves if curve.style != "smooth"):
        plots.append(make_plot("log", curves, across))
    steps = [
        Tick(f"{value:,.0f}", across(value) / WIDTH * 100)
        for value in tick_values(float(low), float(high))
        if low <= value <= high and value == round(value)
    ]
    legend: list[tuple[str, Style]] = [(curve.label, curve.style) for curve in curves]
    return Chart(title, legend, steps, plots, read_out(curves, across))


def scaled(low: float, high: float, length: float) -> Callable[[Any], Any]:
    """Return a linear map from [low, high] to [0, length]."""
    return lambda value: (value - low) / (high - low or 1.0) * length


def make_plot(scale: Scale, curves: Sequence[Curve], across: Callable[[Any], Any]) -> Plot:
    # A running mean has no peaks: a third of the points draws it as well.
    columns = {curve.style: COLUMNS // 3 if curve.style == "smooth" else COLUMNS for curve in curves}
    shown = [(curve, *thin_out(curve.steps, curve.values, columns[curve.style])) for curve in curves]
    if scale == "log":  # the line at the end of a running mean may end below 0
        shown = [(curve, steps[values > 0], np.log10(values[values > 0])) for curve, steps, values in shown]
    low, high = padded(min(values.min() for _, _, values in shown), max(values.max() for _, _, values in shown))
    up = scaled(low, high, 100)
    values = log_ticks(10**low, 10**high) if scale == "log" else tick_values(low, high)
    ticks = [Tick(f"{value:g}", up(math.log10(value) if scale == "log" else value)) for value in values]
    lines: list[tuple[Style, np.ndarray]] = [
        (curve.style, np.stack([across(steps), HEIGHT * (1 - up(at) / 100)], axis=1).round().astype(int))
        for curve, steps, at in shown
    ]
    return Plot(scale, [tick for tick in ticks if 0 <= tick.percent <= 100], lines)


def padded(low: float, high: float) -> tuple[float, float]:
    """Return a range with some room around it; one of no height is opened."""
    room = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    return low - room, high + room


def tick_values(low: float, high: float) -> list[float]:
    """Return round values from at most `low` to at least `high`, 1, 2 or 5 times a power of ten apart, in 5
    parts or fewer."""
    # matplotlib has this as MaxNLocator, and takes 0.4 CPU seconds to import, at the end of each run.
    power = 10.0 ** math.floor(math.log10((high - low or 1.0) / 5))
    steps = (power * factor for factor in (1, 2, 5, 10, 20))
    step = next(each for each in steps if math.ceil(high / each) - math.floor(low / each) <= 5)
    digits = max(0, math.ceil(-math.log10(power)))
    return [round(number * step, digits) for number in range(math.floor(low / step), math.ceil(high / step) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten, or where that are few, 1, 2 and 5 times these, or round values between."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 2, 5)):
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        if len(inside := [tick for tick in ticks if low <= tick <= high]) >= 3:
            return inside[:: math.ceil(len(inside) / 6)]
    return [tick for tick in tick_values(low, high) if tick > 0]


def paths_of(points: np.ndarray, style: Style) -> Iterator[tuple[str, str]]:
    """Yield the `d` of SVG paths with classes: a line, and dots (lines of no length) for few points."""
    yield "M" + " ".join(map(str, points.ravel().tolist())), style  # pairs after the first are lines to them
    if has_dots(style, points):
        yield "".join(f"M{x} {y}h0" for x, y in points.tolist()), f"{style} dot"


def has_dots(style: Style, points: np.ndarray) -> bool:
    return style.startswith("held-out") or len(points) == 1


def read_out(curves: Sequence[Curve], across: Callable[[Any], Any], points: int = 200) -> list[tuple[float, str]]:
    """Return evenly chosen points as (percent of the width, what each curve is there)."""
    steps = curves[0].steps
    if not all(np.array_equal(steps, curve.steps) for curve in curves):
        steps = np.unique(np.concatenate([curve.steps for curve in curves]))
    chosen = steps[np.unique(np.linspace(0, len(steps) - 1, points).round().astype(int))]
    texts = [[f"step {step:,.0f}"] for step in chosen]
    for curve in curves:
        index = np.clip(np.searchsorted(curve.steps, chosen), 0, len(curve.steps) - 1)
        for text, step, at in zip(texts, chosen, index, strict=True):
            if curve.steps[at] == step:
                text.append(f"{curve.label}: {curve.values[at]:.4g}")
    return [
        (round(float(across(step)) / WIDTH * 100, 2), ", ".join(text)) for step, text in zip(chosen, texts, strict=True)
    ]


# Styles of runs in a chart, one each; more could not be told apart.
STYLES: tuple[Style, ...] = ("run-1", "run-2", "run-3", "run-4", "run-5", "run-6")
COMPARED = (
    ("Loss", "loss", True),
    ("Loss on held-out images", "eval_loss", True),
    ("Learning rate", "learning_rate", False),
    ("Gradient norm, before clipping", "grad_norm", True),
    ("Samples per second", "samples_per_second", False),
)
SMOOTHED = ("loss", "grad_norm", "samples_per_second")


def compare(columns: Mapping[str, MetricColumns], smoothing: float) -> Iterator[Chart]:
    for title, metric, log in COMPARED:
        curves = []
        for (name, each), style in zip(columns.items(), STYLES, strict=False):
            curve = with_mean(each, metric, smoothing if metric in SMOOTHED else 0.0)[-1]
            if len(curve.steps):
                curves.append(Curve(name, style, curve.steps, curve.values))
        if (chart := make_chart(title, curves, log)) is not None:
            yield chart


CURVE = "loss.png"
SIZE_PX = (960, 540)
FRAME_PX = (76, 48, 936, 480)
"""Left, top, right and bottom of the area of the lines."""
# Lines are drawn so many times larger and then reduced: Pillow has no antialiased lines.
FINER = 2
INK, GRID, EDGE = "#333333", "#e4e7eb", "#9aa3ad"
LINES: dict[Style, tuple[str, int]] = {
    "raw": ("#9ecae1", 1),
    "smooth": ("#08519c", 2),
    "held-out": ("#d94801", 2),
    "held-out-ema": ("#238b45", 2),
}
"""Colour and width in px by the style of a curve."""


def draw_loss(columns: MetricColumns, path: Path) -> None:
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
