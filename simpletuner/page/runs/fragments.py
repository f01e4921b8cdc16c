"""Parts of a run's page. A poll brings the checksums of those it has, and gets those that changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request

from simpletuner.page.rendering import field, folders_of, render
from simpletuner.page.runs import watching
from simpletuner.page.runs.processes import processes_of
from simpletuner.page.runs.results import Exporting, list_results
from simpletuner.page.runs.samples import tried_images
from simpletuner.page.runs.watching import Watched
from simpletuner.runs.charts import STYLES
from simpletuner.runs.checkpoints import list_rows
from simpletuner.runs.folder import RunFolder, open_run, read_log
from simpletuner.runs.health.best_step import best_saved, find_best
from simpletuner.runs.listing import Summary, summarize
from simpletuner.runs.metrics import METRICS
from simpletuner.system.files.checksums import value_checksum

# Of the log, below the problems, which are all shown.
LAST_ENTRIES = 200
MAX_PROBLEMS = 500


@dataclass(frozen=True)
class Fragment:
    """A part of the page: what its content follows from, and how to make it."""

    name: str
    key: str
    body: Callable[[], str]

    def html(self) -> str:
        return render("runs/fragment", name=self.name, key=self.key, body=self.body())


def view_of(request: Request) -> tuple[list[RunFolder], str]:
    """Return the runs that a request names, the one to watch first, and the smoothing."""
    folders = folders_of(request)
    run = open_run(folders, field(request, "run"))
    others = [open_run(folders, name) for name in request.query_params.getlist("with") if name]
    runs = {each.path: each for each in (run, *others)}
    smoothing = field(request, "smoothing", "medium")
    return [*runs.values()][: len(STYLES)], smoothing if smoothing in watching.SMOOTHING else "medium"


def fragments_of(request: Request, runs: Sequence[RunFolder], smoothing: str) -> list[Fragment]:
    run, watched = runs[0], watched_of(request)
    log = read_log(run)
    offsets = watching.update(watched, list(runs))
    known = watched.of(run)
    with known.lock:
        prompts, note = known.gallery.choose() if run.holds_folder("validation") else ([], "")
        measured = known.held_out(run.path) if run.file(METRICS) is not None else []
    checkpoints = list_rows(run)
    summary = summarize(run, processes_of(request).known(run))
    results, job = list_results(run), exporting_of(request).jobs.get(run.path)
    return [
        made("status", summary=summary, best=find_best(measured)),
        Fragment(
            "curves",
            # By how far files were read, not by the result: drawing is what costs.
            value_checksum({"read": offsets, "smoothing": smoothing}),
            partial(draw, watched, list(runs), smoothing),
        ),
        made("images", run=run, prompts=prompts, note=note, version=round(known.started)),
        made("tried", run=run, tried=tried_images(run), job=request.app.state.sampling.jobs.get(run.path)),
        made(
            "checkpoints",
            run=run,
            checkpoints=checkpoints,
            best=best_saved(measured, [each.row.step for each in checkpoints if not each.problem]),
            summary=summary,
            base=summary.base,
            exported={(each.step, each.is_average) for each in results},
            job=job,
        ),
        made("results", run=run, results=results, job=job),
        made(
            "messages",
            problems=log.problems[-MAX_PROBLEMS:],
            earlier=log.earlier_problems[-MAX_PROBLEMS:],
            entries=log.entries[-LAST_ENTRIES:],
            is_cut=log.is_cut,
        ),
    ]


def made(name: str, **values: Any) -> Fragment:
    body = render(f"runs/{name}", **values)
    return Fragment(name, value_checksum({"body": body}), lambda: body)


class KeptRows:
    """The rows of the list of runs, made again only when a summary has changed."""

    def __init__(self) -> None:
        self.last: tuple[list[Summary], Fragment] | None = None

    def fragment(self, rows: list[Summary], roots: Sequence[Path]) -> Fragment:
        if self.last is None or self.last[0] != rows:
            self.last = rows, made("rows", rows=rows, roots=roots)
        return self.last[1]


def draw(watched: Watched, runs: list[RunFolder], smoothing: str) -> str:
    return render("runs/curves", charts=watching.charts_of(watched, runs, watching.SMOOTHING[smoothing]))


def watched_of(request: Request) -> Watched:
    return request.app.state.watched


def exporting_of(request: Request) -> Exporting:
    return request.app.state.exporting
