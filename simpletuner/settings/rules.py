"""Settings that contradict one another, found before torch is imported."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.settings.deepspeed.config import extra_deepspeed_settings
from simpletuner.settings.deepspeed.limits import (
    offloading_is_possible,
    zero_trains_whole_models,
)
from simpletuner.settings.sections import Settings

WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")

Rule = Callable[[Settings], Iterator[str]]


def contradictions(settings: Settings) -> list[str]:
    """Return one sentence for each contradiction."""
    return [sentence for rule in RULES for sentence in rule(settings)]


def incomplete(settings: Settings) -> list[str]:
    """Return one sentence for each thing that a run cannot do without."""
    return [*model_is_named(settings), *pictures_are_named(settings), *machine_0_is_named(settings)]


def settled(settings: Settings) -> tuple[Settings, dict[str, str]]:
    """Return settings without choices that have no effect, so that saved files stay the same, and why by name."""
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
            reasons["deepspeed_config"] = "what goes without saying is left out"
    if not changes:
        return settings, {}
    return settings.model_copy(update={"parallel": parallel.model_copy(update=changes)}), reasons


def warnings_about(settings: Settings) -> list[str]:
    """Return one sentence for each choice that is accepted but deprecated or without effect."""
    parallel = settings.parallel
    said = {
        "fsdp_version=1 is deprecated: FSDP2 runs instead, with the same checkpoints": parallel.fsdp_version == 1,
        "fsdp_cpu_ram_efficient_loading=false has no effect: each rank always reads only its own slices": (
            not parallel.fsdp_cpu_ram_efficient_loading
        ),
    }
    found = [sentence for sentence, is_so in said.items() if is_so and parallel.fsdp_enable]
    return [*found, *accumulation_in_bf16(settings)]


def accumulation_in_bf16(settings: Settings) -> Iterator[str]:
    """Say where DeepSpeed adds up the gradients of several passes in bf16."""
    training, types = settings.training, (settings.parallel.deepspeed_config or {}).get("data_types")
    accumulates = training.gradient_accumulation_steps > 1 and training.mixed_precision == "bf16"
    if accumulates and settings.parallel.zero_stage == 1 and not types:
        yield (
            "zero_stage=1 adds up gradients in bf16; zero_stage=2 does so in float32, as the other engines do, and "
            "takes less memory"
        )


def model_is_named(settings: Settings) -> Iterator[str]:
    """Ask for a family."""
    if not settings.model.model_family:
        yield "model_family is missing: say what to train, such as --model_family=sdxl"


def pictures_are_named(settings: Settings) -> Iterator[str]:
    """Ask for a description of the data."""
    if settings.data.instance_data_dir is None and settings.data.data_backend_config is None:
        yield "no pictures: give --instance_data_dir=FOLDER or --data_backend_config=FILE"


def machine_0_is_named(settings: Settings) -> Iterator[str]:
    """Ask for the address where several machines meet."""
    launch = settings.launch
    if launch.num_machines > 1 and not launch.main_process_ip:
        yield f"num_machines = {launch.num_machines} needs --main_process_ip: the address of machine 0"


def pictures_are_named_once(settings: Settings) -> Iterator[str]:
    """Refuse two descriptions of the data, and a caption strategy without what it needs."""
    data = settings.data
    if data.instance_data_dir is not None and data.data_backend_config is not None:
        yield "instance_data_dir and data_backend_config both name pictures: keep one of them"
    if data.caption_strategy == "instanceprompt" and not data.instance_prompt and data.data_backend_config is None:
        yield "caption_strategy=instanceprompt needs --instance_prompt='a phrase'"


def sharding_trains_whole_models(settings: Settings) -> Iterator[str]:
    """Refuse adapters under FSDP."""
    if settings.model.model_type == "lora" and settings.parallel.fsdp_enable:
        yield "model_type=lora cannot run with FSDP: sharding only slows small adapters; drop fsdp_enable"


def machines_are_equal(settings: Settings) -> Iterator[str]:
    """Ask for the same number of ranks on every machine, and for a rank of this machine that there is."""
    launch = settings.launch
    if launch.num_processes % launch.num_machines:
        yield (
            f"num_processes = {launch.num_processes} cannot be shared equally by num_machines = {launch.num_machines}: "
            "every machine must run the same number of ranks"
        )
    if launch.machine_rank >= launch.num_machines:
        yield (
            f"machine_rank = {launch.machine_rank}, but num_machines = {launch.num_machines}: "
            f"ranks of machines go from 0 to {launch.num_machines - 1}"
        )


def one_engine_shards(settings: Settings) -> Iterator[str]:
    """Refuse two sharding engines at once."""
    if settings.parallel.fsdp_enable and settings.parallel.zero_stage is not None:
        yield "FSDP and DeepSpeed cannot be enabled simultaneously. Set zero_stage=none, or fsdp_enable=false"


def context_parallelism_has_fsdp2(settings: Settings) -> Iterator[str]:
    """Ask for FSDP2, and for ranks that fill the groups, where sequences are split."""
    parallel, size = settings.parallel, settings.parallel.context_parallel_size
    if size > 1 and not (parallel.fsdp_enable and parallel.fsdp_version == 2):
        yield "Context parallelism requires FSDP2. Set fsdp_enable=true and fsdp_version=2, or context_parallel_size=1"
    if settings.launch.num_processes % size:
        yield (
            f"num_processes = {settings.launch.num_processes} is no multiple of context_parallel_size = {size}: "
            "every group of ranks must be whole"
        )


def compiler_can_do_it(settings: Settings) -> Iterator[str]:
    """Refuse what torch.compile cannot do, or would silently ignore."""
    wish = settings.compile
    if wish.dynamo_backend not in ("no", "inductor") and wish.dynamo_mode != "default":
        yield (
            f"dynamo_mode={wish.dynamo_mode} is for dynamo_backend=inductor: {wish.dynamo_backend} has no modes; "
            "leave dynamo_mode out"
        )
    if wish.dynamo_backend != "no" and settings.parallel.zero_stage == 3:
        yield (
            f"dynamo_backend={wish.dynamo_backend} cannot be used with zero_stage = 3: DeepSpeed gathers weights by "
            "hooks inside the blocks, which torch.compile would compile as well, for minutes; use fsdp_enable, "
            "zero_stage=2, or dynamo_backend=no"
        )
    whole = wish.dynamo_backend != "no" and wish.dynamo_fullgraph and not wish.dynamo_use_regional_compilation
    if whole and settings.parallel.fsdp_enable:
        yield (
            "dynamo_fullgraph cannot compile a sharded denoiser as a whole, since FSDP2 gathers weights between its "
            "graphs: set dynamo_use_regional_compilation=true"
        )


def pickles_are_trusted(settings: Settings) -> Iterator[str]:
    """Ask for a word before pickles are read."""
    source = settings.checkpoints.import_deepspeed_checkpoint
    if source is not None and not settings.checkpoints.allow_pickle:
        yield (
            f"import_deepspeed_checkpoint = {source} is a pickle, which can run any program when it is read: "
            "set allow_pickle=true if you trust who made it"
        )


UNSUPPORTED_VALUES = {"model_type": frozenset({"lora"})}
"""Choices that are known by name, so that they are answered, and not offered."""


def unsupported(settings: Settings) -> list[str]:
    """Return one sentence for each thing that this version knows by name and cannot do yet."""
    wanted = {
        "model_type=lora": settings.model.model_type in UNSUPPORTED_VALUES["model_type"],
        "context_parallel_size above 1": settings.parallel.context_parallel_size > 1,
    }
    return [f"{name} is not supported yet by this version" for name, is_wanted in wanted.items() if is_wanted]


def refuse_unsupported(settings: Settings) -> None:
    """Raise SettingsError for what this version cannot do yet."""
    if missing := unsupported(settings):
        raise SettingsError("\n  ".join(missing), "leave it out, or wait for a later version")


def wrap_policy_is_known(settings: Settings) -> Iterator[str]:
    """Accept the three policies and a dotted path."""
    policy = settings.parallel.fsdp_auto_wrap_policy
    if policy not in WRAP_POLICIES and "." not in policy:
        yield f"fsdp_auto_wrap_policy = {policy!r}: use {', '.join(WRAP_POLICIES)}, or a dotted path to a callable"


def validation_size_is_readable(settings: Settings) -> Iterator[str]:
    """Accept EDGE and WIDTHxHEIGHT."""
    size = settings.validation.validation_resolution
    if size and not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?", size):
        yield f"validation_resolution = {size!r}: write an edge such as 1024, or 1216x832"


def warm_up_ends(settings: Settings) -> Iterator[str]:
    """Refuse a warm-up that is longer than the run."""
    steps, warm_up = settings.training.max_train_steps, settings.optimizer.lr_warmup_steps
    if steps is not None and warm_up > steps:
        yield f"lr_warmup_steps = {warm_up} is more than max_train_steps = {steps}"


RULES: tuple[Rule, ...] = (
    pictures_are_named_once,
    sharding_trains_whole_models,
    one_engine_shards,
    zero_trains_whole_models,
    offloading_is_possible,
    context_parallelism_has_fsdp2,
    machines_are_equal,
    compiler_can_do_it,
    pickles_are_trusted,
    wrap_policy_is_known,
    validation_size_is_readable,
    warm_up_ends,
)
