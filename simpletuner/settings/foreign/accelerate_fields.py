"""accelerate's configuration as settings, and back.

Every field has a rule: it becomes a setting, it asks for what happens anyway, or a warning says that it is
not used and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.settings.declared.errors import FLOAT8, nearest
from simpletuner.settings.declared.sections import Settings
from simpletuner.settings.files.config_files import FileEntry
from simpletuner.settings.files.formats import read_entries
from simpletuner.settings.files.raw_values import RawValue
from simpletuner.settings.foreign.deepspeed_keys import read_stage
from simpletuner.settings.foreign.key_table import (
    Ignores,
    KeyTable,
    MappedField,
    Maps,
    Refuses,
    Rule,
    export,
    in_section,
    inner_entries,
    interpret,
    never,
)
from simpletuner.settings.values.spelling import normalize_name
from simpletuner.system.files.paths import shown_path

ENGINES = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED")
OFF = ("false", "no", "none", "0", "[]", "{}", "")
TPU = Ignores("TPUs are not supported")
SP_SIZE = Ignores("counts only with sp_size", warns=False)
ON_EVERY_MACHINE = "start `simpletuner train` on every machine"


def on_many_machines(settings: Settings) -> bool:
    return settings.launch.num_machines > 1


def has_several_axes(settings: Settings) -> bool:
    return settings.parallel.context_parallel_size > 1 or settings.parallel.dp_replicate_size > 1


RESHARDS = {"full_shard": True, "shard_grad_op": False, "hybrid_shard": True, "hybrid_shard_zero2": False}
NUMBERS = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard", "5": "hybrid_shard_zero2"}
NOT_SHARDED = ("no_shard", 3)
HYBRID = ("hybrid_shard", "hybrid_shard_zero2")


def strategy_name(value: object) -> str:
    """Return the name of a sharding strategy that is given by name or by torch's number."""
    return NUMBERS.get(normalize_name(value), normalize_name(value))


def read_strategy(value: object) -> bool:
    """Convert a sharding strategy to whether weights are freed after the forward."""
    name = strategy_name(value)
    if name not in RESHARDS:
        names = [known.upper() for known in RESHARDS]
        raise ValueError(f"use one of {', '.join(names)}{nearest(str(value).upper(), names)}")
    return RESHARDS[name]


def read_resharding(value: object) -> object:
    """Convert a boolean for freeing weights, or a strategy; validation refuses anything else."""
    return RESHARDS.get(strategy_name(value), value)


