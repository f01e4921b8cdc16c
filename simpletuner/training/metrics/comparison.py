"""Charts of several runs over one another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from simpletuner.training.metrics.charts import Chart, Curve, Style, make_chart, with_mean
from simpletuner.training.metrics.metrics_reader import MetricColumns

STYLES: tuple[Style, ...] = ("run-1", "run-2", "run-3", "run-4", "run-5", "run-6")
"""Styles of runs in a chart, one each; more could not be told apart."""
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
