"""A config file to start from: every line says what it does and may be, and where a recipe's number is from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tomli_w

from simpletuner.settings.declared.sections import SECTION_OF, Settings, setting_fields
from simpletuner.settings.showing.schema import values_of

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
GROUP_OF_SECTION = {
    **dict.fromkeys(("model", "lora"), "What to train"),
    "data": "On what",
    **dict.fromkeys(("parallel", "launch"), "On how many GPUs"),
    **dict.fromkeys(("checkpoints", "validation", "logging", "hub"), "What to save and to look at"),
}
"""Groups of settings that are in no group by name; those of other sections are about how long and how fast."""

CONFIG_HEAD = """\
#:schema simpletuner.schema.json
# Start with `simpletuner train`; the same command resumes where it stopped. All settings: docs/options.md.
# An editor completes and checks this file after `simpletuner config schema > simpletuner.schema.json` in this folder.

"""


def scaffold_toml(
    settings: Settings, chosen: Mapping[str, Any] = {}, notes: Mapping[str, str] = {}, head: Sequence[str] = ()
) -> str:
    """Write a TOML file for a family, a flavour and a number of GPUs.

    `chosen` are further values, `notes` says of some where they are from, and `head` are comments on top.
    """
    num_processes = settings.launch.num_processes
    values = {
        "model_family": settings.model.model_family,
        "model_flavour": settings.model.model_flavour,
        "instance_data_dir": "pictures",
        "max_train_steps": 1000,
        "lr_warmup_steps": 0.05,
        "num_processes": num_processes,
        "fsdp_enable": num_processes > 1,
        "validation_prompt": ["a photo of a lighthouse at dusk"],
        **chosen,
    }
    top = "".join(f"# {line}".rstrip() + "\n" for line in head)
    groups = [
        f"# {title}\n\n{''.join(lines_of(name, values, notes) for name in names)}"
        for title, names in grouped(values).items()
    ]
    return CONFIG_HEAD + top + "\n" * bool(top) + "\n".join(groups)


def grouped(values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the settings of each group, those that only a value is given for at its end."""
    groups = {title: list(names) for title, names in GROUPS.items()}
    if "data_backend_config" in values:  # names the images in place of the folder
        groups["On what"][0] = "data_backend_config"
    known = {name for names in groups.values() for name in names} | {"instance_data_dir"}
    if values.get("model_type", "full") == "full":
        groups["What to train"].remove("lora_rank")
    for name in (each for each in values if each not in known):
        groups[GROUP_OF_SECTION.get(SECTION_OF[name], "How long, how large, how fast")].append(name)
    return groups


def lines_of(name: str, values: Mapping[str, Any], notes: Mapping[str, str]) -> str:
    """A setting with its description and its note; one with an empty default as a comment."""
    field = setting_fields()[name]
    value = values.get(name, field.default)
    plain = "" if value is None else value if isinstance(value, str | int | float | list) else str(value)
    line = tomli_w.dumps({name: plain}, multiline_strings=False)
    note = f"# {notes[name]}\n" if name in notes else ""
    return f"# {field.description} ({values_of(field).replace('`', '')})\n{note}{'# ' * (plain == '')}{line}\n"
