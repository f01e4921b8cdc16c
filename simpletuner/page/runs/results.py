"""Results of a run for use elsewhere: its report, and exported pipelines and LoRAs, with files to download."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from simpletuner.checkpoints.layout import EXPORTS, FINISHED, PAGE
from simpletuner.errors import SettingsError
from simpletuner.page.rendering import field, folders_of
from simpletuner.page.runs.folder import RunFolder, open_run

NAME = re.compile(
    rf"(?P<kind>{'|'.join(EXPORTS.values())})(?P<ema>-ema)?(?:-(?P<step>\d{{1,12}}))?(\.safetensors)?", re.ASCII
)
PLAIN = re.compile(r"[\w+=-][\w+=. -]*", re.ASCII)
"""Names of files that are offered: no exporter writes others, and a header of a response cannot hold them all."""
# Of one export; a folder of somebody else's may have any number.
MAX_FILES = 500


@dataclass(frozen=True)
class Result:
    """A folder that was exported, or a file; `files` have their sizes in bytes by their names within it."""

    name: str
    path: str
    """As it is shown to people, who may want it elsewhere."""
    kind: str
    is_average: bool
    step: int | None
    """Of the checkpoint that was exported; None of what the run exported when it ended."""
    written: float
    files: Mapping[str, int]

    @property
    def size(self) -> int:
        return sum(self.files.values())

    @property
    def first(self) -> list[str]:
        """The files that somebody downloads: of a LoRA those with weights, of a pipeline none is of use alone."""
        if len(self.files) == 1:
            return [*self.files]
        return [name for name in self.files if name.endswith(".safetensors") and "/" not in name]


def list_results(run: RunFolder) -> list[Result]:
    """Return the report and what was exported last first. What is a link, or lacks its marker, is left out."""
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
    is_average = match is not None and bool(match["ema"])
    return Result(name, run.folders.shown(path), kind, is_average, step, marker.lstat().st_mtime, files)


def kind_of(match: re.Match[str]) -> str:
    noun = "pipeline" if match["kind"] == EXPORTS["full"] else "LoRA"
    return noun + ", EMA" * bool(match["ema"]) + ", in one file" * bool(match[4])


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
