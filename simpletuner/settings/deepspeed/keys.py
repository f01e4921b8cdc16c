"""Every key of DeepSpeed's JSON, and what becomes of it: facts about DeepSpeed 0.19, in its own names.

A key becomes a setting, is kept for DeepSpeed as it is, is left out with a warning, or is refused; each has a reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simpletuner.settings.deepspeed.kinds import EVEN, FLAG, TEXT, TEXTS, Kind, number, whole, words


@dataclass(frozen=True)
class Key:
    """What becomes of a key: one of a setting, a value kept for DeepSpeed, a reason to refuse or to leave it out."""

    knob: str = ""
    becomes: Callable[[Any], Any] = lambda value: value
    kind: Kind | None = None
    refused: str = ""
    unused: str = ""
    idle: tuple[Any, ...] = ()
    """Values, beside those that turn something off, that ask for nothing."""


def setting(knob: str, kind: Kind | None = None, becomes: Callable[[Any], Any] = lambda value: value) -> Key:
    """Return a key that becomes a setting."""
    return Key(knob, becomes, kind)


def kept(kind: Kind) -> Key:
    """Return a key that DeepSpeed is given as it is."""
    return Key(kind=kind)


def refused(reason: str, *idle: Any) -> Key:
    """Return a key that would fight with us or with the engine."""
    return Key(refused=reason, idle=idle)


def unused(reason: str, *idle: Any) -> Key:
    """Return a key that has no effect here, which the user should know."""
    return Key(unused=reason, idle=idle)


def idle() -> Key:
    """Return a key that cannot change what happens anyway."""
    return Key()


def below(section: str, keys: dict[str, Key]) -> dict[str, Key]:
    """Return the keys of a section by their whole names."""
    return {f"{section}.{name}": key for name, key in keys.items()}


def stage_of(value: Any) -> Any:
    """Return a ZeRO stage; what is none goes on to validation. Raises ValueError for stage 0."""
    if isinstance(value, int | float) and value == 0:
        raise ValueError("stage 0 is plain data parallelism, which needs no DeepSpeed: use 1 to 3, or leave it out")
    return int(value) if isinstance(value, float) and value.is_integer() else value


PRECISION = "weights are trained in bf16 over float32 masters, or in float32: set mixed_precision"
FLOAT32 = "masters and moments are float32 here, so that every engine can go on from a checkpoint"
REMOVED = "DeepSpeed has removed it"
OWN_CHECKPOINTS = "checkpoints are simpletuner's own, equal for all engines"
SAME_GRADIENTS = "gradients are averaged as with the other engines"
NO_TENSOR_PARALLEL = "layers are not split over ranks"
METRICS = "set report_to"

BF16 = {
    "enabled": setting("mixed_precision", FLAG, lambda on: "bf16" if on else "no"),
    "immediate_grad_update": kept(FLAG),
    "check_grad_overflow": kept(FLAG),
    "bf16_master_weights_and_grads": refused(FLOAT32),
    "bf16_optimizer_states": refused(FLOAT32),
}
FP16 = {
    "enabled": refused("fp16 would need its loss scaled, bf16 does not: set mixed_precision=bf16"),
    **dict.fromkeys(("auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis"), idle()),
    **dict.fromkeys(("consecutive_hysteresis", "min_loss_scale", "fp16_master_weights_and_grads"), idle()),
}
OFFLOAD_PARAM = {
    "device": setting("offload_param"),
    "nvme_path": setting("offload_param_path"),
    "buffer_count": kept(whole(1)),
    "buffer_size": kept(whole(1)),
    "max_in_cpu": kept(whole()),
    "pin_memory": kept(FLAG),
}
OFFLOAD_OPTIMIZER = {
    "device": setting("offload_optimizer"),
    "nvme_path": setting("offload_param_path"),
    "buffer_count": kept(whole(4)),  # Adam swaps weight, gradient and two moments at once
    "pin_memory": kept(FLAG),
    "pipeline_read": kept(FLAG),
    "pipeline_write": kept(FLAG),
    "fast_init": kept(FLAG),
    "ratio": refused("a part of the optimizer state cannot stay on the GPU", 1),
    "super_offload": refused("SuperOffload is not supported"),
    "cpuadam_cores_perc": idle(),
}
STAGE3 = {
    "prefetch_bucket_size": kept(whole()),
    "param_persistence_threshold": kept(whole()),
    "model_persistence_threshold": kept(whole()),
    "max_live_parameters": kept(whole()),
    "max_reuse_distance": kept(whole()),
    "module_granularity_threshold": kept(whole()),
    "use_all_reduce_for_fetch_params": kept(FLAG),
    "allgather_sequential": kept(FLAG),
    "gather_16bit_weights_on_model_save": idle(),
}
ZERO = {
    "stage": setting("zero_stage", becomes=stage_of),
    "contiguous_gradients": kept(FLAG),
    "reduce_scatter": kept(FLAG),
    "reduce_bucket_size": kept(whole(1)),
    "use_multi_rank_bucket_allreduce": kept(FLAG),
    "allgather_partitions": kept(FLAG),
    "allgather_bucket_size": kept(EVEN),
    "overlap_comm": kept(FLAG),
    "compute_grad_norm": idle(),
    "load_from_fp32_weights": idle(),
    "elastic_checkpoint": unused(OWN_CHECKPOINTS),
    "pipeline_loading_checkpoint": unused(OWN_CHECKPOINTS),
    "sub_group_size": kept(whole(1)),
    "cpu_offload": setting("offload_optimizer", FLAG, lambda on: "cpu" if on else "none"),
    "cpu_offload_param": setting("offload_param", FLAG, lambda on: "cpu" if on else "none"),
    "cpu_offload_use_pin_memory": unused("DeepSpeed has replaced it by offload_optimizer.pin_memory"),
    "stage3_gather_fp16_weights_on_model_save": idle(),
    "ignore_unused_parameters": kept(FLAG),
    "legacy_stage1": refused(REMOVED),
    "round_robin_gradients": kept(FLAG),
    "parameter_alignment": kept(FLAG),
    "zero_hpz_partition_size": refused("weights are shared over all ranks", 1),
    "zero_quantized_weights": refused("weights are exchanged as they are"),
    "zero_quantized_nontrainable_weights": refused("weights are exchanged as they are"),
    "zero_quantized_gradients": refused(SAME_GRADIENTS),
    "zeropp_loco_param": refused(REMOVED),
    "mics_shard_size": refused(REMOVED, -1),
    "mics_hierarchical_params_gather": refused(REMOVED),
    "zenflow": refused("ZenFlow updates a part of the weights late: losses would differ from other engines"),
    "memory_efficient_linear": kept(FLAG),
    "override_module_apply": kept(FLAG),
    "log_trace_cache_warnings": kept(FLAG),
    "enable_sanity_checks": kept(FLAG),
    "save_muon_momentum_buffer_in_memory": idle(),
    **below("leaf_module", dict.fromkeys(("classes", "names", "name_suffixes"), kept(TEXTS))),
    **below("offload_param", OFFLOAD_PARAM),
    **below("offload_optimizer", OFFLOAD_OPTIMIZER),
    **{f"stage3_{name}": key for name, key in STAGE3.items()},
}
MEASURING = {
    "steps_per_print": kept(whole(1)),
    "wall_clock_breakdown": kept(FLAG),
    "memory_breakdown": kept(FLAG),
    "dump_state": kept(FLAG),
    "log_level": kept(TEXT),
    **below("timers.throughput", {"enabled": kept(FLAG), "synchronized": kept(FLAG)}),
    **below("comms_logger", dict.fromkeys(("enabled", "prof_all", "verbose", "debug"), kept(FLAG))),
    "comms_logger.prof_ops": kept(TEXTS),
    "flops_profiler.enabled": kept(FLAG),
    "flops_profiler.recompute_fwd_factor": kept(number()),
    "flops_profiler.profile_step": kept(whole(1)),
    "flops_profiler.module_depth": kept(whole(-1)),
    "flops_profiler.top_modules": kept(whole(1)),
    "flops_profiler.detailed": kept(FLAG),
    "flops_profiler.output_file": kept(TEXT),
    **dict.fromkeys(("tensorboard", "wandb", "csv_monitor", "comet"), unused(METRICS)),
}
AIO = {
    "block_size": kept(whole(1)),
    "queue_depth": kept(whole(1)),
    "intra_op_parallelism": kept(whole(1)),
    "single_submit": kept(FLAG),
    "overlap_events": kept(FLAG),
    "use_gds": kept(FLAG),
    "thread_count": unused("DeepSpeed has replaced it by intra_op_parallelism", 1),
}
ELSEWHERE = {
    "activation_checkpointing": unused("gradient_checkpointing recomputes activations"),
    "checkpoint": unused(OWN_CHECKPOINTS),
    "datastates_ckpt": unused(OWN_CHECKPOINTS),
    "dataloader_drop_last": idle(),
    "zero_allow_untested_optimizer": idle(),
    "zero_force_ds_cpu_optimizer": idle(),
    "managed_gradient_accumulation": idle(),
    "disable_allgather": idle(),
    "disable_python_gc": kept(FLAG),
    "vocabulary_size": idle(),
    "use_data_before_expert_parallelism": idle(),
    "seq_parallel_communication_data_type": idle(),
    "sequence_parallel_size": refused("set context_parallel_size, with FSDP2", 1),
    "prescale_gradients": refused(SAME_GRADIENTS),
    "gradient_predivide_factor": refused(SAME_GRADIENTS, 1),
    "gradient_allreduce_op": refused(SAME_GRADIENTS, "mean"),
    "communication_data_type": kept(words("fp32", "bf16")),
    "data_types.grad_accum_dtype": kept(words("fp32", "bf16")),
    **below("data_types", dict.fromkeys(("param_dtype", "buffer_dtype", "keep_in_fp32_modules"), refused(PRECISION))),
    "torch_autocast": refused(PRECISION),
    "data_efficiency": refused("the order of data is simpletuner's own, equal for all engines"),
    "autotuning": refused("`simpletuner deepspeed build --stage=auto` chooses by memory"),
    "compile": refused("set dynamo_backend"),
    "hybrid_engine": refused("it is for text generation"),
    "weight_quantization": refused("it is for inference"),
    "pipeline": refused("layers are not run on different ranks"),
    "tensor_parallel": refused(NO_TENSOR_PARALLEL),
    "expert_parallel": refused(NO_TENSOR_PARALLEL),
    **dict.fromkeys(("amp", "nebula", "compression_training", "quantize_training", "eigenvalue"), refused(REMOVED)),
    **dict.fromkeys(("sparse_gradients", "sparse_attention", "elasticity", "graph_harvesting"), refused(REMOVED)),
    **dict.fromkeys(("curriculum_learning", "progressive_layer_drop"), refused(REMOVED)),
}
KEYS: dict[str, Key] = {
    "train_batch_size": kept(whole(1)),
    "train_micro_batch_size_per_gpu": setting("train_batch_size"),
    "gradient_accumulation_steps": setting("gradient_accumulation_steps"),
    "gradient_clipping": setting("max_grad_norm"),
    **below("bf16", BF16),
    **below("fp16", FP16),
    **below("zero_optimization", ZERO),
    **below("aio", AIO),
    **MEASURING,
    **ELSEWHERE,
}
SECTIONS = {name[:end] for name in KEYS for end, letter in enumerate(name) if letter == "."}

OTHER_NAMES = {
    "bfloat16": "bf16",
    **{f"zero_optimization.{name}": f"zero_optimization.stage3_{name}" for name in STAGE3},
}
"""Names that DeepSpeed takes as well, and those by which the table knows them."""
