"""The model card: README.md in the folder of an exported pipeline, which the hub shows."""

from __future__ import annotations

import html
import re
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpletuner.checkpoints.export import read_marker
from simpletuner.checkpoints.layout import BEST_SUFFIX
from simpletuner.models.catalog.registry import LICENSES, describe_license, license_of
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.opening.assistant_lora import assistant_files
from simpletuner.runs.facts import (
    DatasetFacts,
    Rows,
    RunFacts,
    base_of,
    describe_energy,
    describe_result,
    describe_times,
    hub_id,
    read_starts,
)
from simpletuner.runs.health.best_step import Measured, best_saved, read_measured
from simpletuner.runs.images import MP4, WEBP, ImageInfo, read_info, round_folders, step_of_round
from simpletuner.runs.metrics import METRICS, read_columns
from simpletuner.settings import Settings
from simpletuner.settings.declared.knob import kind_of
from simpletuner.settings.declared.sections import Model, setting_fields
from simpletuner.settings.showing.export import ExplainedSetting, as_flags, format_command
from simpletuner.settings.values.parsed import LORA_TYPES
from simpletuner.settings.values.spelling import as_text
from simpletuner.system.files.atomic import remove, write_file
from simpletuner.system.files.regular_files import read_file
from simpletuner.training.publishing.usage import usage_code

if TYPE_CHECKING:  # the library is imported when a run has ended
    from huggingface_hub import ModelCardData
    from jinja2 import Template


CARD, SAMPLES = "README.md", "samples"
TEMPLATE = Path(__file__).parent / "card.md.jinja"
OURS = "<!-- Written by simpletuner, and again at the end of a later run, unless this line is removed. -->"
MAX_SAMPLES = 6
# Of the first table of a run: those that say something to others.
ROWS = ("model", "pipeline", "found", "engine", "effective batch", "images")
OF_A_MACHINE = (
    *("output_dir", "mirror_output", "logging_dir", "main_process_ip", "machine_rank", "notify_url", "run_secret_file"),
    *("preemption_check", "preemption_grace_seconds"),
)
"""Settings that others can do nothing with."""


@dataclass(frozen=True)
class CardSample:
    """An image in the card's folder with its metadata; `clip` and `moving` are a clip's MP4 and WebP."""

    image: str
    info: ImageInfo | None
    clip: str = ""
    moving: str = ""

    @property
    def prompt(self) -> str:
        return self.info.prompt if self.info else ""


def write_card(settings: Settings, family: ModelFamily, facts: RunFacts, pipeline: Path, folder: Path) -> None:
    """Write the card of `pipeline` and its sample images into the folder that takes its place.

    One that somebody has made theirs stays.
    """
    path = folder / CARD
    if path.exists() and OURS not in read_file(path).decode("utf-8", "replace"):
        return
    best = best_exported(settings.training.output_dir, folder) if pipeline.name.endswith(BEST_SUFFIX) else None
    variant = best.weights if best is not None else "ema" if pipeline.name.endswith("-ema") else "trained"
    last = last_images(settings.training.output_dir / "validation", best.step if best is not None else None)
    own = [image for image in last if image.name.startswith(f"{variant}-")]
    samples = copy_samples(own[:MAX_SAMPLES], folder / SAMPLES)
    # With ema_validation=ema_only the average alone is sampled: its prompt is better than none.
    sampled = samples[0].info if samples else first_info(last)
    write_file(path, render(settings, family, facts, pipeline, samples, sampled, best).encode())


def render(
    settings: Settings,
    family: ModelFamily,
    facts: RunFacts,
    pipeline: Path,
    samples: Sequence[CardSample],
    sampled: ImageInfo | None,
    best: Measured | None = None,
) -> str:
    from huggingface_hub import ModelCard

    base, lora = base_of(settings.model), settings.model.model_type == "lora"
    public = {each.name: public_value(each, settings.model) for each in facts.settings if each.name not in OF_A_MACHINE}
    command = format_command(["simpletuner", "train", *as_flags(public)]).strip()
    code = usage_code(family, pipeline, sampled)
    has_clips = any(each.clip for each in samples) or any("@" in name for name, _, _ in facts.buckets)
    content = template().render(
        card_data=front_matter(settings.model, samples, has_clips).to_yaml(),
        ours=OURS,
        name=escaped(facts.name),
        base=escaped(base),
        lora=lora and with_article(LORA_TYPES[settings.lora.lora_type]),
        assistants=", ".join(escaped(path.name) for path in assistant_files(settings)),
        average=pipeline.name.endswith("-ema") or (best is not None and best.weights == "ema"),
        best=best.step if best is not None else None,
        samples=[(each.moving or each.image, each.clip, escaped(each.prompt) or "(empty prompt)") for each in samples],
        noun="clip" if samples and samples[0].clip else "image",
        sampler=f"{family.pipeline_name} with {type(family.scheduler()).__name__}",
        code=code,
        of_other=sampled is not None and not samples,
        numbers=table(measured_rows(settings.training.output_dir, facts)),
        rows=table((name, value) for name, value in facts.rows if name in ROWS),
        license=describe_license(license_of(hub_id(settings.model))),
        datasets=[dataset_cells(each) for each in facts.datasets],
        settings=[(name, escaped(as_text(value))) for name, value in public.items()],
        command=command,
        # A fence must be longer than the runs of backticks within it (CommonMark, section 4.5).
        fence="`" * max(3, 1 + max(map(len, re.findall("`+", code + command)), default=0)),
    )
    return str(ModelCard(content))


