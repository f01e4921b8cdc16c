"""Results of a run for use elsewhere: its report, pipelines and LoRAs, and exports of its checkpoints.

Exports run in processes of their own, one after the other.
"""

from __future__ import annotations

import json
import os
import re
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from tempfile import TemporaryDirectory

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Route

from simpletuner.checkpoints.layout import EXPORTS, FINISHED, PAGE, remove_checkpoint
from simpletuner.errors import EnvironmentNotReady, SettingsError, SimpleTunerError, explain_os_error
from simpletuner.page.child_processes import AwaitedCommands
from simpletuner.page.rendering import field, folders_of, respond, toast
from simpletuner.page.runs.processes import look_at, processes_of
from simpletuner.page.runs.watching import SMOOTHING, Watched, WatchedRun
from simpletuner.runs.charts import COMPARED, SMOOTHED, with_mean
from simpletuner.runs.checkpoints import named_checkpoint
from simpletuner.runs.folder import RunFolder, open_run
from simpletuner.runs.gallery import GalleryImage
from simpletuner.settings.values.parsed import checkpoint_name
from simpletuner.system.files.lease import Holding

NAME = re.compile(
    rf"(?P<kind>{'|'.join(EXPORTS.values())})(?P<of>-ema|-best)?(?:-(?P<step>\d{{1,12}}))?(\.safetensors)?", re.ASCII
)
# Names of files that are offered: no exporter writes others, and a response's header cannot hold all.
PLAIN = re.compile(r"[\w+=-][\w+=. -]*", re.ASCII)
# Of one export; a folder of somebody else's may have any number.
MAX_FILES = 500


@dataclass(frozen=True)
class Result:
    """A folder that was exported, or a file; `files` have their sizes in bytes by their names within it."""

    name: str
    path: str
    """Path as it is shown to people, who may want to copy from it."""
    kind: str
    is_average: bool
    step: int | None
    """Step of the exported checkpoint; None for the export at a run's end."""
    written: float
    files: Mapping[str, int]

    @property
    def size(self) -> int:
        return sum(self.files.values())

    @property
    def first(self) -> list[str]:
        # Of a pipeline no file is of use alone.
        if len(self.files) == 1:
            return [*self.files]
        return [name for name in self.files if name.endswith(".safetensors") and "/" not in name]


def list_results(run: RunFolder) -> list[Result]:
    """Report and what was exported last first. What is a link, or lacks its marker, is left out."""
    found = [
        result
        for entry in sorted(os.scandir(run.path), key=lambda entry: entry.name)
        if (result := result_of(run, entry.name))
    ]
    return sorted(found, key=lambda each: (each.name != PAGE, -each.written))


def result_of(run: RunFolder, name: str) -> Result | None:
    match, path = NAME.fullmatch(name), run.path / name
    if name != PAGE and match is None:
        return None
    if run.holds_folder(name) and not path.is_symlink() and run.file(f"{name}/{FINISHED}"):
        files, marker = dict(files_in(path)), path / FINISHED
    elif (match is None or match[4]) and (size := regular_size(path)) is not None:
        files, marker = {name: size}, path
    else:
        return None
    kind = kind_of(match) if match else "report"
    step = int(match["step"]) if match and match["step"] else None
    is_average = match is not None and match["of"] == "-ema"
    return Result(name, run.folders.shown(path), kind, is_average, step, marker.lstat().st_mtime, files)


def kind_of(match: re.Match[str]) -> str:
    noun = "pipeline" if match["kind"] == EXPORTS["full"] else "LoRA"
    of = {"-ema": ", EMA", "-best": ", best step"}.get(match["of"] or "", "")
    return noun + of + ", in one file" * bool(match[4])


