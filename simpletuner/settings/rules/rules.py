"""Rules between settings, checked before torch is imported: contradictions, gaps, missing effects."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simpletuner.errors import BrokenRule
from simpletuner.settings.declared.errors import broken
from simpletuner.settings.declared.sections import Model, Settings
from simpletuner.settings.foreign.original_tables import FAMILY_NAMES
from simpletuner.settings.rules.engine_rules import (
    compiler_chooses_activations,
    compiler_supports_settings,
    context_parallelism_has_fsdp2,
    copies_are_sharded_equally,
    float8_has_bf16_around_it,
    gradients_can_be_released,
    machines_are_equal,
    offloading_is_possible,
    one_engine_shards,
    only_fsdp2_offloads_params,
    optimizer_fits_the_engine,
    projections_can_be_fused,
    schedule_free_replaces_schedule_and_average,
    split_state_is_possible,
    warmup_ends,
    wrap_policy_is_known,
)
from simpletuner.settings.values.parsed import DIFFUSERS, parse_step_range

Rule = Callable[[Settings], Iterator[BrokenRule]]

# Usual learning rate of a LoRA, as in the recipes: ten times the default (docs/lora.md).
LORA_RATE = 1e-4
# Families whose original layout is written (`models/single_file/conversion.py`).
SINGLE_FILE_FAMILIES = ("sd1x", "sd2x", "sdxl")


def find_contradictions(settings: Settings) -> list[BrokenRule]:
    return [mistake for rule in RULES for mistake in rule(settings)]


def find_missing(settings: Settings) -> list[BrokenRule]:
    """Return settings that a run cannot do without, although `config show` can."""
    return [mistake for rule in COMPLETENESS_RULES for mistake in rule(settings)]


def normalize(settings: Settings) -> tuple[Settings, dict[str, str]]:
    """Reset choices without an effect, so that saved files stay the same; return the reasons by name."""
    parallel, model = settings.parallel, settings.model
    changes: dict[str, object] = {}
    reasons: dict[str, str] = {}
    if other := name_here(model):
        reasons["model_family"] = f"{model.model_family} is called {other} here"
        settings = settings.model_copy(update={"model": model.model_copy(update={"model_family": other})})
    if parallel.fsdp_version == 1:
        changes["fsdp_version"] = 2
        reasons["fsdp_version"] = "1 is deprecated: FSDP2 runs instead"
    if parallel.context_parallel_size == 1 and parallel.context_parallel_comm_strategy != "allgather":
        changes["context_parallel_comm_strategy"] = "allgather"
        reasons["context_parallel_comm_strategy"] = "reset, since context_parallel_size = 1 turns it off"
    if parallel.deepspeed_config and parallel.zero_stage:
        from simpletuner.settings.foreign.deepspeed_config import extra_deepspeed_settings

        changes["deepspeed_config"] = rest = extra_deepspeed_settings(settings)
        if rest != parallel.deepspeed_config:
            reasons["deepspeed_config"] = "values that follow from other settings are left out"
    if not changes:
        return settings, reasons
    return settings.model_copy(update={"parallel": parallel.model_copy(update=changes)}), reasons


def name_here(model: Model) -> str:
    """Return the name here of a family that the original calls otherwise; empty for any other."""
    return "" if model.model_family in (model.model_families or {}) else FAMILY_NAMES.get(model.model_family, "")


def warnings_about(settings: Settings) -> Iterator[BrokenRule]:
    """Yield one sentence for each choice that is accepted, but deprecated or costly."""
    parallel = settings.parallel
    if other := name_here(settings.model):
        yield broken(f"model_family={settings.model.model_family} is called {other} here", "model_family")
    if parallel.fsdp_enable and parallel.fsdp_version == 1:
        yield broken("fsdp_version=1 is deprecated: FSDP2 runs instead, with the same checkpoints", "fsdp_version")
    if parallel.fsdp_enable and not parallel.fsdp_cpu_ram_efficient_loading:
        message = "fsdp_cpu_ram_efficient_loading=false has no effect: each rank always reads only its own slices"
        yield broken(message, "fsdp_cpu_ram_efficient_loading")
    if settings.training.float8 and settings.compile.dynamo_backend == "no":
        message = "float8 without torch.compile casts in passes of its own, which may cost more than it saves: set "
        yield broken(f"{message}dynamo_backend=inductor", "float8", "dynamo_backend")
    if settings.optimizer.optimizer == "prodigy" and (rate := settings.optimizer.learning_rate) < 0.1:
        message = f"optimizer = prodigy multiplies the rate that it finds by learning_rate = {rate}: 1 is usual"
        yield broken(message, "learning_rate", "optimizer")
    yield from rate_of_full_run(settings)
    yield from bf16_accumulation(settings)


def rate_of_full_run(settings: Settings) -> Iterator[BrokenRule]:
    """A LoRA at the default, which is for all weights: little is learned, and nothing else says why."""
    rate = settings.optimizer.learning_rate
    is_default = rate == type(settings.optimizer).model_fields["learning_rate"].default
    if settings.model.model_type == "lora" and is_default and settings.optimizer.optimizer != "prodigy":
        message = f"learning_rate = {rate} is the default, for all weights: a LoRA is usually trained at {LORA_RATE}"
        yield broken(message, "learning_rate", "model_type")


def bf16_accumulation(settings: Settings) -> Iterator[BrokenRule]:
    training, types = settings.training, (settings.parallel.deepspeed_config or {}).get("data_types")
    accumulates = training.gradient_accumulation_steps > 1 and training.mixed_precision == "bf16"
    parallel = settings.parallel
    in_float32 = parallel.fsdp_enable and not parallel.fsdp_sync_each_batch
    if accumulates and (layout := settings.optimizer.state_layout) != "fp32" and not in_float32:
        message = (
            f"state_layout={layout} adds up the gradients of gradient_accumulation_steps in bf16; FSDP2 does so in "
            "float32, with fsdp_sync_each_batch=false"
        )
        yield broken(message, "state_layout")
    if accumulates and parallel.zero_stage == 1 and not types:
        message = (
            "zero_stage=1 adds up gradients in bf16; zero_stage=2 does so in float32, as the other engines do, and "
            "takes less memory"
        )
        yield broken(message, "zero_stage")


def one_shift_is_meant(settings: Settings) -> Iterator[BrokenRule]:
    own = settings.objective
    # 1 leaves noise levels as they are; the original's 0 becomes 1, with which its files ask for the other.
    if own.flow_schedule_auto_shift and own.flow_schedule_shift not in (None, 1):
        message = (
            "flow_schedule_auto_shift shifts by image size, but flow_schedule_shift = "
            f"{own.flow_schedule_shift} is for all sizes: leave one of them out"
        )
        yield broken(message, "flow_schedule_auto_shift", "flow_schedule_shift")


def needs_model_family(settings: Settings) -> Iterator[BrokenRule]:
    if not settings.model.model_family:
        message = "model_family is missing: say what to train, such as --model_family=sdxl"
        yield broken(message, "model_family", hint="`simpletuner models` lists all families")


def needs_images(settings: Settings) -> Iterator[BrokenRule]:
    names = ("instance_data_dir", "data_backend_config")
    if settings.data.instance_data_dir is None and settings.data.data_backend_config is None:
        message = "no images: give --instance_data_dir=FOLDER or --data_backend_config=FILE"
        yield broken(message, *names, hint="`simpletuner dataset check` shows what a run would make of a folder")


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
    """Refuse settings that shard or read all weights with an adapter, and adapter settings without one."""
    if settings.model.model_type != "lora":
        if settings.lora.base_model_precision != "no_change":
            message = (
                f"base_model_precision = {settings.lora.base_model_precision}, but model_type = full trains all "
                "weights, in float32; a quantized base is for LoRA: set model_type=lora, or leave it out and share "
                "weights out over the ranks with fsdp_enable"
            )
            yield broken(message, "base_model_precision", "model_type")
        return
    if settings.parallel.zero_stage is not None:
        message = (
            "model_type=lora cannot run with DeepSpeed: it shares out the state of all weights, of which an adapter "
            "has few, and saves them whole; drop zero_stage and deepspeed_config"
        )
        yield broken(message, "model_type", "zero_stage", "deepspeed_config")


def a_kernel_of_the_hub_is_flash3(settings: Settings) -> Iterator[BrokenRule]:
    own = settings.training
    if own.attention_kernel and own.attention_backend != "flash3":
        message = (
            f"attention_kernel is for attention_backend=flash3, but it is {own.attention_backend}: set it to flash3"
        )
        yield broken(message, "attention_kernel", "attention_backend")


def adapters_have_their_own_settings(settings: Settings) -> Iterator[BrokenRule]:
    """Refuse what a kind of adapter does not have, or peft does not do."""
    own, kind = settings.lora, settings.lora.lora_type
    if settings.model.model_type != "lora":
        return
    if kind == "dora" and own.base_model_precision != "no_change":
        message = (
            f"base_model_precision = {own.base_model_precision}, but lora_type = dora measures the rows of the base's "
            "weights in each step, and peft does not know the quantized ones: take lora, loha, lokr or oft"
        )
        yield broken(message, "base_model_precision", "lora_type")
    if own.base_model_compute == "int8" and own.base_model_precision != "int8":
        message = (
            "base_model_compute = int8 multiplies weights that are in int8, but base_model_precision = "
            f"{own.base_model_precision}: set it to int8"
        )
        yield broken(message, "base_model_compute", "base_model_precision")
    if kind == "oft" and own.lora_alpha is not None:
        message = "lora_type=oft rotates, and has nothing to scale: leave lora_alpha out"
        yield broken(message, "lora_alpha", "lora_type")
    if kind not in ("lora", "dora") and own.lora_dropout:
        message = (
            f"lora_dropout zeroes the inputs of LoRA's matrices, which lora_type = {kind} does not have: leave it out"
        )
        yield broken(message, "lora_dropout", "lora_type")
    if kind != "lokr" and own.lokr_factor != -1:
        yield broken(f"lokr_factor is for lora_type=lokr, not {kind}: leave it out", "lokr_factor", "lora_type")
    if kind != "lora" and own.export_format != DIFFUSERS:
        message = f"export_format = {own.export_format} writes LoRA alone for other programs, not {kind}: leave it out"
        yield broken(message, "export_format", "lora_type")


def single_files_have_a_known_layout(settings: Settings) -> Iterator[BrokenRule]:
    model, name = settings.model, "export_single_file"
    if not settings.checkpoints.export_single_file:
        return
    if model.model_type == "lora":
        message = "export_single_file is for whole models: a LoRA is one file already; leave it out"
        yield broken(message, name, "model_type")
    elif model.model_family and model.model_family not in SINGLE_FILE_FAMILIES:
        message = (
            f"export_single_file is for model_family={', '.join(SINGLE_FILE_FAMILIES)}: the original layout of "
            f"{model.model_family} is not written"
        )
        yield broken(message, name, "model_family")


def adapters_are_exported_in_16_bits_or_more(settings: Settings) -> Iterator[BrokenRule]:
    if settings.checkpoints.export_precision == "float8" and settings.model.model_type == "lora":
        message = "export_precision = float8 is for whole models, not for adapters; set bf16 or fp16"
        yield broken(message, "export_precision", "model_type")


def profile_begins_in_time(settings: Settings) -> Iterator[BrokenRule]:
    steps, traced = settings.training.max_train_steps, settings.logging.profile_steps
    if traced and steps is not None and parse_step_range(traced)[1] > steps:
        message = f"profile_steps = {traced} goes beyond max_train_steps = {steps}: end it at {steps} or before"
        yield broken(message, "profile_steps", "max_train_steps")


COMPLETENESS_RULES: tuple[Rule, ...] = (needs_model_family, needs_images, needs_length, needs_address_of_machine_0)
RULES: tuple[Rule, ...] = (
    one_shift_is_meant,
    images_have_one_source,
    lora_is_for_whole_denoisers,
    adapters_have_their_own_settings,
    a_kernel_of_the_hub_is_flash3,
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
    wrap_policy_is_known,
    warmup_ends,
    single_files_have_a_known_layout,
    adapters_are_exported_in_16_bits_or_more,
    profile_begins_in_time,
)
