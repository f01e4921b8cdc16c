"""Configurations: list config files, copy one, and make a new one from a family and a number of GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from simpletuner.errors import SettingsError
from simpletuner.models.catalog.registry import presets, trainable_flavours
from simpletuner.page.rendering import editor_address, field, folders_of, render, respond
from simpletuner.recipes.library import find_recipe, recipe_names
from simpletuner.runs.folder import MAX_DEPTH, SKIPPED, Folders
from simpletuner.settings.declared.errors import shorten
from simpletuner.settings.editors.editing import change_text, setting_of
from simpletuner.settings.files.formats import FORMATS, read_entries, suffix_of
from simpletuner.system.files.atomic import save
from simpletuner.system.files.regular_files import read_file
from simpletuner.tools.config_files import new_config, own_output_dir

# Bounds of a search that may begin in a home folder.
MAX_FILES = 300
MAX_FOLDERS = 2000
# A folder with more entries holds images or a cache: reading it to its end can take minutes.
MAX_ENTRIES = 2000
# Larger files are data.
MAX_BYTES = 256 << 10
NO_CONFIG = (".txt", ".jpg", ".jpeg", ".png", ".webp", ".mp4", ".safetensors")
"""Ends of the names of most files of datasets and models."""
SHOWN = ("model_family", "model_flavour", "model_type", "num_processes")


@dataclass(frozen=True)
class ConfigFile:
    name: str
    settings: int
    shown: dict[str, str]
    changed: float
    """Seconds since 1970."""


def show_list(request: Request) -> Response:
    folders = folders_of(request)
    files = list_files(folders)
    opened = request.app.state.config and folders.shown(request.app.state.config)
    values = {
        "roots": folders.roots,
        "recipes": recipe_names(),
        "target": new_name(folders),
        **model_choices(request),
    }
    return respond(request, "configurations", title="Configurations", files=files, opened=opened, **values)


def show_recipe(request: Request) -> Response:
    """Answer with the purpose of the recipe that was chosen, and with its family and flavour."""
    return HTMLResponse(render("recipe_chosen", **model_choices(request)))


def model_choices(request: Request) -> dict[str, object]:
    """Return the values of the fields that a recipe decides, or those of the form without one."""
    families = [name for name, preset in presets().items() if preset.family_class]
    name = field(request, "recipe")
    chosen = find_recipe(name) if name in recipe_names() else None
    family = chosen.model_family if chosen else field(request, "model_family")
    family = family if family in families else families[0]
    flavour = chosen.model_flavour if chosen else field(request, "model_flavour")
    flavours = trainable_flavours(family)
    return {"chosen": chosen, "families": families, "family": family, "flavours": flavours, "flavour": flavour}


def new_name(folders: Folders) -> str:
    """Propose the file that `simpletuner train` reads where none is named, or one in the first folder."""
    usual = Path("config/config.toml")
    return str(usual) if folders.holds(usual) else folders.shown(folders.roots[0] / "config.toml")


def show_flavours(request: Request) -> Response:
    return HTMLResponse(render("flavours", flavours=trainable_flavours(field(request, "model_family"))))


def list_files(folders: Folders) -> list[ConfigFile]:
    return [found for path in find_files(folders) if (found := describe(path, folders))]


def find_files(folders: Folders) -> Iterator[Path]:
    """Yield files that may hold settings, in the folders and a few levels below, the nearest first."""
    level, visited, found = list(folders.roots), 0, 0
    for _ in range(MAX_DEPTH):
        below: list[Path] = []
        for folder in level[: MAX_FOLDERS - visited]:
            visited += 1
            names, inner = entries_of(folder)
            below += inner
            for path in names:
                if suffix_of(path) in FORMATS and found < MAX_FILES and folders.holds(path):
                    found += 1
                    yield path
        # A folder may lie below another one, where it is found again.
        level = [folder for folder in below if folder not in folders.roots]


def entries_of(folder: Path) -> tuple[list[Path], list[Path]]:
    """Files and the folders in a folder; none for a run's, for images and for what cannot be read."""
    try:
        with os.scandir(folder) as scanned:
            entries = list(islice(scanned, MAX_ENTRIES + 1))
    except OSError:
        return [], []
    # Folders of runs hold settings.json, which is the record of a run and not to be edited.
    if len(entries) > MAX_ENTRIES or any(entry.name == "metrics.jsonl" for entry in entries):
        return [], []
    # By name first: a hundred folders of a thousand images would make 200,000 paths for nothing.
    named = [entry for entry in entries if not entry.name.endswith(NO_CONFIG)]
    inner = [
        Path(entry.path)
        for entry in named
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".") and entry.name not in SKIPPED
    ]
    return sorted(Path(entry.path) for entry in named if entry.is_file()), sorted(inner)


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
    return ConfigFile(folders.shown(path), len(values), shown, stat.st_mtime)


