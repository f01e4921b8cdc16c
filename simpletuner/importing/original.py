"""Files of the original: their values as settings, and values and defaults that mean something else here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from simpletuner.errors import Mistake, SettingsError
from simpletuner.settings.declared.errors import shown_value
from simpletuner.settings.declared.sections import SECTION_OF
from simpletuner.settings.declared.table import canonical_name, plain_name
from simpletuner.settings.files.config_files import ACCELERATE_CONFIG
from simpletuner.settings.files.formats import read_entries, suffix_of
from simpletuner.settings.files.raw_values import EXTRA_ARGS, RawValue, raw_value, split_arguments
from simpletuner.settings.foreign.key_table import inner_entries
from simpletuner.settings.foreign.original_names import map_name
from simpletuner.settings.foreign.original_tables import RENAMED
from simpletuner.settings.resolving.sources import is_variable
from simpletuner.settings.values.spelling import normalize_name

FILES = ("config.json", "config.toml", "config.env")
"""Files that the original looks for in a config folder, in this order."""
BACKEND = ("config_backend", "config_type")
LAUNCHERS = ("mixed_precision", "dynamo_backend", ACCELERATE_CONFIG)
"""Settings that the original reads from config.env even beside a config.json, like section `launch`."""
Effect = Literal["none", "look", "lost"]
"""Effect of leaving a value out: none, on something besides the training, or on what is trained."""


@dataclass(frozen=True)
class UnmappedValue:
    name: str
    value: Any
    place: str
    reason: str
    effect: Effect = "look"

    @property
    def given(self) -> str:
        return f"{self.name.lstrip('-')} = {shown_value(self.name, self.value)}"

    def __str__(self) -> str:
        return f"{self.given} ({self.place}): {self.reason}"


@dataclass(frozen=True)
class MappedValue:
    """A value that becomes a setting: as the original has it, and as the new file has it."""

    given: RawValue
    value: RawValue
    note: str = ""


@dataclass
class Original:
    """Values of the original's files. `variables` are other programs', which may hold secrets."""

    file: Path
    values: list[RawValue]
    left_out: list[UnmappedValue] = field(default_factory=list)
    variables: list[str] = field(default_factory=list)
    taken: dict[str, MappedValue] = field(default_factory=dict)
    their_defaults: list[RawValue] = field(default_factory=list)
    """Values that the original trains with where its file says nothing."""
    is_simpletuner: bool = True
    """True if it is a file of the original SimpleTuner, not of another trainer."""

    def leave_out(self, given: RawValue, reason: str, effect: Effect = "look") -> None:
        self.left_out.append(UnmappedValue(given.name, given.as_written, given.place, without_advice(reason), effect))

    def drop(self, setting: str, reason: str, effect: Effect = "look") -> None:
        self.leave_out(self.taken.pop(setting).given, reason, effect)


def read_original(path: Path) -> Original:
    """Read a file of the original, or the one that it would read in a folder. Raises SettingsError."""
    if not path.is_dir():
        return read_one(path)
    found = [path / name for name in FILES if (path / name).is_file()]
    if not found:
        raise SettingsError(f"{path} holds none of {', '.join(FILES)}", "name the file of settings itself")
    beside = read_one(path / FILES[-1]) if path / FILES[-1] in found else None
    backend = next((given.value for given in beside.values if given.name.lower() in BACKEND), "") if beside else ""
    original = read_one(next((file for file in found if file.suffix == f".{backend}"), found[0]))
    if beside is not None and beside.file != original.file:
        original.variables = beside.variables
        add_launch_values(original, beside)
    return original


def read_one(path: Path) -> Original:
    entries = [entry for entry in read_entries(path) if entry.key != "$schema"]
    is_env = suffix_of(path) == ".env"
    variables = [entry.key for entry in entries if is_env and is_variable(entry.key)]
    wrapper = next((entry for entry in entries if entry.key == "config" and isinstance(entry.value, Mapping)), None)
    around = [entry for entry in entries if wrapper and entry is not wrapper]
    inside = list(inner_entries(wrapper)) if wrapper else [entry for entry in entries if entry.key not in variables]
    original = Original(path, [raw_value(path, entry) for entry in inside], variables=variables)
    for entry in around:
        original.leave_out(raw_value(path, entry), "the WebUI's own notes", "none")
    return original


def add_launch_values(original: Original, beside: Original) -> None:
    """Add the launcher's settings of a config.env: beside config.json the original reads no others."""
    known = {setting_of(given) for given in original.values}
    for given in beside.values:
        setting = setting_of(given)
        if (SECTION_OF.get(setting) == "launch" or setting in LAUNCHERS) and setting not in known:
            original.values.append(given)
        else:
            original.leave_out(given, f"{original.file.name} is read in its place", "none")


def names_accelerate(given: RawValue) -> bool:
    return plain_name(given.name) in (ACCELERATE_CONFIG, *RENAMED[ACCELERATE_CONFIG].split())


