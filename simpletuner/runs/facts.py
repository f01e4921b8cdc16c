"""Facts for report and model card: results, start, time and energy over all starts of a run. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simpletuner.data.config.dataset_types import ImageDataset, LocalImages
from simpletuner.errors import SimpleTunerError
from simpletuner.models.catalog.registry import repository_named
from simpletuner.runs.metrics import ENDS, HELD_OUT, MetricColumn, MetricColumns, parse_lines
from simpletuner.runs.settings_record import HISTORY
from simpletuner.settings import Loaded, Settings
from simpletuner.settings.declared.sections import Model, Training
from simpletuner.settings.showing.export import ExplainedSetting, as_flags, explain_settings, format_command
from simpletuner.settings.values.parsed import LORA_TYPES
from simpletuner.status_line import format_seconds
from simpletuner.system.files.regular_files import read_file
from simpletuner.system.numbers import count_noun

if TYPE_CHECKING:
    from simpletuner.preparation.plan import Plan

# Of a table of names and values.
Rows = list[tuple[str, object]]

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class DatasetFacts:
    id: str
    images: int
    repeats: int
    resolution: str
    captions: str
    place: str


@dataclass(frozen=True)
class RunFacts:
    """A run as it began: rows of its first table, data, settings other than defaults, the command."""

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
    """Digest of names, sizes and captions of all images; empty on ranks that write nothing."""

    @property
    def lead(self) -> Rows:
        """Rows that a reader looks for first: model, data, engine and device."""
        rows = dict(self.rows)
        trained, held_out = sum(images for _, images, _ in self.buckets), f", {self.held_out:,} held out"
        names = ", ".join(each.id for each in self.datasets)
        images = f"{count_noun(trained, 'image')} of {names}{held_out if self.held_out else ''}"
        known = [("trained", self.trained), ("model", rows.get("model")), ("data", images if self.datasets else "")]
        known += [(name, rows.get(name)) for name in ("engine", "device")]
        return [(name, value) for name, value in known if value]


def run_facts(loaded: Loaded, rows: Rows, plan: Plan, data_digest: str = "") -> RunFacts:
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
    return LORA_TYPES[settings.lora.lora_type] if settings.model.model_type == "lora" else "fine-tune"


def name_of(settings: Settings) -> str:
    """Name of a run: that of its repository, at its tracker, or of its folder; else of what it trains."""
    folder = settings.training.output_dir
    if own := settings.hub.hub_model_id.rpartition("/")[2] or settings.logging.tracker_run_name:
        return own
    if folder != Training().output_dir:
        return folder.absolute().name
    return f"{base_of(settings.model)} {kind_trained(settings)}"


def base_of(model: Model) -> str:
    """Name of the base model: its hub id, or that of its folder, with the run's where a run exported it."""
    if (name := hub_id(model)) or not model.pretrained_model_name_or_path:
        return name or f"{model.model_family} with random weights"
    path = Path(model.pretrained_model_name_or_path).absolute()
    return f"{path.parent.name}/{path.name}" if path.name.startswith("pipeline") else path.name


def hub_id(model: Model) -> str | None:
    """Return the base model's id on the hub; None for a folder, and for the tiny flavour."""
    name = repository_named(model)
    return name if HUB_ID.fullmatch(name) and not Path(name).exists() else None


def dataset_facts(dataset: ImageDataset, images: int) -> DatasetFacts:
    unit = {"pixel": "px short edge", "area": "megapixels", "pixel_area": "px, by area"}[dataset.resolution_type]
    captions = dataset.caption_strategy
    if dataset.instance_prompt and (captions == "instanceprompt" or dataset.prepend_instance_prompt):
        captions = f"{captions}: {dataset.instance_prompt}"
    if dataset.prior_images:
        captions = "prompts by which the base model made them"
    kind = " (held out)" if dataset.dataset_type == "eval" else ""
    place = str(dataset.instance_data_dir) if isinstance(dataset, LocalImages) else dataset.type
    resolution = f"{dataset.resolution:g} {unit}"
    return DatasetFacts(f"{dataset.id}{kind}", images, dataset.repeats, resolution, captions, place)


