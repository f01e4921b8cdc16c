"""Variables as sources of settings: those of config.env, and those of the environment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_origin

from simpletuner.settings.declared.sections import SECTION_OF, setting_fields
from simpletuner.settings.files.config_files import CONFIG_FOLDER, PREFIX
from simpletuner.settings.files.formats import read_entries
from simpletuner.settings.files.raw_values import RawValue, Source, raw_value
from simpletuner.settings.foreign.original.names import TABLE
from simpletuner.settings.values.spelling import normalize_name
from simpletuner.system.files.paths import shown_path

CHOOSES_FOLDER = "it chooses a folder of config/ in the shell and in config/config.env, where no file is named"
NOT_SETTINGS = {
    "config": "",
    "debug": "",
    "home": "",
    "run_secret": "",
    "env": CHOOSES_FOLDER,
    "environment": CHOOSES_FOLDER,
    "log_level": "errors are short; `--debug` shows more",
    "config_backend": "the file's suffix says its format",
    "config_type": "the file's suffix says its format",
    "config_dir": "name the file with --config",
    "workspace": "set output_dir",
    "log_format": "errors are short; `--debug` shows more",
    "accelerate_extra_args": "set gpu_ids, use_cpu or an accelerate file",
}
"""Names that users have next to settings in config.env or in the environment, and why not used ("": quietly)."""
OTHER_PROGRAMS = (
    *("HF_", "HUGGINGFACE_", "HUGGING_FACE_", "TRANSFORMERS_", "DIFFUSERS_", "TOKENIZERS_", "SAFETENSORS_"),
    *("CUDA_", "NVIDIA_", "CUDNN_", "CUBLAS_", "NCCL_", "GLOO_", "UCX_", "RCCL_", "HIP_", "HSA_", "ROCR_", "MIOPEN_"),
    *("TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "XFORMERS_", "OMP_", "MKL_", "DS_"),
    *("WANDB_", "AWS_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
"""Prefixes of other programs' variables, which the original's config.env holds in addition to settings."""


def folder_variables(path: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of config/config.env that choose a folder of config/."""
    return {entry.key: entry.value for entry in read_entries(path, environment) if entry.key in CONFIG_FOLDER}


def from_env_file(path: Path, environment: Mapping[str, str] = os.environ, used: str = "") -> Source:
    """Read a config.env. The variable `used` has chosen the config file."""
    entries = [entry for entry in read_entries(path, environment) if entry.key != used]
    name = shown_path(path)
    variables = {entry.key: entry.value for entry in entries if is_variable(entry.key)}
    source = from_variables(name, [raw_value(path, entry) for entry in entries if entry.key not in variables])
    # Names only: their values may be secrets.
    passed_on = [f"{name}: passed on to the ranks, as variables: {', '.join(variables)}"] if variables else []
    return replace(source, warnings=[*source.warnings, *passed_on], is_file=True, variables=variables)


def is_variable(key: str) -> bool:
    """Return whether a name in config.env is a variable of another program, such as HF_TOKEN."""
    return key.upper().startswith(OTHER_PROGRAMS) and normalize_name(key) not in (*TABLE.rules, *SECTION_OF)


def from_environment(environment: Mapping[str, str]) -> Source:
    ours = [name for name in environment if name.startswith(PREFIX)]
    values = [RawValue(name, environment[name], f"environment {name}", reference=f"{{env:{name}}}") for name in ours]
    return from_variables("environment", values)


def from_variables(name: str, variables: Iterable[RawValue]) -> Source:
    """Return what variables say; those that are no settings are left out, with a reason."""
    source = Source(name, [])
    for variable in variables:
        plain = normalize_name(variable.name.removeprefix(PREFIX))
        if plain not in NOT_SETTINGS:
            value = [] if variable.value == "" and is_list(plain) else variable.value
            source.values.append(replace(variable, name=plain, value=value))
        elif NOT_SETTINGS[plain]:
            source.warnings.append(f"{variable.name} ({variable.place}) is not used: {NOT_SETTINGS[plain]}")
    return source


def is_list(name: str) -> bool:
    """Return whether a setting is a list, which an empty variable leaves empty; elsewhere "" is an item."""
    return name in setting_fields() and get_origin(setting_fields()[name].annotation) is list
