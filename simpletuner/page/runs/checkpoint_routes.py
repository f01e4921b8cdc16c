"""Actions of the page on checkpoints: export one, remove one, and compare two."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from simpletuner.checkpoints.layout import remove_checkpoint
from simpletuner.errors import EnvironmentNotReady
from simpletuner.page.rendering import field, folders_of, respond, toast
from simpletuner.page.runs.checkpoints import named_checkpoint
from simpletuner.page.runs.curves import SMOOTHING
from simpletuner.page.runs.exporting import Exporting
from simpletuner.page.runs.folder import RunFolder, open_run
from simpletuner.page.runs.processes import look_at, processes_of
from simpletuner.page.runs.watching import Watched, WatchedRun
from simpletuner.system.files.lease import Holding
from simpletuner.training.html_report.thumbnails import GalleryImage
from simpletuner.training.metrics.charts import with_mean
from simpletuner.training.metrics.comparison import COMPARED, SMOOTHED


def delete(request: Request) -> Response:
    """Remove a checkpoint of a run that has ended: one that prunes would miss it, and end with an error."""
    run = open_run(folders_of(request), field(request, "run"))
    checkpoint = named_checkpoint(run, field(request, "name"))
    with request.app.state.saving:  # no run is started meanwhile
        # Both: one that has said its end may still hold the folder.
        is_held = run.lease[1] is Holding.HELD
        if is_held or not look_at(processes_of(request), run)[1].has_ended:
            raise EnvironmentNotReady(f"a run may be using {run.name}", "stop it first: it may read this checkpoint")
        remove_checkpoint(run.path / "checkpoints" / checkpoint.row.name)
    said = toast(f"{checkpoint.row.name} of {run.name} is deleted", f"{checkpoint.row.size} are free")
    return HTMLResponse(said, headers={"HX-Reswap": "none"})


def export(request: Request) -> Response:
    """Begin to write the pipeline or LoRA of a checkpoint beside that of the run; the page of the run shows the end."""
    run = open_run(folders_of(request), field(request, "run"))
    name, average = named_checkpoint(run, field(request, "name")).row.name, ["--ema"] * bool(field(request, "ema"))
    base = field(request, "base")  # as the user was shown it, and agreed
    named = [f"--pretrained_model_name_or_path={base}"] if base else []
    exporting: Exporting = request.app.state.exporting
    label = "EMA of " * bool(average) + name
    exporting.begin(run, label, ["runs", "export", str(run.path), f"--checkpoint={name}", *average, *named])
    return HTMLResponse(headers={"HX-Trigger": json.dumps({"attend": {"id": "results-title"}})})


@dataclass(frozen=True)
class ComparedPrompt:
    """A prompt with the images that were made at, or last before, each of two steps."""

    prompt: str
    note: str
    sides: Sequence[tuple[int, Sequence[GalleryImage]]]


def compare(request: Request) -> Response:
    """Show the metrics at the steps of two checkpoints, and their images of the same prompts side by side."""
    run = open_run(folders_of(request), field(request, "run"))
    chosen = [named_checkpoint(run, field(request, name)) for name in ("one", "two")]
    steps = sorted(each.row.step for each in chosen)
    watched: Watched = request.app.state.watched
    known = watched.of(run)
    with known.lock:
        known.columns.update()
        metrics, prompts = list(metrics_at(known, steps)), list(prompts_at(known, run, steps))
    names = [f"checkpoint-{step:06d}" for step in steps]
    values = {"run": run, "names": names, "metrics": metrics, "prompts": prompts, "version": round(known.started)}
    return respond(request, "runs/two_checkpoints", title=f"{' and '.join(names)} of {run.name}", **values)


def metrics_at(known: WatchedRun, steps: Sequence[int]) -> Iterator[tuple[str, list[str]]]:
    """Yield each metric with its value at the steps, smoothed as the curves are; a dash where there is none yet."""
    for title, name, _ in COMPARED:
        curve = with_mean(known.columns, name, SMOOTHING["medium"] if name in SMOOTHED else 0.0)[-1]
        if not len(curve.steps):
            continue
        before = [curve.values[curve.steps <= step] for step in steps]
        yield title, [f"{values[-1]:.4g}" if len(values) else "–" for values in before]


def prompts_at(known: WatchedRun, run: RunFolder, steps: Sequence[int]) -> Iterator[ComparedPrompt]:
    """Yield the prompts that were sampled before both steps."""
    prompts = known.gallery.choose()[0] if run.holds_folder("validation") else []
    for prompt in prompts:
        before = [[each for each in prompt.rounds if each[0] <= step][-1:] for step in steps]
        if all(before):
            yield ComparedPrompt(prompt.prompt, prompt.note, [sides[0] for sides in before])


ROUTES = [
    Route("/runs/checkpoints/delete", delete, methods=["POST"]),
    Route("/runs/checkpoints/export", export, methods=["POST"]),
    Route("/runs/checkpoints/compare", compare),
]
