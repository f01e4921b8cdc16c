"""Fields that `accelerate launch` passes to its ranks in the environment, and messages on unused ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from simpletuner.errors import Mistake, SettingsError
from simpletuner.settings.declared.errors import did_you_mean, shorten
from simpletuner.settings.files.config_files import LAUNCHED_BY_ACCELERATE, FileEntry, file_place
from simpletuner.settings.files.raw_values import RawValue, Source
from simpletuner.settings.foreign.accelerate_fields import (
    ENGINES,
    HYBRID,
    SECTIONS_OF_ENGINE,
    STRATEGIES,
    STRATEGY_FIELDS,
    TABLE,
    kind_of,
    left_out,
    map_file,
    read_file,
    strategy_name,
)
from simpletuner.settings.foreign.key_table import MappedField
from simpletuner.settings.values.spelling import normalize_name
from simpletuner.system.files.paths import shown_path

LAUNCHED = {
    LAUNCHED_BY_ACCELERATE: "mixed_precision",
    "ACCELERATE_USE_CPU": "use_cpu",
    "ACCELERATE_DEBUG_MODE": "debug",
    "ACCELERATE_CPU_AFFINITY": "enable_cpu_affinity",
    "ACCELERATE_DYNAMO_BACKEND": "dynamo_config.dynamo_backend",
    "ACCELERATE_DYNAMO_MODE": "dynamo_config.dynamo_mode",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "dynamo_config.dynamo_use_fullgraph",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "dynamo_config.dynamo_use_dynamic",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "dynamo_config.dynamo_use_regional_compilation",
    "FSDP_VERSION": "fsdp_config.fsdp_version",
    "FSDP_SHARDING_STRATEGY": "fsdp_config.fsdp_sharding_strategy",
    "FSDP_RESHARD_AFTER_FORWARD": "fsdp_config.fsdp_reshard_after_forward",
    "FSDP_OFFLOAD_PARAMS": "fsdp_config.fsdp_offload_params",
    "FSDP_MIN_NUM_PARAMS": "fsdp_config.fsdp_min_num_params",
    "FSDP_AUTO_WRAP_POLICY": "fsdp_config.fsdp_auto_wrap_policy",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
    "FSDP_STATE_DICT_TYPE": "fsdp_config.fsdp_state_dict_type",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "fsdp_config.fsdp_cpu_ram_efficient_loading",
    "FSDP_ACTIVATION_CHECKPOINTING": "fsdp_config.fsdp_activation_checkpointing",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "fsdp_config.fsdp_activation_checkpointing_offload",
    "FSDP_IGNORED_MODULES": "fsdp_config.fsdp_ignored_modules",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "parallelism_config.parallelism_config_dp_replicate_size",
    "PARALLELISM_CONFIG_TP_SIZE": "parallelism_config.parallelism_config_tp_size",
    "PARALLELISM_CONFIG_SP_SIZE": "parallelism_config.parallelism_config_sp_size",
    "PARALLELISM_CONFIG_CP_SIZE": "parallelism_config.parallelism_config_cp_size",
    "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "parallelism_config.parallelism_config_cp_comm_strategy",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "deepspeed_config.zero_stage",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "deepspeed_config.offload_optimizer_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "deepspeed_config.offload_param_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "deepspeed_config.offload_optimizer_nvme_path",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "deepspeed_config.offload_param_nvme_path",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "deepspeed_config.deepspeed_config_file",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "deepspeed_config.gradient_accumulation_steps",
    "ACCELERATE_GRADIENT_CLIPPING": "deepspeed_config.gradient_clipping",
}
"""Variables that `accelerate launch` gives its ranks, and the fields of the file that they repeat."""


def launched_entries(environment: Mapping[str, str]) -> list[FileEntry]:
    """Settings that `accelerate launch` passed to this process in its environment."""
    engine = next((name for name in ("fsdp", "deepspeed") if f"ACCELERATE_USE_{name.upper()}" in environment), "no")
    entries: dict[str, Any] = {"distributed_type": engine.upper()}
    for variable, field in LAUNCHED.items():
        value = environment.get(variable)
        section, dot, name = field.rpartition(".")
        other_engine = SECTIONS_OF_ENGINE.get(section) not in (None, engine)
        if value is None or other_engine or variable in irrelevant_variables(environment):
            continue
        target = entries.setdefault(section, {}) if dot else entries
        target[name] = value
    fsdp = entries.get("fsdp_config", {})
    if any(strategy_name(fsdp[name]) in HYBRID for name in fsdp if name.endswith(STRATEGY_FIELDS)):
        # One copy per machine, of which torchrun has one agent each; accelerate hands on no num_machines.
        copies = entries.setdefault("parallelism_config", {})
        copies.setdefault("parallelism_config_dp_replicate_size", environment.get("GROUP_WORLD_SIZE", "1"))
    return [FileEntry(key, value) for key, value in entries.items()]


def irrelevant_variables(environment: Mapping[str, str]) -> set[str]:
    """Variables that accelerate sets to its own defaults, although they count only with another choice."""
    compiles = normalize_name(environment.get("ACCELERATE_DYNAMO_BACKEND", "no")) != "no"
    resharding, strategy = "FSDP_RESHARD_AFTER_FORWARD", "FSDP_SHARDING_STRATEGY"
    # The dialogue writes FSDP1's strategy under FSDP2's name, and the launcher adds its own default.
    is_strategy = strategy_name(environment.get(resharding)) in STRATEGIES
    by_dialogue = is_strategy and strategy_name(environment.get(strategy)) == "full_shard"
    other = resharding if environment.get("FSDP_VERSION") == "1" and not by_dialogue else strategy
    dynamo = {name for name in LAUNCHED if name.startswith("ACCELERATE_DYNAMO_")} - {"ACCELERATE_DYNAMO_BACKEND"}
    return {other} | (set() if compiles else dynamo)


# Largest number of unknown fields that are named; the others are counted.
MAX_NAMED = 5
# Values of distributed_type for which accelerate's default of one rank is not a slip.
ALONE = ("no", "multi_cpu")


def warnings_of(name: str, fields: Sequence[MappedField]) -> list[str]:
    """Return a sentence for each field that is not used as it is written, and one for all unknown ones."""
    warnings = [
        f"{file_place(name, found.line)}: {found.path}: {found.note}"
        for found in fields
        if found.outcome == "set" and found.note
    ]
    warnings += [
        f"{file_place(name, found.line)}: {found.path} = {shorten(found.value)} is not used: {found.note}"
        for found in fields
        if found.outcome == "unused"
    ]
    unknown = [found for found in fields if found.outcome == "unknown"]
    if not unknown:
        return warnings
    place = file_place(name, unknown[0].line)
    return [*warnings, f"{place}: not used, since simpletuner does not know it: {first_of(unknown)}"]


def first_of(unknown: Sequence[MappedField]) -> str:
    """Name the first of the fields, each with the nearest known one, and count the others."""
    named = [f"{found.path} = {shorten(found.value)}{guess_field(found)}" for found in unknown[:MAX_NAMED]]
    more = len(unknown) - len(named)
    return ", ".join(named) + (f", and {more:,} more" if more else "")


def guess_field(found: MappedField) -> str:
    section, dot, name = found.path.rpartition(".")
    question = did_you_mean(name, TABLE.names_in(section + dot))
    return f" ({question})" if question else ""


def mistakes_of(name: str, fields: Iterable[MappedField]) -> list[Mistake]:
    """Return the fields that cannot be meant: another engine, a section that is none."""
    return [
        Mistake(found.path, found.note, file_place(name, found.line), shorten(found.value), guess_engine(found))
        for found in fields
        if found.outcome == "refused"
    ]


def guess_engine(found: MappedField) -> str:
    return did_you_mean(str(found.value).upper(), ENGINES) if found.path == "distributed_type" else ""


def place_of_ranks(name: str, entries: Iterable[FileEntry]) -> str:
    """File and line that ask for several ranks; empty if none does, or if that is a mistake anyway."""
    kind = kind_of(entries)
    asks = normalize_name(kind.value) not in ALONE and str(kind.value).upper() in ENGINES
    return f"distributed_type: {kind.value} ({file_place(name, kind.line)})" if asks else ""


def launched_source(environment: Mapping[str, str]) -> Source:
    """Settings that `accelerate launch` passed to this process."""
    return accelerate_source("accelerate launch", launched_entries(environment), implicit=False)


def file_source(path: Path, implicit: bool) -> Source:
    """Settings in a file of accelerate. Raises SettingsError for a file that is none."""
    entries = read_file(path)
    if not any(entry.key == "distributed_type" for entry in entries):
        raise SettingsError(
            f"{shown_path(path)} is no accelerate file: it has no distributed_type", "`accelerate config` writes one"
        )
    return accelerate_source(shown_path(path), entries, implicit)


def accelerate_source(name: str, entries: list[FileEntry], implicit: bool) -> Source:
    """Settings from accelerate's fields, with warnings for unused and mistakes for impossible ones."""
    fields = map_file(entries)
    values = [RawValue(found.setting, found.value, accelerate_place(name, found)) for found in fields if found.setting]
    needs_ranks = "" if any(value.name == "num_processes" for value in values) else place_of_ranks(name, entries)
    mistakes = mistakes_of(name, fields)
    return Source(
        name, values, warnings_of(name, fields), mistakes, needs_ranks, implicit, left_out=left_out(entries, fields)
    )


def accelerate_place(name: str, found: MappedField) -> str:
    """Return the place of a field, with its own name where the setting has another."""
    return file_place(name, found.line) + (f" {found.path}" if found.path != found.setting else "")
