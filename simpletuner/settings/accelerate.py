"""accelerate's configuration as settings, and back: its YAML, and the environment of `accelerate launch`.

Every field has a rule: it becomes a setting, it asks for what happens anyway, or a warning says that it is not used
and why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.settings.file_entries import FileEntry
from simpletuner.settings.formats import read_entries
from simpletuner.settings.key_table import (
    Ignores,
    KeyTable,
    MappedField,
    Maps,
    Rule,
    export,
    in_section,
    interpret,
    never,
)
from simpletuner.settings.sections import Settings
from simpletuner.settings.spelling import normalize_name

OFF = ("false", "no", "none", "0", "[]", "{}", "")
TPU = Ignores("TPUs are not supported")
SP_SIZE = Ignores("counts only with sp_size", warns=False)
ON_EVERY_MACHINE = "start `simpletuner train` on every machine"
OVER_ALL_RANKS = "weights are sharded over all ranks"


def on_many_machines(settings: Settings) -> bool:
    return settings.launch.num_machines > 1


DYNAMO: dict[str, Rule] = {
    "dynamo_backend": Maps("dynamo_backend", write=str.upper),
    "dynamo_mode": Maps("dynamo_mode"),
    "dynamo_use_dynamic": Maps("dynamo_dynamic"),
    "dynamo_use_fullgraph": Maps("dynamo_fullgraph"),
    "dynamo_use_regional_compilation": Maps("dynamo_use_regional_compilation"),
}
FSDP: dict[str, Rule] = {
    "fsdp_version": Maps("fsdp_version"),
    "fsdp_reshard_after_forward": Maps("fsdp_reshard_after_forward"),
    "fsdp_sharding_strategy": Maps("fsdp_reshard_after_forward", export_if=never),  # its name in FSDP1
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
    "fsdp_offload_params": Ignores("FSDP2 keeps its shards on the GPU here"),
    "fsdp_activation_checkpointing_offload": Ignores("activations stay on the GPU"),
    "fsdp_ignored_modules": Ignores("all modules are sharded"),
    "fsdp_backward_prefetch": Ignores("FSDP2 prefetches by itself", warns=False),
    "fsdp_forward_prefetch": Ignores("FSDP2 prefetches by itself", warns=False),
    "fsdp_use_orig_params": Ignores("FSDP2 always keeps the original parameters", warns=False),
    "fsdp_sync_module_states": Ignores("every rank reads its own slices", warns=False),
}
DEEPSPEED: dict[str, Rule] = {
    "zero_stage": Maps("zero_stage"),
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
    "parallelism_config_dp_shard_size": Ignores(OVER_ALL_RANKS, warns=False),
    "parallelism_config_dp_replicate_size": Ignores(OVER_ALL_RANKS, neutral=(1,)),
    "parallelism_config_tp_size": Ignores("tensor parallelism is not supported", neutral=(1,)),
    "parallelism_config_sp_size": Ignores("set context_parallel_size", neutral=(1,)),
    "parallelism_config_sp_backend": SP_SIZE,
    "parallelism_config_sp_seq_length": SP_SIZE,
    "parallelism_config_sp_seq_length_is_variable": SP_SIZE,
    "parallelism_config_sp_attn_implementation": SP_SIZE,
}
RULES: dict[str, Rule] = {
    "compute_environment": Ignores("start simpletuner on the machines themselves", neutral=("local_machine",)),
    "distributed_type": Ignores(
        "this engine is not supported", neutral=("multi_gpu", "multi_cpu", "fsdp", "deepspeed")
    ),
    "num_processes": Maps("num_processes", neutral=(-1,)),
    "num_machines": Maps("num_machines"),
    "machine_rank": Maps("machine_rank", export_if=on_many_machines),
    "main_process_ip": Maps("main_process_ip", write=lambda address: address or None, export_if=on_many_machines),
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
    "fp8_config": Ignores("fp8 is not supported"),
    "megatron_lm_config": Ignores("Megatron-LM is not supported"),
    "mpirun_config": Ignores("`simpletuner train` starts the ranks of each machine"),
    "ipex_config": Ignores("IPEX is not supported"),
    "dynamo_backend": Maps("dynamo_backend", export_if=never),  # an older place of it
    **in_section("dynamo_config", DYNAMO, lambda settings: settings.compile.dynamo_backend != "no"),
    **in_section("fsdp_config", FSDP, lambda settings: settings.parallel.fsdp_enable),
    **in_section("deepspeed_config", DEEPSPEED, lambda settings: settings.parallel.zero_stage is not None),
    **in_section("parallelism_config", PARALLELISM, lambda settings: settings.parallel.context_parallel_size > 1),
}
TABLE = KeyTable(RULES, is_off=lambda value: normalize_name(value) in OFF)

DEFAULT_ZERO_STAGE = 2
"""accelerate's default, where its file has a deepspeed_config without a stage."""
SECTIONS_OF_ENGINE = {"fsdp_config": "fsdp", "deepspeed_config": "deepspeed"}
"""Sections that count only with their distributed_type."""


