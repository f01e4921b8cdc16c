"""Read what accelerate was told, from its YAML or from the environment of `accelerate launch`, as our settings.

Every field is accounted for: it becomes a setting, it asks for what happens anyway, or a warning says that it is not
used and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.settings.formats import Entry, read_entries
from simpletuner.settings.spelling import normalize_name

ANY = ("*",)
"""Every value asks for what happens anyway."""
OFF = ("false", "no", "none", "0", "[]", "{}", "")


@dataclass(frozen=True)
class Field:
    """What becomes of one field: a setting, nothing where it is one of `idle`, or a warning with the reason."""

    knob: str = ""
    idle: tuple[str, ...] = ()
    reason: str = ""
    becomes: Callable[[Any], Any] = lambda value: value


def on_tpu() -> Field:
    """Return what becomes of a field about TPUs."""
    return Field(idle=OFF, reason="TPUs are not supported")


def always(what: str) -> Field:
    """Return what becomes of a field that cannot change what happens anyway."""
    return Field(idle=ANY, reason=what)


FIELDS: dict[str, Field] = {
    "compute_environment": Field(idle=("local_machine",), reason="start simpletuner on the machines themselves"),
    "distributed_type": Field(
        idle=("no", "false", "multi_gpu", "multi_cpu", "fsdp", "deepspeed"), reason="this engine is not supported"
    ),
    "num_processes": Field("num_processes", idle=("_1",)),
    "num_machines": Field("num_machines"),
    "machine_rank": Field("machine_rank"),
    "main_process_ip": Field("main_process_ip"),
    "main_process_port": Field("main_process_port", idle=("0",)),
    "mixed_precision": Field("mixed_precision"),
    "fp16": Field("mixed_precision", idle=OFF, becomes=lambda value: "fp16"),
    "use_cpu": Field("use_cpu"),
    "gpu_ids": Field("gpu_ids"),
    "same_network": always("machines meet at main_process_ip"),
    "rdzv_backend": always("machines meet at main_process_ip"),
    "rdzv_conf": Field(idle=OFF, reason="node_join_timeout says how long machines wait for one another"),
    "main_training_function": always("`simpletuner train` is started"),
    "debug": Field(idle=OFF, reason="say `simpletuner --debug`"),
    "enable_cpu_affinity": Field(idle=OFF, reason="start with `numactl` to pin processes"),
    "downcast_bf16": on_tpu(),
    "tpu_name": on_tpu(),
    "tpu_zone": on_tpu(),
    "tpu_use_cluster": on_tpu(),
    "tpu_use_sudo": on_tpu(),
    "tpu_vm": on_tpu(),
    "tpu_env": on_tpu(),
    "command_file": on_tpu(),
    "commands": on_tpu(),
    "fp8_config": Field(idle=OFF, reason="fp8 is not supported"),
    "megatron_lm_config": Field(idle=OFF, reason="Megatron-LM is not supported"),
    "mpirun_config": Field(idle=OFF, reason="`simpletuner train` starts the ranks of each machine"),
    "ipex_config": Field(idle=OFF, reason="IPEX is not supported"),
    "dynamo_backend": Field("dynamo_backend"),
    "dynamo_config.dynamo_backend": Field("dynamo_backend"),
    "dynamo_config.dynamo_mode": Field("dynamo_mode"),
    "dynamo_config.dynamo_use_dynamic": Field("dynamo_dynamic"),
    "dynamo_config.dynamo_use_fullgraph": Field("dynamo_fullgraph"),
    "dynamo_config.dynamo_use_regional_compilation": Field("dynamo_use_regional_compilation"),
    "fsdp_config.fsdp_version": Field("fsdp_version"),
    "fsdp_config.fsdp_reshard_after_forward": Field("fsdp_reshard_after_forward"),
    "fsdp_config.fsdp_sharding_strategy": Field("fsdp_reshard_after_forward"),
    "fsdp_config.fsdp_auto_wrap_policy": Field("fsdp_auto_wrap_policy"),
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": Field("fsdp_transformer_layer_cls_to_wrap"),
    "fsdp_config.fsdp_min_num_params": Field("fsdp_min_num_params", idle=("0",)),
    "fsdp_config.fsdp_state_dict_type": Field("fsdp_state_dict_type"),
    "fsdp_config.fsdp_cpu_ram_efficient_loading": Field("fsdp_cpu_ram_efficient_loading"),
    "fsdp_config.fsdp_activation_checkpointing": Field("gradient_checkpointing", idle=OFF),
    "fsdp_config.fsdp_offload_params": Field(idle=OFF, reason="FSDP2 keeps its shards on the GPU here"),
    "fsdp_config.fsdp_activation_checkpointing_offload": Field(idle=OFF, reason="activations stay on the GPU"),
    "fsdp_config.fsdp_ignored_modules": Field(idle=OFF, reason="all modules are sharded"),
    "fsdp_config.fsdp_backward_prefetch": always("FSDP2 prefetches by itself"),
    "fsdp_config.fsdp_forward_prefetch": always("FSDP2 prefetches by itself"),
    "fsdp_config.fsdp_use_orig_params": always("FSDP2 always keeps the original parameters"),
    "fsdp_config.fsdp_sync_module_states": always("every rank reads its own slices"),
    "deepspeed_config.zero_stage": Field("zero_stage"),
    "deepspeed_config.offload_optimizer_device": Field("offload_optimizer"),
    "deepspeed_config.offload_param_device": Field("offload_param"),
    "deepspeed_config.offload_optimizer_nvme_path": Field("offload_param_path", idle=OFF),
    "deepspeed_config.offload_param_nvme_path": Field("offload_param_path", idle=OFF),
    "deepspeed_config.deepspeed_config_file": Field("deepspeed_config", idle=OFF),
    "deepspeed_config.gradient_accumulation_steps": Field("gradient_accumulation_steps", idle=("auto",)),
    "deepspeed_config.gradient_clipping": Field("max_grad_norm", idle=("auto",)),
    "deepspeed_config.zero3_init_flag": always("the denoiser is built without memory at every stage"),
    "deepspeed_config.zero3_save_16bit_model": always("checkpoints are whole at every stage"),
    "deepspeed_config.deepspeed_multinode_launcher": Field(
        idle=("standard",), reason="start `simpletuner train` on every machine"
    ),
    "deepspeed_config.deepspeed_hostfile": Field(idle=OFF, reason="start `simpletuner train` on every machine"),
    "deepspeed_config.deepspeed_inclusion_filter": Field(idle=OFF, reason="set gpu_ids"),
    "deepspeed_config.deepspeed_exclusion_filter": Field(idle=OFF, reason="set gpu_ids"),
    "deepspeed_config.deepspeed_moe_layer_cls_names": Field(idle=OFF, reason="no family has experts"),
    "parallelism_config.parallelism_config_cp_size": Field("context_parallel_size"),
    "parallelism_config.parallelism_config_cp_comm_strategy": Field("context_parallel_comm_strategy"),
    "parallelism_config.parallelism_config_cp_backend": always("sequences are split by FSDP2's ranks"),
    "parallelism_config.parallelism_config_dp_shard_size": always("weights are sharded over all ranks"),
    "parallelism_config.parallelism_config_dp_replicate_size": Field(
        idle=("1", "none"), reason="weights are sharded over all ranks"
    ),
    "parallelism_config.parallelism_config_tp_size": Field(idle=("1",), reason="tensor parallelism is not supported"),
    "parallelism_config.parallelism_config_sp_size": Field(idle=("1",), reason="set context_parallel_size"),
    "parallelism_config.parallelism_config_sp_backend": always("counts only with sp_size"),
    "parallelism_config.parallelism_config_sp_seq_length": always("counts only with sp_size"),
    "parallelism_config.parallelism_config_sp_seq_length_is_variable": always("counts only with sp_size"),
    "parallelism_config.parallelism_config_sp_attn_implementation": always("counts only with sp_size"),
}
ZERO_STAGE_UNSAID = 2
"""accelerate's default."""
SECTIONS_OF_ENGINE = {"fsdp_config": "fsdp", "deepspeed_config": "deepspeed"}
"""Sections that count only with their distributed_type."""


