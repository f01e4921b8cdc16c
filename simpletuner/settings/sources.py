"""Sources of settings, weakest first: config.env, accelerate, a config file, the environment, flags.

A source is a list of what was written where. Merging keeps for every value its place and what it outranks, so that
`config show` and every mistake can name file and line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError

from simpletuner.errors import Mistake, SettingsError
from simpletuner.settings.accelerate import default_file, map_file, read_file
from simpletuner.settings.accelerate_launch import launched_entries
from simpletuner.settings.accelerate_messages import mistakes_of, place_of_ranks, warnings_of
from simpletuner.settings.config_files import CONFIG_ENV, CONFIG_FOLDER, PREFIX, find_config, named_path
from simpletuner.settings.errors import shorten
from simpletuner.settings.file_entries import FileEntry, file_place
from simpletuner.settings.formats import read_entries, suffix_of
from simpletuner.settings.key_table import MappedField
from simpletuner.settings.original import TABLE
from simpletuner.settings.original_names import RENAMED
from simpletuner.settings.sections import SECTION_OF, SECTIONS, setting_fields
from simpletuner.settings.spelling import WORDS_FOR_NOTHING, normalize_name, normalize_value
from simpletuner.system.paths import shown_path

RANKS = "num_processes"
ACCELERATE_CONFIG = "accelerate_config"
"""Names a source rather than a setting; may stand wherever settings do. `none` turns the default file off."""

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
    "trainer_extra_args": "write each argument as a setting",
    "debug_extra_args": "write each argument as a setting",
}
"""Names that users have beside settings in config.env or in the environment, and why not used ("": quietly)."""
OTHER_PROGRAMS = (
    *("HF_", "HUGGINGFACE_", "HUGGING_FACE_", "TRANSFORMERS_", "DIFFUSERS_", "TOKENIZERS_", "SAFETENSORS_"),
    *("CUDA_", "NVIDIA_", "CUDNN_", "CUBLAS_", "NCCL_", "GLOO_", "UCX_", "RCCL_", "HIP_", "HSA_", "ROCR_", "MIOPEN_"),
    *("TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "XFORMERS_", "OMP_", "MKL_", "DS_"),
    *("WANDB_", "AWS_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
"""How variables of other programs begin, which the original's config.env holds beside settings."""


@dataclass(frozen=True)
class RawValue:
    """A value as it was written."""

    name: str
    value: Any
    place: str
    file: str = ""
    """The JSON file that was read for the value, if there was one."""
    written: Any = None
    """What the file has, where `value` was converted from it."""


@dataclass(frozen=True)
class Source:
    """One place that settings come from; `warnings` name what it holds that is not used."""

    name: str
    values: list[RawValue]
    warnings: list[str] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)
    needs_ranks: str = ""
    """Where it asks for several ranks without saying how many."""
    implicit: bool = False
    """Found rather than named by the user: the run's summary says what it decided."""
    is_file: bool = False
    """A config file or config.env, which may be one of the original's."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of other programs in config.env, which ranks are given."""


@dataclass(frozen=True)
class Origin:
    """Where a value came from, what was written there, and what it outranked."""

    place: str
    given: Any
    source: str = ""
    outranks: tuple[Origin, ...] = ()
    reason: str = ""
    file: str = ""
    """The JSON file that the value was read from, where a source only names one."""

    def __str__(self) -> str:
        return self.place


@dataclass
class MergedValues:
    """What all sources say together, by setting."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

    def set(self, given: RawValue, source: str) -> None:
        """Take a value from a source that outranks those before it."""
        before = self.origins.get(given.name)
        outranks = (replace(before, outranks=()), *before.outranks) if before else ()
        self.values[given.name] = normalize_value(given.name, setting_fields()[given.name], given.value)
        written = given.value if given.written is None else given.written
        self.origins[given.name] = Origin(given.place, written, source, outranks, file=given.file)

    def require_equal(self, given: RawValue, source: str, reason: str = "") -> None:
        """Take a value that another setting implies; a source that says otherwise is a mistake, not outranked."""
        before = self.origins.get(given.name)
        if before is None:
            self.set(given, source)
            self.origins[given.name] = replace(self.origins[given.name], reason=reason)
        elif not is_equal(self.value(given.name), to_setting_type(given.name, given.value)):
            message = f"{given.place} says {shorten(given.value)}"
            self.mistakes.append(
                Mistake(given.name, message, str(before), shorten(before.given), hint="keep one of them")
            )

    def value(self, name: str) -> Any:
        """A setting's value in its type, or its default; as it was written if it is none of its type."""
        return to_setting_type(name, self.values[name]) if name in self.values else setting_fields()[name].default


