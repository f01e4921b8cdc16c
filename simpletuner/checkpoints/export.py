"""Write a complete diffusers pipeline with trained weights: the base pipeline with its denoiser replaced."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from pydantic import BaseModel, Field

from simpletuner.checkpoints.layout import FINISHED, file_sizes
from simpletuner.checkpoints.precision import exported_dtypes, in_precision
from simpletuner.checkpoints.saving import make_empty_folder, publish, run_on_all_ranks, run_on_first_rank, write_group
from simpletuner.checkpoints.tensors import TensorGroup
from simpletuner.checkpoints.verification import compute_checksums
from simpletuner.checkpoints.writing import as_bytes, make_header, write_full, write_safetensors
from simpletuner.errors import EnvironmentNotReady
from simpletuner.models.family.adapter import Adapter
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.folder.malformed import read_json
from simpletuner.models.folder.weights import (
    COMPONENT_SUFFIXES,
    INDEX,
    MODULAR_INDEX,
    belongs_to_component,
    component_source,
    index_file,
    source_of,
    weights_files,
)
from simpletuner.models.opening.lora_config import write_formats
from simpletuner.models.opening.lora_file import write_lora
from simpletuner.models.single_file.conversion import original_reads
from simpletuner.parallel.mesh import mesh_of
from simpletuner.parallel.optimizer_state import NamedTensors
from simpletuner.parallel.world import World
from simpletuner.system.files.atomic import flush_to_disk, unfinished_path, write_json
from simpletuner.system.files.checksums import is_intact, with_checksum
from simpletuner.system.files.mounts import rename_over
from simpletuner.system.files.regular_files import read_file

ENCODER_STEM = "model"
# Components written from the family's config, with the run's prediction type; others are copied.
SCHEDULER = "scheduler/scheduler_config.json"


class MarkerFields(BaseModel):
    steps: int = Field(ge=0)
    files: dict[str, int]
    checksums: dict[str, str]
    precision: str | None = None
    """export_precision of the run."""


def export_pipeline(
    family: ModelFamily,
    target: Path,
    config: Mapping[str, object],
    weights: TensorGroup,
    world: World,
    steps: int,
    write_card: Callable[[Path], None],
    encoders: Mapping[str, TensorGroup] = MappingProxyType({}),
) -> dict[str, str]:
    """Collective: write the pipeline to `target`, and return the checksum of every file by name.

    All ranks write weights, rank 0 copies the rest and calls `write_card` with the folder as it is written.
    The denoiser is written in export_precision. `encoders` has weights of text encoders that are not copied.
    """
    denoiser = family.denoiser_name
    weights = in_precision(
        weights, exported_dtypes(family, {name: each.dtype for name, each in weights.plan.tensors.items()})
    )

    def write_rest(hidden: Path) -> None:
        write_json(hidden / denoiser / "config.json", config)
        (hidden / SCHEDULER).parent.mkdir()
        copy_other_components(family, hidden, encoders)
        write_json(hidden / SCHEDULER, family.scheduler_config)

    def write_weights(hidden: Path) -> dict[str, str]:
        sums: dict[str, str] = {}
        run_on_all_ranks(world, hidden, lambda: write_group(hidden / denoiser, weights, world, True, sums))
        for name, group in encoders.items():
            run_on_all_ranks(
                world, hidden, lambda name=name, group=group: sums.update(write_encoder(hidden, name, group, world))
            )
        return sums

    precision = family.settings.checkpoints.export_precision
    return replace_export(target, world, steps, write_weights, write_rest, write_card, precision)


def export_lora(
    family: ModelFamily,
    adapter: Adapter,
    target: Path,
    weights: NamedTensors,
    world: World,
    steps: int,
    write_card: Callable[[Path], None],
) -> None:
    """Collective: write a LoRA for diffusers' `load_lora_weights`, in export_format and export_precision."""
    whole = {name: each if mesh_of(each) is None else cast(Any, each).full_tensor() for name, each in weights.items()}

    def write(hidden: Path) -> None:
        write_lora(hidden, family, adapter, whole)
        write_formats(hidden, family, adapter, whole)

    precision = family.settings.checkpoints.export_precision
    replace_export(target, world, steps, lambda _: {}, write, write_card, precision)


