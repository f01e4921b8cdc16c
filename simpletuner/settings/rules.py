"""Rules between settings, checked before torch is imported: contradictions, what is missing, what has no effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from simpletuner.errors import BrokenRule
from simpletuner.settings.deepspeed.config import extra_deepspeed_settings
from simpletuner.settings.sections import Lora, Settings
from simpletuner.settings.step_ranges import parse_step_range

CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
NOT_FOR_DEEPSPEED = {
    "adafactor": "its step depends on whole rows and columns, and ZeRO hands it slices of all layers as one tensor",
    "muon": "it orthogonalizes whole matrices, and ZeRO hands it slices of all layers as one tensor",
    "adamw_schedulefree": "what it evaluates and saves are not the weights that it trains, which ZeRO keeps",
}
WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")

Rule = Callable[[Settings], Iterator[BrokenRule]]


def broken(message: str, setting: str, *others: str) -> BrokenRule:
    """A broken rule about some settings; a page shows it beside the first of them."""
    return BrokenRule(setting, message, others=others)


def find_contradictions(settings: Settings) -> list[BrokenRule]:
    return [mistake for rule in RULES for mistake in rule(settings)]


def find_missing(settings: Settings) -> list[BrokenRule]:
    """What a run cannot do without, although `config show` can."""
    return [mistake for rule in COMPLETENESS_RULES for mistake in rule(settings)]


def normalize(settings: Settings) -> tuple[Settings, dict[str, str]]:
    """Reset choices that have no effect, so that saved files stay the same; return by name why each was reset."""
    parallel = settings.parallel
    changes: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    if parallel.fsdp_version == 1:
        changes["fsdp_version"] = 2
        reasons["fsdp_version"] = "1 is deprecated: FSDP2 runs instead"
    if parallel.context_parallel_size == 1 and parallel.context_parallel_comm_strategy != "allgather":
        changes["context_parallel_comm_strategy"] = "allgather"
        reasons["context_parallel_comm_strategy"] = "reset, since context_parallel_size = 1 turns it off"
    if parallel.deepspeed_config and parallel.zero_stage:
        changes["deepspeed_config"] = rest = extra_deepspeed_settings(settings)
        if rest != parallel.deepspeed_config:
            reasons["deepspeed_config"] = "values that follow from other settings are left out"
    if not changes:
        return settings, {}
    return settings.model_copy(update={"parallel": parallel.model_copy(update=changes)}), reasons


def warnings_about(settings: Settings) -> Iterator[BrokenRule]:
    """Yield one sentence for each choice that is accepted, but deprecated or without effect."""
    parallel = settings.parallel
    if parallel.fsdp_enable and parallel.fsdp_version == 1:
        yield broken("fsdp_version=1 is deprecated: FSDP2 runs instead, with the same checkpoints", "fsdp_version")
    if parallel.fsdp_enable and not parallel.fsdp_cpu_ram_efficient_loading:
        message = "fsdp_cpu_ram_efficient_loading=false has no effect: each rank always reads only its own slices"
        yield broken(message, "fsdp_cpu_ram_efficient_loading")
    if settings.training.float8 and settings.compile.dynamo_backend == "no":
        message = "float8 without torch.compile casts in passes of its own, which may cost more than it saves: set "
        yield broken(f"{message}dynamo_backend=inductor", "float8", "dynamo_backend")
    yield from lora_without_effect(settings)
    yield from bf16_accumulation(settings)


def lora_without_effect(settings: Settings) -> Iterator[BrokenRule]:
    if settings.model.model_type == "full":
        for name in Lora.model_fields:
            if (value := getattr(settings.lora, name)) != Lora.model_fields[name].default:
                yield broken(f"{name} = {value} has no effect with model_type=full: it is for LoRA", name)


def bf16_accumulation(settings: Settings) -> Iterator[BrokenRule]:
    training, types = settings.training, (settings.parallel.deepspeed_config or {}).get("data_types")
    accumulates = training.gradient_accumulation_steps > 1 and training.mixed_precision == "bf16"
    parallel = settings.parallel
    in_float32 = parallel.fsdp_enable and not parallel.fsdp_sync_each_batch
    if accumulates and settings.optimizer.state_layout == "split" and not in_float32:
        message = (
            "state_layout=split adds up the gradients of gradient_accumulation_steps in bf16; FSDP2 does so in "
            "float32, with fsdp_sync_each_batch=false"
        )
        yield broken(message, "state_layout")
    if accumulates and parallel.zero_stage == 1 and not types:
        message = (
            "zero_stage=1 adds up gradients in bf16; zero_stage=2 does so in float32, as the other engines do, and "
            "takes less memory"
        )
        yield broken(message, "zero_stage")


def needs_model_family(settings: Settings) -> Iterator[BrokenRule]:
    if not settings.model.model_family:
        yield broken("model_family is missing: say what to train, such as --model_family=sdxl", "model_family")


def needs_images(settings: Settings) -> Iterator[BrokenRule]:
    names = ("instance_data_dir", "data_backend_config")
    if settings.data.instance_data_dir is None and settings.data.data_backend_config is None:
        yield broken("no images: give --instance_data_dir=FOLDER or --data_backend_config=FILE", *names)


def needs_length(settings: Settings) -> Iterator[BrokenRule]:
    if settings.training.num_train_epochs == 0 and settings.training.max_train_steps is None:
        message = "num_train_epochs = 0 and no max_train_steps: say how long to train, by one of them"
        yield broken(message, "max_train_steps", "num_train_epochs")


def needs_address_of_machine_0(settings: Settings) -> Iterator[BrokenRule]:
    launch = settings.launch
    if launch.num_machines > 1 and not launch.main_process_ip:
        message = f"num_machines = {launch.num_machines} needs --main_process_ip: the address of machine 0"
        yield broken(message, "main_process_ip", "num_machines")


def images_have_one_source(settings: Settings) -> Iterator[BrokenRule]:
    data = settings.data
    if data.instance_data_dir is not None and data.data_backend_config is not None:
        message = "instance_data_dir and data_backend_config both name images: keep one of them"
        yield broken(message, "instance_data_dir", "data_backend_config")
    if data.caption_strategy == "instanceprompt" and not data.instance_prompt and data.data_backend_config is None:
        message = "caption_strategy=instanceprompt needs --instance_prompt='a phrase'"
        yield broken(message, "instance_prompt", "caption_strategy")


def lora_is_for_whole_denoisers(settings: Settings) -> Iterator[BrokenRule]:
    """Refuse what shares out all weights, or reads them, together with an adapter; and what only an adapter can use."""
    if settings.model.model_type != "lora":
        if settings.lora.base_model_precision != "no_change":
            message = (
                f"base_model_precision = {settings.lora.base_model_precision}, but model_type = full trains all "
                "weights, in float32; a quantized base is for LoRA: set model_type=lora, or leave it out and share "
                "weights out over the ranks with fsdp_enable"
            )
            yield broken(message, "base_model_precision", "model_type")
        return
    if settings.parallel.fsdp_enable:
        message = "model_type=lora cannot run with FSDP: sharding only slows small adapters; drop fsdp_enable"
        yield broken(message, "model_type", "fsdp_enable")
    if settings.parallel.zero_stage is not None:
        message = (
            "model_type=lora cannot run with DeepSpeed: it shares out the state of all weights, of which an adapter "
            "has few, and saves them whole; drop zero_stage and deepspeed_config"
        )
        yield broken(message, "model_type", "zero_stage", "deepspeed_config")
    if settings.checkpoints.import_deepspeed_checkpoint is not None:
        message = "import_deepspeed_checkpoint holds all weights, of which model_type=lora trains none: leave it out"
        yield broken(message, "import_deepspeed_checkpoint", "model_type")


def split_state_is_possible(settings: Settings) -> Iterator[BrokenRule]:
    """Refuse state_layout=split where something else holds weights and moments, or weights are not computed in bf16."""
    if settings.optimizer.state_layout != "split":
        return
    name = settings.optimizer.optimizer
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
    for other, (is_broken, reason) in reasons.items():
        if is_broken:
            yield broken(f"state_layout = split {reason}", "state_layout", other)


def schedule_free_replaces_schedule_and_average(settings: Settings) -> Iterator[BrokenRule]:
    """Refuse what schedule-free AdamW does itself: it averages weights in place of lowering the learning rate."""
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
            f"updates weights before the norm of all gradients is known, by which max_grad_norm = {own.max_grad_norm} "
            "scales them: set max_grad_norm=0",
        ),
        "gradient_accumulation_steps": (
            passes > 1,
            f"frees gradients that gradient_accumulation_steps = {passes} would add up: set it to 1",
        ),
        "optimizer": (
            own.optimizer in ("muon", "adafactor"),
            f"updates weights one by one, but optimizer = {own.optimizer} exchanges tensors of many weights at once: "
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
        "model_type": (
            settings.model.model_type == "lora",
            "is for model_type=full: the gradients of a LoRA are small; leave it out",
        ),
    }
    for other, (is_broken, reason) in reasons.items():
        if is_broken:
            yield broken(f"optimizer_release_gradients {reason}", "optimizer_release_gradients", other)


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
    for other, (is_broken, reason) in reasons.items():
        if is_broken:
            yield broken(f"float8 {reason}", "float8", other)


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
    """Refuse a budget where no partitioner of torch.compile reads it."""
    backend, budget = settings.compile.dynamo_backend, settings.training.activation_memory_budget
    if budget is not None and backend not in ("auto", "inductor", "aot_eager"):
        message = (
            f"activation_memory_budget = {budget:g} is for compiled blocks, but dynamo_backend = {backend}: set "
            "dynamo_backend=inductor, or leave the budget to gradient_checkpointing"
        )
        yield broken(message, "activation_memory_budget", "dynamo_backend")


def projections_can_be_fused(settings: Settings) -> Iterator[BrokenRule]:
    """Refuse fuse_qkv_projections where a projection is more than its weight, or where its weight may be away."""
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


def pickles_are_trusted(settings: Settings) -> Iterator[BrokenRule]:
    source = settings.checkpoints.import_deepspeed_checkpoint
    if source is not None and not settings.checkpoints.allow_pickle:
        message = (
            f"import_deepspeed_checkpoint = {source} is a pickle, which can run any program when it is read: "
            "set allow_pickle=true if you trust who made it"
        )
        yield broken(message, "allow_pickle", "import_deepspeed_checkpoint")


def wrap_policy_is_known(settings: Settings) -> Iterator[BrokenRule]:
    policy = settings.parallel.fsdp_auto_wrap_policy
    if policy not in WRAP_POLICIES and "." not in policy:
        known = ", ".join(WRAP_POLICIES)
        message = f"fsdp_auto_wrap_policy = {policy!r}: use {known}, or a dotted path to a callable"
        yield broken(message, "fsdp_auto_wrap_policy")


def warmup_ends(settings: Settings) -> Iterator[BrokenRule]:
    steps, warmup = settings.training.max_train_steps, settings.optimizer.lr_warmup_steps
    if steps is not None and warmup > steps:
        message = f"lr_warmup_steps = {warmup} is more than max_train_steps = {steps}"
        yield broken(message, "lr_warmup_steps", "max_train_steps")


def profile_begins_in_time(settings: Settings) -> Iterator[BrokenRule]:
    steps, traced = settings.training.max_train_steps, settings.logging.profile_steps
    if traced and steps is not None and parse_step_range(traced)[1] > steps:
        message = f"profile_steps = {traced} goes beyond max_train_steps = {steps}"
        yield broken(message, "profile_steps", "max_train_steps")


COMPLETENESS_RULES: tuple[Rule, ...] = (needs_model_family, needs_images, needs_length, needs_address_of_machine_0)
RULES: tuple[Rule, ...] = (
    images_have_one_source,
    lora_is_for_whole_denoisers,
    one_engine_shards,
    split_state_is_possible,
    schedule_free_replaces_schedule_and_average,
    optimizer_fits_the_engine,
    gradients_can_be_released,
    float8_has_bf16_around_it,
    offloading_is_possible,
    copies_are_sharded_equally,
    only_fsdp2_offloads_params,
    context_parallelism_has_fsdp2,
    machines_are_equal,
    compiler_supports_settings,
    compiler_chooses_activations,
    projections_can_be_fused,
    pickles_are_trusted,
    wrap_policy_is_known,
    warmup_ends,
    profile_begins_in_time,
)
