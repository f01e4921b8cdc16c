"""Every setting as command lines list it, from table.json: without pydantic, which takes 0.1 CPU s to import.

`make goldens` writes the file from the declarations (`settings/showing/scaffold.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from simpletuner.settings.values.spelling import normalize_name

TABLE = Path(__file__).with_name("table.json")
# What stands for a value in help, of settings and of other options.
TYPE_NAMES: Mapping[object, str] = {bool: "true|false", int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}


class Row(NamedTuple):
    """A setting: the title of its section, and all that help and a shell's completion say."""

    section: str
    sentence: str
    metavar: str
    unit: str = ""
    default: str = ""
    kind: Literal["", "list", "switch"] = ""
    """A switch is set by its flag alone."""
    words: Sequence[str] = ()
    """Values that are known."""
    aliases: Sequence[str] = ()


@cache
def setting_table() -> Mapping[str, Row]:
    """Every setting by name, in the order of the sections."""
    return {name: Row(**row) for name, row in json.loads(TABLE.read_text(encoding="utf-8")).items()}


def canonical_name(key: str) -> str | None:
    """Return the setting that a key means: leading dashes, dashes for underscores, any case, older names."""
    name = plain_name(key)
    return name if name in setting_table() else older_names().get(name)


@cache
def older_names() -> Mapping[str, str]:
    return {alias: name for name, row in setting_table().items() for alias in row.aliases}


def plain_name(key: str) -> str:
    return normalize_name(key.lstrip("-"))


# Settings of a file that `config init` writes, and of short help.
GROUPS: dict[str, tuple[str, ...]] = {
    "What to train": ("model_type", "lora_rank", "model_family", "model_flavour", "pretrained_model_name_or_path"),
    "On what": ("instance_data_dir", "caption_strategy", "resolution", "output_dir"),
    "How long, how large, how fast": (
        "max_train_steps",
        "train_batch_size",
        "gradient_accumulation_steps",
        "global_batch_size",
        "learning_rate",
        "lr_scheduler",
        "lr_warmup_steps",
        "mixed_precision",
        "gradient_checkpointing",
        "use_ema",
    ),
    "On how many GPUs": ("num_processes", "fsdp_enable", "fsdp_reshard_after_forward"),
    "What to save and to look at": ("checkpoint_step_interval", "validation_step_interval", "validation_prompt"),
}