def create(request: Request) -> Response:
    """Write a new file, and the dataset file that its recipe needs, and go to it."""
    target = new_file(request, field(request, "target"))
    given = {name: field(request, name) for name in ("model_family", "model_flavour", "num_processes")}
    # A name of the package alone: a path would be a file that the server reads.
    recipe = field(request, "recipe")
    if recipe and recipe not in recipe_names():
        raise SettingsError(f"there is no recipe {shorten(recipe)}", "choose one of the list")
    name, output = folders_of(request).shown(target), free_output_dir(request, target)
    new = new_config({key: value for key, value in given.items() if value} | {"output_dir": output}, recipe, name)
    if new.datasets:
        save(new_file(request, new.datasets_file), new.datasets, replaces=False)
    return write_new(request, target, new.text)


def copy(request: Request) -> Response:
    source = folders_of(request).resolve(field(request, "file"))
    # The text is copied as it is, so it must be read by the same format.
    if suffix_of(Path(field(request, "target"))) != suffix_of(source):
        raise SettingsError(f"a copy of {source.name} must end in {suffix_of(source)}", "give it such a name")
    values = {setting_of(source, each): each.value for each in read_entries(source)}  # raises for what is no settings
    target = new_file(request, field(request, "target"))
    output = free_output_dir(request, target)
    changes = {"output_dir": output}
    if mirror := str(values.get("mirror_output") or ""):  # else the copy would go on from the other's checkpoints there
        changes["mirror_output"] = f"{mirror.rstrip('/').rpartition('/')[0]}/{Path(output).name}"
    return write_new(request, target, change_text(target, read_file(source).decode("utf-8"), changes))


def free_output_dir(request: Request, target: Path) -> str:
    """Return an output_dir for a new file that no other file of the page's folders has."""
    folders, taken = folders_of(request), set[str]()
    for path in find_files(folders):
        with suppress(OSError, SettingsError):
            if path.stat().st_size <= MAX_BYTES:
                taken |= {str(each.value) for each in read_entries(path) if setting_of(path, each) == "output_dir"}
    return own_output_dir(folders.shown(target), taken, folders.roots[0])


def new_file(request: Request, target: str) -> Path:
    """Path of a new file. Raises SettingsError for one that exists, or that can hold no settings."""
    folders = folders_of(request)
    path = folders.resolve(target)
    if suffix_of(path) not in FORMATS:
        raise SettingsError(f"{target}: settings are in {', '.join(FORMATS)} files", "give the file such a name")
    if path.exists():
        raise SettingsError(f"{folders.shown(path)} exists already", "give another name")
    return path


def write_new(request: Request, path: Path, text: str) -> Response:
    save(path, text, replaces=False)
    return HTMLResponse(headers={"HX-Redirect": editor_address(folders_of(request).shown(path))})


ROUTES = [
    Route("/configurations", show_list),
    Route("/configurations/flavours", show_flavours),
    Route("/configurations/recipe", show_recipe),
    Route("/configurations/new", create, methods=["POST"]),
    Route("/configurations/copy", copy, methods=["POST"]),
]
