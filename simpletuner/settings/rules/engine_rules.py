"""Contradictions between engines, machines, the compiler, and where memory is."""

from __future__ import annotations

from collections.abc import Iterator

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
