"""The DeepSpeed Builder dialog: that of the command line, with JSON and memory as choices are made."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from simpletuner.counting.zero_memory import estimate_for_settings
from simpletuner.deepspeed.builder import (
    OFFLOAD_FOLDER,
    QUESTIONS,
    BuildResult,
    DeepSpeedBuilder,
    format_template,
    load_templates,
    user_template_path,
)
from simpletuner.deepspeed.requirements import check_platform, check_settings
from simpletuner.errors import SettingsError, SimpleTunerError
from simpletuner.page.editing.documents import Document, find_outside, shown_value
from simpletuner.page.editing.editor import read_document
from simpletuner.page.rendering import field, folders_of, render, toast
from simpletuner.parallel.devices import MemoryEstimate
from simpletuner.settings.declared.sections import setting_fields
from simpletuner.settings.resolving.deepspeed_source import NAME
from simpletuner.settings.resolving.loading import Loaded
from simpletuner.settings.showing.export import field_value
from simpletuner.settings.values.spelling import choices_of
from simpletuner.system.files.atomic import save

PREFIX = "build_"
"""Prefix of the dialog's fields, which are sent with those of the form below it."""
ASKED = (*QUESTIONS, OFFLOAD_FOLDER)


@dataclass(frozen=True)
class AskedSetting:
    """A question of the builder with the answer so far."""

    name: str
    text: str
    value: str
    choices: Sequence[str]


@dataclass(frozen=True)
class Preview:
    """The result of the answers: the JSON, the memory that it needs, and warnings; or why there is none."""

    json: str = ""
    estimate: MemoryEstimate | None = None
    shortfall: str = ""
    warnings: Sequence[str] = ()
    error: SimpleTunerError | None = None
    parameters: int | None = None


def open_dialog(request: Request) -> Response:
    """Show the dialog with what the configuration says, or with a template's values."""
    check_platform()
    document, builder = builder_of(request, {})
    return HTMLResponse(render("builder", **dialog_values(request, document, builder)))


def builder_of(request: Request, answers: Mapping[str, str]) -> tuple[Document, DeepSpeedBuilder]:
    """Return the builder for the configuration as it is typed, with the dialog's answers on top."""
    document = read_document(request)
    find_outside(document, folders_of(request))
    kept = {name: text for name, text in document.typed.items() if text.strip() and name != NAME}
    memory = [field(request, name).strip() or None for name in ("gpu_memory", "host_memory", "parameters")]
    template = field(request, "template") or None
    # The JSON is for DeepSpeed: FSDP2, which the configuration may have, gives way.
    flags = {**kept, **answers, "fsdp_enable": "false"}
    builder = DeepSpeedBuilder.from_arguments(flags, None, template, document.path, *memory)
    if builder.load().settings.parallel.zero_stage is None:
        builder.answers["zero_stage"] = next(each.default for each in QUESTIONS if each.setting == "zero_stage")
    return document, builder


def answers_of(request: Request) -> dict[str, str]:
    given = {each.setting: field(request, PREFIX + each.setting).strip() for each in ASKED}
    return {name: text for name, text in given.items() if text}


def dialog_values(request: Request, document: Document, builder: DeepSpeedBuilder) -> dict[str, object]:
    loaded = builder.load()
    return {
        "questions": [ask(each.setting, each.text, loaded) for each in ASKED],
        "templates": load_templates(os.environ).values(),
        "template": field(request, "template"),
        "target": field(request, "target") or str(document.path.with_name("deepspeed.json")),
        "memory": {name: field(request, name) for name in ("gpu_memory", "host_memory", "parameters")},
        "preview": preview_of(builder),
        "reason": "",
    }


def ask(name: str, text: str, loaded: Loaded) -> AskedSetting:
    """A question, with the value that counts so far: of the configuration, of the template, or by default."""
    declared = setting_fields()[name]
    value = shown_value(field_value(loaded.settings, name))
    choices = [str(choice) for choice in choices_of(declared.annotation)]
    return AskedSetting(name, text, "" if value == "none" and not choices else value, choices)


def preview(request: Request) -> Response:
    """Refresh the JSON and the memory table."""
    try:
        _, builder = builder_of(request, answers_of(request))
        made = preview_of(builder)
    except SimpleTunerError as error:
        made = Preview(error=error)
    return HTMLResponse(render("builder_preview", preview=made))


def preview_of(builder: DeepSpeedBuilder) -> Preview:
    try:
        result = builder.result()
        text = as_text(result)
        warnings = [*result.loaded.warnings, *check_settings(result.loaded.settings, builder.num_parameters)]
    except SimpleTunerError as error:
        return Preview(error=error)
    estimate = estimate_for_settings(result.loaded.settings, builder.num_parameters) if builder.num_parameters else None
    return Preview(text, estimate, result.shortfall, warnings, parameters=builder.num_parameters)


def as_text(result: BuildResult) -> str:
    return json.dumps(result.json, indent=2, ensure_ascii=False) + "\n"


def recommend(request: Request) -> Response:
    """Choose the lowest stage and the least offloading that fit, and show why."""
    chosen = {"zero_stage", "offload_optimizer", "offload_param"}
    answers = {name: text for name, text in answers_of(request).items() if name not in chosen}
    document, builder = builder_of(request, answers)
    reason = builder.choose()
    return HTMLResponse(render("builder", **dialog_values(request, document, builder) | {"reason": reason}))


def save_template(request: Request) -> Response:
    """Keep the result under a name, for other configurations."""
    path = user_template_path(field(request, "template_name"))
    replaces = field(request, "replace") == "on"
    if path.exists() and not replaces:
        raise SettingsError(f"the template {path.stem} exists already", "give another name, or tick Replace")
    _, builder = builder_of(request, answers_of(request))
    save(path, format_template(builder.result().json), replaces)
    return HTMLResponse(toast(f"saved as the template {path.stem}"), headers={"HX-Reswap": "none"})


def apply(request: Request) -> Response:
    """Write the JSON next to the configuration, and put its name into the form."""
    document, builder = builder_of(request, answers_of(request))
    target = folders_of(request).resolve(field(request, "target"))
    if target.suffix != ".json" or target == folders_of(request).resolve(document.path):
        raise SettingsError(
            f"{target.name}: DeepSpeed's configuration is a JSON file of its own", "such as deepspeed.json"
        )
    replaces = field(request, "replace") == "on" or document.values.get(NAME) == field(request, "target")
    if target.exists() and not replaces:
        raise SettingsError(f"{field(request, 'target')} exists already", "give another name, or tick Replace")
    result = builder.result()
    if result.shortfall:
        builder.refuse_shortfall(result.shortfall)
    save(target, as_text(result), replaces)
    name = folders_of(request).shown(target)
    filled = json.dumps({"fill": {"name": NAME, "value": name}})
    said = toast(f"{name} is written, and the form names it", "Save the configuration to keep that")
    return HTMLResponse(said, headers={"HX-Reswap": "none", "HX-Trigger": filled})


ROUTES = [
    Route("/deepspeed", open_dialog),
    Route("/deepspeed/preview", preview, methods=["POST"]),
    Route("/deepspeed/recommend", recommend, methods=["POST"]),
    Route("/deepspeed/template", save_template, methods=["POST"]),
    Route("/deepspeed/apply", apply, methods=["POST"]),
]