@dataclass(frozen=True)
class Told:
    """One field of accelerate's, the setting that it becomes ("" for none), and where it stands."""

    field: str
    value: Any
    line: int
    knob: str = ""
    note: str = ""
    """Why it becomes no setting."""
    warning: bool = False


def account(entries: list[Entry]) -> list[Told]:
    """Return what becomes of each field of an accelerate file."""
    engine = normalize_name(next((entry.value for entry in entries if entry.key == "distributed_type"), "no"))
    told = [told for entry in entries for told in told_of(entry, engine)]
    told = [item for index, item in enumerate(told) if not any(repeats(item, other) for other in told[:index])]
    if engine == "fsdp":
        told.append(Told("distributed_type", True, line_of("distributed_type", entries), "fsdp_enable"))
    return told


def repeats(item: Told, other: Told) -> bool:
    """Return whether a field says of a setting what another has said already."""
    return bool(item.knob) and (item.knob, item.value) == (other.knob, other.value)


def told_of(entry: Entry, engine: str) -> Iterator[Told]:
    """Yield what becomes of one entry; of a section, each of its fields."""
    if not isinstance(entry.value, Mapping) or entry.key in FIELDS:
        yield told_field(entry.key, entry.value, entry.line)
        return
    needed = SECTIONS_OF_ENGINE.get(entry.key)
    if needed not in (None, engine):
        yield Told(entry.key, entry.value, entry.line, note=f"counts only with distributed_type: {needed.upper()}")
        return
    for name, value in entry.value.items():
        yield told_field(f"{entry.key}.{name}", value, entry.inner_lines.get(name, entry.line))
    if entry.key == "deepspeed_config" and not {"zero_stage", "deepspeed_config_file"} & entry.value.keys():
        yield Told(entry.key, ZERO_STAGE_UNSAID, entry.line, "zero_stage")


