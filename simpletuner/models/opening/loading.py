"""Find the pipeline to start from: a local folder, a download from the hub, or the tiny one built here.

Packages that no part of it needs are left out of the imports of diffusers, transformers and accelerate, which import
what is installed: together 0.5 of the 4.4 CPU s from the command to the first step of a tiny SDXL.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

from simpletuner.errors import EnvironmentNotReady, SettingsError, explain_system_errors
from simpletuner.models.catalog.registry import TINY, check_pipeline, repository_named, revision_of, suggest_base
from simpletuner.models.family.base import ModelFamily, family_class
from simpletuner.models.folder.malformed import CHECK_COPY, translate_load_errors
from simpletuner.models.folder.named_code import refuse_code
from simpletuner.models.folder.weights import (
    COMPONENT_SUFFIXES,
    INDEX,
    MODULAR_INDEX,
    commit_of,
    index_file,
    read_index,
    refuse_pickles,
    refuse_special_files,
)
from simpletuner.models.opening.completeness import check_complete, is_checked
from simpletuner.models.single_file.conversion import convert
from simpletuner.models.single_file.source import check_single_file, is_converted, named_file, source_of
from simpletuner.models.tiny.build import build_tiny
from simpletuner.parallel.world import World
from simpletuner.private_api.of_diffusers import import_without_transformers, leave_out
from simpletuner.settings.declared.sections import Model, Settings
from simpletuner.system.files.atomic import remove, replace_folder, unfinished_path
from simpletuner.system.files.regular_files import read_file

# Longest wait of the other ranks while the first downloads a model.
DOWNLOAD_SECONDS = 12 * 3600

# Weights with a variant's name in theirs, such as model.fp16.safetensors.
VARIANT_WEIGHTS = "*/*.*.safetensors"


def load_family(
    settings: Settings, world: World, stop: Callable[[], None], skips_checked: bool = False, commit: str = ""
) -> ModelFamily:
    """Collective: open the base model's folder, which the first rank builds or downloads if need be.

    With `skips_checked`, what an earlier start has found complete here is not checked again (`note_checked`).
    A model of the hub is of one commit on all ranks: `commit`, or the one that the first rank is given.
    Raises EnvironmentNotReady for a folder that is malformed or lacks anything that would be made up.
    """
    model = settings.model
    cls = family_class(model)
    if model.model_flavour == TINY and not model.pretrained_model_name_or_path:
        folder = tiny_folder(settings)
        if world.is_first and not folder.exists():
            hidden = unfinished_path(folder)
            with explain_system_errors(folder):
                remove(hidden)
                build_tiny(model, hidden)
                replace_folder(hidden, folder)
    elif (path := named_file(model)) is not None:
        check_single_file(model)
        folder = settings.training.output_dir / f"base-{path.stem}"
        if world.is_first:
            convert_once(path, model, cls, folder)
    else:
        folder = local_folder(model) or (download(model, commit) if world.is_first else None)
    world.store_barrier("base model", stop, DOWNLOAD_SECONDS)
    if world.size > 1:
        world.barrier()  # what is wrong with the folder ends all ranks alike, at one point
    # Of the same commit, whatever the branch is now; from the hub's cache, where ranks share it.
    first = world.from_first("commit of the base model", lambda: commit_of(folder) if folder else "", stop)
    folder = folder or download(model, first)
    with translate_load_errors(folder):
        refuse_special_files(folder)
        refuse_pickles(folder)
        refuse_code(folder)
        refuse_other_family(folder, cls, model)
        family = cls.open(folder, settings)
        # Not collective, but on every rank: all find the same within a second, so none begins to encode.
        if not (skips_checked and is_checked(family)):
            check_complete(family)
    return family


def convert_once(path: Path, model: Model, cls: type[ModelFamily], folder: Path) -> None:
    """Make a pipeline folder of a model in one file, unless an earlier start has done so."""
    config = model.single_file_config
    assert config is not None
    refuse_other_family(config, cls, model)
    if not is_converted(folder, source_of(path, config)):
        hidden = unfinished_path(folder)
        remove(hidden)
        with explain_system_errors(folder), translate_load_errors(path):
            refuse_code(config)
            convert(path, config, hidden, cls.denoiser_in(config))
        replace_folder(hidden, folder)


def folder_at_hand(settings: Settings) -> Path | None:
    """Return the base model's folder if it is on this machine; build and download nothing."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    model = settings.model
    if model.model_flavour == TINY and not model.pretrained_model_name_or_path:
        folder = tiny_folder(settings)
        return folder if folder.is_dir() else None
    if folder := local_folder(model):
        return folder
    name = repository_named(model)
    try:
        return Path(snapshot_download(name, revision=revision_of(model), local_files_only=True)) if name else None
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def tiny_folder(settings: Settings) -> Path:
    return settings.training.output_dir / f"base-{settings.model.model_family}-tiny"


