"""Contradictions between engines, machines, the compiler, the optimizer, and where memory is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from simpletuner.errors import BrokenRule
from simpletuner.settings.declared.errors import broken, nearest
from simpletuner.settings.declared.sections import Settings

# The modes of torch.compile that set `triton.cudagraphs` (torch/_inductor/__init__.py, list_mode_options).
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")


def machines_are_equal(settings: Settings) -> Iterator[BrokenRule]:
    launch = settings.launch
    if launch.num_processes % launch.num_machines:
        message = (
            f"num_processes = {launch.num_processes} cannot be shared equally by num_machines = {launch.num_machines}: "
            "every machine must run the same number of ranks"
        )
        yield broken(message, "num_processes", "num_machines")
    if launch.machine_rank >= launch.num_machines:
        message = (
            f"machine_rank = {launch.machine_rank}, but num_machines = {launch.num_machines}: "
            f"ranks of machines go from 0 to {launch.num_machines - 1}"
        )
        yield broken(message, "machine_rank", "num_machines")


def one_engine_shards(settings: Settings) -> Iterator[BrokenRule]:
    if settings.parallel.fsdp_enable and settings.parallel.zero_stage is not None:
        message = "FSDP and DeepSpeed cannot be enabled simultaneously. Set zero_stage=none, or fsdp_enable=false"
        yield broken(message, "fsdp_enable", "zero_stage")


def copies_are_sharded_equally(settings: Settings) -> Iterator[BrokenRule]:
    copies, ranks = settings.parallel.dp_replicate_size, settings.launch.num_processes
    if copies > 1 and not settings.parallel.fsdp_enable:
        message = (
            f"dp_replicate_size = {copies} is for FSDP2, which shards each copy: set fsdp_enable=true, or leave it out "
            "for a whole copy on each rank"
        )
        yield broken(message, "dp_replicate_size", "fsdp_enable")
    elif ranks % copies:
        message = f"num_processes = {ranks} is no multiple of dp_replicate_size = {copies}: copies would be unequal"
        yield broken(message, "dp_replicate_size", "num_processes")


def only_fsdp2_offloads_params(settings: Settings) -> Iterator[BrokenRule]:
    if settings.parallel.fsdp_offload_params and not settings.parallel.fsdp_enable:
        message = "fsdp_offload_params is for FSDP2: set fsdp_enable=true, or zero_stage=3 with offload_param=cpu"
        yield broken(message, "fsdp_offload_params", "fsdp_enable", "zero_stage")


def context_parallelism_has_fsdp2(settings: Settings) -> Iterator[BrokenRule]:
    parallel, size = settings.parallel, settings.parallel.context_parallel_size
    if size > 1 and not (parallel.fsdp_enable and parallel.fsdp_version == 2):
        message = (
            "Context parallelism requires FSDP2. Set fsdp_enable=true and fsdp_version=2, or context_parallel_size=1"
        )
        yield broken(message, "context_parallel_size", "fsdp_enable", "fsdp_version")
    if settings.launch.num_processes % size:
        message = (
            f"num_processes = {settings.launch.num_processes} is no multiple of context_parallel_size = {size}: "
            "every group of ranks must be whole"
        )
        yield broken(message, "context_parallel_size", "num_processes")
    elif (ranks := settings.launch.num_processes // parallel.dp_replicate_size) % size:
        message = (
            f"dp_replicate_size = {parallel.dp_replicate_size} leaves {ranks} ranks to each copy, which is no multiple "
            f"of context_parallel_size = {size}: every group of ranks must be whole"
        )
        yield broken(message, "context_parallel_size", "dp_replicate_size", "num_processes")


def compiler_supports_settings(settings: Settings) -> Iterator[BrokenRule]:
    """Refuse what torch.compile cannot do, or would silently ignore."""
    own = settings.compile
    if own.dynamo_backend not in ("auto", "no", "inductor") and own.dynamo_mode != "default":
        message = (
            f"dynamo_mode={own.dynamo_mode} is for dynamo_backend=inductor: {own.dynamo_backend} has no modes; "
            "leave dynamo_mode out"
        )
        yield broken(message, "dynamo_mode", "dynamo_backend")
    records = own.dynamo_backend == "cudagraphs" or (own.dynamo_backend != "no" and own.dynamo_mode in CUDA_GRAPH_MODES)
    sharded = "fsdp_enable" if settings.parallel.fsdp_enable else "zero_stage"
    if records and (settings.parallel.fsdp_enable or settings.parallel.zero_stage is not None):
        message = (
            f"CUDA graphs cannot be used with {sharded}: gathered weights have another address in each step, so every "
            "block would be recorded again; set dynamo_mode to default or max-autotune-no-cudagraphs, with "
            "dynamo_backend=inductor"
        )
        yield broken(message, "dynamo_mode", "dynamo_backend", sharded)
    if records and settings.training.gradient_accumulation_steps > 1:
        # pytorch issues 169545, an error, and 96693, where gradients are wrong and nothing is said.
        message = (
            "CUDA graphs cannot be used with gradient_accumulation_steps above 1: the next micro-batch writes over the "
            "gradients of this one; set dynamo_mode to default or max-autotune-no-cudagraphs, or train_batch_size to "
            "the sum"
        )
        yield broken(message, "dynamo_mode", "dynamo_backend", "gradient_accumulation_steps")
    if own.is_on and settings.parallel.zero_stage == 3:
        message = (
            f"dynamo_backend={own.dynamo_backend} cannot be used with zero_stage = 3: DeepSpeed gathers weights by "
            "hooks inside the blocks, which torch.compile would compile as well, for minutes; use fsdp_enable, "
            "zero_stage=2, or dynamo_backend=no"
        )
        yield broken(message, "dynamo_backend", "zero_stage", "fsdp_enable")
    if own.dynamo_backend != "no" and own.dynamo_fullgraph and settings.parallel.context_parallel_size > 1:
        message = (
            "dynamo_fullgraph cannot be used with context_parallel_size above 1, since ranks exchange keys and values "
            "between graphs: leave it out"
        )
        yield broken(message, "dynamo_fullgraph", "context_parallel_size")
    whole = own.dynamo_backend != "no" and own.dynamo_fullgraph and not own.dynamo_use_regional_compilation
    if whole and settings.parallel.fsdp_enable:
        message = (
            "dynamo_fullgraph cannot compile a sharded denoiser as a whole, since FSDP2 gathers weights between its "
            "graphs: set dynamo_use_regional_compilation=true"
        )
        yield broken(message, "dynamo_fullgraph", "dynamo_use_regional_compilation")


def compiler_chooses_activations(settings: Settings) -> Iterator[BrokenRule]:
    """Refuse a budget where blocks are compiled and no partitioner reads it."""
    backend, budget = settings.compile.dynamo_backend, settings.training.activation_memory_budget
    if budget is not None and backend not in ("auto", "no", "inductor", "aot_eager"):
        message = (
            f"activation_memory_budget = {budget:g} is not read by dynamo_backend = {backend}: set "
            "dynamo_backend=inductor or no, or leave the budget to gradient_checkpointing"
        )
        yield broken(message, "activation_memory_budget", "dynamo_backend")


def projections_can_be_fused(settings: Settings) -> Iterator[BrokenRule]:
    """Refuse fuse_qkv_projections if a projection is more than its weight, or if its weight may be away."""
    if not settings.training.fuse_qkv_projections:
        return
    policy, name = settings.parallel.fsdp_auto_wrap_policy, "fuse_qkv_projections"
    if settings.model.model_type == "lora":
        message = f"{name} would pass over the adapters that model_type = lora adds to single projections: leave it out"
        yield broken(message, name, "model_type")
    if settings.parallel.zero_stage == 3:
        message = (
            f"{name} cannot be used with zero_stage = 3, where DeepSpeed gathers a layer's weights when that layer is "
            "called: use fsdp_enable or zero_stage=2, or leave it out"
        )
        yield broken(message, name, "zero_stage")
    if settings.parallel.fsdp_enable and policy not in ("TRANSFORMER_BASED_WRAP", "NO_WRAP"):
        message = (
            f"{name} needs units that are whole blocks, but fsdp_auto_wrap_policy = {policy} may make a projection a "
            "unit of its own: set TRANSFORMER_BASED_WRAP, or leave it out"
        )
        yield broken(message, name, "fsdp_auto_wrap_policy")


def offloading_is_possible(settings: Settings) -> Iterator[BrokenRule]:
    """Refuse offloading where ZeRO keeps nothing that could be offloaded, or does not know how."""
    parallel, stage = settings.parallel, settings.parallel.zero_stage
    devices = {"offload_optimizer": parallel.offload_optimizer, "offload_param": parallel.offload_param}
    used = {name: device for name, device in devices.items() if device != "none"}
    if stage is None:
        for name, device in used.items():
            yield broken(f"{name} = {device} needs DeepSpeed: set zero_stage, or {name}=none", name, "zero_stage")
    if stage in (1, 2) and "offload_param" in used:
        message = (
            f"offload_param = {used['offload_param']}, but zero_stage = {stage}: below stage 3 every rank keeps all "
            "weights at hand; set zero_stage=3, or offload_param=none"
        )
        yield broken(message, "offload_param", "zero_stage")
    if stage in (1, 2) and parallel.offload_optimizer == "nvme":
        message = (
            f"offload_optimizer = nvme, but zero_stage = {stage}: below stage 3 DeepSpeed keeps what is offloaded in "
            "memory; set zero_stage=3, or offload_optimizer=cpu"
        )
        yield broken(message, "offload_optimizer", "zero_stage")
    on_disk = [name for name, device in used.items() if device == "nvme"]
    if on_disk and parallel.offload_param_path is None:
        names = " and ".join(f"{name} = nvme" for name in on_disk)
        message = f"{names}: where to? Set offload_param_path to a folder on a fast disk of each machine"
        yield broken(message, "offload_param_path", *on_disk)


def wrap_policy_is_known(settings: Settings) -> Iterator[BrokenRule]:
    policy = settings.parallel.fsdp_auto_wrap_policy
    if policy not in WRAP_POLICIES and "." not in policy:
        known = ", ".join(WRAP_POLICIES)
        like = nearest(policy.upper(), WRAP_POLICIES)
        message = f"fsdp_auto_wrap_policy = {policy!r}: use {known}, or a dotted path to a callable{like}"
        yield broken(message, "fsdp_auto_wrap_policy")


NOT_FOR_DEEPSPEED = {
    "adafactor": "its step depends on whole rows and columns, and ZeRO hands it slices of all layers as one tensor",
    "prodigy": "its rate depends on sums over all weights, of which ZeRO hands it slices",
    "adamw_schedulefree": "what it evaluates and saves are not the weights that it trains, which ZeRO keeps",
}


def split_state_is_possible(settings: Settings) -> Iterator[BrokenRule]:
    """Refuse bf16 weights if something else holds weights and moments, or computes in float32."""
    name, layout = settings.optimizer.optimizer, settings.optimizer.state_layout
    if layout == "fp32":
        return
    reasons = {
        "optimizer": (
            name != "adamw",
            f"holds the moments of AdamW: set optimizer=adamw, or state_layout=fp32 for {name}",
        ),
        "mixed_precision": (
            settings.training.mixed_precision == "no",
            "holds weights in bf16 to compute with them, but mixed_precision = no computes in float32: set "
            "mixed_precision=bf16, or state_layout=fp32",
        ),
        "zero_stage": (
            settings.parallel.zero_stage is not None,
            "cannot run with DeepSpeed, which makes float32 masters and moments of its own: use fsdp_enable in place "
            "of zero_stage, or state_layout=fp32",
        ),
        "model_type": (
            settings.model.model_type == "lora",
            "is for model_type=full: the few weights of a LoRA are float32, and its frozen base is in bf16 already; "
            "leave state_layout out",
        ),
    }
    yield from broken_beside("state_layout", f"state_layout = {layout}", reasons)


def broken_beside(setting: str, said: str, reasons: Mapping[str, tuple[bool, str]]) -> Iterator[BrokenRule]:
    """Yield a sentence for each other setting that excludes one; `reasons` say by its name whether and why."""
    for other, (is_broken, reason) in reasons.items():
        if is_broken:
            yield broken(f"{said} {reason}", setting, other)


def schedule_free_replaces_schedule_and_average(settings: Settings) -> Iterator[BrokenRule]:
    """Refuse settings that schedule-free AdamW replaces: it averages weights instead of lowering the rate."""
    own = settings.optimizer
    if own.optimizer != "adamw_schedulefree":
        return
    if not own.lr_scheduler.startswith("constant"):
        message = (
            f"optimizer = adamw_schedulefree averages its steps in place of lr_scheduler = {own.lr_scheduler}: set "
            "lr_scheduler to constant or constant_with_warmup"
        )
        yield broken(message, "lr_scheduler", "optimizer")
    if settings.ema.use_ema:
        message = (
            "optimizer = adamw_schedulefree evaluates and saves an average of its own, which needs no second one: set "
            "use_ema=false"
        )
        yield broken(message, "use_ema", "optimizer")
    if own.adam_beta1 == 0:
        message = "optimizer = adamw_schedulefree takes gradients near its average, which adam_beta1 = 0 leaves out"
        yield broken(message, "adam_beta1", "optimizer")


def optimizer_fits_the_engine(settings: Settings) -> Iterator[BrokenRule]:
    name, parallel = settings.optimizer.optimizer, settings.parallel
    if name in NOT_FOR_DEEPSPEED and parallel.zero_stage is not None:
        message = f"optimizer = {name} cannot run with DeepSpeed: {NOT_FOR_DEEPSPEED[name]}; use fsdp_enable"
        yield broken(message, "optimizer", "zero_stage", "fsdp_enable")
    if settings.optimizer.grad_clip_method == "value" and parallel.zero_stage is not None:
        message = (
            "grad_clip_method = value cannot run with DeepSpeed, which clips by the norm: set norm, or use fsdp_enable"
        )
        yield broken(message, "grad_clip_method", "zero_stage", "fsdp_enable")
    if name == "muon" and parallel.zero_stage is not None and parallel.offload_optimizer != "none":
        message = (
            "optimizer = muon multiplies matrices in each step, which offload_optimizer = "
            f"{parallel.offload_optimizer} would leave to the CPU: set offload_optimizer=none"
        )
        yield broken(message, "optimizer", "offload_optimizer")
    if name == "muon" and parallel.fsdp_offload_params:
        message = (
            "optimizer = muon multiplies matrices in each step, which fsdp_offload_params would leave to the CPU: set "
            "fsdp_offload_params=false"
        )
        yield broken(message, "optimizer", "fsdp_offload_params")


def gradients_can_be_released(settings: Settings) -> Iterator[BrokenRule]:
    """Refuse what needs all gradients at once, or frees none, with optimizer_release_gradients."""
    own, parallel = settings.optimizer, settings.parallel
    if not own.optimizer_release_gradients:
        return
    passes, ranks = settings.training.gradient_accumulation_steps, settings.launch.num_processes
    is_replicated = ranks > 1 and not parallel.fsdp_enable and parallel.zero_stage is None
    reasons = {
        "max_grad_norm": (
            own.max_grad_norm > 0,
            f"updates weights before all gradients are there, which max_grad_norm = {own.max_grad_norm} clips "
            "together: set max_grad_norm=0",
        ),
        "gradient_accumulation_steps": (
            passes > 1,
            f"frees gradients that gradient_accumulation_steps = {passes} would add up: set it to 1",
        ),
        "optimizer": (
            own.optimizer in ("muon", "adafactor", "prodigy"),
            f"updates weights one by one, but optimizer = {own.optimizer} needs the gradients of many weights at once: "
            "set optimizer=adamw",
        ),
        "zero_stage": (
            parallel.zero_stage is not None,
            "cannot run with DeepSpeed, which keeps gradients in buffers of its own: use fsdp_enable",
        ),
        "fsdp_enable": (
            is_replicated,
            f"frees nothing on {ranks} ranks without FSDP2, since DDP keeps all gradients in its buckets: set "
            "fsdp_enable=true",
        ),
        "fsdp_offload_params": (
            parallel.fsdp_offload_params,
            "frees no GPU memory with fsdp_offload_params, which moves gradients off the GPU already: leave it out",
        ),
        "sound_loss_weight": (
            settings.objective.sound_loss_weight > 0,
            "updates no weight without a gradient, which clips without sound leave many of: set sound_loss_weight=0",
        ),
        "model_type": (
            settings.model.model_type == "lora",
            "is for model_type=full: the gradients of a LoRA are small; leave it out",
        ),
    }
    yield from broken_beside("optimizer_release_gradients", "optimizer_release_gradients", reasons)


def float8_has_bf16_around_it(settings: Settings) -> Iterator[BrokenRule]:
    if not settings.training.float8:
        return
    reasons = {
        "mixed_precision": (
            settings.training.mixed_precision != "bf16",
            "is for linear layers of a denoiser that computes in bf16: set mixed_precision=bf16",
        ),
        "zero_stage": (
            settings.parallel.zero_stage is not None,
            "was not tried with DeepSpeed, which replaces linear layers itself: use fsdp_enable",
        ),
        "model_type": (
            settings.model.model_type == "lora",
            "is for model_type=full: leave it out, or hold the frozen base in 8 bits with base_model_precision=int8",
        ),
    }
    yield from broken_beside("float8", "float8", reasons)


def warmup_ends(settings: Settings) -> Iterator[BrokenRule]:
    steps, warmup = settings.training.max_train_steps, settings.optimizer.lr_warmup_steps
    if steps is not None and warmup > steps:
        message = (
            f"lr_warmup_steps = {warmup:.0f} is more than max_train_steps = {steps}: set it to {steps} or less, or "
            "to a fraction of the run, such as 0.05"
        )
        yield broken(message, "lr_warmup_steps", "max_train_steps")