def told_field(name: str, value: Any, line: int) -> Told:
    """Return what becomes of one field."""
    field = FIELDS.get(name)
    if field is None:
        return Told(name, value, line, note="not a field that simpletuner knows", warning=True)
    if value is None or field.idle == ANY or normalize_name(value) in field.idle:
        return Told(name, value, line, note=field.reason if field.idle == ANY else "asks for nothing special")
    if field.knob:
        return Told(name, field.becomes(value), line, field.knob)
    return Told(name, value, line, note=field.reason, warning=True)


def line_of(key: str, entries: list[Entry]) -> int:
    """Return the line of a field."""
    return next(entry.line for entry in entries if entry.key == key)


def default_file(environment: Mapping[str, str]) -> Path | None:
    """Return the file that `accelerate config` wrote, if there is one."""
    home = Path(environment.get("HOME", "~")).expanduser()
    caches = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    folder = Path(environment.get("HF_HOME") or caches / "huggingface").expanduser() / "accelerate"
    return next((path for name in ("yaml", "json") if (path := folder / f"default_config.{name}").is_file()), None)


def read_file(path: Path) -> list[Entry]:
    """Read an accelerate file. Raises SettingsError when it is missing or does not parse."""
    if not path.is_file():
        raise SettingsError(f"there is no accelerate file {path}", "`accelerate config` writes one; or name none")
    return read_entries(path)


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


def launched_entries(environment: Mapping[str, str]) -> list[Entry]:
    """Return what `accelerate launch` resolved and handed to this process; nothing if it did not start it."""
    if "ACCELERATE_MIXED_PRECISION" not in environment:
        return []
    engine = next((name for name in ("fsdp", "deepspeed") if f"ACCELERATE_USE_{name.upper()}" in environment), "no")
    entries: dict[str, Any] = {"distributed_type": engine.upper()}
    for variable, field in LAUNCHED.items():
        value = environment.get(variable)
        section, dot, name = field.rpartition(".")
        elsewhere = SECTIONS_OF_ENGINE.get(section) not in (None, engine)
        if value is None or elsewhere or variable in idle_variables(environment):
            continue
        target = entries.setdefault(section, {}) if dot else entries
        target[name] = value
    return [Entry(key, value) for key, value in entries.items()]


def idle_variables(environment: Mapping[str, str]) -> set[str]:
    """Return variables that accelerate sets to its own defaults, though they count only with another choice."""
    compiles = normalize_name(environment.get("ACCELERATE_DYNAMO_BACKEND", "no")) != "no"
    other = "FSDP_RESHARD_AFTER_FORWARD" if environment.get("FSDP_VERSION") == "1" else "FSDP_SHARDING_STRATEGY"
    dynamo = {name for name in LAUNCHED if name.startswith("ACCELERATE_DYNAMO_")} - {"ACCELERATE_DYNAMO_BACKEND"}
    return {other} | (set() if compiles else dynamo)