def describe_result(columns: MetricColumns) -> Rows:
    """Return names and values of a run's result, from its metrics; empty for a run without a step."""
    losses, measured = columns.column("loss"), columns.column("eval_loss")
    if not losses.points:
        return []
    numbers: Rows = [("steps", losses.last_step), ("loss", describe_losses(losses))]
    if len(speeds := columns.column("samples_per_second").means()[1]):
        numbers.append(("samples/s", f"{np.median(speeds):.1f}"))
    if measured.points:
        numbers.append(("held-out loss", f"{measured.first[0]:.4f} at first, {measured.last[-1]:.4f} at last"))
    return [*numbers, *describe_best(columns)]


def describe_best(columns: MetricColumns) -> Rows:
    """Return the best step of a run by its held-out loss; nothing without one."""
    if not any(columns.column(name).points for name in HELD_OUT):
        return []
    from simpletuner.runs.health.best_step import find_best_of

    found = find_best_of(columns.reader.path.parent)
    return [("best step", found.describe())] if found is not None else []


def describe_losses(losses: MetricColumn) -> str:
    """Compare the first with the last steps, as many of each as fit without overlap."""
    count = min(ENDS, losses.points // 2)
    if not count:
        return f"{losses.first[0]:.4f} at the only step"
    steps = f"means of {count} steps each" if count > 1 else "one step each"
    return f"{losses.first[:count].mean():.4f} at first, {losses.last[-count:].mean():.4f} at last ({steps})"


TIME = "%Y-%m-%d %H:%M UTC"


@dataclass(frozen=True)
class Start:
    """A start of a run: time, step before it, number of GPUs and the power limit of each."""

    time: datetime
    step: int
    gpus: int = 0
    watts: float = 0.0
    """0 where it is not known."""
    data: str = ""
    """Key of the listing of its data; empty where it has none."""


def read_starts(output: Path) -> list[Start]:
    """Return the starts of a run in their order, from the one that began it; those of a version that wrote
    none are not known."""
    try:
        rows = parse_lines(read_file(output / HISTORY).splitlines())
    except (OSError, SimpleTunerError):
        return []
    starts = [start for row in rows for start in parse_start(row)]
    begun = max((number for number, start in enumerate(starts) if start.step == 0), default=0)
    return starts[begun:]


def parse_start(row: Any) -> list[Start]:
    try:
        time = datetime.fromisoformat(row["time"]).astimezone(UTC)
        numbers = int(row["step"]), int(row.get("gpus", 0)), float(row.get("gpu_watts", 0))
        return [Start(time, *numbers, str(row.get("data", "")))]
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
        return []


def describe_times(starts: Sequence[Start], columns: MetricColumns) -> list[tuple[str, str]]:
    """Return names and values of a run's start and of the duration of its steps."""
    rows = []
    if starts:
        again = f"; {count_noun(len(starts), 'start')}, the last {starts[-1].time:{TIME}}" if len(starts) > 1 else ""
        rows.append(("started", f"{starts[0].time:{TIME}}{again}"))
    seconds, counts = columns.column("seconds").means()[1:]
    if len(counts):
        total = format_seconds(float(seconds @ counts))
        rows.append(("trained for", f"{total} in {count_noun(int(counts.sum()), 'step')}"))
    return rows


def describe_energy(starts: Sequence[Start], columns: MetricColumns) -> str:
    """Upper bound of what the GPUs took for the steps: seconds x power limit, by the start that took each.

    A board takes no more than its limit on average, so less was used; the rest of the machine is left out.
    """
    steps, seconds, counts = columns.column("seconds").means()
    watts = np.zeros(len(steps))
    for start in starts:  # a later one has taken again what follows its checkpoint
        watts[steps > start.step] = start.gpus * start.watts
    if not len(steps) or not watts.all():
        return "not estimated: no power limit of a GPU is known for all steps"
    kilowatt_hours = float((watts * seconds * counts).sum()) / 3.6e6
    gpus = " and ".join(dict.fromkeys(f"{count_noun(each.gpus, 'GPU')} of {each.watts:g} W" for each in starts))
    return (
        f"at most {kilowatt_hours:.3g} kWh (estimate: seconds of all steps x GPUs x power limit; {gpus}), "
        "without encoding, validation and the machines around the GPUs"
    )
