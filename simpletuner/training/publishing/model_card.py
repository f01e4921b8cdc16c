"""The model card: README.md in the folder of an exported pipeline, which the hub shows."""

from __future__ import annotations

import html
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from simpletuner.models.registry import flavour_of
from simpletuner.session import Session
from simpletuner.settings.explain import ExplainedSetting
from simpletuner.settings.export import as_flags, format_command
from simpletuner.settings.knob import kind_of
from simpletuner.settings.sections import Model, setting_fields
from simpletuner.settings.spelling import as_text
from simpletuner.system.files import write_file
from simpletuner.system.regular_files import read_file
from simpletuner.training.image_files import read_info
from simpletuner.training.metrics_reader import METRICS, read_columns
from simpletuner.training.output_dir import pipelines_of
from simpletuner.training.run_facts import DatasetFacts, RunFacts, describe_result

CARD, SAMPLES = "README.md", "samples"
TEMPLATE = Path(__file__).parent / "card.md.jinja"
OURS = "<!-- Written by simpletuner, and again at the end of a later run, unless this line is removed. -->"
MAX_SAMPLES = 6
ROWS = ("model", "engine", "effective batch", "images")
"""Of the first table of a run: those that say something to others."""
OF_A_MACHINE = ("output_dir", "logging_dir", "main_process_ip", "machine_rank", "notify_url", "run_secret_file")
"""Settings that others can do nothing with."""
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def write_cards(session: Session, facts: RunFacts) -> None:
    """Write a card into each folder that the run exports to, on rank 0."""
    if session.world.is_first:
        for pipeline in pipelines_of(session.settings):
            write_card(session, facts, pipeline)


def write_card(session: Session, facts: RunFacts, pipeline: Path) -> None:
    """Write a card and its sample images. One that somebody has made theirs stays."""
    path = pipeline / CARD
    if path.exists() and OURS not in read_file(path).decode("utf-8", "replace"):
        return
    variant = "ema" if pipeline.name.endswith("-ema") else "trained"
    samples = copy_samples(session.settings.training.output_dir / "validation", pipeline / SAMPLES, variant)
    write_file(path, render(session, facts, variant, samples).encode())


def render(session: Session, facts: RunFacts, variant: str, samples: list[tuple[str, str]]) -> str:
    from huggingface_hub import ModelCard, ModelCardData

    settings = session.settings
    base, lora = base_of(settings.model), settings.model.model_type == "lora"
    public = {each.name: public_value(each, settings.model) for each in facts.settings if each.name not in OF_A_MACHINE}
    command = format_command(["simpletuner", "train", *as_flags(public)]).strip()
    data = ModelCardData(
        base_model=hub_id(settings.model),
        library_name="diffusers",
        pipeline_tag="text-to-image",
        tags=[settings.model.model_family, *(["lora"] if lora else []), "simpletuner"],
    )
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        ours=OURS,
        name=escaped(facts.name),
        base=escaped(base),
        lora=lora,
        variant=variant,
        repository=settings.hub.hub_model_id or "PATH_OR_ID",
        samples=[(file, escaped(prompt) or "(empty prompt)") for file, prompt in samples],
        numbers=table(describe_result(read_columns(settings.training.output_dir / METRICS))),
        rows=table((name, value) for name, value in facts.rows if name in ROWS),
        datasets=[dataset_cells(each) for each in facts.datasets],
        settings=table((name, as_text(value)) for name, value in public.items()),
        command=command,
        fence="`" * max(3, 1 + max(map(len, re.findall("`+", command)), default=0)),
    )
    return str(card)


def base_of(model: Model) -> str:
    """Return the name of the base model: its hub id, or the name of its folder without what is above it."""
    flavour = flavour_of(model)
    name = model.pretrained_model_name_or_path or (flavour.hub if flavour else "")
    return (name if hub_id(model) else Path(name).name) or f"{model.model_family} with random weights"


def hub_id(model: Model) -> str | None:
    """Return the base model's id on the hub; None for a folder, and for the tiny flavour."""
    flavour = flavour_of(model)
    name = model.pretrained_model_name_or_path or (flavour.hub if flavour else "")
    return name if HUB_ID.fullmatch(name) and not Path(name).exists() else None


def public_value(setting: ExplainedSetting, model: Model) -> Any:
    """Return a setting's value; of a path, which others do not have, its last part."""
    is_path = kind_of(setting_fields()[setting.name].annotation) is Path
    is_folder = setting.name == "pretrained_model_name_or_path" and hub_id(model) is None
    return Path(setting.value).name if isinstance(setting.value, str) and (is_path or is_folder) else setting.value


def copy_samples(validation: Path, folder: Path, variant: str) -> list[tuple[str, str]]:
    """Copy images of the last round that has any; return their names in the card's folder, with their prompts."""
    rounds = sorted(validation.glob(f"step-*/{variant}-*.png"), key=lambda path: (len(path.parent.name), path))
    last = [path for path in rounds if path.parent == rounds[-1].parent][:MAX_SAMPLES]
    shutil.rmtree(folder, ignore_errors=True)
    copied: list[tuple[str, str]] = []
    for number, path in enumerate(last):
        folder.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / f"{number:02d}.png")
        info = read_info(path)
        copied.append((f"{folder.name}/{number:02d}.png", info.prompt if info else ""))
    return copied


def dataset_cells(facts: DatasetFacts) -> list[object]:
    return [escaped(facts.id), facts.images, facts.repeats, facts.resolution, escaped(facts.captions)]


def table(rows: Iterable[tuple[str, object]]) -> list[tuple[str, str]]:
    return [(escaped(name), escaped(str(value))) for name, value in rows]


def escaped(text: str) -> str:
    """Escape text for a cell of a Markdown table: it must not end the cell, or be markup."""
    shown = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*_\[\]|~#!$])", r"\\\1", shown)
