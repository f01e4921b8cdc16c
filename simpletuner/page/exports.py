"""Export a configuration in every format of `config export`, with the command that replays it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import PurePath

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from simpletuner.errors import SettingsError, SimpleTunerError
from simpletuner.page.configurations import list_files
from simpletuner.page.editing.documents import Document, load_document
from simpletuner.page.rendering import field, folders_of, respond
from simpletuner.settings.showing.export import FORMATS, Exported
from simpletuner.tools.config_files import export_checked

# Names of formats that are not their own in capitals.
TITLES = {
    "cli": "Command line",
    "env": ".env",
    "accelerate": "Accelerate",
    "deepspeed": "DeepSpeed",
    "torchrun": "torchrun",
    "kubernetes": "Kubernetes",
    "kubeflow": "Kubeflow",
    "skypilot": "SkyPilot",
    "dstack": "dstack",
}


@dataclass(frozen=True)
class ExportChoice:
    """A choice of a file, a format, and whether defaults are written, too."""

    file: str
    to: str
    everything: bool


def choice_of(request: Request) -> ExportChoice:
    to = field(request, "to", "cli")
    return ExportChoice(field(request, "file"), to if to in FORMATS else "cli", field(request, "all") == "on")


def show(request: Request) -> Response:
    """The page; a configuration that cannot be written in a format says why in its place."""
    choice, files = choice_of(request), list_files(folders_of(request))
    if not choice.file and len(files) == 1:
        choice = replace(choice, file=files[0].name)
    exported, error = None, None
    if choice.file:
        try:
            exported = make_export(request, choice)
        except SimpleTunerError as refused:
            error = refused
    titles = {name: TITLES.get(name, name.upper()) for name in FORMATS}
    values = {"files": files, "titles": titles, "choice": choice}
    return respond(request, "export", title="Export", exported=exported, error=error, **values)


def make_export(request: Request, choice: ExportChoice) -> Exported:
    document = Document.read(folders_of(request), choice.file)
    loaded = load_document(document, folders_of(request), os.environ)
    return export_checked(loaded, choice.to, choice.everything)


def download(request: Request) -> Response:
    choice = choice_of(request)
    if not choice.file:
        raise SettingsError("which configuration?", "choose a file")
    exported = make_export(request, choice)
    name = PurePath(exported.name).name or "train.sh"
    disposition = f'attachment; filename="{name}"'
    return Response(exported.text, media_type="application/octet-stream", headers={"Content-Disposition": disposition})


ROUTES = [Route("/export", show), Route("/export/download", download)]
