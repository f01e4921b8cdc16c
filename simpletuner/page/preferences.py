"""Preferences: cache maintenance, with what and how many bytes each cache has, and whether a run uses it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from simpletuner.errors import SettingsError, SimpleTunerError
from simpletuner.page.configurations import list_files
from simpletuner.page.editing.documents import Document, load_document
from simpletuner.page.rendering import field, folders_of, render, respond, toast
from simpletuner.settings import Settings
from simpletuner.system.files.lease import Holding
from simpletuner.system.files.lease_folder import holder_of
from simpletuner.system.files.locks import RUN_LOCK
from simpletuner.system.numbers import count_noun, format_bytes
from simpletuner.tools.cache.clearing import clear, find_caches, refuse_in_use
from simpletuner.tools.cache.contents import CacheItem, CacheKind

TITLES = {
    CacheKind.BLOCKS: ("FSDP Detection Cache", "Blocks that were detected in denoisers, of all configurations."),
    CacheKind.DEEPSPEED: ("DeepSpeed Offload Cache", "Files of weights and optimizer state in offload_param_path."),
    CacheKind.LATENTS: ("Latents Cache", "Images as the VAE has encoded them."),
    CacheKind.TEXT: ("Text Embeddings Cache", "Captions as the text encoders have encoded them."),
}


@dataclass(frozen=True)
class CacheRow:
    """A kind of cache: its size, and why it cannot be cleared."""

    kind: CacheKind
    title: str
    sentence: str
    items: Sequence[CacheItem]
    refused: str

    @property
    def size(self) -> str:
        return format_bytes(sum(item.bytes for item in self.items))


def show(request: Request) -> Response:
    file, values = chosen(request)
    return respond(
        request, "preferences", title="Preferences", files=list_files(folders_of(request)), file=file, **values
    )


def chosen(request: Request) -> tuple[str, dict[str, Any]]:
    """File whose caches are shown, and their rows, or the error of a file that cannot be read."""
    file = field(request, "file")
    try:
        return file, {"rows": rows_of(settings_of(request, file)), "error": None}
    except SimpleTunerError as error:
        return file, {"rows": rows_of(Settings(), kinds=[CacheKind.BLOCKS]), "error": error}


def settings_of(request: Request, file: str) -> Settings:
    if not file:
        return Settings()
    document = Document.read(folders_of(request), file)
    return load_document(document, folders_of(request), os.environ).settings


def rows_of(settings: Settings, kinds: Sequence[CacheKind] = tuple(TITLES)) -> list[CacheRow]:
    return [CacheRow(kind, *TITLES[kind], *what_there_is(settings, kind)) for kind in kinds]


def what_there_is(settings: Settings, kind: CacheKind) -> tuple[list[CacheItem], str]:
    """Return the caches of a kind, and why they cannot be cleared; empty where they can."""
    try:
        items, _ = find_caches(settings, [kind])
    except SettingsError as error:  # one folder for latents and text
        return [], error.message
    used = [item for item in items if item.in_use]
    return items, describe_owner(used[0], settings.training.output_dir) if used else ""


def clear_cache(request: Request) -> Response:
    """Clear the caches of one kind; the status is refreshed, and a toast says what was removed."""
    name = field(request, "kind")
    if name not in TITLES:
        raise SettingsError("which cache?", "choose one of those on the page")
    kind, settings = CacheKind(name), settings_of(request, field(request, "file"))
    items, _ = find_caches(settings, [kind])
    if used := [item for item in items if item.in_use]:
        said = toast("nothing is removed", describe_owner(used[0], settings.training.output_dir), "error")
    else:
        refuse_in_use(items)
        # A config file may name any folder: only those that the page was started for are cleared.
        for item in items:
            if item.kind is not CacheKind.BLOCKS:  # that one is in a place of its own, which no setting names
                folders_of(request).resolve(item.path)
        removable = [item for item in items if not item.kept]
        what = f"{TITLES[kind][0]}: {count_noun(len(removable), 'cache')}"
        said = toast(f"{what}, {format_bytes(clear(items))} removed" if removable else "there is nothing to remove")
    file, values = chosen(request)
    return HTMLResponse(render("caches", file=file, **values) + said)


ROUTES = [Route("/preferences", show), Route("/preferences/clear", clear_cache, methods=["POST"])]


def describe_owner(item: CacheItem, output: Path) -> str:
    """Name the run that uses a cache: by the swap folder's owner, else by who holds the output folder."""
    if item.kept:
        return f"{item.path}: {item.kept}"
    holder, holding = holder_of(output / RUN_LOCK)
    named = holder.describe() if holding is Holding.HELD else ""
    return f"{item.path} is in use by a run{named}: stop it, or wait for it"