def files_in(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield regular files below a folder with their sizes; no link is followed."""
    count = 0
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(each for each in folders if PLAIN.fullmatch(each))
        for name in sorted(filter(PLAIN.fullmatch, names)):
            path = Path(place, name)
            if (size := regular_size(path)) is not None and (count := count + 1) <= MAX_FILES:
                yield path.relative_to(folder).as_posix(), size


def regular_size(path: Path) -> int | None:
    """Return the size of a regular file in bytes; None for what is gone, a link or anything else."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def download(request: Request) -> Response:
    """Send a file of the list. Its place is looked up there, so that no name in a request leads elsewhere."""
    run, name, file = (
        open_run(folders_of(request), field(request, "run")),
        field(request, "name"),
        field(request, "file"),
    )
    result = result_of(run, name)
    if result is None or file not in result.files:
        raise SettingsError(f"{run.name} has no such file", "the page of the run shows those there are")
    path = run.path / name if file == name else run.path / name / file
    # As an attachment of no type: markup in a file of somebody else's must not run as a page of this server.
    return FileResponse(path, media_type="application/octet-stream", filename=f"{run.path.name}-{path.name}")


ROUTES = [Route("/runs/results/download", download)]


@dataclass
class ExportJob:
    """An export of a checkpoint, or why the last one failed."""

    checkpoint: str
    command: Sequence[str]
    began: float
    """Start in seconds since 1970."""
    doing: str = "waiting for another one"
    images: Sequence[bytes] = ()
    """Files of `--image`."""
    error: SimpleTunerError | None = None
    is_running: bool = True


@dataclass
class Exporting:
    """The exports, or samples, that this page was asked for, the last one of each run."""

    commands: AwaitedCommands
    participle: str = "exported"
    jobs: dict[Path, ExportJob] = dataclass_field(default_factory=dict)

    def begin(self, run: RunFolder, checkpoint: str, command: Sequence[str], images: Sequence[bytes] = ()) -> None:
        """Raises EnvironmentNotReady while another one is exported, SettingsError for NUL characters."""
        if any("\0" in each for each in command):  # in the name of a base model
            raise SettingsError(f"{checkpoint} of {run.name}: NUL characters are no part of a name", "remove them")
        job = self.jobs.get(run.path)
        if job is not None and job.is_running:
            raise EnvironmentNotReady(
                f"{job.checkpoint} of {run.name} is being {self.participle}", "wait until it is written"
            )
        self.jobs[run.path] = job = ExportJob(checkpoint, command, time.time(), images=images)
        threading.Thread(target=self.export, args=(job,), name="export", daemon=True).start()

    def export(self, job: ExportJob) -> None:
        def show(line: str) -> None:
            job.doing = line.strip() or job.doing

        with self.commands.heavy:
            job.doing = "starting"
            try:
                with images_on_disk(job.images) as flags:
                    # With the page ends it: a half-written export has no name.
                    self.commands.run([*job.command, *flags], say=show)
            except SimpleTunerError as error:
                job.error = error
            except OSError as error:  # no process can be started
                job.error = explain_os_error(error)
        job.is_running, job.images = False, ()


@contextmanager
def images_on_disk(images: Sequence[bytes]) -> Iterator[list[str]]:
    """Yield flags that name the images, which nobody else may read, as long as a command needs them."""
    with TemporaryDirectory(prefix="simpletuner-images-") as folder:
        paths = [Path(folder, f"image-{number}") for number in range(1, len(images) + 1)]
        for path, content in zip(paths, images, strict=True):
            path.write_bytes(content)
        yield [f"--image={path}" for path in paths]


def delete(request: Request) -> Response:
    """Remove a checkpoint of a run that has ended: one that goes on may read it."""
    run = open_run(folders_of(request), field(request, "run"))
    checkpoint = named_checkpoint(run, field(request, "name"))
    with request.app.state.saving:  # no run is started meanwhile
        # Both: one that has said its end may still hold the folder.
        is_held = run.lease[1] is Holding.HELD
        if is_held or not look_at(processes_of(request), run).has_ended:
            raise EnvironmentNotReady(f"a run may be using {run.name}", "stop it first: it may read this checkpoint")
        remove_checkpoint(run.path / "checkpoints" / checkpoint.row.name)
    said = toast(f"{checkpoint.row.name} of {run.name} is deleted", f"{checkpoint.row.size} are free")
    return HTMLResponse(said, headers={"HX-Reswap": "none"})


def export(request: Request) -> Response:
    """Begin to write the pipeline or LoRA of a checkpoint; the page of the run shows the end."""
    run = open_run(folders_of(request), field(request, "run"))
    name, average = (
        named_checkpoint(run, field(request, "name")).row.name,
        ["--ema"] * (field(request, "ema") == "true"),
    )
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
    names = [checkpoint_name(str(step)) for step in steps]
    values = {"run": run, "names": names, "metrics": metrics, "prompts": prompts, "version": round(known.started)}
    return respond(request, "runs/two_checkpoints", title=f"{' and '.join(names)} of {run.name}", **values)


def metrics_at(known: WatchedRun, steps: Sequence[int]) -> Iterator[tuple[str, list[str]]]:
    """Yield each metric with its values at the steps, smoothed as the curves are; a dash for none."""
    for title, name, _ in COMPARED:
        curve = with_mean(known.columns, name, SMOOTHING["medium"] if name in SMOOTHED else 0.0)[-1]
        if not len(curve.steps):
            continue
        before = [curve.values[curve.steps <= step] for step in steps]
        yield title, [f"{values[-1]:.4g}" if len(values) else "–" for values in before]


def prompts_at(known: WatchedRun, run: RunFolder, steps: Sequence[int]) -> Iterator[ComparedPrompt]:
    prompts = known.gallery.choose()[0] if run.holds_folder("validation") else []
    for prompt in prompts:
        before = [[each for each in prompt.rounds if each[0] <= step][-1:] for step in steps]
        if all(before):
            yield ComparedPrompt(prompt.prompt, prompt.note, [sides[0] for sides in before])


CHECKPOINT_ROUTES = [
    Route("/runs/checkpoints/delete", delete, methods=["POST"]),
    Route("/runs/checkpoints/export", export, methods=["POST"]),
    Route("/runs/checkpoints/compare", compare),
]
