"""Every key of DeepSpeed's JSON, and what becomes of it: facts about DeepSpeed 0.19, in its own names.

A key becomes a setting, is passed on to DeepSpeed, is ignored with a warning, or is refused; each has a
reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from simpletuner.settings.declared.errors import FP16_NEEDS
from simpletuner.settings.declared.sections import Settings
from simpletuner.settings.foreign.key_table import (
    Convert,
    Ignores,
    Keeps,
    KeyTable,
    Maps,
    Refuses,
    Rule,
    in_section,
    never,
)

AUTO = "auto"
"""Placeholder of accelerate and transformers for a value that is to be filled in."""


def reader(name: str, convert: Convert) -> Convert:
    """A function that converts values of one kind, and names the kind where it refuses one."""

    def read(value: object) -> Any:
        try:
            return convert(value)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"use {name}") from None

    return read


def to_flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def to_number(value: object, least: float, most: float = math.inf) -> float:
    # bool is a subclass of int: without this check `true` would pass as 1.
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError
    return value


def to_whole(value: Any, least: int, multiple_of: int = 1) -> int:
    """Whole numbers may be written as 5e8, as DeepSpeed's own samples do."""
    if to_number(value, least) != int(value) or value % multiple_of:
        raise ValueError
    return int(value)


def to_text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def to_texts(value: object) -> list[str]:
    if not isinstance(value, str | list):
        raise TypeError
    return [to_text(item) for item in ([value] if isinstance(value, str) else value)]


def to_word(value: object, known: tuple[str, ...]) -> str:
    return known[known.index(to_text(value).lower())]


flag = reader("true or false", to_flag)
text = reader("text", to_text)
texts = reader("a list of texts", to_texts)
even = reader("an even number of at least 2", lambda value: to_whole(value, 2, multiple_of=2))


def whole(least: int = 0) -> Convert:
    return reader(f"a whole number of at least {least}", lambda value: to_whole(value, least))


def number(least: float = 0, most: float = math.inf) -> Convert:
    upper = "" if most == math.inf else f" and at most {most:g}"
    return reader(f"a number of at least {least:g}{upper}", lambda value: to_number(value, least, most))


def words(*known: str) -> Convert:
    return reader(f"one of {', '.join(known)}", lambda value: to_word(value, known))


def read_stage(value: object) -> object:
    """Convert a ZeRO stage; what is none of them is left to validation."""
    if isinstance(value, bool):
        raise ValueError("use 1, 2 or 3")
    if value == "0" or (isinstance(value, int | float) and value == 0):  # `accelerate launch` passes text
        raise ValueError("stage 0 is plain data parallelism, which needs no DeepSpeed: use 1 to 3, or leave it out")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def read_cpu_offload(value: object) -> str:
    return "cpu" if flag(value) else "none"


def is_off(value: object) -> bool:
    """True for null, false, none, or an object that is not enabled."""
    if isinstance(value, Mapping):
        return value.get("enabled") in (False, AUTO) or all(map(is_off, value.values()))
    return value is None or value is False or value in ([], "none", AUTO)


def offloads(name: str, *places: str) -> Callable[[Settings], bool]:
    return lambda settings: getattr(settings.parallel, name) in places


PRECISION = "weights are trained in bf16 over float32 masters, or in float32: set mixed_precision"
FLOAT32 = "masters and moments are float32 here, so that every engine can go on from a checkpoint"
REMOVED = "DeepSpeed has removed it"
OWN_CHECKPOINTS = "checkpoints are simpletuner's own, equal for all engines"
SAME_GRADIENTS = "gradients are averaged as with the other engines"
NO_TENSOR_PARALLEL = "layers are not split over ranks"
METRICS = "set report_to"
ANYWAY = Ignores("it cannot change what happens anyway", warns=False)