DYNAMO: dict[str, Rule] = {
    # accelerate says NO where nothing was asked for, also to its ranks: it does not stand against `auto`.
    "dynamo_backend": Maps("dynamo_backend", neutral=("no",), write=str.upper),
    "dynamo_mode": Maps("dynamo_mode"),
    "dynamo_use_dynamic": Maps("dynamo_dynamic"),
    "dynamo_use_fullgraph": Maps("dynamo_fullgraph"),
    "dynamo_use_regional_compilation": Maps("dynamo_use_regional_compilation"),
}
FSDP: dict[str, Rule] = {
    "fsdp_version": Maps("fsdp_version"),
    # The dialogue of accelerate 1.15 writes FSDP1's strategy here, too.
    "fsdp_reshard_after_forward": Maps("fsdp_reshard_after_forward", read_resharding, neutral=NOT_SHARDED),
    # Its name in FSDP1.
    "fsdp_sharding_strategy": Maps(
        "fsdp_reshard_after_forward",
        read_strategy,
        neutral=NOT_SHARDED,
        export_if=never,
    ),
    "fsdp_state_dict_type": Maps("fsdp_state_dict_type"),
    "fsdp_cpu_ram_efficient_loading": Maps("fsdp_cpu_ram_efficient_loading"),
    # accelerate knows the three policies by name, but no dotted path to a callable.
    "fsdp_auto_wrap_policy": Maps(
        "fsdp_auto_wrap_policy", export_if=lambda settings: "." not in settings.parallel.fsdp_auto_wrap_policy
    ),
    "fsdp_min_num_params": Maps(
        "fsdp_min_num_params",
        neutral=(0,),
        export_if=lambda settings: settings.parallel.fsdp_auto_wrap_policy == "SIZE_BASED_WRAP",
    ),
    "fsdp_transformer_layer_cls_to_wrap": Maps(
        "fsdp_transformer_layer_cls_to_wrap",
        export_if=lambda settings: bool(settings.parallel.fsdp_transformer_layer_cls_to_wrap),
    ),
    "fsdp_activation_checkpointing": Maps("gradient_checkpointing", neutral=OFF, export_if=never),
    "fsdp_offload_params": Maps("fsdp_offload_params"),
    "fsdp_activation_checkpointing_offload": Maps("offload_activations", neutral=OFF, export_if=never),
    "fsdp_ignored_modules": Ignores("all modules are sharded"),
    "fsdp_backward_prefetch": Ignores("FSDP2 prefetches by itself", warns=False),
    "fsdp_forward_prefetch": Ignores("FSDP2 prefetches by itself", warns=False),
    "fsdp_use_orig_params": Ignores("FSDP2 always keeps the original parameters", warns=False),
    "fsdp_sync_module_states": Ignores("every rank reads its own slices", warns=False),
}
DEEPSPEED: dict[str, Rule] = {
    "zero_stage": Maps("zero_stage", read_stage),
    "offload_optimizer_device": Maps("offload_optimizer"),
    "offload_param_device": Maps("offload_param"),
    # Not exported: accelerate does not pass the paths on to its ranks, so they stay flags.
    "offload_optimizer_nvme_path": Maps("offload_param_path", neutral=OFF, export_if=never),
    "offload_param_nvme_path": Maps("offload_param_path", neutral=OFF, export_if=never),
    "deepspeed_config_file": Maps("deepspeed_config", neutral=OFF, export_if=never),
    "gradient_accumulation_steps": Maps("gradient_accumulation_steps", neutral=("auto",), export_if=never),
    "gradient_clipping": Maps("max_grad_norm", neutral=("auto",), export_if=never),
    "zero3_init_flag": Ignores("the denoiser is built without memory at every stage", warns=False),
    "zero3_save_16bit_model": Ignores("checkpoints are whole at every stage", warns=False),
    "deepspeed_multinode_launcher": Ignores(ON_EVERY_MACHINE, neutral=("standard",)),
    "deepspeed_hostfile": Ignores(ON_EVERY_MACHINE),
    "deepspeed_inclusion_filter": Ignores("set gpu_ids"),
    "deepspeed_exclusion_filter": Ignores("set gpu_ids"),
    "deepspeed_moe_layer_cls_names": Ignores("no family has experts"),
}
PARALLELISM: dict[str, Rule] = {
    "parallelism_config_cp_size": Maps("context_parallel_size"),
    "parallelism_config_cp_comm_strategy": Maps("context_parallel_comm_strategy"),
    "parallelism_config_cp_backend": Ignores("sequences are split by FSDP2's ranks", warns=False),
    "parallelism_config_dp_shard_size": Ignores("each copy is sharded over all of its ranks", warns=False),
    "parallelism_config_dp_replicate_size": Maps("dp_replicate_size"),
    "parallelism_config_tp_size": Ignores("tensor parallelism is not supported", neutral=(1,)),
    "parallelism_config_sp_size": Ignores("set context_parallel_size", neutral=(1,)),
    "parallelism_config_sp_backend": SP_SIZE,
    "parallelism_config_sp_seq_length": SP_SIZE,
    "parallelism_config_sp_seq_length_is_variable": SP_SIZE,
    "parallelism_config_sp_attn_implementation": SP_SIZE,
}
RULES: dict[str, Rule] = {
    "compute_environment": Ignores("start simpletuner on the machines themselves", neutral=("local_machine",)),
    "distributed_type": Refuses(f"use one of {', '.join(ENGINES)}", neutral=ENGINES),
    # -1 is what accelerate 1.15 assumes for a file without it (accelerate/commands/config/config_args.py).
    "num_processes": Maps("num_processes", neutral=(-1,)),
    "num_machines": Maps("num_machines"),
    "machine_rank": Maps("machine_rank", export_if=on_many_machines),
    "main_process_ip": Maps("main_process_ip", write=lambda address: address or None, export_if=on_many_machines),
    # 0 asks accelerate for any free port.
    "main_process_port": Maps("main_process_port", neutral=(0,)),
    "mixed_precision": Maps("mixed_precision"),
    "fp16": Maps("mixed_precision", read=lambda value: "fp16", neutral=OFF, export_if=never),
    "use_cpu": Maps("use_cpu"),
    "gpu_ids": Maps("gpu_ids"),
    "same_network": Ignores("machines connect to main_process_ip", warns=False),
    "rdzv_backend": Ignores("machines connect to main_process_ip", warns=False),
    "rdzv_conf": Ignores("node_join_timeout says how long machines wait for one another"),
    "main_training_function": Ignores("`simpletuner train` is started", warns=False),
    "debug": Ignores("use `simpletuner --debug`"),
    "enable_cpu_affinity": Ignores("start with `numactl` to pin processes"),
    **dict.fromkeys(("downcast_bf16", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm"), TPU),
    **dict.fromkeys(("tpu_env", "command_file", "commands"), TPU),
    "fp8_config": Ignores(FLOAT8),
    "megatron_lm_config": Ignores("Megatron-LM is not supported"),
    "mpirun_config": Ignores("`simpletuner train` starts the ranks of each machine"),
    "ipex_config": Ignores("IPEX is not supported"),
    "dynamo_backend": Maps("dynamo_backend", neutral=("no",), export_if=never),  # an older place of it
    **in_section("dynamo_config", DYNAMO, lambda settings: settings.compile.is_on),
    **in_section("fsdp_config", FSDP, lambda settings: settings.parallel.fsdp_enable),
    **in_section("deepspeed_config", DEEPSPEED, lambda settings: settings.parallel.zero_stage is not None),
    **in_section("parallelism_config", PARALLELISM, has_several_axes),
}
# Names without their section's prefix, as in old files; accelerate adds it.
SHORT_NAMES = {
    name.replace(f".{prefix}_", "."): name
    for prefix in ("fsdp", "dynamo")
    for name in RULES
    if name.startswith(f"{prefix}_config.")
}
TABLE = KeyTable(RULES, SHORT_NAMES, is_off=lambda value: normalize_name(value) in OFF)

DEFAULT_ZERO_STAGE = 2
"""accelerate's default, where its file names no stage."""
NO_SECTION = {"deepspeed_config": "use a section of fields, in which deepspeed_config_file names a file"}
SECTIONS_OF_ENGINE = {"fsdp_config": "fsdp", "deepspeed_config": "deepspeed"}
"""Sections that count only with their distributed_type."""


def map_file(entries: list[FileEntry]) -> list[MappedField]:
    kind = kind_of(entries)
    engine = normalize_name(kind.value)
    fields: list[MappedField] = []
    for found in (found for entry in entries for found in map_entry(entry, engine)):
        # The same value from two fields, such as both nvme paths, is no contradiction.
        repeats = any((found.setting, found.value) == (other.setting, other.value) for other in fields)
        if not (found.setting and repeats):
            fields.append(found)
    if engine == "fsdp":
        fields += fsdp_fields(entries, fields)
    if engine == "deepspeed" and not {"zero_stage", "deepspeed_config"} & {found.setting for found in fields}:
        fields.append(MappedField(kind.key, kind.key, DEFAULT_ZERO_STAGE, "set", "zero_stage", line=kind.line))
    return fields


def fsdp_fields(entries: list[FileEntry], fields: list[MappedField]) -> Iterator[MappedField]:
    """Yield what distributed_type: FSDP means with the strategy that the file names, if any."""
    kind, strategy = kind_of(entries), strategy_of(entries)
    name = strategy_name(strategy.value) if strategy else ""
    if name != "no_shard":  # else each rank holds a whole copy, which is data-parallel
        yield MappedField(kind.key, kind.key, True, "set", "fsdp_enable", line=kind.line)
    if strategy and strategy.key.endswith("reshard_after_forward") and name != "full_shard":
        yield MappedField(strategy.key, strategy.key, strategy.value, "set", note=OVERRULED, line=strategy.line)
    by_setting = {found.setting: found for found in fields}
    machines = by_setting.get("num_machines")
    if strategy and name in HYBRID and machines and "dp_replicate_size" not in by_setting:  # one copy per machine
        yield MappedField(strategy.key, strategy.key, machines.value, "set", "dp_replicate_size", line=strategy.line)


OVERRULED = (
    "accelerate 1.15 itself shards by FULL_SHARD: it looks at fsdp_sharding_strategy, which its dialogue leaves out"
)
STRATEGY_FIELDS = ("sharding_strategy", "reshard_after_forward")
STRATEGIES = set(NUMBERS.values())


def strategy_of(entries: list[FileEntry]) -> FileEntry | None:
    sections = [entry for entry in entries if entry.key == "fsdp_config" and isinstance(entry.value, Mapping)]
    inner = (each for section in sections for each in inner_entries(section))
    named = [each for each in inner if each.value is not None and each.key.endswith(STRATEGY_FIELDS)]
    known = (each for each in named if strategy_name(each.value) in STRATEGIES)
    return next(known, None)


def kind_of(entries: Iterable[FileEntry]) -> FileEntry:
    """The entry that says how ranks work together."""
    return next((entry for entry in entries if entry.key == "distributed_type"), FileEntry("distributed_type", "no"))


def map_entry(entry: FileEntry, engine: str) -> Iterator[MappedField]:
    needed = SECTIONS_OF_ENGINE.get(entry.key)
    if needed not in (None, engine) and isinstance(entry.value, Mapping):
        note = f"counts only with distributed_type: {needed.upper()}"
        yield MappedField(entry.key, entry.key, entry.value, "neutral", note=note, line=entry.line)
        return
    for found in interpret(TABLE, [entry]):
        is_no_section = found.outcome == "refused" and found.key in TABLE.sections
        yield replace(found, note=NO_SECTION.get(found.key, "use a section of fields")) if is_no_section else found


def left_out(entries: list[FileEntry], fields: list[MappedField]) -> list[RawValue]:
    """Defaults that accelerate gives DeepSpeed for keys missing in its file; none if it names a JSON file."""
    keys = {found.key for found in fields}
    says = {"deepspeed_config.gradient_clipping", "deepspeed_config.deepspeed_config_file"} & keys
    is_on = normalize_name(kind_of(entries).value) == "deepspeed"
    return [RawValue("max_grad_norm", 1.0, "deepspeed_config.gradient_clipping")] if is_on and not says else []


def to_fields(settings: Settings) -> dict[str, Any]:
    engine = {"compute_environment": "LOCAL_MACHINE", "distributed_type": engine_name(settings)}
    return engine | export(TABLE, settings)


def engine_name(settings: Settings) -> str:
    if settings.parallel.fsdp_enable:
        return "FSDP"
    if settings.parallel.zero_stage is not None:
        return "DEEPSPEED"
    many = settings.launch.num_processes > 1
    return ("MULTI_CPU" if settings.launch.use_cpu else "MULTI_GPU") if many else "NO"


def read_file(path: Path) -> list[FileEntry]:
    """Read an accelerate file. Raises SettingsError when it is missing or does not parse."""
    if not path.exists():
        raise SettingsError(f"there is no accelerate file {path}", "`accelerate config` writes one; or name none")
    entries = read_entries(path)
    lines: dict[str, int] = {}
    for entry in entries:
        if lines.setdefault(entry.key, entry.line) != entry.line:
            places = f"lines {lines[entry.key]} and {entry.line}"
            raise SettingsError(f"{shown_path(path)}: {entry.key} is set twice, in {places}", "keep one of them")
    return entries
