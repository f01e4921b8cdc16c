"""Pages that show runs: report.html of one, and a comparison of several, with tables of validation images.

The report is written in a thread, so that no step waits.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from simpletuner.checkpoints.layout import PAGE
from simpletuner.errors import SimpleTunerError, Stopped, without_errno
from simpletuner.report import Report
from simpletuner.runs.charts import compare, make_charts
from simpletuner.runs.checkpoints import TIME, CheckpointRow, checkpoint_rows
from simpletuner.runs.facts import RunFacts, describe_result, describe_times, read_starts
from simpletuner.runs.gallery import Gallery, GalleryImage, PromptRounds
from simpletuner.runs.metrics import HELD_OUT, LOSSES, METRICS, WINDOW_SHARE, MetricColumns, level_names
from simpletuner.runs.settings_record import SETTINGS, read_settings
from simpletuner.settings.values.spelling import as_text
from simpletuner.system.files.atomic import write_file
from simpletuner.system.processes.threads import SerialWorker

Cell = Sequence[tuple[str, GalleryImage]]
"""Images with their labels."""


@dataclass(frozen=True)
class TableHead:
    title: str
    note: str = ""


@dataclass(frozen=True)
class ImageTable:
    """Rows of cells, with what is above and before them."""

    corner: str
    columns: list[TableHead]
    rows: list[tuple[TableHead, list[Cell]]]

    @property
    def has_pairs(self) -> bool:
        """True where a cell has several images, such as those of the trained weights and of the EMA."""
        return any(len(cell) > 1 for _, cells in self.rows for cell in cells)


def prompt_head(prompt: PromptRounds) -> TableHead:
    negative = f" · negative: {prompt.negative_prompt}" if prompt.negative_prompt else ""
    return TableHead(prompt.prompt or "(empty prompt)", f"{prompt.note}{negative}")


def rounds_table(prompts: Sequence[PromptRounds]) -> ImageTable | None:
    """Return the rounds of a run, those of each prompt in a column; None where it has no images."""
    rows: list[tuple[TableHead, list[Cell]]] = []
    if any(prompt.before for prompt in prompts):
        base: list[Cell] = [[("base", prompt.before)] if prompt.before else [] for prompt in prompts]
        rows.append((TableHead("before"), base))
    by_step = [dict(prompt.rounds) for prompt in prompts]
    for step in sorted({step for rounds in by_step for step in rounds}):
        cells: list[Cell] = [[(each.info.weights, each) for each in rounds.get(step, ())] for rounds in by_step]
        rows.append((TableHead(f"step {step:,}"), cells))
    return ImageTable("prompt", [prompt_head(prompt) for prompt in prompts], rows) if rows else None


def runs_table(prompts: Sequence[tuple[PromptRounds, Mapping[str, tuple[int, GalleryImage]]]]) -> ImageTable | None:
    """Return images of the same prompts, those of each run in a column; None where there are none."""
    names = list(dict.fromkeys(name for _, images in prompts for name in images))
    rows: list[tuple[TableHead, list[Cell]]] = []
    for prompt, images in prompts:
        shown = [images.get(name) for name in names]
        rows.append((prompt_head(prompt), [[(f"step {each[0]:,}", each[1])] if each else [] for each in shown]))
    return ImageTable("prompt", [TableHead(name) for name in names], rows) if rows else None


TEMPLATES = Path(__file__).parent / "templates"


SHOWN = {*LOSSES, *chain(*map(level_names, HELD_OUT)), "learning_rate", "grad_norm", "samples_per_second", "seconds"}
"""Metrics on the page."""


class HtmlReport:
    """Write the page in a thread, one at a time: what is asked for meanwhile the next one shows."""

    def __init__(self, output: Path, facts: RunFacts, max_steps: int, report: Report) -> None:
        self.output = output
        self.facts = facts
        self.max_steps = max_steps
        self.report = report
        self.columns, self.gallery = MetricColumns(output / METRICS, names=SHOWN), Gallery(output)
        self.worker = SerialWorker("report.html", self._warn)

    def renew(self, step: int) -> None:
        # Skipped while one is queued.
        if not self.worker.is_queued:
            self.worker.submit(self.write, f"running: step {step:,} of {self.max_steps:,}")

    def finish(self, status: str) -> None:
        """Write the page for the last time, and wait for it."""
        self.worker.submit(self.write, status)
        self.worker.close()

    def _warn(self, error: BaseException) -> None:
        path = self.output / PAGE
        self.report.warn(f"{path} could not be written: {without_errno(error, path)}")  # which must not end a run

    def write(self, status: str) -> None:
        write_file(self.output / PAGE, self.render(status).encode("utf-8", "replace"))

    def render(self, status: str) -> str:
        columns = self.columns.update()
        prompts, note = self.gallery.collect()
        rows = list(checkpoint_rows(self.output))
        return template("page.html.jinja").render(
            facts=self.facts,
            status=status,
            time=datetime.now(UTC).strftime(TIME),
            lead=[*self.facts.lead, *describe_times(read_starts(self.output), columns)],
            numbers=describe_result(columns),
            charts=make_charts(columns),
            table=rounds_table(prompts),
            note=note,
            checkpoints=rows,
            best=best_of(self.output, columns, rows),
            **embedded(),
        )


@cache
def template(name: str) -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    settings = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, **settings)
    environment.filters["as_text"] = as_text
    return environment.get_template(name)


@cache
def script() -> str:
    return (TEMPLATES / "script.js").read_text(encoding="utf-8")


def embedded() -> dict[str, str]:
    """Return script and style, which a page has in itself: it fetches nothing."""
    return {
        "script": script(),
        "script_hash": base64.b64encode(hashlib.sha256(script().encode()).digest()).decode(),
        "style": (TEMPLATES / "style.css").read_text(encoding="utf-8"),
    }


@contextmanager
def open_html_report(output: Path, facts: RunFacts, max_steps: int, report: Report) -> Iterator[HtmlReport]:
    """Write the page for the last time when the block ends, however it does."""
    page = HtmlReport(output, facts, max_steps, report)
    status = "failed"
    try:
        yield page
        status = "finished"
    except Stopped:
        status = "stopped; the same command goes on"
        raise
    except SimpleTunerError as error:
        status = f"failed: {error.message}"
        raise
    finally:
        page.finish(status)


# Settings that name a place or a run: they do not change the trained weights.
WHERE = ("output_dir", "instance_data_dir", "config", "tracker_run_name")


def render_comparison(runs: Mapping[str, Path], folder: Path) -> str:
    """Return the page about runs by name, as a file in `folder`."""
    columns = {name: MetricColumns(path / METRICS).update() for name, path in runs.items()}
    return template("comparison.html.jinja").render(
        names=list(runs),
        time=datetime.now(UTC).strftime(TIME),
        charts=list(compare(columns, WINDOW_SHARE)),
        table=runs_table(list(same_prompts(runs, folder))),
        best=[(name, said) for name, path in runs.items() if (said := describe_best_of(path))],
        settings=list(different_settings(runs)),
        **embedded(),
    )


def comparison_facts(runs: Mapping[str, Path]) -> dict[str, object]:
    """Return steps and losses of each run, and the settings that differ, for scripts."""
    facts = {}
    for name, path in runs.items():
        columns = MetricColumns(path / METRICS).update()
        losses, held_out = columns.column("loss"), columns.column("eval_loss")
        facts[name] = {
            "steps": max(0, losses.last_step),
            "loss": float(losses.last.mean()) if losses.points else None,
            "eval_loss": float(held_out.last[-1]) if held_out.points else None,
            **best_facts(path),
        }
    settings = {name: dict(zip(runs, values, strict=True)) for name, values in different_settings(runs)}
    return {"runs": facts, "settings": settings}


def best_of(output: Path, columns: MetricColumns, rows: Sequence[CheckpointRow]) -> int | None:
    """Return the step of the best of some checkpoints; None for a run without a held-out loss."""
    if not any(columns.column(name).points for name in HELD_OUT):
        return None
    from simpletuner.runs.health.best_step import best_saved_of

    return best_saved_of(output, [each.step for each in rows])


def best_facts(path: Path) -> dict[str, object]:
    """Return the best step of a run and its held-out loss; None without one."""
    from simpletuner.runs.health.best_step import find_best_of

    found = find_best_of(path)
    step, loss = (found.best.step, found.best.loss) if found is not None else (None, None)
    return {"best_step": step, "best_eval_loss": loss}


def describe_best_of(path: Path) -> str:
    from simpletuner.runs.health.best_step import find_best_of

    found = find_best_of(path)
    return found.describe() if found is not None else ""


def different_settings(runs: Mapping[str, Path]) -> Iterator[tuple[str, list[Any]]]:
    """Yield settings of several values, with that of each run; None where a version had none."""
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