def to_setting_type(name: str, value: Any) -> Any:
    """Convert a value to the type of a setting; return it as it came if the setting refuses it."""
    try:
        return validate_value(name, value)
    except ValidationError:
        return value


def validate_value(name: str, value: Any) -> Any:
    """Convert a value to the type of a setting. Raises pydantic's ValidationError if the setting refuses it."""
    section = SECTIONS[SECTION_OF[name]]
    return getattr(section(**{name: normalize_value(name, setting_fields()[name], value)}), name)


def is_equal(one: Any, other: Any) -> bool:
    """Compare two values, numbers up to rounding: a learning rate may be the product of two others."""
    both_numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return math.isclose(one, other, rel_tol=1e-9) if both_numbers else one == other


def collect_sources(flags: Mapping[str, Any], config: Path | None, environment: Mapping[str, str]) -> list[Source]:
    """Return all sources, weakest first. Raises SettingsError for a file that is missing or does not parse."""
    flag_source = from_flags(flags)
    base = Path(CONFIG_ENV) if Path(CONFIG_ENV).is_file() else None
    in_base = folder_variables(base) if base else {}
    found = find_config(environment, in_base, config)
    variables = from_environment({name: value for name, value in environment.items() if name != found.variable})
    variables.warnings.extend(found.warnings)
    path = found.path
    files = [from_file(path)] if path else []
    env_files = [file for file in (base, found.env_file) if file and file != path]
    used = found.variable if in_base.get(found.variable) == found.folder else ""
    pairs = [from_env_file(file, used if file == base else "", implicit=True) for file in env_files]
    chosen = pop_accelerate_config([*pairs, *files, variables, flag_source])
    accelerate = from_accelerate(chosen, environment)
    return [*from_launcher(environment), *pairs, *accelerate, *files, variables, flag_source]


def collect_from_file(path: Path) -> list[Source]:
    """Return what a config file says, and the accelerate file if it names one, whatever other sources there are."""
    source = from_file(path)
    chosen = pop_accelerate_config([source])
    return [*(from_accelerate(chosen, {}) if chosen else []), source]


def from_flags(flags: Mapping[str, Any]) -> Source:
    # On the command line only `[]` can empty a list: an empty text is an item of it, the empty prompt.
    return Source("flag", [RawValue(name, [] if value == ["[]"] else value, "flag") for name, value in flags.items()])


def from_launcher(environment: Mapping[str, str]) -> list[Source]:
    """How many ranks a launcher has started, if this is one of them: the weakest source, since nobody wrote it."""
    if not {"RANK", "WORLD_SIZE"} <= set(environment):
        return []
    return [Source("launcher", [RawValue("num_processes", environment["WORLD_SIZE"], "launcher WORLD_SIZE")])]


def pop_accelerate_config(sources: list[Source]) -> Any:
    """Take the name of the accelerate file out of the sources and return it; the strongest wins."""
    chosen = None
    for source in sources:
        for given in [given for given in source.values if is_accelerate_config(given.name)]:
            source.values.remove(given)
            chosen = given.value
    return chosen


def is_accelerate_config(name: str) -> bool:
    name = normalize_name(name.lstrip("-")).removeprefix(PREFIX.lower())
    return name in (ACCELERATE_CONFIG, *RENAMED[ACCELERATE_CONFIG].split())


def from_file(path: Path) -> Source:
    entries = [entry for entry in read_entries(path) if entry.key != "$schema"]  # for editors, not for us
    if suffix_of(path) == ".env":
        return from_env_file(path)
    values = [RawValue(entry.key, entry.value, file_place(path, entry.line)) for entry in entries]
    return Source(shown_path(path), values, is_file=True)


