"""Refusal of a start in the output_dir of another project's run: its pipeline would be taken for this one's,
or its weights trained on with other images and overwritten.

A project is a model family, flavour and kind, and the images. Those may be moved, copied, renamed, added and
removed: data is another only if none of its images was trained on before.
"""

# pyright: basic, reportAttributeAccessIssue=false
# pyarrow comes without types.

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from simpletuner.checkpoints.layout import FINISHED, Checkpoint, list_checkpoints
from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.samples.samples import DatasetSamples, Samples
from simpletuner.data.scan.comparison import hash_content
from simpletuner.errors import EnvironmentNotReady, OtherRunsFolder
from simpletuner.models.catalog.registry import flavours_of, repository_named
from simpletuner.models.folder.weights import BASE_COMMIT, commit_in
from simpletuner.runs.data_listing import DataListing, place_of, read_listing_of
from simpletuner.runs.metrics import parse_lines
from simpletuner.runs.settings_record import HISTORY, SETTINGS, read_settings
from simpletuner.session import Session
from simpletuner.settings import Settings
from simpletuner.system.files.regular_files import read_file
from simpletuner.system.numbers import count_noun

BASE, FLAVOUR = "pretrained_model_name_or_path", "model_flavour"
OTHER_FOLDER = "give this run another --output_dir, or --resume_from_checkpoint=none to begin anew in this one"
MOST_READ = 1000
"""Images that are opened, where those of a moved folder are looked for."""
HUB, HUB_MODEL = "datasets--", "models--"
"""Prefixes of the folders of datasets and models in the hub's cache, with one folder per commit."""


def commit_of_run(settings: Settings, checkpoint: Checkpoint | None) -> str:
    """Return the commit of the hub that a run's base model was read at first; empty for one that has none.

    It is taken again as long as the settings name the same: without it a branch that has moved since would
    change the frozen weights under a LoRA, or the VAE under its cached latents.
    """
    before = read_settings(settings.training.output_dir / SETTINGS) or {}
    if checkpoint is None or before.get("revision") != settings.model.revision:
        return ""
    fact = checkpoint.state.get("proven", {}).get(BASE_COMMIT, "")
    return commit_in(str(fact), repository_named(settings.model))


def refuse_other_model(session: Session, checkpoint: Checkpoint | None) -> None:
    """Raise OtherRunsFolder for a family, flavour or kind of model that the run in output_dir does not have.

    Without a checkpoint that is its last start's record: a pipeline may be all that is left of a run.
    """
    settings = session.settings
    output, model = settings.training.output_dir, settings.model
    before = read_settings(output / SETTINGS) if continues_run(settings) else None
    state = checkpoint.state if checkpoint is not None else before or {}
    place = checkpoint.folder if checkpoint is not None else output
    hint = OTHER_FOLDER
    family = state.get("model_family")
    if family not in (None, "", model.model_family):
        raise OtherRunsFolder(f"{place} is of model_family {family}, but model_family = {model.model_family}", hint)
    held, wanted = state.get("model_type", "full" if checkpoint else None), model.model_type
    if held not in (None, wanted):
        what = {"full": "all weights", "lora": "a LoRA"}.get(held, held)
        raise OtherRunsFolder(f"{place} holds {what}, but model_type = {wanted}", f"set model_type={held}, or {hint}")
    if before:
        refuse_other_base(settings, before, has_finished=False)


def refuse_other_base(settings: Settings, before: Mapping[str, object], has_finished: bool) -> None:
    """Raise OtherRunsFolder where the run in output_dir was of another base model than a start names.

    `before` are its settings. A folder may be moved, and a flavour downloaded to one: they keep the last part
    of the name. A run that has not finished is refused for another flavour alone; of another folder the
    shapes of the weights are compared, and the table of changes says what goes on.
    """
    output, model = settings.training.output_dir, settings.model
    was, now = BaseModel.of(before), BaseModel.of(model.model_dump())
    are_published = FLAVOUR == was.setting == now.setting
    is_same = was.name == now.name and not (are_published and was.denoiser != now.denoiser)
    if not (was.value and now.value) or is_same or not (has_finished or are_published):
        return
    said = f"{output} has a run that was trained from {was.value}{', and has finished' * has_finished}"
    alone = f" without {BASE}" * (was.setting == FLAVOUR != now.setting)
    hint = f"set {was.setting}={was.value}{alone}, or {OTHER_FOLDER}"
    raise OtherRunsFolder(f"{said}, but {now.setting} = {now.value}", hint)


@dataclass(frozen=True)
class BaseModel:
    """The base model of a start: the setting that decides it, and what it is known by wherever it is."""

    setting: str
    value: str
    name: str
    denoiser: str = ""
    """Component that a flavour names of a pipeline with two denoisers; compared with the checkpoint's."""

    @classmethod
    def of(cls, settings: Mapping[str, object]) -> BaseModel:
        """Read the base model from recorded settings. The flavour is left out beside a folder, file or hub
        id: it is only a hint."""
        if value := str(settings.get(BASE) or ""):
            path = Path(value).expanduser()
            path = path.resolve() if path.exists() else path
            of_hub = next((part.rpartition("--")[2] for part in path.parts if part.startswith(HUB_MODEL)), "")
            return cls(BASE, value, of_hub or path.name)
        flavours = flavours_of(str(settings.get("model_family") or ""))
        value = str(settings.get(FLAVOUR) or next(iter(flavours), ""))
        chosen = flavours.get(value)
        return cls(FLAVOUR, value, Path(chosen.hub).name, chosen.denoiser) if chosen else cls(FLAVOUR, value, value)


def continues_run(settings: Settings) -> bool:
    return settings.checkpoints.resume_from_checkpoint != "none" and has_results(settings.training.output_dir)


