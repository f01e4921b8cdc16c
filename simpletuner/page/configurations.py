"""Configurations: list config files, copy one, and make a new one from a family and a number of GPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from simpletuner.errors import SettingsError
from simpletuner.models.registry import presets, trainable_flavours
from simpletuner.page.folders import Folders
from simpletuner.page.rendering import field, folders_of, render, respond
from simpletuner.settings.editing import setting_of
from simpletuner.settings.formats import FORMATS, read_entries, suffix_of
from simpletuner.system.output_file import save
from simpletuner.tools.new_config import new_config

MAX_DEPTH = 4
MAX_FILES = 300
MAX_BYTES = 1 << 20
"""Larger files are data."""
SKIPPED = {"node_modules", "site-packages", "checkpoints", "cache", "__pycache__", "venv"}
SHOWN = ("model_family", "model_flavour", "model_type", "num_processes")


@dataclass(frozen=True)
class ConfigFile:
    """A config file in a list."""

    name: str
    settings: int
    shown: dict[str, str]
    changed: str


def show_list(request: Request) -> Response:
    folders = folders_of(request)
    files = list_files(folders)
    families = [name for name, preset in presets().items() if preset.family_class]
    opened = request.app.state.config and folders.shown(request.app.state.config)
    values = {"families": families, "flavours": trainable_flavours(families[0]), "roots": folders.roots}
    return respond(request, "configurations", title="Configurations", files=files, opened=opened, **values)


def show_flavours(request: Request) -> Response:
    return HTMLResponse(render("flavours", flavours=trainable_flavours(field(request, "model_family"))))


def list_files(folders: Folders) -> list[ConfigFile]:
    return [found for path in find_files(folders) if (found := describe(path, folders))]


def find_files(folders: Folders) -> Iterator[Path]:
    """Yield files that may hold settings, in the folders and a few levels below; at most MAX_FILES."""
    seen: set[Path] = set()
    for root in folders.roots:
        for place, below, names in os.walk(root):
            depth = len(Path(place).relative_to(root).parts)
            # Folders of runs hold settings.json, which is the record of a run and not to be edited.
            is_run = "metrics.jsonl" in names
            kept = [name for name in sorted(below) if not name.startswith(".") and name not in SKIPPED]
            below[:] = kept if depth < MAX_DEPTH and not is_run else []
            for name in sorted(names) if not is_run else ():
                path = Path(place, name)
                if suffix_of(path) in FORMATS and path not in seen and folders.holds(path) and len(seen) < MAX_FILES:
                    seen.add(path)
                    yield path


def describe(path: Path, folders: Folders) -> ConfigFile | None:
    """Describe a config file; None for a file that holds no settings or does not parse."""
    try:
        stat = path.stat()
        if stat.st_size > MAX_BYTES:
            return None
        entries = [(setting_of(path, entry), entry.value) for entry in read_entries(path)]
    except (OSError, SettingsError):
        return None
    values = {name: value for name, value in entries if name is not None}
    if not values or 2 * len(values) < len(entries):  # a package.json has a name and a version, too
        return None
    shown = {name: str(values[name]) for name in SHOWN if name in values}
    changed = time.strftime("%Y-%m-%d %H:%M", time.localtime(stat.st_mtime))
    return ConfigFile(folders.shown(path), len(values), shown, changed)


def create(request: Request) -> Response:
    """Write a new file, and go to it."""
    text = new_config(field(request, "model_family"), field(request, "model_flavour"), field(request, "num_processes"))
    return write_new(request, field(request, "target"), text)


def copy(request: Request) -> Response:
    """Copy a file, and go to the copy."""
    source = folders_of(request).resolve(field(request, "file"))
    if suffix_of(Path(field(request, "target"))) != suffix_of(source):
        raise SettingsError(f"a copy of {source.name} must end in {suffix_of(source)}", "give it such a name")
    read_entries(source)  # raises for a file that holds no settings: nothing else is copied
    return write_new(request, field(request, "target"), source.read_bytes().decode("utf-8"))


def write_new(request: Request, target: str, text: str) -> Response:
    folders = folders_of(request)
    path = folders.resolve(target)
    if suffix_of(path) not in FORMATS:
        raise SettingsError(f"{target}: settings are in {', '.join(FORMATS)} files", "give the file such a name")
    if path.exists():
        raise SettingsError(f"{folders.shown(path)} exists already", "give another name")
    save(path, text)
    response = HTMLResponse()
    response.headers["HX-Redirect"] = str(request.url_for("edit").include_query_params(file=folders.shown(path)))
    return response


ROUTES = [
    Route("/configurations", show_list),
    Route("/configurations/flavours", show_flavours),
    Route("/configurations/new", create, methods=["POST"]),
    Route("/configurations/copy", copy, methods=["POST"]),
]
