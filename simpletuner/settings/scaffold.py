"""Write a commented config file to start from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simpletuner.settings.loading import knobs
from simpletuner.settings.schema import values_of
from simpletuner.settings.sections import Settings

GROUPS: dict[str, tuple[str, ...]] = {
    "What to train": ("model_family", "model_flavour", "pretrained_model_name_or_path"),
    "On what": ("instance_data_dir", "caption_strategy", "resolution", "output_dir"),
    "How long, how large, how fast": (
        "max_train_steps",
        "train_batch_size",
        "gradient_accumulation_steps",
        "learning_rate",
        "lr_scheduler",
        "lr_warmup_steps",
        "mixed_precision",
        "gradient_checkpointing",
        "use_ema",
    ),
    "On how many GPUs": ("num_processes", "fsdp_enable", "fsdp_reshard_after_forward"),
    "What to keep and to look at": ("checkpoint_step_interval", "validation_step_interval", "validation_prompt"),
}


def scaffold_toml(settings: Settings) -> str:
    """Return a TOML file for a family, a flavour and a number of GPUs: every line says what it does and may be."""
    num_processes = settings.launch.num_processes
    values = {
        "model_family": settings.model.model_family,
        "model_flavour": settings.model.model_flavour,
        "instance_data_dir": "pictures",
        "max_train_steps": 1000,
        "lr_warmup_steps": 100,
        "num_processes": num_processes,
        "fsdp_enable": num_processes > 1,
        "validation_prompt": ["a photo of a lighthouse at dusk"],
    }
    groups = [f"# {title}\n\n{lines_of(names, values)}" for title, names in GROUPS.items()]
    return HEAD + "\n".join(groups)


HEAD = """\
#:schema simpletuner.schema.json
# Start with `simpletuner train`; the same command goes on where it was stopped. All settings: docs/options.md.
# An editor completes and checks this file after `simpletuner config schema > config/simpletuner.schema.json`.

"""


def lines_of(names: tuple[str, ...], values: Mapping[str, Any]) -> str:
    """Return settings with their sentences; those that are left at an empty default as comments."""
    import tomli_w

    text = ""
    for name in names:
        field = knobs()[name]
        value = values.get(name, field.default)
        plain = value if isinstance(value, str | int | float | list) else str(value)
        line = tomli_w.dumps({name: plain}, multiline_strings=False)
        text += f"# {field.description} ({values_of(field).replace('`', '')})\n{'# ' * (plain == '')}{line}\n"
    return text