def has_results(output: Path) -> bool:
    """True for a folder with a checkpoint or a pipeline."""
    return bool(list_checkpoints(output / "checkpoints")) or any(output.glob(f"[!.]*/{FINISHED}"))


def refuse_other_data(session: Session, samples: Samples) -> None:
    """Raise OtherRunsFolder where the run in output_dir was trained on none of these images.

    For one process: it may open up to MOST_READ images.
    """
    settings = session.settings
    output = settings.training.output_dir
    before = last_listing(output) if has_results(output) else None
    if before is None or not len(before.table) or not len(samples) or has_image_of(before, samples):
        return
    old, new = places_in(before), " and ".join(dict.fromkeys(place_of(part) for part in samples.parts))
    said = f"{output} has a run on {old} ({count_noun(len(before.table), 'image')}), of which none is among the "
    said += f"{len(samples):,} of {new}"
    if settings.training.continue_with_other_data:
        session.report.warn(f"{said}: that run goes on with other data")
        return
    mirror = " and mirror_output" if settings.checkpoints.mirror_output else ""
    hint = f"give this run another output_dir{mirror}, or `--continue_with_other_data` to train that one on with these"
    raise OtherRunsFolder(said, hint)


def places_in(listing: DataListing) -> str:
    return " and ".join(dict.fromkeys(listing.places.values())) or "other data"


def last_listing(output: Path) -> DataListing | None:
    """Return the data of the last start that trained; None where that is not known."""
    try:
        rows = [row for row in parse_lines(read_file(output / HISTORY).splitlines()) if isinstance(row, dict)]
        return read_listing_of(output, next(row["data"] for row in reversed(rows) if row.get("data")))
    except (OSError, TypeError, StopIteration, EnvironmentNotReady):
        return None


def has_image_of(before: DataListing, samples: Samples) -> bool:
    """Search the samples for an image that an earlier start trained on, whatever its place and name now.

    Images of an eval dataset and of regularisation do not count: several projects have the same.
    """
    trained = [part for part in samples.parts if part.dataset.dataset_type != "eval"]
    own = [part for part in trained if not part.dataset.is_regularisation_data] or trained
    rows = before.table.filter(pc.invert(before.table["held_out"])) if len(own) else before.table
    return any(is_of_same_source(before, part) or shares_images(before, rows, part) for part in own)


def is_of_same_source(before: DataListing, part: DatasetSamples) -> bool:
    # Another commit has other files.
    place = hub_name(place_of(part))
    return bool(place) and place in map(hub_name, before.places.values())


def hub_name(place: str) -> str:
    return next((name for name in Path(place).parts if name.startswith(HUB)), "")


def shares_images(before: DataListing, rows: pa.Table, part: DatasetSamples) -> bool:
    """Search the samples of one dataset for an image of `rows`, the listing's trained ones."""
    own = part.table.select(["name", "version"]).take(pa.array(part.rows)).combine_chunks()
    names, sizes = base_names(own["name"]), size_of(own["version"]).combine_chunks()
    place, is_local = place_of(part), isinstance(part.dataset, LocalImages)
    # A file of the same place, time and size is the same; so is an object with the same hash.
    places = [each for each, known in before.places.items() if known == place] if is_local else [""]
    there = rows.filter(starts_with_any(rows["id"], places))
    if any_in(joined(names, own["version"]), joined(base_names(there["id"]), there["version"])):
        return True
    if is_local:
        if has_copy(before, rows, part, own["name"].combine_chunks(), sizes):
            return True
        rows = rows.filter(pc.invert(starts_with_any(rows["id"], before.contents)))  # of those the content decides
    return any_in(joined(names, sizes), joined(base_names(rows["id"]), size_of(rows["version"])))


def has_copy(before: DataListing, rows: pa.Table, part: DatasetSamples, names: pa.Array, sizes: pa.Array) -> bool:
    """Search for a file with the content of one of `rows`; opens only files of equal size."""
    digests = {f"{each}/{name}": digest for each, some in before.contents.items() for name, digest in some.items()}
    kept = rows.filter(pc.is_in(rows["id"], value_set=pa.array(digests, pa.large_string())))
    wanted = {digests[each] for each in kept["id"].to_pylist()}
    candidates = names.filter(pc.is_in(sizes, value_set=pc.unique(size_of(kept["version"]))))
    is_named = pc.is_in(base_names(candidates), value_set=pc.unique(base_names(kept["id"])))
    likeliest = [*candidates.filter(is_named).to_pylist(), *candidates.filter(pc.invert(is_named)).to_pylist()]
    return any(hash_content(part.storage, name) in wanted for name in likeliest[:MOST_READ])


def starts_with_any(ids: pa.Array, datasets: Collection[str]) -> pa.Array:
    """Return a mask of the ids of these datasets; an empty name matches all."""
    pattern = "|".join(re.escape(each) + "/" * bool(each) for each in datasets)
    return pc.match_substring_regex(ids, f"^({pattern})") if datasets else pa.array(np.zeros(len(ids), bool))


def base_names(names: pa.Array) -> pa.Array:
    return pc.replace_substring_regex(names, r"^.*/([^/]+/?)$", r"\1")


def size_of(versions: pa.Array) -> pa.Array:
    """Return the first part of versions: the bytes of a file or object, or the number of a clip's frames."""
    return pc.replace_substring_regex(versions, r"-.*$", "")


def joined(one: pa.Array, two: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise(one, two, pa.scalar("/", pa.large_string()))


def any_in(some: pa.Array, others: pa.Array) -> bool:
    return len(others) > 0 and bool(pc.any(pc.is_in(some, value_set=pc.unique(others))).as_py())