def map_file(entries: list[FileEntry]) -> list[MappedField]:
    """Map each field of an accelerate file, in its order."""
    kind = next((entry for entry in entries if entry.key == "distributed_type"), FileEntry("distributed_type", "no"))
    engine = normalize_name(kind.value)
    fields: list[MappedField] = []
    for found in (found for entry in entries for found in map_entry(entry, engine)):
        # The same value from two fields, such as both nvme paths, is no contradiction.
        repeats = any((found.setting, found.value) == (other.setting, other.value) for other in fields)
        if not (found.setting and repeats):
            fields.append(found)
    if engine == "fsdp":
        fields.append(MappedField(kind.key, kind.key, True, "set", "fsdp_enable", line=kind.line))
    return fields


def map_entry(entry: FileEntry, engine: str) -> Iterator[MappedField]:
    needed = SECTIONS_OF_ENGINE.get(entry.key)
    if needed not in (None, engine) and isinstance(entry.value, Mapping):
        note = f"counts only with distributed_type: {needed.upper()}"
        yield MappedField(entry.key, entry.key, entry.value, "neutral", note=note, line=entry.line)
        return
    yield from interpret(TABLE, [entry])
    if entry.key != "deepspeed_config" or not isinstance(entry.value, Mapping):
        return
    if not {"zero_stage", "deepspeed_config_file"} & entry.value.keys():
        yield MappedField(entry.key, entry.key, DEFAULT_ZERO_STAGE, "set", "zero_stage", line=entry.line)


def to_fields(settings: Settings) -> dict[str, Any]:
    """What accelerate's own configuration can say of the settings."""
    engine = {"compute_environment": "LOCAL_MACHINE", "distributed_type": engine_name(settings)}
    return engine | export(TABLE, settings)


def engine_name(settings: Settings) -> str:
    """accelerate's distributed_type."""
    if settings.parallel.fsdp_enable:
        return "FSDP"
    if settings.parallel.zero_stage is not None:
        return "DEEPSPEED"
    many = settings.launch.num_processes > 1
    return ("MULTI_CPU" if settings.launch.use_cpu else "MULTI_GPU") if many else "NO"


def default_file(environment: Mapping[str, str]) -> Path | None:
    """The file that `accelerate config` wrote, if there is one."""
    home = Path(environment.get("HOME", "~")).expanduser()
    caches = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    folder = Path(environment.get("HF_HOME") or caches / "huggingface").expanduser() / "accelerate"
    return next((path for name in ("yaml", "json") if (path := folder / f"default_config.{name}").is_file()), None)


def read_file(path: Path) -> list[FileEntry]:
    """Read an accelerate file. Raises SettingsError when it is missing or does not parse."""
    if not path.exists():
        raise SettingsError(f"there is no accelerate file {path}", "`accelerate config` writes one; or name none")
    entries = read_entries(path)
    lines: dict[str, int] = {}
    for entry in entries:
        if lines.setdefault(entry.key, entry.line) != entry.line:
            places = f"lines {lines[entry.key]} and {entry.line}"
            raise SettingsError(f"{path}: {entry.key} is set twice, in {places}", "keep one of them")
    return entries


LAUNCHED = {
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
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
    """Return what `accelerate launch` resolved and passed to this process; nothing if it did not start it."""
    if "ACCELERATE_MIXED_PRECISION" not in environment:
        return []
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
    return [FileEntry(key, value) for key, value in entries.items()]


def irrelevant_variables(environment: Mapping[str, str]) -> set[str]:
    """Variables that accelerate sets to its own defaults, although they count only with another choice."""
    compiles = normalize_name(environment.get("ACCELERATE_DYNAMO_BACKEND", "no")) != "no"
    other = "FSDP_RESHARD_AFTER_FORWARD" if environment.get("FSDP_VERSION") == "1" else "FSDP_SHARDING_STRATEGY"
    dynamo = {name for name in LAUNCHED if name.startswith("ACCELERATE_DYNAMO_")} - {"ACCELERATE_DYNAMO_BACKEND"}
    return {other} | (set() if compiles else dynamo)
