"""Write report.html from the files in output_dir, in a thread, so that no step waits."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from simpletuner.checkpoints.layout import PAGE
from simpletuner.errors import SimpleTunerError, Stopped, without_errno
from simpletuner.report import Report
from simpletuner.session import Session
from simpletuner.settings.values.spelling import as_text
from simpletuner.system.files.atomic import write_file
from simpletuner.system.processes.threads import SerialWorker
from simpletuner.training.html_report.checkpoint_rows import TIME, checkpoint_rows
from simpletuner.training.html_report.image_table import rounds_table
from simpletuner.training.html_report.thumbnails import Gallery
from simpletuner.training.metrics.charts import make_charts
from simpletuner.training.metrics.metrics_reader import METRICS, MetricColumns
from simpletuner.training.run_folder.run_summary import RunFacts, describe_result
from simpletuner.training.run_folder.run_times import describe_times, read_starts

TEMPLATES = Path(__file__).parent


class HtmlReport:
    """Write the page in a thread, at most one at a time: what is asked for meanwhile is what the next one shows."""

    def __init__(self, output: Path, facts: RunFacts, max_steps: int, report: Report) -> None:
        self.output, self.facts, self.max_steps, self.report = output, facts, max_steps, report
        self.columns, self.gallery = MetricColumns(output / METRICS), Gallery(output)
        self.worker = SerialWorker("report.html", self._warn)

    def renew(self, step: int) -> None:
        """Queue writing the page after a step, without waiting; skip it while an earlier request is queued."""
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
        return template("page.html.jinja").render(
            facts=self.facts,
            status=status,
            time=datetime.now(UTC).strftime(TIME),
            lead=[*self.facts.lead, *describe_times(read_starts(self.output), columns)],
            numbers=describe_result(columns),
            charts=make_charts(columns),
            table=rounds_table(prompts),
            note=note,
            checkpoints=list(checkpoint_rows(self.output)),
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
def open_html_report(session: Session, facts: RunFacts, max_steps: int) -> Iterator[HtmlReport | None]:
    """Write the page for the last time when the block ends, however it does; None on ranks above 0."""
    if not session.world.is_first:
        yield None
        return
    page = HtmlReport(session.settings.training.output_dir, facts, max_steps, session.report)
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
