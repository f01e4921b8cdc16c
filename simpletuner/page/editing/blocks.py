"""The Detect Blocks dialog: classes that FSDP should wrap. Uncached results come from a process."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from simpletuner.counting.block_detection import Detection, find_cached, from_json
from simpletuner.errors import EnvironmentNotReady
from simpletuner.models.catalog.architecture import architecture_of
from simpletuner.page.child_processes import AwaitedCommands
from simpletuner.page.editing.documents import Document
from simpletuner.page.editing.editor import read_document
from simpletuner.page.editing.fields import examine
from simpletuner.page.rendering import folders_of, render
from simpletuner.settings import Settings
from simpletuner.settings.declared.sections import Model
from simpletuner.settings.showing.export import as_flags

SETTING = "fsdp_transformer_layer_cls_to_wrap"
NAMES_MODEL = ("model_family", "model_flavour", "pretrained_model_name_or_path", "revision", "model_families")
# The largest published denoiser takes 20 s on two cores, most of it the import of torch and diffusers.
SECONDS = 300


def open_dialog(request: Request) -> Response:
    """Show what is cached, or begin to detect."""
    document, model = model_of(request)
    warnings: list[str] = []
    architecture = architecture_of(model, warnings.append)
    cached = find_cached(model, architecture, warnings.append)
    values = {"found": cached, "chosen": chosen(document, cached), "warnings": warnings, "error": None}
    return HTMLResponse(render("blocks", setting=SETTING, name=name_of(model), **values))


def detect(request: Request) -> Response:
    """Detect in a separate process: building a model needs torch, which this server does without."""
    document, model = model_of(request)
    found, error = None, None
    try:
        commands: AwaitedCommands = request.app.state.commands
        with commands.heavy:
            printed = commands.run(arguments_for(model), SECONDS)
        detected = from_json(json.loads(printed)) if printed else None
        found = detected and replace(detected, cached=False)
    except EnvironmentNotReady as raised:
        error = raised
    values = {"found": found, "chosen": chosen(document, found), "warnings": [], "error": error}
    return HTMLResponse(render("blocks_found", setting=SETTING, name=name_of(model), **values))


def model_of(request: Request) -> tuple[Document, Model]:
    document = read_document(request)
    return document, examine(document, folders_of(request)).settings.model


def arguments_for(model: Model) -> list[str]:
    """The arguments of the command that detects this model, whatever else this folder's config files say."""
    values: Mapping[str, Any] = Settings(model=model).model_dump(mode="json")["model"]
    flags = as_flags({name: values[name] for name in NAMES_MODEL})
    own = ["--json", "--refresh", f"--config={os.devnull}", "--accelerate_config=none"]
    return ["detect-blocks", *own, *flags]


def chosen(document: Document, found: Detection | None) -> set[str]:
    """Ticked classes: the form's, else the recommended ones."""
    typed = document.typed.get(SETTING, str(document.values.get(SETTING, "")))
    named = {name.strip() for name in typed.split(",") if name.strip()}
    return named or set(found.blocks.recommended if found else ())


def name_of(model: Model) -> str:
    return " ".join(filter(None, (model.model_family, model.model_flavour))) or model.pretrained_model_name_or_path


ROUTES = [Route("/blocks", open_dialog), Route("/blocks/detect", detect, methods=["POST"])]
