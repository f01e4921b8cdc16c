"""Every key that another trainer has is answered: by a setting, or by a reason; defaults lose nothing.

`vocabulary/PROGRAM.txt` has a key per line with its default and kind, taken from the program's own argument
parsers and configuration classes.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from trainer_files import answers, entries, put, vocabulary

from simpletuner.errors import SettingsError
from simpletuner.importing.original import UnmappedValue
from simpletuner.importing.trainers.ai_toolkit import AI_TOOLKIT
from simpletuner.importing.trainers.diffusion_pipe import DIFFUSION_PIPE
from simpletuner.importing.trainers.kohya_gui import KOHYA_GUI
from simpletuner.importing.trainers.musubi import MUSUBI_TUNER
from simpletuner.importing.trainers.onetrainer import ONE_TRAINER
from simpletuner.importing.trainers.sd_scripts import SD_SCRIPTS

OTHER: dict[str, list[Any]] = {
    "flag": [True, False],
    "int": [7],
    "float": [7.5],
    "str": ["other"],
    "list": [["other"]],
    "table": [{"other": 1}],
    "any": [7, "other", True],
}
"""Values by kind, of which one at least is not the default."""


PROCESS = {
    "type": "sd_trainer",
    "training_folder": "output",
    "network": {"type": "lora", "linear": 4},
    "datasets": [{"folder_path": "pictures", "caption_ext": "txt"}],
    "model": {"name_or_path": "some/model", "arch": "sdxl"},
    "sample": {"samples": [{"prompt": "a cat"}]},
}


def ai_toolkit(name: str, value: Any) -> list[UnmappedValue]:
    process = copy.deepcopy(PROCESS)
    put(process, name, value)
    return answers(AI_TOOLKIT, {"job": "extension", "config": {"name": "mine", "process": [process]}})


def sd_scripts(name: str, value: Any) -> list[UnmappedValue]:
    network = {"network_module": "networks.lora", "network_train_unet_only": True}
    base = {"pretrained_model_name_or_path": "xl", **network}
    flux = {**network, "network_module": "networks.lora_flux", "model_prediction_type": "raw"}
    return [item for each in (base, flux, {"clip_g": "x"}) for item in answers(SD_SCRIPTS, each | {name: value})]


def kohya_gui(name: str, value: Any) -> list[UnmappedValue]:
    bases = ({"LoRA_type": "Standard", "sdxl": True, "unet_lr": 1e-4}, {"sdxl": True})
    return [item for base in bases for item in answers(KOHYA_GUI, base | {name: value})]


def onetrainer(name: str, value: Any) -> list[UnmappedValue]:
    quiet = {"train": False}
    values = {"model_type": "STABLE_DIFFUSION_XL_10_BASE", "training_method": "LORA", "base_model_name": "some/model"}
    values |= {
        "text_encoder": quiet,
        "text_encoder_2": quiet,
        "concepts": [{"path": "x"}],
        "samples": [{"prompt": "x"}],
    }
    values = copy.deepcopy(values)
    put(values, name, value)
    return answers(ONE_TRAINER, values)


def musubi(name: str, value: Any) -> list[UnmappedValue]:
    bases = ({"network_module": "networks.lora_wan"}, {"model_version": "edit"})
    return [
        item for base in bases for item in answers(MUSUBI_TUNER, {"optimizer_type": "adamw"} | base | {name: value})
    ]


def sd_scripts_datasets(name: str, value: Any) -> list[UnmappedValue]:
    return entries(
        SD_SCRIPTS, {"datasets": [{"subsets": [{"image_dir": "a", "caption_extension": "txt"} | {name: value}]}]}
    )


def musubi_datasets(name: str, value: Any) -> list[UnmappedValue]:
    bases = ({"image_directory": "a"}, {"video_directory": "a"})
    tables = [{"resolution": 512, "caption_extension": ".txt"} | base | {name: value} for base in bases]
    return entries(MUSUBI_TUNER, {"datasets": tables})


def diffusion_pipe(name: str, value: Any) -> list[UnmappedValue]:
    said = []
    for kind in ("flux", "wan", "sdxl"):
        values = {"model": {"type": kind, "text_encoder_1_lr": 0, "text_encoder_2_lr": 0}, "adapter": {"type": "lora"}}
        put(values, name, value)
        said += answers(DIFFUSION_PIPE, values)
    return said


def diffusion_pipe_datasets(name: str, value: Any) -> list[UnmappedValue]:
    return entries(DIFFUSION_PIPE, {"directory": [{"path": "a"} | {name: value}]})


PROGRAMS = {"onetrainer": onetrainer, "ai_toolkit": ai_toolkit, "sd_scripts": sd_scripts, "kohya_gui": kohya_gui}
PROGRAMS |= {"musubi": musubi, "sd_scripts_datasets": sd_scripts_datasets, "musubi_datasets": musubi_datasets}
PROGRAMS |= {"diffusion_pipe": diffusion_pipe, "diffusion_pipe_datasets": diffusion_pipe_datasets}
MODEL = {
    "onetrainer": ("model_type", "training_method"),
    "ai_toolkit": ("model.arch", "model.is_", "network", "model.name_or_path"),
    "sd_scripts": (
        *("network_module", "network_train_unet_only", "pretrained_model_name_or_path", "model_prediction_type"),
        "clip_g",
    ),
    "kohya_gui": ("LoRA_type", "sdxl", "unet_lr"),
    "sd_scripts_datasets": ("image_dir",),
    "diffusion_pipe": ("model.type", "model.text_encoder_"),
    "diffusion_pipe_datasets": (),
    "musubi_datasets": ("image_", "video_"),
    "musubi": ("network_module", "model_version", "optimizer_type", "edit"),
}
"""Beginnings of keys whose defaults are another model than the file's."""


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_key_of_a_program_is_answered(program):
    unknown, lost = [], []
    for name, default, kind in vocabulary(program):
        for value in OTHER[kind]:
            try:
                said = PROGRAMS[program](name, value)
            except SettingsError:
                continue  # a sentence
            unknown += [item.given for item in said if item.reason.startswith("not a key of")]
        if not name.startswith(MODEL[program]):
            lost += [item.given for item in PROGRAMS[program](name, default) if item.effect == "lost"]
    assert (unknown, lost) == ([], [])