def setting_of(given: RawValue) -> str:
    if names_accelerate(given):
        return ACCELERATE_CONFIG
    found = map_name(given.name, canonical_name(given.name) or plain_name(given.name), given.value)
    return found.setting or found.key


def without_advice(reason: str) -> str:
    # It is left out already.
    return reason.replace("; leave it out", "")


def split_variables(original: Original) -> None:
    """Replace the variables that hold arguments by the arguments."""
    mistakes: list[Mistake] = []
    given = original.values
    original.values = [value for variable in given for value in with_arguments(variable, mistakes)]
    for mistake in mistakes:
        variable = next(each for each in given if each.place == mistake.place and each.name == mistake.setting)
        original.leave_out(variable, mistake.message, "lost")


def with_arguments(given: RawValue, mistakes: list[Mistake]) -> list[RawValue]:
    """Return the arguments that a variable of the original holds; any other variable as it is."""
    if normalize_name(given.name) not in EXTRA_ARGS:
        return [given]
    try:
        return split_arguments(given)
    except ValueError as error:
        mistakes.append(Mistake(given.name, str(error), given.place, hint="write each argument as a setting"))
        return []


@dataclass(frozen=True)
class Meaning:
    """A setting's meaning here that differs from the original, shown where it is set and `holds` is true of
    the file."""

    setting: str
    text: str
    holds: Callable[[Mapping[str, Any]], bool]


def says(name: str, *words: str) -> Callable[[Mapping[str, object]], bool]:
    return lambda values: normalize_name(values.get(name)) in words


MEANINGS = (
    Meaning(
        "lr_warmup_steps",
        "lr_scheduler=constant warms up, too; in the original it does not",
        says("lr_scheduler", "constant"),
    ),
    Meaning(
        "lr_scheduler",
        "half a cosine from the peak to lr_end over the whole run; in the original lr_warmup_steps is its period",
        says("lr_scheduler", "cosine"),
    ),
)
FLOAT16 = "float16 is not offered: bf16 here, of the same size, with a range that needs no scaled loss"
DIFFUSION = ("sd1x", "sd2x", "sdxl", "kolors", "pixart_sigma")
"""Families whose noise levels are no flow's."""
DEFAULTS: dict[str, str] = {
    "learning_rate": "4e-07",
    "grad_clip_method": "value",
    "aspect_bucket_sizes": "nearest",
    "lr_end": "4e-07",
    "lr_power": "0.8",
    "flow_schedule_shift": "3.0",
    "lora_dropout": "0.1",
    "seed": "none",
    "caption_strategy": "filename",
    "crop_style": "random",
    "vae_dtype": "bf16",
    "compress_disk_cache": "true",
    "eval_timesteps": "28",
    "validation_negative_prompt": "blurry, cropped, ugly",
    "validation_resolution": "256",
}
"""The original's defaults where ours differ and the result depends on them."""
SAME_RESULT: dict[str, str] = {
    **dict.fromkeys(("output_dir", "logging_dir", "tracker_run_name", "tracker_project_name"), "names of results"),
    **dict.fromkeys(("cache_dir_text", "main_process_ip"), "an address or a folder of this run"),
    **dict.fromkeys(
        ("dataloader_prefetch_qlen", "text_encoder_batch_size", "max_workers", "gradient_checkpointing"),
        "time and memory alone",
    ),
    **dict.fromkeys(("dynamo_backend", "dynamo_use_regional_compilation"), "time alone"),
    "fsdp_cpu_ram_efficient_loading": "memory alone",
    "lr_scheduler": "constant and constant_with_warmup are the same here",
    "sana_complex_human_instruction": "the pipeline's own text",
}
"""Names whose defaults differ without changing what is trained, and why."""
COUNT_WITH = {
    "lr_end": says("lr_scheduler", "polynomial"),
    "lr_power": says("lr_scheduler", "polynomial"),
    "flow_schedule_shift": lambda values: not says("model_family", *DIFFUSION)(values),
    # Datasets of a file crop by themselves.
    "crop_style": lambda values: says("crop", "true")(values) or bool(values.get("data_backend_config")),
    "lora_dropout": says("model_type", "lora"),
    # DeepSpeed clips by the norm there, too.
    "grad_clip_method": lambda values: values.get("zero_stage") is None,
}
"""The settings with which some of these defaults count."""


def remark_on(setting: str, values: Mapping[str, object]) -> str:
    """Note on a setting that means something else here than in the original; empty if it means the same."""
    return next((each.text for each in MEANINGS if each.setting == setting and each.holds(values)), "")


def defaults_there(values: Mapping[str, object]) -> dict[str, str]:
    """Original's defaults that are others here and count with these values, which take their place."""
    return {
        name: theirs
        for name, theirs in DEFAULTS.items()
        if name not in values and COUNT_WITH.get(name, lambda _: True)(values)
    }
