"""A page that compares runs: settings that differ, curves, and images of the same prompts side by side."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from simpletuner.training.html_report.checkpoint_rows import TIME
from simpletuner.training.html_report.image_table import runs_table
from simpletuner.training.html_report.page import embedded, template
from simpletuner.training.html_report.thumbnails import Gallery, GalleryImage, PromptRounds
from simpletuner.training.metrics.comparison import compare
from simpletuner.training.metrics.curves import WINDOW_SHARE
from simpletuner.training.metrics.metrics_reader import METRICS, MetricColumns
from simpletuner.training.run_folder.run_summary import LOSS_STEPS
from simpletuner.training.run_folder.settings_record import SETTINGS, read_settings

WHERE = ("output_dir", "instance_data_dir", "config", "tracker_run_name")
"""Settings that name a place or a run, which differ without a difference in what is learned."""


def render_comparison(runs: Mapping[str, Path], folder: Path) -> str:
    """Return the page about runs by name, as a file in `folder`."""
    columns = {name: MetricColumns(path / METRICS).update() for name, path in runs.items()}
    return template("comparison.html.jinja").render(
        names=list(runs),
        time=datetime.now(UTC).strftime(TIME),
        charts=list(compare(columns, WINDOW_SHARE)),
        table=runs_table(list(same_prompts(runs, folder))),
        settings=list(different_settings(runs)),
        **embedded(),
    )


def comparison_facts(runs: Mapping[str, Path]) -> dict[str, Any]:
    """Return steps and losses of each run, and the settings that differ, for scripts."""
    facts = {}
    for name, path in runs.items():
        columns = MetricColumns(path / METRICS).update()
        steps, losses = columns.finite("loss")
        held_out = columns.finite("eval_loss")[1]
        facts[name] = {
            "steps": int(steps[-1]) if len(steps) else 0,
            "loss": float(losses[-LOSS_STEPS:].mean()) if len(losses) else None,
            "eval_loss": float(held_out[-1]) if len(held_out) else None,
        }
    settings = {name: dict(zip(runs, values, strict=True)) for name, values in different_settings(runs)}
    return {"runs": facts, "settings": settings}


def different_settings(runs: Mapping[str, Path]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the settings that have several values, with that of each run; None where a version did not have it."""
    known = [read_settings(path / SETTINGS) or {} for path in runs.values()]
    for name in dict.fromkeys(name for settings in known for name in settings):
        values = [settings.get(name) for settings in known]
        if name not in WHERE and any(value != values[0] for value in values):
            yield name, values


def same_prompts(
    runs: Mapping[str, Path], folder: Path
) -> Iterator[tuple[PromptRounds, dict[str, tuple[int, GalleryImage]]]]:
    """Yield the prompts that several runs have sampled, with step and last image of each run by its name."""
    found: dict[tuple[str, str, str], dict[str, tuple[int, GalleryImage]]] = {}
    prompts: dict[tuple[str, str, str], PromptRounds] = {}
    for name, path in runs.items():
        for prompt in Gallery(path).collect_last():
            key = (prompt.prompt, prompt.negative_prompt, prompt.note)
            prompts.setdefault(key, prompt)
            for step, images in prompt.rounds:
                if images:
                    opened = os.path.relpath(path / images[-1].href, folder)
                    found.setdefault(key, {})[name] = step, replace(images[-1], href=opened)
    yield from ((prompts[key], images) for key, images in found.items() if len(images) > 1)
