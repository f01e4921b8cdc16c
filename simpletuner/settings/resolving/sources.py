"""Sources of settings, weakest first: config.env, accelerate, a config file, the environment, flags.

A source is a list of values with their places. Merging keeps the place of every value and the values that it
outranks, so that `config show` and every mistake can name file and line. `global_batch_size` is a source of
gradient_accumulation_steps: a run keeps its batch on any number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError

from simpletuner.errors import BrokenRule, Mistake, SettingsError
from simpletuner.settings.declared.errors import is_secret, shorten
from simpletuner.settings.declared.knob import own_defaults
from simpletuner.settings.declared.sections import SECTION_OF, SECTIONS, setting_fields
from simpletuner.settings.files.config_files import (
    ACCELERATE_CONFIG,
    CONFIG_CANDIDATES,
    CONFIG_ENV,
    CONFIG_FOLDER,
    LAUNCHED_BY_ACCELERATE,
    PREFIX,
    default_accelerate_file,
    find_config,
    named_path,
)
from simpletuner.settings.files.formats import read_entries, suffix_of
from simpletuner.settings.files.raw_values import Origin, RawValue, Source, is_reference, raw_value
from simpletuner.settings.foreign.recognition import import_hint, is_dataset_file, trainer_of
from simpletuner.settings.values.spelling import WORDS_FOR_NOTHING, is_equal, normalize_name, normalize_value
from simpletuner.system.files.paths import shown_path
from simpletuner.system.numbers import count_noun

CHOOSES_FOLDER = "it chooses a folder of config/ in the shell and in config/config.env, where no file is named"
# Names beside settings in config.env or the environment, and the reason for not using them ("": quiet).
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
# Prefixes of other programs' variables, which the original's config.env holds in addition to settings.
OTHER_PROGRAMS = (
    *("HF_", "HUGGINGFACE_", "HUGGING_FACE_", "TRANSFORMERS_", "DIFFUSERS_", "TOKENIZERS_", "SAFETENSORS_"),
    *("CUDA_", "NVIDIA_", "CUDNN_", "CUBLAS_", "NCCL_", "GLOO_", "UCX_", "RCCL_", "HIP_", "HSA_", "ROCR_", "MIOPEN_"),
    *("TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "XFORMERS_", "OMP_", "MKL_", "DS_"),
    *("WANDB_", "AWS_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)


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
    """True if a name in config.env is another program's variable, such as HF_TOKEN."""
    if not key.upper().startswith(OTHER_PROGRAMS):
        return False
    from simpletuner.settings.foreign.original_names import TABLE

    return normalize_name(key) not in (*TABLE.rules, *SECTION_OF)


def from_environment(environment: Mapping[str, str]) -> Source:
    ours = [name for name in environment if name.startswith(PREFIX)]
    values = [RawValue(name, environment[name], f"environment {name}", reference=f"{{env:{name}}}") for name in ours]
    return from_variables("environment", values)


def from_variables(name: str, variables: Iterable[RawValue]) -> Source:
    """Settings in variables; other names are left out, with a reason."""
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
    # An empty variable empties a list; elsewhere "" is a value.
    return name in setting_fields() and get_origin(setting_fields()[name].annotation) is list


RANKS = "num_processes"


@dataclass
class MergedValues:
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

    def set(self, given: RawValue, source: str) -> None:
        """Take a value from a source that outranks those before it."""
        before = self.origins.get(given.name)
        outranks = (replace(before, outranks=()), *before.outranks) if before else ()
        self.values[given.name] = normalize_value(given.name, setting_fields()[given.name], given.value)
        as_written = reference_to(given) if is_secret(given.name) else given.as_written
        self.origins[given.name] = Origin(given.place, as_written, source, outranks, file=given.file)

    def require_equal(self, given: RawValue, source: str, reason: str = "") -> None:
        """Take a value that another setting implies; a contradicting source is a mistake, not outranked."""
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


def reference_to(given: RawValue) -> str:
    # A secret that was typed must be in a replay's environment.
    if is_reference(given.value):
        return given.value
    return given.reference or f"{{env:{PREFIX}{given.name.upper()}}}"


def to_setting_type(name: str, value: object) -> object:
    """Convert a value to the type of a setting; return it as it came if the setting refuses it."""
    try:
        return validate_value(name, value)
    except ValidationError:
        return value