def replace_export(
    target: Path,
    world: World,
    steps: int,
    write_on_all_ranks: Callable[[Path], dict[str, str]],
    write_on_first_rank: Callable[[Path], None],
    write_card: Callable[[Path], None],
    precision: str | None = None,
) -> dict[str, str]:
    """Collective: write a folder under a hidden name, replace `target` with it, and return its checksums.

    `write_on_all_ranks` returns the checksums that it knows. `steps`, after which it was written, tells a
    later start that nothing is left to do. Raises EnvironmentNotReady on all ranks when one of them cannot
    write.
    """
    hidden = unfinished_path(target, world.lease.record.id)

    def finish() -> None:
        marker = MarkerFields(steps=steps, files=file_sizes(hidden, sums), checksums=sums, precision=precision)
        write_json(hidden / FINISHED, with_checksum(marker.model_dump()))
        keep_foreign_files(target, hidden)
        # Before the rename: a start after a kill finds the pipeline finished and would never write the card.
        # After the marker: people may change a card, and it would not be whole any more.
        write_card(hidden)
        publish(hidden, target, world.lease)

    run_on_first_rank(world, hidden, lambda: make_empty_folder(hidden))
    written = write_on_all_ranks(hidden)
    run_on_first_rank(world, hidden, lambda: write_on_first_rank(hidden))
    sums = compute_checksums(hidden, world, written)
    run_on_first_rank(world, hidden, finish)
    return sums


def write_encoder(folder: Path, name: str, group: TensorGroup, world: World) -> dict[str, str]:
    """Collective: write the weights of a text encoder by the name that transformers expects."""
    sums = write_full(folder / name, group, world, ENCODER_STEM)
    return {f"{name}/{file}": value for file, value in sums.items()}


def copy_other_components(family: ModelFamily, target: Path, written: Collection[str] = ()) -> None:
    """Copy all but the denoiser; of components that are `written` all but the weights."""
    for name, source in files_to_copy(family):
        if Path(name).parts[0] in written and name.endswith((".safetensors", ".safetensors.index.json")):
            continue
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    write_modular_index(family, target)


def write_modular_index(family: ModelFamily, target: Path) -> None:
    """Write a modular pipeline's index; the base model's names the publisher's source of each component."""
    base, hub = index_file(family.folder), family.settings.hub
    if base.name != MODULAR_INDEX:
        return
    # An account known only to the hub is left out: diffusers then loads none instead of the publisher's.
    place = hub.hub_model_id if hub.push_to_hub and "/" in hub.hub_model_id else None
    index = read_json(base)
    for name in family.index:
        if name == family.denoiser_name or (target / name).is_dir() or name == Path(SCHEDULER).parent.name:
            variant = None if name == family.denoiser_name else source_of(index.get(name)).get("variant")
            index[name] = component_source(family.index[name], name, place, variant)
    write_json(target / MODULAR_INDEX, index)


def files_to_copy(family: ModelFamily) -> list[tuple[str, Path]]:
    """Files that an export copies from the base model, as (name below it, file).

    Raises EnvironmentNotReady for what is not a regular file, and for a link that leads out of the model's
    folders: publishing the pipeline would publish its target.
    """
    base = family.folder
    names = [name for name, value in family.index.items() if isinstance(value, list) and any(value)]
    found = [(INDEX, base / INDEX)] if index_file(base).name == INDEX else []
    for component in names:
        folder = base / component
        if component == family.denoiser_name or Path(component).name != component or not folder.is_dir():
            continue
        roots = (base.resolve(), folder.resolve(), *hub_blobs(base))
        for path in walk_files(folder):
            if path.suffix in COMPONENT_SUFFIXES:
                check_copyable(path, roots)
            if belongs_to_component(path):
                found.append((path.relative_to(base).as_posix(), path))
    return found


def base_files(family: ModelFamily) -> dict[str, Path]:
    """Files of the base model that a run does not change, by name: those of an exported pipeline, and the
    weights below a LoRA."""
    copied = {name: path for name, path in files_to_copy(family) if name != SCHEDULER}
    denoiser = family.folder / family.denoiser_name
    frozen = weights_files(denoiser, family.settings.model.variant) if family.adapter else []
    return copied | {f"{denoiser.name}/{path.name}": path for path in frozen}


def walk_files(folder: Path) -> Iterator[Path]:
    # Links to folders are not followed.
    for root, folders, files in os.walk(folder):
        folders.sort()
        yield from (Path(root) / name for name in sorted(files))


