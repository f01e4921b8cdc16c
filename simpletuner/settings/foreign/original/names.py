"""The original's settings: every name that its files have becomes one of ours, asks for nothing, or is refused.

The names are data, in `original_names.py` and `original_refusals.py`; docs/from-the-original.md is made of the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, get_args

from simpletuner.settings.declared.sections import SECTION_OF, setting_fields
from simpletuner.settings.foreign.key_table import Ignores, KeyTable, MappedField, Maps, Refuses, Rule, map_field
from simpletuner.settings.foreign.original.refusals import REFUSED
from simpletuner.settings.foreign.original.tables import ASKS_FOR_NOTHING, RENAMED
from simpletuner.settings.values.spelling import normalize_name

OFF = ("false", "no", "off", "none", "null", "0", "0.0", "[]", "{}", "", "no_change")
ZERO = (0, "0", "0.0")
FLOAT32 = "weights and optimizer state are float32, 12 bytes per weight, which fsdp_enable shares out over the ranks"
OPTIMIZERS: dict[str, tuple[str, str]] = {
    "adamw_bf16": ("adamw", FLOAT32),
    "optimi_adamw": ("adamw", FLOAT32),
    "optimi_adam": ("adam", FLOAT32),
    "optimi_lion": ("lion", "weights and optimizer state are float32, 8 bytes per weight"),
    "torch_adamw": ("adamw", ""),
    "torch_adafactor": ("adafactor", ""),
    "bnb_adamw": ("adamw", ""),
    "bnb_adam": ("adam", ""),
    "bnb_adagrad": ("adagrad", ""),
    "bnb_lion": ("lion", ""),
}
"""The original's optimizers that one of ours replaces, and what that costs."""
FEW_BITS = ("8bit", "4bit", "fp8")
EIGHT_BIT = (
    "optimizer=adamw with state_layout=split has moments of 8 bits (model_type=full); without it adamw takes its place "
    "with 8 bytes of state per weight instead of 2, which fsdp_enable shares out over the ranks"
)
LIBRARIES = ("optimi_", "bnb_", "torch_", "torchao_", "ao_", "dadapt")
NOT_HERE = "this version does not have it; adamw takes its place, with a learning_rate of its own"


def optimizer_here(value: Any) -> Any:
    """Return the optimizer that takes the place of one of the original's. Raises ValueError where none does."""
    name = normalize_name(value)
    if any(bits in name for bits in FEW_BITS):
        raise ValueError(EIGHT_BIT)
    if name not in OPTIMIZERS and name.startswith(LIBRARIES):
        raise ValueError(NOT_HERE)
    return OPTIMIZERS.get(name, (value, ""))[0]


def target_names(value: Any) -> Any:
    """Return a list of names as one text; the original also has them as JSON in a text."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError("use names with commas between them") from None
    return ",".join(map(str, value)) if isinstance(value, list) else value


def zero_as(here: Any) -> Callable[[Any], Any]:
    """Return a conversion of 0, by which the original means that a setting is not set."""
    return lambda value: here if not isinstance(value, bool) and value in ZERO else value


def adapter_here(value: Any) -> Any:
    """Return a kind of adapter, also for use_dora. Raises ValueError for LyCORIS, whose algorithm has its own file."""
    if normalize_name(value) == "lycoris":
        raise ValueError("set lora_type to the algorithm of lycoris_config (loha, lokr; lora for locon), and its sizes")
    return "dora" if normalize_name(value) == "true" else value


ATTENTION = {"flash_attn": "flash", "flash_attn_3": "flash3"}
"""The original's attention_mechanism, where attention_backend calls it otherwise."""


VALUES: dict[str, Maps] = {
    "attention_backend": Maps("attention_backend", lambda value: ATTENTION.get(normalize_name(value), value)),
    "offload_activations": Maps("offload_activations", lambda value: value == "unsloth" or value),
    "optimizer": Maps("optimizer", optimizer_here),
    "lora_target_modules": Maps("lora_target_modules", target_names),
    "lora_type": Maps("lora_type", adapter_here, neutral=("standard",)),
    "flow_schedule_shift": Maps("flow_schedule_shift", zero_as(1)),  # off, which 1 is
    **{
        name: Maps(name, zero_as(None))
        for name in ("max_train_steps", "minimum_image_size", "snr_gamma", "tokenizer_max_length")
    },
    "resume_from_checkpoint": Maps("resume_from_checkpoint", lambda value: "latest" if value is None else value),
}
"""Names that both have, with values that only the original knows."""


def names_of(texts: Mapping[str, str]) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """Yield (answer, name, values that ask for nothing) of the data."""
    for answer, text in texts.items():
        for word in text.split():
            name, _, neutral = word.partition("=")
            values = [value for value in neutral.split("|") if value]
            # As numbers, too: 1 and 1.0 are equal, their texts are not.
            yield answer, name, (*values, *(float(value) for value in values if value.isdigit()))


def renamed(setting: str, neutral: tuple[Any, ...]) -> Rule:
    """The rule of another name of a setting: that of the setting itself, if it has one."""
    return replace(VALUES.get(setting, Maps(setting)), neutral=neutral)


def is_off(value: Any) -> bool:
    return normalize_name(value) in OFF


TABLE = KeyTable(
    {
        **VALUES,
        **{name: renamed(setting, neutral) for setting, name, neutral in names_of(RENAMED) if setting in SECTION_OF},
        **{name: Ignores(reason, neutral) for reason, name, neutral in names_of(ASKS_FOR_NOTHING)},
        **{name: Refuses(reason, neutral) for reason, name, neutral in names_of(REFUSED)},
    },
    unset=(),
    is_off=is_off,
)


def map_name(key: str, name: str, value: Any) -> MappedField:
    """Say what becomes of a value: `key` as it is written, `name` as settings and the table have it.

    In the original's files null stands for any setting that is not set.
    """
    found = map_field(TABLE, MappedField(key, name, value, "unknown"))
    if found.outcome == "unknown" and name in SECTION_OF:
        found = MappedField(key, name, value, "set", name)
    if found.outcome != "set" or found.value is not None:
        return found
    may_be_null = type(None) in get_args(setting_fields()[found.setting].annotation)  # validation knows what it means
    return found if may_be_null else MappedField(key, name, value, "neutral", note="not set")