def refuse_other_family(folder: Path, cls: type[ModelFamily], model: Model) -> None:
    """Raise SettingsError for another family's pipeline, EnvironmentNotReady without a denoiser."""
    named = read_index(folder).get("_class_name")
    if named is None:  # diffusers would raise KeyError when it opens the folder, after training
        raise EnvironmentNotReady(f"{index_file(folder)} does not name the pipeline's class (_class_name)", CHECK_COPY)
    if cls.opens(named):
        return
    check_pipeline(folder, named, model.model_family)
    if not (folder / cls.denoiser_name).is_dir():
        raise EnvironmentNotReady(
            f"{folder} has no {cls.denoiser_name}: {index_file(folder).name} says that it is a {named}",
            f"give a pipeline of model_family={model.model_family}, or another family",
        )


def local_folder(model: Model) -> Path | None:
    """The pipeline folder that the user named, or None if the model is on the hub."""
    path = Path(model.pretrained_model_name_or_path).expanduser()
    return path if model.pretrained_model_name_or_path and path.is_dir() else None


def download(model: Model, commit: str = "") -> Path:
    """Fetch what is missing of a published pipeline, at a commit if one is named, and return its folder.

    Raises EnvironmentNotReady when the hub does not have it or cannot be reached.
    """
    found = fetch_files(model, [INDEX, MODULAR_INDEX], commit=commit)
    # Files of one commit, also where somebody pushes another one between these requests.
    index, commit = read_index(found), commit_of(found)
    components = [part for part, value in index.items() if isinstance(value, list) and value[0]]
    wanted = [INDEX, MODULAR_INDEX, *(f"{part}/*{suffix}" for part in components for suffix in COMPONENT_SUFFIXES)]
    # Many repositories also hold the whole model as a single file and in other precisions.
    return fetch_files(model, wanted, None if model.variant else [VARIANT_WEIGHTS], commit)


def fetch_files(model: Model, wanted: list[str], ignored: list[str] | None = None, commit: str = "") -> Path:
    """Fetch files of a published pipeline by patterns, and return its folder.

    Raises EnvironmentNotReady when the hub does not have it or cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name = repository_named(model)
    try:
        revision = commit or revision_of(model)
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=ignored))
    except HFValidationError:
        raise SettingsError(f"{name} is neither a folder nor a hub id", "check this name of the base model") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        # Random weights are no cure for a name that is mistyped.
        named = model.pretrained_model_name_or_path
        hint = f"there is no folder {named} here: check this name of the base model" if named else suggest_base(model)
        if commit:
            branch = revision_of(model) or "main"
            hint = f"the run has begun with this commit: --revision={branch} takes what is there now"
        place = f" at {commit}" if commit else ""
        raise EnvironmentNotReady(f"cannot fetch {name}{place} from the hub: {reason}", hint) from None


def leave_out_unused(settings: Settings, only_counts: bool = False) -> None:
    """Keep libraries from importing what these settings have no use for, in this process from here on.

    `only_counts` says that no component of a base model is read, whose config could name torchao.
    """
    leave_out({*unused_packages(settings), *(["torchao"] if only_counts else [])})
    # accelerate's dialogues import boto3. Datasets and mirrors in buckets import it themselves.
    if "boto3" not in sys.modules:
        sys.modules["boto3"] = None
        try:
            import_module("accelerate")
        finally:
            del sys.modules["boto3"]
    import_without_transformers()


def unused_packages(settings: Settings) -> Iterator[str]:
    """Yield the optional packages that a run with these settings never imports."""
    if settings.model.model_type != "lora":
        yield "peft"
    if settings.parallel.zero_stage is None:
        yield "deepspeed"
    is_quantized = settings.training.float8 or settings.lora.base_model_precision != "no_change"
    if not is_quantized and not has_quantized_part(folder_at_hand(settings)):
        yield "torchao"


def has_quantized_part(folder: Path | None) -> bool:
    """True if a component of the base model, such as a text encoder, may be quantized by torchao."""
    try:
        return folder is None or any(b"torchao" in read_file(path) for path in folder.glob("*/config.json"))
    except OSError:  # which the check of the model names
        return True
