"""The model that a LoRA is of: opened as a run opens it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.models.catalog.registry import AUTO, presets
from simpletuner.models.catalog.support import check_path, lora_can_be_loaded, lora_format_is_of_the_family
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.folder.weights import read_index
from simpletuner.models.opening.loading import download, load_family, local_folder
from simpletuner.models.opening.stored_weights import denoiser_weights
from simpletuner.parallel.world import World
from simpletuner.settings.declared.sections import Checkpoints, ExportPrecision, Lora, Model, Settings
from simpletuner.system.processes.signals import StopRequest


@dataclass(frozen=True)
class NamedModel:
    """A pipeline, folder or hub id, with revision and variant; `flavour` says which of two denoisers."""

    name: str
    revision: str = ""
    variant: str = ""
    flavour: str = ""

    def as_settings(self) -> dict[str, Any]:
        found = {"revision": self.revision, "variant": self.variant, "model_flavour": self.flavour}
        return {"pretrained_model_name_or_path": self.name, **{key: each for key, each in found.items() if each}}


def open_base(
    named: NamedModel, world: World, lora: Lora | None = None, precision: ExportPrecision | None = None
) -> ModelFamily:
    """Open a model by the family of the pipeline that its index names; `auto` where none has it.

    With `lora` as the base of a LoRA that is to be written, with `precision` to be written in that. Raises
    SettingsError for what is neither folder nor hub id, and for weights in 8 bits; EnvironmentNotReady for a
    folder that is incomplete or damaged.
    """
    given, name = named.as_settings(), named.name
    model = Model(model_family=AUTO, pretrained_model_name_or_path=name, revision=given.get("revision"))
    if Path(name).expanduser().is_file():
        raise SettingsError(
            f"{name} is a file, and the model must be a pipeline in diffusers format",
            "name its folder or hub id; a run with single_file_config leaves such a folder, base-NAME",
        )
    check_path(model)
    index = read_index(local_folder(model) or download(model))
    family = next((key for key, each in presets().items() if has_pipeline(each, index)), AUTO)
    model = Model(model_family=family, model_type="lora" if lora else "full", **given)
    settings = Settings(model=model, lora=lora or Lora(), checkpoints=Checkpoints(export_precision=precision))
    if broken := [*lora_can_be_loaded(settings), *lora_format_is_of_the_family(settings)]:
        raise SettingsError(mistakes=broken)
    family = load_family(settings, world, StopRequest().check, skips_checked=True)
    stored = denoiser_weights(family).shapes
    if name := next((name for name, each in stored.items() if each.dtype.itemsize == 1), ""):
        raise SettingsError(
            f"{family.folder} holds {name} in 8 bits, which was rounded for inference",
            "take the model in bf16, fp16 or fp32",
        )
    return family


def has_pipeline(preset: Any, index: Mapping[str, Any]) -> bool:
    return bool(preset.family_class) and index.get("_class_name") in preset.pipelines