BF16: dict[str, Rule] = {
    "enabled": Maps("mixed_precision", lambda on: "bf16" if flag(on) else "no", write=lambda name: name == "bf16"),
    "immediate_grad_update": Keeps(flag),
    "check_grad_overflow": Keeps(flag),
    "bf16_master_weights_and_grads": Refuses(FLOAT32),
    "bf16_optimizer_states": Refuses(FLOAT32),
}
FP16: dict[str, Rule] = {
    "enabled": Refuses(f'{FP16_NEEDS}: write "bf16": {{"enabled": true}} in the place of fp16'),
    **dict.fromkeys(("auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis"), ANYWAY),
    **dict.fromkeys(("consecutive_hysteresis", "min_loss_scale", "fp16_master_weights_and_grads"), ANYWAY),
}
OFFLOAD_PARAM: dict[str, Rule] = {
    "device": Maps("offload_param", export_if=offloads("offload_param", "cpu", "nvme")),
    "nvme_path": Maps("offload_param_path", write=str, export_if=offloads("offload_param", "nvme")),
    "buffer_count": Keeps(whole(1)),
    "buffer_size": Keeps(whole(1)),
    "max_in_cpu": Keeps(whole()),
    "pin_memory": Keeps(flag),
}
OFFLOAD_OPTIMIZER: dict[str, Rule] = {
    "device": Maps("offload_optimizer", export_if=offloads("offload_optimizer", "cpu", "nvme")),
    "nvme_path": Maps("offload_param_path", write=str, export_if=offloads("offload_optimizer", "nvme")),
    "buffer_count": Keeps(whole(4)),  # Adam swaps weight, gradient and two moments at once
    "pin_memory": Keeps(flag),
    "pipeline_read": Keeps(flag),
    "pipeline_write": Keeps(flag),
    "fast_init": Keeps(flag),
    "ratio": Refuses("a part of the optimizer state cannot stay on the GPU", (1,)),
    "super_offload": Refuses("SuperOffload is not supported"),
    "cpuadam_cores_perc": ANYWAY,
}
STAGE3: dict[str, Rule] = {
    "prefetch_bucket_size": Keeps(whole()),
    "param_persistence_threshold": Keeps(whole()),
    "model_persistence_threshold": Keeps(whole()),
    "max_live_parameters": Keeps(whole()),
    "max_reuse_distance": Keeps(whole()),
    "module_granularity_threshold": Keeps(whole()),
    "use_all_reduce_for_fetch_params": Keeps(flag),
    "allgather_sequential": Keeps(flag),
    "gather_16bit_weights_on_model_save": ANYWAY,
}
ZERO: dict[str, Rule] = {
    "stage": Maps("zero_stage", read_stage),
    "contiguous_gradients": Keeps(flag),
    "reduce_scatter": Keeps(flag),
    "reduce_bucket_size": Keeps(whole(1)),
    "use_multi_rank_bucket_allreduce": Keeps(flag),
    "allgather_partitions": Keeps(flag),
    # DeepSpeed wants buckets of whole 4 bytes, two fp16 numbers (0.19.8: runtime/zero/stage_1_and_2.py).
    "allgather_bucket_size": Keeps(even),
    "overlap_comm": Keeps(flag),
    "compute_grad_norm": ANYWAY,
    "load_from_fp32_weights": ANYWAY,
    "elastic_checkpoint": Ignores(OWN_CHECKPOINTS),
    "pipeline_loading_checkpoint": Ignores(OWN_CHECKPOINTS),
    "sub_group_size": Keeps(whole(1)),
    "cpu_offload": Maps("offload_optimizer", read_cpu_offload, export_if=never),
    "cpu_offload_param": Maps("offload_param", read_cpu_offload, export_if=never),
    "cpu_offload_use_pin_memory": Ignores("DeepSpeed has replaced it by offload_optimizer.pin_memory"),
    "stage3_gather_fp16_weights_on_model_save": ANYWAY,
    "ignore_unused_parameters": Keeps(flag),
    "legacy_stage1": Refuses(REMOVED),
    "round_robin_gradients": Keeps(flag),
    "parameter_alignment": Keeps(flag),
    "zero_hpz_partition_size": Refuses("weights are shared over all ranks", (1,)),
    "zero_quantized_weights": Refuses("weights are exchanged as they are"),
    "zero_quantized_nontrainable_weights": Refuses("weights are exchanged as they are"),
    "zero_quantized_gradients": Refuses(SAME_GRADIENTS),
    "zeropp_loco_param": Refuses(REMOVED),
    "mics_shard_size": Refuses(REMOVED, (-1,)),
    "mics_hierarchical_params_gather": Refuses(REMOVED),
    "zenflow": Refuses("ZenFlow updates a part of the weights late: losses would differ from other engines"),
    "memory_efficient_linear": Keeps(flag),
    "override_module_apply": Keeps(flag),
    "log_trace_cache_warnings": Keeps(flag),
    "enable_sanity_checks": Keeps(flag),
    "save_muon_momentum_buffer_in_memory": ANYWAY,
    **in_section("leaf_module", dict.fromkeys(("classes", "names", "name_suffixes"), Keeps(texts))),
    **in_section("offload_optimizer", OFFLOAD_OPTIMIZER),
    **in_section("offload_param", OFFLOAD_PARAM),
    **{f"stage3_{name}": key for name, key in STAGE3.items()},
}
MEASURING: dict[str, Rule] = {
    "steps_per_print": Keeps(whole(1)),
    "wall_clock_breakdown": Keeps(flag),
    "memory_breakdown": Keeps(flag),
    "dump_state": Keeps(flag),
    "log_level": Keeps(text),
    **in_section("timers.throughput", {"enabled": Keeps(flag), "synchronized": Keeps(flag)}),
    **in_section("comms_logger", dict.fromkeys(("enabled", "prof_all", "verbose", "debug"), Keeps(flag))),
    "comms_logger.prof_ops": Keeps(texts),
    "flops_profiler.enabled": Keeps(flag),
    "flops_profiler.recompute_fwd_factor": Keeps(number()),
    "flops_profiler.profile_step": Keeps(whole(1)),
    "flops_profiler.module_depth": Keeps(whole(-1)),
    "flops_profiler.top_modules": Keeps(whole(1)),
    "flops_profiler.detailed": Keeps(flag),
    "flops_profiler.output_file": Keeps(text),
    **dict.fromkeys(("tensorboard", "wandb", "csv_monitor", "comet"), Ignores(METRICS)),
}
AIO: dict[str, Rule] = {
    "block_size": Keeps(whole(1)),
    "queue_depth": Keeps(whole(1)),
    "intra_op_parallelism": Keeps(whole(1)),
    "single_submit": Keeps(flag),
    "overlap_events": Keeps(flag),
    "use_gds": Keeps(flag),
    "thread_count": Ignores("DeepSpeed has replaced it by intra_op_parallelism", (1,)),
}
ELSEWHERE: dict[str, Rule] = {
    "activation_checkpointing": Ignores("gradient_checkpointing recomputes activations"),
    "checkpoint": Ignores(OWN_CHECKPOINTS),
    "datastates_ckpt": Ignores(OWN_CHECKPOINTS),
    "dataloader_drop_last": ANYWAY,
    "zero_allow_untested_optimizer": ANYWAY,
    "zero_force_ds_cpu_optimizer": ANYWAY,
    "managed_gradient_accumulation": ANYWAY,
    "disable_allgather": ANYWAY,
    "disable_python_gc": Keeps(flag),
    "vocabulary_size": ANYWAY,
    "use_data_before_expert_parallelism": ANYWAY,
    "seq_parallel_communication_data_type": ANYWAY,
    "sequence_parallel_size": Refuses("set context_parallel_size, with FSDP2", (1,)),
    "prescale_gradients": Refuses(SAME_GRADIENTS),
    "gradient_predivide_factor": Refuses(SAME_GRADIENTS, (1,)),
    "gradient_allreduce_op": Refuses(SAME_GRADIENTS, ("mean",)),
    "communication_data_type": Keeps(words("fp32", "bf16")),
    "data_types.grad_accum_dtype": Keeps(words("fp32", "bf16")),
    **in_section(
        "data_types", dict.fromkeys(("param_dtype", "buffer_dtype", "keep_in_fp32_modules"), Refuses(PRECISION))
    ),
    "torch_autocast": Refuses(PRECISION),
    "data_efficiency": Refuses("the order of data is simpletuner's own, equal for all engines"),
    "autotuning": Refuses("`simpletuner deepspeed build --stage=auto` chooses by memory"),
    "compile": Refuses("set dynamo_backend"),
    "hybrid_engine": Refuses("it is for text generation"),
    "weight_quantization": Refuses("it is for inference"),
    "pipeline": Refuses("layers are not run on different ranks"),
    "tensor_parallel": Refuses(NO_TENSOR_PARALLEL),
    "expert_parallel": Refuses(NO_TENSOR_PARALLEL),
    **dict.fromkeys(("amp", "nebula", "compression_training", "quantize_training", "eigenvalue"), Refuses(REMOVED)),
    **dict.fromkeys(("sparse_gradients", "sparse_attention", "elasticity", "graph_harvesting"), Refuses(REMOVED)),
    **dict.fromkeys(("curriculum_learning", "progressive_layer_drop"), Refuses(REMOVED)),
}
RULES: dict[str, Rule] = {
    "train_batch_size": Keeps(whole(1)),
    "train_micro_batch_size_per_gpu": Maps("train_batch_size"),
    "gradient_accumulation_steps": Maps("gradient_accumulation_steps"),
    "gradient_clipping": Maps("max_grad_norm"),
    **in_section("bf16", BF16),
    **in_section("fp16", FP16),
    **in_section("zero_optimization", ZERO),
    **in_section("aio", AIO),
    **MEASURING,
    **ELSEWHERE,
}
OTHER_NAMES = {
    "bfloat16": "bf16",
    **{f"zero_optimization.{name}": f"zero_optimization.stage3_{name}" for name in STAGE3},
}
TABLE = KeyTable(RULES, OTHER_NAMES, unset=(None, AUTO), is_off=is_off)
