"""Find the pipeline to start from: a folder, a hub download, or the tiny one built here."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from simpletuner.errors import EnvironmentNotReady, SettingsError, explain_system_errors
from simpletuner.models.completeness import check_complete
from simpletuner.models.family import Family, Traits
from simpletuner.models.malformed import opening, read_json
from simpletuner.models.registry import FAMILIES, TINY, flavour_of, traits_of
from simpletuner.models.tiny import build_tiny
from simpletuner.models.weights import COMPONENT_SUFFIXES, refuse_pickles, refuse_special_files
from simpletuner.parallel.world import World
from simpletuner.settings.sections import Model, Settings
from simpletuner.system.files import replace_folder, unfinished_path

DOWNLOAD_SECONDS = 12 * 3600
"""How long the other ranks wait while the first downloads a model."""

INDEX = "model_index.json"
OF_A_VARIANT = "*/*.*.safetensors"
"""Weights with a variant's name in theirs, such as model.fp16.safetensors."""


def load_family(settings: Settings, world: World, stop: Callable[[], None]) -> Family:
    """Return the model family with its pipeline folder, which the first rank builds or downloads if need be.

    Raises EnvironmentFault for a folder that is malformed or lacks anything that would be made up.
    """
    model = settings.model
    traits = traits_of(model)
    if needs_building(model):
        folder = settings.training.output_dir / f"base-{model.model_family}-tiny"
        if world.is_first and not folder.exists():
            # Saving a pipeline imports DeepSpeed where it is installed, which would print what it detects to stdout.
            os.environ.setdefault("DS_ACCELERATOR", world.device.type)
            with explain_system_errors(folder):
                build_tiny(traits, unfinished_path(folder))
                replace_folder(unfinished_path(folder), folder)
    else:
        folder = local_folder(model) or (downloaded(model) if world.is_first else None)
    world.meet("base model", stop, DOWNLOAD_SECONDS)
    folder = folder or downloaded(model)
    with opening(folder):
        refuse_special_files(folder)
        refuse_pickles(folder)
        refuse_other_family(folder, traits, model)
        family = Family(traits, folder, settings)
        check_complete(family)  # on every rank: each finds the same in the same second, so none encodes
    return family


def refuse_other_family(folder: Path, traits: Traits, model: Model) -> None:
    """Raise SettingsError for a pipeline of another family, EnvironmentFault for a folder without a denoiser."""
    named = read_json(folder / INDEX).get("_class_name")
    if any(named in each.pipelines for each in (traits, *traits.siblings)):
        return
    for name in (name for name, entry in FAMILIES.items() if entry.traits):
        other = traits_of(Model(model_family=name))
        if any(named in each.pipelines for each in (other, *other.siblings)):
            raise SettingsError(
                f"{folder} is a {named}, which is not of model_family={model.model_family}", f"set model_family={name}"
            )
    if not (folder / traits.denoiser_name).is_dir():
        raise EnvironmentNotReady(
            f"{folder} has no {traits.denoiser_name}: {INDEX} says that it is a {named}",
            f"give a pipeline of model_family={model.model_family}, or another family",
        )


def local_folder(model: Model) -> Path | None:
    """Return the pipeline folder if it is on this machine: a path that the user gave. None: it is on the hub."""
    path = Path(model.pretrained_model_name_or_path).expanduser()
    return path if model.pretrained_model_name_or_path and path.is_dir() else None


def downloaded(model: Model) -> Path:
    """Return the folder of a published pipeline, downloading what is missing.

    Raises EnvironmentFault when the hub does not have it or cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    flavour = flavour_of(model)
    name = model.pretrained_model_name_or_path or (flavour.hub if flavour else "")
    fetch = partial(snapshot_download, name, revision=model.revision)
    try:
        index = read_json(Path(fetch(allow_patterns=[INDEX])) / INDEX)
        components = [part for part, value in index.items() if isinstance(value, list) and value[0]]
        wanted = [INDEX, *(f"{part}/*{suffix}" for part in components for suffix in COMPONENT_SUFFIXES)]
        # Many repositories hold the whole model once more, as one file and in other precisions.
        return Path(fetch(allow_patterns=wanted, ignore_patterns=None if model.variant else [OF_A_VARIANT]))
    except HFValidationError:
        raise SettingsError(f"{name} is neither a folder nor a hub id", "check pretrained_model_name_or_path") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise EnvironmentNotReady(
            f"cannot fetch {name} from the hub: {reason}",
            "give a local folder with --pretrained_model_name_or_path, or try --model_flavour=tiny, built here",
        ) from None


def needs_building(model: Model) -> bool:
    """Return whether the model is the locally built tiny one."""
    return model.model_flavour == TINY and not model.pretrained_model_name_or_path
