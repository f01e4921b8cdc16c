"""Settings for the export of a run: its folder may be somebody else's, so that it is only data."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.settings import Settings
from simpletuner.settings.files.raw_values import RawValue, Source
from simpletuner.settings.resolving.loading import resolve
from simpletuner.training.run_folder.settings_record import SETTINGS, read_settings

TAKEN = frozenset(
    {
        *("model_family", "model_flavour", "model_type", "prediction_type", "variant", "tokenizer_max_length"),
        *("lora_type", "lora_rank", "lora_alpha", "lora_dropout", "lokr_factor", "lora_target_modules"),
        *("assistant_lora_strength", "export_format", "flux_guidance_value"),
    }
)
"""Facts of a run that an export needs; none can run code, reach the network or name a file."""
NAMED: tuple[str, ...] = ("pretrained_model_name_or_path", "single_file_config", "revision", "model_families")
"""Modules to import, folders to read and repositories to download: the user names them, not the run's folder."""
LONGEST_SHOWN = 300


def recorded_settings(output: Path, named: Mapping[str, str]) -> Settings:
    """Return the settings that an export of a run needs, with its folder as it is called now.

    `named` has the user's values of `NAMED`. Raises SettingsError where settings.json cannot be read, or has a value of
    these that the user has not given.
    """
    recorded = read_settings(output / SETTINGS)
    if recorded is None:
        raise SettingsError(f"{output} has no readable {SETTINGS}", "name the output folder of a run that has trained")
    if missing := {name: value for name in NAMED if (value := recorded.get(name)) and not named.get(name)}:
        flags = [f"--{name}={shown(value)}" for name, value in missing.items()]
        raise SettingsError(
            f"{output / SETTINGS} names {' and '.join(missing)}, which an export does not take from there: the folder "
            "may be somebody else's",
            f"where you know what it names: {shlex.join(['simpletuner', 'runs', 'export', str(output), *flags])}",
        )
    values = [RawValue(name, recorded[name], f"{output / SETTINGS}") for name in sorted(TAKEN & recorded.keys())]
    assistants = recorded.get("assistant_lora")
    if isinstance(assistants, list):  # a checkpoint is compared with their names; no such file is read
        values.append(RawValue("assistant_lora", [Path(str(each)).name for each in assistants], f"{output / SETTINGS}"))
    values += [RawValue(name, value, "command line") for name, value in named.items() if value]
    values.append(RawValue("output_dir", str(output), "command line"))
    return resolve([Source(SETTINGS, values)], complete=False).settings


def base_of(settings: Mapping[str, Any]) -> str:
    """Return the base model that a run's settings name, to be shown; empty for the flavour's own."""
    return shown(base) if (base := settings.get("pretrained_model_name_or_path")) else ""


def shown(value: object) -> str:
    """Format a recorded value for a command line; `...` for one that no such line can hold."""
    if isinstance(value, dict) and len(value) == 1:
        value = "=".join(map(str, *value.items()))
    return value if isinstance(value, str) and value.isprintable() and len(value) <= LONGEST_SHOWN else "..."
