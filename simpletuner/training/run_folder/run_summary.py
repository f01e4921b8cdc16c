"""Facts about a run that the report and the model card show."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from simpletuner.data.config.dataset_types import ImageDataset, LocalImages
from simpletuner.models.catalog.registry import flavour_of
from simpletuner.models.family.adapter_types import LABELS
from simpletuner.preparation.plan import Plan
from simpletuner.settings import Loaded, Settings
from simpletuner.settings.declared.sections import Model, Training
from simpletuner.settings.showing.explain import ExplainedSetting, explain_settings
from simpletuner.settings.showing.export import as_flags, format_command
from simpletuner.system.numbers import count_noun
from simpletuner.training.metrics.metrics_reader import MetricColumns

# Of a table of names and values.
Rows = list[tuple[str, Any]]

LOSS_STEPS = 20
"""Largest number of steps that the first and the last loss are means of; they never overlap."""

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class DatasetFacts:
    """A dataset as it takes part in a run."""

    id: str
    images: int
    repeats: int
    resolution: str
    captions: str
    place: str


@dataclass(frozen=True)
class RunFacts:
    """A run as it began: the rows of its first table, data, settings that are not at their default, the command."""

    name: str
    rows: Rows
    datasets: Sequence[DatasetFacts]
    buckets: Sequence[tuple[str, int, int]]
    """Name, images, and how often an epoch shows one of them."""
    held_out: int
    settings: Sequence[ExplainedSetting]
    command: str
    trained: str = ""
    """Kind and base model, as in `LoRA of NAME`."""
    data_digest: str = ""
    """Of names, sizes and captions of all images; empty on ranks that write nothing."""

    @property
    def lead(self) -> Rows:
        """Rows that a reader looks for first: what is trained, on which data, by what."""
        rows = dict(self.rows)
        trained, held_out = sum(images for _, images, _ in self.buckets), f", {self.held_out:,} held out"
        names = ", ".join(each.id for each in self.datasets)
        images = f"{count_noun(trained, 'image')} of {names}{held_out if self.held_out else ''}"
        known = [("trained", self.trained), ("model", rows.get("model")), ("data", images if self.datasets else "")]
        known += [(name, rows.get(name)) for name in ("engine", "device")]
        return [(name, value) for name, value in known if value]


def facts_of(loaded: Loaded, rows: Rows, plan: Plan, data_digest: str = "") -> RunFacts:
    """Return the facts of a run; `rows` are those of its first table, `data_digest` that of its listing."""
    settings = [each for each in explain_settings(loaded) if each.value != each.default]
    words = ["simpletuner", "train", *as_flags({each.name: each.value for each in settings})]
    return RunFacts(
        name=name_of(loaded.settings),
        rows=rows,
        datasets=[dataset_facts(part.dataset, len(part)) for part in plan.samples.parts],
        buckets=[(name, bucket.num_samples, len(bucket)) for name, bucket in plan.buckets.items()],
        held_out=len(plan.held_out),
        settings=settings,
        command=format_command(words),
        trained=f"{kind_trained(loaded.settings)} of {base_of(loaded.settings.model)}",
        data_digest=data_digest,
    )


def kind_trained(settings: Settings) -> str:
    return LABELS[settings.lora.lora_type] if settings.model.model_type == "lora" else "fine-tune"


def name_of(settings: Settings) -> str:
    """Return what a run is called: as its repository, at its tracker, or as its folder; else what it trains."""
    folder = settings.training.output_dir
    if own := settings.hub.hub_model_id.rpartition("/")[2] or settings.logging.tracker_run_name:
        return own
    if folder != Training().output_dir:
        return folder.absolute().name
    return f"{base_of(settings.model)} {kind_trained(settings)}"


def base_of(model: Model) -> str:
    """Return the name of the base model: its hub id, or that of its folder, with the run's where a run exported it."""
    if (name := hub_id(model)) or not model.pretrained_model_name_or_path:
        return name or f"{model.model_family} with random weights"
    path = Path(model.pretrained_model_name_or_path).absolute()
    return f"{path.parent.name}/{path.name}" if path.name.startswith("pipeline") else path.name


def hub_id(model: Model) -> str | None:
    """Return the base model's id on the hub; None for a folder, and for the tiny flavour."""
    flavour = flavour_of(model)
    name = model.pretrained_model_name_or_path or (flavour.hub if flavour else "")
    return name if HUB_ID.fullmatch(name) and not Path(name).exists() else None


def dataset_facts(dataset: ImageDataset, images: int) -> DatasetFacts:
    unit = {"pixel": "px short edge", "area": "megapixels", "pixel_area": "px, by area"}[dataset.resolution_type]
    captions = dataset.caption_strategy
    if dataset.instance_prompt and (captions == "instanceprompt" or dataset.prepend_instance_prompt):
        captions = f"{captions}: {dataset.instance_prompt}"
    kind = " (held out)" if dataset.dataset_type == "eval" else ""
    place = str(dataset.instance_data_dir) if isinstance(dataset, LocalImages) else dataset.type
    resolution = f"{dataset.resolution:g} {unit}"
    return DatasetFacts(f"{dataset.id}{kind}", images, dataset.repeats, resolution, captions, place)


def describe_result(columns: MetricColumns) -> Rows:
    """Return how a run went by its metrics, as names and values; nothing of a run without a step."""
    steps, losses = columns.points("loss")
    if not len(steps):
        return []
    numbers: Rows = [("steps", int(steps[-1])), ("loss", describe_losses(losses))]
    if len(speeds := columns.points("samples_per_second")[1]):
        numbers.append(("samples/s", f"{np.median(speeds):.1f}"))
    if len(measured := columns.points("eval_loss")[1]):
        numbers.append(("held-out loss", f"{measured[0]:.4f} at first, {measured[-1]:.4f} at last"))
    return numbers


def describe_losses(losses: np.ndarray) -> str:
    """Compare the first with the last steps, as many of each as fit without overlap."""
    count = min(LOSS_STEPS, len(losses) // 2)
    if not count:
        return f"{losses[0]:.4f} at the only step"
    steps = f"means of {count} steps each" if count > 1 else "one step each"
    return f"{losses[:count].mean():.4f} at first, {losses[-count:].mean():.4f} at last ({steps})"