def folder_variables(path: Path) -> dict[str, str]:
    """The variables of config/config.env that choose a folder of config/."""
    return {entry.key: entry.value for entry in read_entries(path) if entry.key in CONFIG_FOLDER}


def from_env_file(path: Path, used: str = "", implicit: bool = False) -> Source:
    """Read a config.env; the variable `used` has chosen the config file."""
    entries = [entry for entry in read_entries(path) if entry.key != used]
    name = shown_path(path)
    variables = {entry.key: entry.value for entry in entries if is_variable(entry.key)}
    pairs = {file_place(path, entry.line): (entry.key, entry.value) for entry in entries if entry.key not in variables}
    source = from_pairs(name, pairs, implicit)
    # Names only: their values may be secrets.
    passed_on = [f"{name}: passed on to the ranks, as variables: {', '.join(variables)}"] if variables else []
    return replace(source, warnings=[*source.warnings, *passed_on], is_file=True, variables=variables)


def is_variable(key: str) -> bool:
    """Whether a name in config.env is a variable of another program, such as HF_TOKEN."""
    return key.upper().startswith(OTHER_PROGRAMS) and normalize_name(key) not in (*TABLE.rules, *SECTION_OF)


def from_environment(environment: Mapping[str, str]) -> Source:
    ours = [name for name in environment if name.startswith(PREFIX)]
    return from_pairs("environment", {f"environment {name}": (name, environment[name]) for name in ours})


def from_pairs(name: str, pairs: Mapping[str, tuple[str, Any]], implicit: bool = False) -> Source:
    """A source of pairs by their places; names known not to be settings are left out, with a reason."""
    values, warnings = [], []
    for place, (key, value) in pairs.items():
        plain = key.removeprefix(PREFIX).lower()
        if plain not in NOT_SETTINGS:
            values.append(RawValue(plain, [] if value == "" and is_list(plain) else value, place))
        elif NOT_SETTINGS[plain]:
            warnings.append(f"{key} ({place}) is not used: {NOT_SETTINGS[plain]}")
    return Source(name, values, warnings, implicit=implicit)


def is_list(name: str) -> bool:
    """Whether a setting is a list, which an empty variable leaves empty; elsewhere "" is an item."""
    return name in setting_fields() and get_origin(setting_fields()[name].annotation) is list


def from_accelerate(chosen: Any, environment: Mapping[str, str]) -> list[Source]:
    """What accelerate is configured to do: by `accelerate launch`, in the chosen file, or in its default one."""
    # What `accelerate launch` resolved includes its file and its own flags: the file must not be read again.
    if entries := launched_entries(environment):
        return [accelerate_source("accelerate launch", entries, implicit=False)]
    chosen = chosen or environment.get("ACCELERATE_CONFIG_FILE")
    if chosen is not None and normalize_name(chosen) in WORDS_FOR_NOTHING:
        return []
    path = named_path(chosen, ACCELERATE_CONFIG) if chosen else default_file(environment)
    if path is None:
        return []
    entries = read_file(path)
    if not any(entry.key == "distributed_type" for entry in entries):
        raise SettingsError(
            f"{shown_path(path)} is no accelerate file: it has no distributed_type", "`accelerate config` writes one"
        )
    return [accelerate_source(shown_path(path), entries, implicit=chosen is None)]


def accelerate_source(name: str, entries: list[FileEntry], implicit: bool) -> Source:
    """accelerate's fields as settings; those that are not used as warnings, those that cannot be meant as mistakes."""
    fields = map_file(entries)
    values = [RawValue(found.setting, found.value, accelerate_place(name, found)) for found in fields if found.setting]
    needs_ranks = "" if any(value.name == RANKS for value in values) else place_of_ranks(name, entries)
    return Source(name, values, warnings_of(name, fields), mistakes_of(name, fields), needs_ranks, implicit)


def accelerate_place(name: str, found: MappedField) -> str:
    """Where a field stands, with its own name where the setting has another."""
    return file_place(name, found.line) + (f" {found.path}" if found.path != found.setting else "")
