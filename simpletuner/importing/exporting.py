"""Write a run as a file of another trainer: what its own import reads back decides what the file says.

A writer makes the parts of a file that no table holds: model, network, noise levels, folders. Values that differ
after this file is read back are written by the trainer's table of keys; what differs still cannot be said there.
So a file is as true as the import, which has the trainer's meanings and defaults.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.importing.foreign_trainer import ForeignTrainer, Translation
from simpletuner.importing.original import Original
from simpletuner.importing.sorting import ALSO_ASIDE, ASIDE, take_translated
from simpletuner.importing.toml_document import sources_of
from simpletuner.importing.trainers.ai_toolkit import AI_TOOLKIT
from simpletuner.importing.trainers.ai_toolkit_models import ARCHS
from simpletuner.importing.trainers.diffusion_pipe import DIFFUSION_PIPE, FAMILIES
from simpletuner.importing.trainers.sd_scripts import SD_SCRIPTS
from simpletuner.models.catalog.registry import repository_named
from simpletuner.settings.declared.sections import SECTION_OF, Settings
from simpletuner.settings.foreign.key_table import Maps, put
from simpletuner.settings.resolving.loading import Loaded, resolve, settings_as_json

Values = dict[str, Any]
ELSEWHERE = {"model_flavour", "pretrained_model_name_or_path", "output_dir", "data_backend_config", "instance_data_dir"}
"""Settings that are compared otherwise, or name a folder of this run."""
OF_DATA = ("repeats", "resolution", "resolution_type", "crop", "crop_style", "crop_aspect", "caption_strategy")
OF_DATA += ("caption_lines", "skip_uncaptioned", "instance_prompt", "caption_dropout_probability", "minimum_image_size")
"""Settings that an entry of a dataset has for itself."""
NOWHERE = Path("exported")


@dataclass
class ForeignRun:
    """A run as another trainer has it: values of its file, those of its dataset file, and what neither says."""

    values: Values
    keys: Values
    """Table within `values` that keys of the run stand in."""
    datasets: Values = field(default_factory=dict)
    said: set[str] = field(default_factory=set)
    """Settings that the writer has said in words which are read back as others of the same meaning."""
    unsaid: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Writer:
    """A format of `config export --to`."""

    trainer: ForeignTrainer
    write: Callable[[Settings, Sequence[Mapping[str, Any]]], ForeignRun]
    """Makes what the table of keys cannot: model, network, noise levels, folders."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of settings that functions of meaning read."""

    def key_of(self, setting: str) -> str:
        rules = self.trainer.table.rules.items()
        named = (key for key, rule in rules if isinstance(rule, Maps) and rule.setting == setting)
        return self.keys.get(setting) or next(named, "")


def foreign_run(writer: Writer, loaded: Loaded, entries: Sequence[Mapping[str, Any]]) -> ForeignRun:
    """Return a run in another trainer's words. Raises SettingsError for a model that it does not train."""
    ours = comparable(loaded)
    run = writer.write(loaded.settings, entries)
    theirs, _ = read_back(writer.trainer, run)
    for name in differing(ours, theirs):
        if (key := writer.key_of(name)) and ours[name]:
            put(run.keys, key, ours[name])
    theirs, found = read_back(writer.trainer, run)
    wrong = [name for name in differing(ours, theirs) if name not in run.said]
    run.unsaid = [f"{name} = {json.dumps(ours[name])}: it would be {json.dumps(theirs[name])}" for name in wrong]
    if repository_named(loaded.settings.model) != theirs["pretrained_model_name_or_path"]:
        run.unsaid.append(f"the base model: it would be {theirs['pretrained_model_name_or_path']}")
    run.unsaid += unsaid_of(entries, found, ours, theirs)
    return run


