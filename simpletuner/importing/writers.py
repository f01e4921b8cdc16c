"""Formats of `config export --to` of other trainers: model, network, noise levels and folders."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.importing.exporting import OTHER_PROGRAM, ForeignRun, Values, Writer
from simpletuner.importing.trainers.ai_toolkit import AI_TOOLKIT
from simpletuner.importing.trainers.ai_toolkit_models import ARCHS
from simpletuner.importing.trainers.diffusion_pipe import DIFFUSION_PIPE, FAMILIES
from simpletuner.importing.trainers.musubi import FLAVOURS, MUSUBI_TUNER, NETWORKS, SHIFTS
from simpletuner.importing.trainers.musubi import KINDS as KINDS_OF_NETWORKS
from simpletuner.importing.trainers.onetrainer import KINDS, ONE_TRAINER
from simpletuner.importing.trainers.sd_scripts import SD_SCRIPTS
from simpletuner.models.catalog.registry import preset_of, repository_named
from simpletuner.settings.declared.sections import Settings
from simpletuner.settings.values.spelling import normalize_name


def layers_of(settings: Settings) -> list[str]:
    """Return the layers of a LoRA that its settings name, by default all names of attention."""
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
    resolution = float(entry.get("resolution", settings.data.resolution))
    if normalize_name(entry.get("resolution_type", settings.data.resolution_type)) == "area":
        resolution = math.sqrt(resolution * 1_000_000)  # of megapixels
    return {
        "resolution": round(resolution),
        "num_repeats": int(entry.get("repeats", settings.data.repeats)) + 1,
        "caption_dropout_rate": dropout,
    }


def musubi(settings: Settings, entries: Sequence[Mapping[str, Any]]) -> ForeignRun:
    model, own = settings.model, settings.lora
    module = next((name for name, family in NETWORKS.items() if family == model.model_family), "")
    preset = preset_of(model)
    version = "task" if model.model_family in ("wan", "hunyuanvideo") else "model_version"
    flavour = next((word for word, ours in FLAVOURS.items() if ours == model.model_flavour), None)
    has_kind = own.lora_type == "lora" or (own.lora_type in KINDS_OF_NETWORKS and flavour is not None)
    is_there = module and (model.model_family != "flux" or model.model_flavour == "kontext")
    if not is_there or preset is None or model.model_type != "lora" or not has_kind:
        kind = own.lora_type if model.model_type == "lora" else "a whole model"
        message = f"musubi-tuner has no word for {kind} of {model.model_family}: its files are those of LoRAs"
        raise SettingsError(message, OTHER_PROGRAM)
    name = own.lora_type if own.lora_type in KINDS_OF_NETWORKS else module
    values: Values = {
        "dit": "",  # of its own layout, to be named
        "network_module": f"networks.{name}",
        "network_alpha": own.lora_alpha or own.lora_rank,
        **({"network_args": [f"factor={own.lokr_factor}"]} if own.lora_type == "lokr" else {}),
        "optimizer_type": CLASSES.get(settings.optimizer.optimizer, settings.optimizer.optimizer),
        "optimizer_args": optimizer_arguments(settings),
        "mixed_precision": "bf16",
        "timestep_sampling": timestep_sampling(settings),
        "discrete_flow_shift": settings.objective.flow_schedule_shift or 1.0,
        "sigmoid_scale": settings.objective.flow_sigmoid_scale,
        **({version: flavour} if flavour else {}),
    }
    if settings.objective.flow_use_uniform_schedule:
        values["timestep_sampling"] = "uniform"  # with sigma, its default, no shift has an effect
    if values["timestep_sampling"] == "flux_shift":
        values["timestep_sampling"] = SHIFTS.get(model.model_family, "shift")
    general = {"caption_extension": ".txt", "enable_bucket": True, "batch_size": settings.training.train_batch_size}
    given = [(entry, of_folder(entry, settings)) for entry in entries]
    datasets = [
        {"image_directory": entry["instance_data_dir"], **{name: each[name] for name in ("resolution", "num_repeats")}}
        for entry, each in given
    ]
    unsaid = [f"the files of the base: name those of {repository_named(model)} as dit, vae and its text encoders"]
    if "kohya" in preset.lora_formats:
        unsaid.append("its layout of LoRAs: export_format=kohya writes those of this run in it")
    return ForeignRun(values, values, {"general": general, "datasets": datasets}, unsaid=unsaid)


CLASSES = {
    "lion": "lion_pytorch.Lion",
    "prodigy": "prodigyopt.Prodigy",
    "adamw_schedulefree": "schedulefree.AdamWScheduleFree",
}
"""Optimizers of packages as musubi-tuner names them."""


def optimizer_arguments(settings: Settings) -> list[str]:
    own = settings.optimizer
    given = {
        "weight_decay": own.adam_weight_decay,
        "betas": f"{own.adam_beta1},{own.adam_beta2}",
        "eps": own.adam_epsilon,
    }
    return [f"{name}={value}" for name, value in given.items()]


def sd_scripts(settings: Settings, entries: Sequence[Mapping[str, Any]]) -> ForeignRun:
    model = settings.model
    module = {**dict.fromkeys(("sd1x", "sd2x", "sdxl"), "networks.lora"), **MODULES}.get(model.model_family, "")
    if not module or model.model_type != "lora":
        what = model.model_family if not module else "whole models, whose script decides what is trained"
        raise SettingsError(f"files of sd-scripts are written for LoRAs, and not for {what}", OTHER_PROGRAM)
    values: Values = {
        "pretrained_model_name_or_path": repository_named(model),
        "output_dir": str(settings.training.output_dir),
        "network_module": module,
        "network_train_unet_only": True,
        "network_alpha": settings.lora.lora_alpha or settings.lora.lora_rank,
    }
    values["optimizer_args"] = optimizer_arguments(settings)
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
ENDLESS = 1_000_000
"""Epochs of a run that is as long as its steps."""


def diffusion_pipe(settings: Settings, entries: Sequence[Mapping[str, Any]]) -> ForeignRun:
    model, own = settings.model, settings.optimizer
    kind = next((name for name, family in FAMILIES.items() if family == model.model_family), "")
    if not kind:
        raise SettingsError(f"diffusion-pipe does not train {model.model_family}", OTHER_PROGRAM)
    values: Values = {
        "output_dir": str(settings.training.output_dir),
        # Its examples have both always; the run ends with the first of epochs and max_steps (train.py:955).
        "epochs": ENDLESS if settings.training.max_train_steps else settings.training.num_train_epochs,
        "model": {"type": kind, "diffusers_path": repository_named(model), "dtype": "bfloat16"},
        "optimizer": {"type": own.optimizer, "lr": own.learning_rate, "betas": [own.adam_beta1, own.adam_beta2]},
    }
    if model.model_type == "lora":
        values["adapter"] = {"type": settings.lora.lora_type, "rank": settings.lora.lora_rank, "dtype": "bfloat16"}
    if kind == "sdxl":  # both are trained there otherwise
        values["model"] |= {"text_encoder_1_lr": 0, "text_encoder_2_lr": 0}
    directories = []
    for entry in entries:
        given = of_folder(entry, settings)
        folder = {"path": entry["instance_data_dir"], "num_repeats": given["num_repeats"]}
        directories.append({**folder, "resolutions": [given["resolution"]]})
    return ForeignRun(values, values, {"enable_ar_bucket": True, "directory": directories})


def one_trainer(settings: Settings, entries: Sequence[Mapping[str, object]]) -> ForeignRun:
    model, own, objective = settings.model, settings.lora, settings.objective
    name, kind = next(((name, kind) for name, kind in KINDS.items() if kind.family == model.model_family), ("", None))
    if kind is None:
        raise SettingsError(f"OneTrainer does not train {model.model_family}", OTHER_PROGRAM)
    is_whole = settings.training.mixed_precision == "no"
    silent = {"train": False}
    values: Values = {
        "__version": VERSION,
        "training_method": "LORA" if model.model_type == "lora" else "FINE_TUNE",
        "model_type": name.upper(),
        "base_model_name": repository_named(model),
        "workspace_dir": str(settings.training.output_dir),
        "epochs": settings.training.num_train_epochs,
        "train_dtype": "FLOAT_32" if is_whole else "BFLOAT_16",
        "learning_rate_warmup_steps": settings.optimizer.lr_warmup_steps
        * settings.training.gradient_accumulation_steps,
        "optimizer": {
            "optimizer": OPTIMIZERS_THERE.get(settings.optimizer.optimizer, settings.optimizer.optimizer).upper()
        },
        kind.part: {
            "train": True,
            "weight_dtype": "FLOAT_32" if is_whole or model.model_type != "lora" else "BFLOAT_16",
        },
        **{"text_encoder" + (f"_{number}" if number > 1 else ""): silent for number in range(1, kind.encoders + 1)},
        "resolution": str(of_folder(entries[0], settings)["resolution"]),
        "learning_rate_scheduler": settings.optimizer.lr_scheduler.removesuffix("_with_warmup").upper(),
        "learning_rate_min_factor": settings.optimizer.lr_end / settings.optimizer.learning_rate,
        "ema": "OFF" if not settings.ema.use_ema else "GPU" if settings.ema.ema_device == "accelerator" else "CPU",
        "concepts": [concept(entry, settings) for entry in entries],
    }
    if kind.is_flow:
        values["timestep_distribution"] = "UNIFORM" if objective.flow_use_uniform_schedule else "LOGIT_NORMAL"
        values["timestep_shift"] = objective.flow_schedule_shift or 1.0
        values["dynamic_timestep_shifting"] = objective.flow_schedule_auto_shift
        values["noising_weight"] = objective.flow_sigmoid_scale - 1
    if objective.snr_gamma:
        values |= {"loss_weight_fn": "MIN_SNR_GAMMA", "loss_weight_strength": objective.snr_gamma}
    said: set[str] = set()
    if model.model_type == "lora":
        values |= {"peft_type": PEFT.get(own.lora_type, "LORA"), "lora_decompose": own.lora_type == "dora"}
        values |= {"lora_decompose_output_axis": own.lora_type == "dora"}
        values |= {"lora_rank": own.lora_rank, "layer_filter": ",".join(layers_of(settings))}
        said = {"lora_target_modules"} if "*" not in own.lora_target_modules else said
    return ForeignRun(values, values, said=said)


# Of 23df3832. A file without one is migrated from the first, which ends in a KeyError (TrainConfig.py:626).
VERSION, CONCEPT_VERSION = 11, 2
PEFT = {"loha": "LOHA", "lokr": "LOKR", "oft": "OFT_2"}
OPTIMIZERS_THERE = {"adamw_schedulefree": "schedule_free_adamw"}


def concept(entry: Mapping[str, Any], settings: Settings) -> Values:
    given = of_folder(entry, settings)
    return {
        "__version": CONCEPT_VERSION,
        "name": entry.get("id", ""),
        "path": entry["instance_data_dir"],
        "include_subdirectories": True,
        "balancing": float(given["num_repeats"]),
        "image": {
            "enable_crop_jitter": False,
            "enable_resolution_override": True,
            "resolution_override": str(given["resolution"]),
        },
    }


WRITERS = {
    "ai-toolkit": Writer(
        AI_TOOLKIT,
        ai_toolkit,
        ".yaml",
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
        ".toml",
        {"learning_rate": "learning_rate", "lora_rank": "network_dim", "optimizer": "optimizer_type"},
    ),
    "musubi": Writer(
        MUSUBI_TUNER, musubi, ".toml", {"learning_rate": "learning_rate", "lora_rank": "network_dim", "snr_gamma": ""}
    ),
    "diffusion-pipe": Writer(DIFFUSION_PIPE, diffusion_pipe, ".toml"),
    "onetrainer": Writer(
        ONE_TRAINER,
        one_trainer,
        ".json",
        {
            "learning_rate": "learning_rate",
            "lr_scheduler": "learning_rate_scheduler",
            "optimizer": "optimizer.optimizer",
            "max_grad_norm": "clip_grad_norm",
            "lora_alpha": "lora_alpha",
            "adam_beta1": "optimizer.beta1",
            "adam_beta2": "optimizer.beta2",
            "adam_epsilon": "optimizer.eps",
            "adam_weight_decay": "optimizer.weight_decay",
            "lora_dropout": "dropout_probability",
            "ema_decay": "ema_decay",
            "ema_update_interval": "ema_update_step_interval",
        },
    ),
}