def check_copyable(path: Path, roots: tuple[Path, ...]) -> None:
    """Raise EnvironmentNotReady for a file that an export must not copy."""
    hint = "replace it by a copy of the file, or remove it"
    try:
        real, mode = path.resolve(strict=True), path.stat().st_mode
    except (OSError, RuntimeError):
        raise EnvironmentNotReady(f"{path} is a link that leads nowhere", hint) from None
    if not stat.S_ISREG(mode):
        raise EnvironmentNotReady(f"{path} is not a regular file", hint)
    if not any(real.is_relative_to(root) for root in roots):
        raise EnvironmentNotReady(f"{path} links to {real}, which is outside of the base model", hint)


def hub_blobs(base: Path) -> list[Path]:
    """Return the folder that the links of a Hugging Face Hub snapshot lead to."""
    return [base.parent.parent.resolve() / "blobs"] if base.parent.name == "snapshots" else []


def check_export(family: ModelFamily, targets: list[Path]) -> None:
    """Raise EnvironmentNotReady, before a run begins, for what would fail or do harm at its end."""
    for target in targets:
        if family.folder.resolve() == target.resolve():
            raise EnvironmentNotReady(
                f"the base model {family.folder} is where the trained pipeline would be written",
                "give another --output_dir, or copy the base model elsewhere",
            )
        if any(target.resolve().is_relative_to((family.folder / name).resolve()) for name in family.index):
            raise EnvironmentNotReady(
                f"output_dir is inside a component of the base model {family.folder}", "give another --output_dir"
            )
    files_to_copy(family)


def check_targets(targets: list[Path]) -> None:
    """Raise EnvironmentNotReady instead of replacing a folder not written by simpletuner."""
    for target in targets:
        if os.path.lexists(target) and (target.is_symlink() or not (target / FINISHED).is_file()):
            raise EnvironmentNotReady(
                f"{target} was not written by simpletuner, and the trained pipeline would replace it",
                "move it away, or choose another folder",
            )


def keep_foreign_files(old: Path, new: Path) -> None:
    """Copy what others added to an exported pipeline, such as a README.md, into the one that replaces it."""
    marker = read_marker(old)
    if marker is None:
        return
    for name in file_sizes(old).keys() - marker["files"].keys() - {FINISHED}:
        if not (new / name).exists() and Path(name).suffix != ".safetensors":  # weights would be loaded with ours
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(old / name, new / name, follow_symlinks=False)


def read_marker(pipeline: Path) -> dict[str, Any] | None:
    """Read the marker of an exported pipeline; None where there is none, or it is damaged."""
    try:
        marker = json.loads(read_file(pipeline / FINISHED))
        return MarkerFields.model_validate(marker, strict=True).model_dump() if is_intact(marker) else None
    except (OSError, ValueError, RecursionError, AttributeError, TypeError):
        return None


def finished_steps(pipeline: Path, world: World) -> int:
    """Step of the complete, undamaged exported pipeline; 0 if there is none. Collective."""
    marker = read_marker(pipeline)
    steps = marker["steps"] if marker and has_all_files(pipeline, marker["files"]) else 0
    if min(int(text) for text in world.gather_texts(str(steps))) == 0 or marker is None:
        return 0
    found = compute_checksums(pipeline, world, {})
    return steps if all(found.get(name) == value for name, value in marker["checksums"].items()) else 0


def has_all_files(pipeline: Path, files: Mapping[str, int]) -> bool:
    found = file_sizes(pipeline)
    return all(found.get(name) == size for name, size in files.items())


def export_single_file(pipeline: Path, path: Path, family: str, check: Callable[[], None] = lambda: None) -> None:
    """Write an exported pipeline as one file in its original layout, which other tools open; one tensor in
    memory.

    `check` is called before the file gets its name, and may raise.
    """
    reads, hidden = original_reads(pipeline, family), unfinished_path(path)
    contents = {}
    for name, read in reads.items():
        tensor = read()
        contents[name] = (tensor.dtype, tuple(tensor.shape))
    # Larger elements first: so all data are aligned.
    contents = dict(sorted(contents.items(), key=lambda item: -item[1][0].itemsize))
    parts = (as_bytes(reads[name]()) for name in contents)
    write_safetensors(hidden, make_header(contents, {"format": "pt"}), parts)
    check()
    rename_over(hidden, path)
    flush_to_disk(path.parent)