def validate_value(name: str, value: object) -> Any:
    """Convert a value to a setting's type. Raises pydantic's ValidationError if the setting refuses it."""
    section = SECTIONS[SECTION_OF[name]]
    return getattr(section(**{name: normalize_value(name, setting_fields()[name], value)}), name)


def collect_sources(flags: Mapping[str, object], config: Path | None, environment: Mapping[str, str]) -> list[Source]:
    """All sources, weakest first. Raises SettingsError for a file that is missing or does not parse."""
    flag_source = from_flags(flags)
    base = Path(CONFIG_ENV) if Path(CONFIG_ENV).is_file() else None
    in_base = folder_variables(base, environment) if base else {}
    found = find_config(environment, in_base, config)
    # Without the variable that has chosen the folder: it had its effect, and needs no warning.
    variables = from_environment({name: value for name, value in environment.items() if name != found.variable})
    variables.warnings.extend(found.warnings)
    path = found.path
    files = [from_file(path, environment)] if path else []
    env_files = [file for file in (base, found.env_file) if file and file != path]
    used = found.variable if in_base.get(found.variable) == found.folder else ""
    pairs = [
        replace(
            from_env_file(file, environment, used if file == base else ""), implicit=True, is_outranked=found.is_named
        )
        for file in env_files
    ]
    chosen = pop_accelerate_config([*pairs, *files, variables, flag_source])
    accelerate = from_accelerate(chosen, environment)
    return [*from_launcher(environment), *pairs, *accelerate, *files, variables, flag_source]


def usual_config(environment: Mapping[str, str]) -> Path:
    """Config file that a run would read if no flag named one. Raises SettingsError where there is none."""
    base = Path(CONFIG_ENV) if Path(CONFIG_ENV).is_file() else None
    found = find_config(environment, folder_variables(base, environment) if base else {})
    if path := found.path or found.env_file or base:
        return path
    raise SettingsError(
        f"there is no {', '.join(CONFIG_CANDIDATES)} or {CONFIG_ENV}",
        "name the file; `simpletuner config init` writes one to start from",
    )


def collect_from_file(path: Path) -> list[Source]:
    """Sources of one config file: itself, and the accelerate file that it names."""
    source = from_file(path)
    chosen = pop_accelerate_config([source])
    return [*(from_accelerate(chosen, {}) if chosen else []), source]


def from_flags(flags: Mapping[str, object]) -> Source:
    # On the command line only `[]` can empty a list: an empty text is an item of it, the empty prompt.
    return Source("flag", [RawValue(name, [] if value == ["[]"] else value, "flag") for name, value in flags.items()])


def from_launcher(environment: Mapping[str, str]) -> list[Source]:
    """Return the number of ranks that a launcher has started, for one of them: the weakest source, since
    nobody wrote it."""
    if not {"RANK", "WORLD_SIZE"} <= set(environment):
        return []
    return [Source("launcher", [RawValue("num_processes", environment["WORLD_SIZE"], "launcher WORLD_SIZE")])]


def pop_accelerate_config(sources: list[Source]) -> object:
    """Take the name of the accelerate file out of the sources and return it; the strongest wins."""
    chosen = None
    for source in sources:
        for given in [given for given in source.values if is_accelerate_config(given.name)]:
            source.values.remove(given)
            chosen = given.value
    return chosen


def is_accelerate_config(name: str) -> bool:
    name = normalize_name(name.lstrip("-")).removeprefix(PREFIX.lower())
    return name == ACCELERATE_CONFIG


def from_file(path: Path, environment: Mapping[str, str] = os.environ) -> Source:
    entries = [entry for entry in read_entries(path, environment) if entry.key != "$schema"]  # for editors, not for us
    if suffix_of(path) == ".env":
        return from_env_file(path, environment)
    values = {entry.key: entry.value for entry in entries}
    if trainer := trainer_of(values):
        message = f"{shown_path(path)} is a file of {trainer}"
        raise SettingsError(message, import_hint(path, is_dataset_file(values), trainer))
    return Source(shown_path(path), [raw_value(path, entry) for entry in entries], is_file=True)