@cache
def template() -> Template:
    from jinja2 import Template

    return Template(TEMPLATE.read_text(encoding="utf-8"))


def measured_rows(output: Path, facts: RunFacts) -> Rows:
    """Return losses, dates, duration, energy, and the digest that identifies the data."""
    columns, starts = read_columns(output / METRICS), read_starts(output)
    rows = [*describe_result(columns), *describe_times(starts, columns), ("energy", describe_energy(starts, columns))]
    if facts.data_digest:
        rows.append(("data digest", f"{facts.data_digest} (XXH3 of names, sizes and captions of all images)"))
    return rows


def with_article(label: str) -> str:
    return f"{'An' if label[0] in 'AEIOU' else 'A'} {label}"


def front_matter(model: Model, samples: Iterable[CardSample], has_clips: bool = False) -> ModelCardData:
    """Return the hub's metadata; its gallery shows the sample images and clips with their prompts."""
    from huggingface_hub import ModelCardData

    base, is_lora = hub_id(model), model.model_type == "lora"
    return ModelCardData(
        **license_keys(license_of(base)),
        base_model=base,
        base_model_relation=("adapter" if is_lora else "finetune") if base else None,
        library_name="diffusers",
        pipeline_tag="text-to-video" if has_clips else "text-to-image",
        tags=[model.model_family, *(["lora"] if is_lora else []), "simpletuner"],
        # An entry without a text is not shown.
        widget=[{"text": each.prompt or " ", "output": {"url": each.clip or each.image}} for each in samples] or None,
    )


def license_keys(name: str) -> dict[str, Any]:
    """Return the keys of a card for the licence of the base model, which what is trained from it inherits."""
    if not name:
        return {}
    if LICENSES[name].is_hub_name:
        return {"license": name}
    return {"license": "other", "license_name": name, "license_link": LICENSES[name].text}


def public_value(setting: ExplainedSetting, model: Model) -> object:
    # Others do not have the path.
    is_path = kind_of(setting_fields()[setting.name].annotation) is Path
    is_folder = setting.name == "pretrained_model_name_or_path" and hub_id(model) is None
    return Path(setting.value).name if isinstance(setting.value, str) and (is_path or is_folder) else setting.value


def best_exported(output: Path, folder: Path) -> Measured | None:
    """Return the step of which the best weights are written into a folder; None where it is not known."""
    marker = read_marker(folder)
    return best_saved(read_measured(output), [marker["steps"]]) if marker is not None else None


def last_images(validation: Path, until: int | None = None) -> list[Path]:
    """Return the images of the last round, up to a step, of the weights that train and of the average."""
    for folder in reversed(round_folders(validation)):
        if until is not None and step_of_round(folder) > until:
            continue
        if images := sorted(path for name in ("trained", "ema") for path in folder.glob(f"{name}-*.png")):
            return images
    return []


def first_info(images: Iterable[Path]) -> ImageInfo | None:
    for path in images:
        with suppress(OSError):
            return read_info(path)[1]
    return None


def copy_samples(images: Sequence[Path], folder: Path) -> list[CardSample]:
    remove(folder)  # also a link
    copied: list[CardSample] = []
    for number, path in enumerate(images):
        try:
            _, info = read_info(path)
        except OSError:  # it is no image (any more)
            continue
        folder.mkdir(exist_ok=True)
        own = [path.with_suffix(suffix) for suffix in (MP4, WEBP)] if info and info.frames > 1 else []
        own = own if all(each.is_file() for each in own) else []
        files = [f"{folder.name}/{number:02d}{each.suffix}" for each in (path, *own)]
        for source, file in zip((path, *own), files, strict=True):
            shutil.copyfile(source, folder.parent / file)
        copied.append(CardSample(files[0], info, *files[1:]))
    return copied


def dataset_cells(facts: DatasetFacts) -> list[object]:
    return [escaped(facts.id), facts.images, facts.repeats, facts.resolution, escaped(facts.captions)]


def table(rows: Iterable[tuple[str, object]]) -> list[tuple[str, str]]:
    return [(escaped(name), escaped(str(value))) for name, value in rows]


def escaped(text: str) -> str:
    # It must not end the cell, or be markup.
    shown = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*_\[\]|~#!$])", r"\\\1", shown)