def comparable(loaded: Loaded) -> dict[str, Any]:
    """Return settings with those written out that follow from others."""
    values = settings_as_json(loaded)
    if values["max_train_steps"]:
        values["num_train_epochs"] = 0  # which it outranks
    if values["lora_alpha"] is None:
        values["lora_alpha"] = float(values["lora_rank"])
    return values


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the settings that differ and change what is trained."""
    aside = {*ELSEWHERE, *OF_DATA, *ALSO_ASIDE}
    names = (name for name in ours if name not in aside and SECTION_OF[name] not in (*ASIDE, "parallel"))
    return [name for name in names if ours[name] != theirs[name] and (name not in OF_LORA or is_lora(ours))]


OF_LORA = {name for name, section in SECTION_OF.items() if section == "lora"}


def is_lora(values: Mapping[str, Any]) -> bool:
    return values["model_type"] == "lora"


def read_back(trainer: ForeignTrainer, run: ForeignRun) -> tuple[dict[str, Any], list[Translation]]:
    """Return the settings and datasets that the import makes of a file."""
    read = trainer.begin(NOWHERE, next(trainer.jobs(run.values)))
    read.values.pop(trainer.dataset_file, None)
    found = list(trainer.entries(read, run.datasets))
    read.answer(trainer.table)
    original = Original(NOWHERE, [], is_simpletuner=False)
    take_translated(original, read)
    lost = [item for item in original.left_out if item.effect == "lost"]
    if lost:
        raise SettingsError(f"{trainer.name} has no word for it: {lost[0].reason}", "export it to another program")
    return comparable(resolve(sources_of(original, {}), complete=False)), found


def unsaid_of(
    entries: Sequence[Mapping[str, Any]],
    found: Sequence[Translation],
    settings: Mapping[str, Any],
    settings_there: Mapping[str, Any],
) -> list[str]:
    """Return what the file of another trainer does not give back of our datasets."""
    by_folder = {str(each.as_entry().get("instance_data_dir")): each.as_entry() for each in found}
    unsaid = []
    for entry in entries:
        name, theirs = entry.get("id"), by_folder.get(str(entry.get("instance_data_dir")))
        if theirs is None:
            unsaid.append(f"dataset `{name}`: it has no place there")
            continue
        wanted = {key: settings[key] for key in OF_DATA} | dict(entry)
        for key, value in wanted.items():
            there = theirs.get(key, settings_there.get(key))
            if key not in ("id", "type", "instance_data_dir") and there != value:
                unsaid.append(f"dataset `{name}`: {key} = {json.dumps(value)}: it would be {json.dumps(there)}")
    return unsaid


def layers_of(settings: Settings) -> list[str]:
    """Return the layers of a LoRA that its settings name; by default those of attention, by all names they have."""
    from simpletuner.models.family.adapter import ATTENTION  # which imports torch

    named = settings.lora.lora_target_modules.split(",") if settings.lora.lora_target_modules else ATTENTION
    return [name.strip() for name in named if name.strip()]


def timestep_sampling(settings: Settings) -> str:
    """Name of the distribution of noise levels as sd-scripts has it."""
    own = settings.objective
    if own.flow_use_uniform_schedule:
        return "sigma"
    return "flux_shift" if own.flow_schedule_auto_shift else "shift"


def ai_toolkit(settings: Settings, entries: Sequence[Mapping[str, Any]]) -> ForeignRun:
    model, own, objective = settings.model, settings.lora, settings.objective
    name = next((name for name, arch in ARCHS.items() if arch.family == model.model_family), "")
    if not name:
        raise SettingsError(f"ai-toolkit does not train {model.model_family}", OTHER_PROGRAM)
    arch, output = ARCHS[name], settings.training.output_dir
    process: Values = {
        "type": "sd_trainer",
        "training_folder": str(output.parent),
        "model": {"name_or_path": repository_named(model), "arch": name},
        "train": {
            "noise_scheduler": "flowmatch" if arch.is_flow else "ddpm",
            "dtype": "fp32" if settings.training.mixed_precision == "no" else "bf16",
        },
        "datasets": [
            {"folder_path": entry["instance_data_dir"], "caption_ext": "txt", **of_folder(entry, settings)}
            for entry in entries
        ],
    }
    if arch.is_flow:
        is_shifted = objective.flow_schedule_auto_shift or objective.flow_schedule_shift not in (None, 1)
        evenly = "shift" if is_shifted else "linear"
        process["train"]["timestep_type"] = evenly if objective.flow_use_uniform_schedule else "sigmoid"
    if model.model_type == "lora":
        alpha = own.lora_alpha or own.lora_rank
        process["network"] = {"type": own.lora_type, "linear": own.lora_rank, "linear_alpha": alpha}
    said: set[str] = set()
    if model.model_type == "lora" and own.lora_target_modules != arch.layers and not arch.own_layout:
        process["network"]["network_kwargs"] = {"only_if_contains": layers_of(settings)}
        said = {"lora_target_modules"} if "*" not in own.lora_target_modules else said
    return ForeignRun({"job": "extension", "config": {"name": output.name, "process": [process]}}, process, said=said)


def of_folder(entry: Mapping[str, Any], settings: Settings) -> Values:
    """Keys of a folder that sd-scripts and ai-toolkit call alike."""
    dropout = entry.get("caption_dropout_probability", settings.data.caption_dropout_probability)
    return {
        "resolution": int(entry.get("resolution", settings.data.resolution)),
        "num_repeats": int(entry.get("repeats", settings.data.repeats)) + 1,
        "caption_dropout_rate": dropout,
    }


def sd_scripts(settings: Settings, entries: Sequence[Mapping[str, Any]]) -> ForeignRun:
    model = settings.model
    module = {**dict.fromkeys(("sd1x", "sd2x", "sdxl"), "networks.lora"), **MODULES}.get(model.model_family, "")
    if not module or model.model_type != "lora":
        what = model.model_family if not module else "whole models, whose script decides what is trained"
        raise SettingsError(f"files of sd-scripts are written for LoRAs, and not for {what}", OTHER_PROGRAM)
    values: Values = {
        "pretrained_model_name_or_path": repository_named(model),
        "network_module": module,
        "network_train_unet_only": True,
        "network_alpha": settings.lora.lora_alpha or settings.lora.lora_rank,
    }
    own = settings.optimizer
    given = {
        "weight_decay": own.adam_weight_decay,
        "betas": f"{own.adam_beta1},{own.adam_beta2}",
        "eps": own.adam_epsilon,
    }
    values["optimizer_args"] = [f"{name}={value}" for name, value in given.items()]
    values |= {"v2": True} if model.model_family == "sd2x" else {}
    if model.model_family in MODULES:
        values |= {"model_prediction_type": "raw", "timestep_sampling": timestep_sampling(settings)}
        values |= {"discrete_flow_shift": settings.objective.flow_schedule_shift or 1.0}
    general = {"caption_extension": ".txt", "enable_bucket": True, "max_bucket_reso": 4096}
    subsets = [
        {"subsets": [{"image_dir": entry["instance_data_dir"], **of_folder(entry, settings)}]} for entry in entries
    ]
    for each in subsets:
        each["resolution"] = each["subsets"][0].pop("resolution")
    return ForeignRun(values, values, {"general": general, "datasets": subsets})


MODULES = {"flux": "networks.lora_flux", "sd3": "networks.lora_sd3", "lumina2": "networks.lora_lumina"}
OTHER_PROGRAM = "choose another format: `simpletuner config export --help` lists them"


def diffusion_pipe(settings: Settings, entries: Sequence[Mapping[str, Any]]) -> ForeignRun:
    model, own = settings.model, settings.optimizer
    kind = next((name for name, family in FAMILIES.items() if family == model.model_family), "")
    if not kind:
        raise SettingsError(f"diffusion-pipe does not train {model.model_family}", OTHER_PROGRAM)
    values: Values = {
        "output_dir": str(settings.training.output_dir),
        "model": {"type": kind, "diffusers_path": repository_named(model), "dtype": "bfloat16"},
        "optimizer": {"type": own.optimizer, "betas": [own.adam_beta1, own.adam_beta2]},
    }
    if model.model_type == "lora":
        values["adapter"] = {"type": settings.lora.lora_type, "rank": settings.lora.lora_rank, "dtype": "bfloat16"}
    directories = []
    for entry in entries:
        given = of_folder(entry, settings)
        folder = {"path": entry["instance_data_dir"], "num_repeats": given["num_repeats"]}
        directories.append({**folder, "resolutions": [given["resolution"]]})
    return ForeignRun(values, values, {"enable_ar_bucket": True, "directory": directories})


WRITERS = {
    "ai-toolkit": Writer(
        AI_TOOLKIT,
        ai_toolkit,
        {
            "learning_rate": "train.lr",
            "optimizer": "train.optimizer",
            "lr_scheduler": "train.lr_scheduler",
            "lr_warmup_steps": "train.lr_scheduler_params.num_warmup_steps",
            "lr_end": "train.lr_scheduler_params.eta_min",
            "max_train_steps": "train.steps",
            "max_grad_norm": "train.max_grad_norm",
            "adam_weight_decay": "train.optimizer_params.weight_decay",
            "adam_epsilon": "train.optimizer_params.eps",
            "use_ema": "train.ema_config.use_ema",
            "ema_decay": "train.ema_config.ema_decay",
            "flux_guidance_value": "train.cfg_scale",
            "base_model_precision": "model.qtype",
        },
    ),
    "kohya": Writer(
        SD_SCRIPTS,
        sd_scripts,
        {"learning_rate": "learning_rate", "lora_rank": "network_dim", "optimizer": "optimizer_type"},
    ),
    "diffusion-pipe": Writer(DIFFUSION_PIPE, diffusion_pipe, {}),
}