def from_accelerate(chosen: Any, environment: Mapping[str, str]) -> list[Source]:
    """Return accelerate's configuration: from `accelerate launch`, the chosen file, or its default one."""
    # What `accelerate launch` resolved includes its file and its own flags: the file must not be read again.
    if LAUNCHED_BY_ACCELERATE in environment:
        from simpletuner.settings.foreign.accelerate import launched_source

        return [launched_source(environment)]
    chosen = chosen or environment.get("ACCELERATE_CONFIG_FILE")
    if chosen is not None and normalize_name(chosen) in WORDS_FOR_NOTHING:
        return []
    path = named_path(chosen, ACCELERATE_CONFIG) if chosen else default_accelerate_file(environment)
    if path is None:
        return []
    from simpletuner.settings.foreign.accelerate import file_source

    return [file_source(path, implicit=chosen is None)]


def missing_ranks(place: str) -> BrokenRule:
    """Error for several ranks without their number, as in `accelerate launch`: with 1 another run would start
    than the file describes."""
    message = f"{RANKS} is missing: {place} means several ranks: write it there, or give --{RANKS}=8"
    return BrokenRule(RANKS, message)


def warn_of_defaults(place: str, left_out: Iterable[RawValue], merged: MergedValues) -> list[str]:
    """Say in one sentence what DeepSpeed itself would take where its file says nothing, as far as it is not
    ours.

    What another source sets is decided. `left_out` has DeepSpeed's value of a setting, and its key as the
    place.
    """
    own = own_defaults(merged.value("optimizer"))
    ours = {given.name: own.get(given.name, merged.value(given.name)) for given in left_out}
    found = [each for each in left_out if each.name not in merged.origins and not is_equal(each.value, ours[each.name])]
    theirs = ", ".join(dict.fromkeys(f"{each.place} = {shorten(each.as_written)}" for each in found))
    here = ", ".join(f"{each.name} = {shorten(ours[each.name])}" for each in found)
    said = f"DeepSpeed itself would take {theirs}, where {place} says nothing; here it is {here}"
    return [said] if found else []


GLOBAL_BATCH, BATCH, CONTEXT = "global_batch_size", "train_batch_size", "context_parallel_size"
SIZES_SHOWN, LARGEST_SHOWN = 6, 10_000


def apply_global_batch_size(merged: MergedValues) -> None:
    """Set gradient_accumulation_steps from the global batch; another given value is a mistake."""
    wanted, batch, ranks, shared = (merged.value(name) for name in (GLOBAL_BATCH, BATCH, RANKS, CONTEXT))
    if wanted is None or not all(type(each) is int and each > 0 for each in (wanted, batch, ranks, shared)):
        return  # validation says so
    # A context_parallel_size above the number of ranks is a mistake that its own rule tells.
    data_ranks = max(1, ranks // shared)
    origin = merged.origins[GLOBAL_BATCH]
    if wanted % (batch * data_ranks):
        message = (
            f"{GLOBAL_BATCH} = {wanted} ({origin}) is no multiple of {BATCH} {batch} x {count_noun(data_ranks, 'rank')}"
        )
        fix = suggest(wanted, batch, data_ranks)
        merged.mistakes.append(BrokenRule(GLOBAL_BATCH, f"{message}: {fix}", others=(BATCH, RANKS)))
        return
    steps = RawValue(
        "gradient_accumulation_steps", wanted // (batch * data_ranks), f"{GLOBAL_BATCH} = {wanted} ({origin})"
    )
    merged.require_equal(steps, origin.source, f"{wanted} / ({BATCH} {batch} x {count_noun(data_ranks, 'rank')})")


def suggest(wanted: int, batch: int, data_ranks: int) -> str:
    """Other sizes of a rank's batch that divide the global batch, or the nearest global batches."""
    product = batch * data_ranks
    nearest = " or ".join(str(each) for each in (wanted // product * product, -(-wanted // product) * product) if each)
    if wanted % data_ranks:
        return f"set {GLOBAL_BATCH} to {nearest}, or start a number of ranks that divides {wanted}"
    own = wanted // data_ranks
    # What is typed may have any number of digits, and is tried one by one.
    sizes = [size for size in range(min(own, batch, LARGEST_SHOWN), 0, -1) if own % size == 0][:SIZES_SHOWN]
    return f"set {BATCH} to {', '.join(map(str, sizes))}, or {GLOBAL_BATCH} to {nearest}"
