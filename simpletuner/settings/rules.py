"""Settings that contradict one another, found before torch is imported."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from simpletuner.settings.sections import Settings

WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")

Rule = Callable[[Settings], Iterator[str]]


def contradictions(settings: Settings) -> list[str]:
    """Return one sentence for each contradiction."""
    return [sentence for rule in RULES for sentence in rule(settings)]


def model_is_named(settings: Settings) -> Iterator[str]:
    """Ask for a family, and for weights unless the flavour brings its own."""
    if not settings.model.model_family:
        yield "model_family is missing: say what to train, such as --model_family=sdxl"


def pictures_are_named(settings: Settings) -> Iterator[str]:
    """Ask for exactly one description of the data."""
    data = settings.data
    if data.instance_data_dir is None and data.data_backend_config is None:
        yield "no pictures: give --instance_data_dir=FOLDER or --data_backend_config=FILE"
    if data.instance_data_dir is not None and data.data_backend_config is not None:
        yield "instance_data_dir and data_backend_config both name pictures: keep one of them"
    if data.caption_strategy == "instanceprompt" and not data.instance_prompt and data.data_backend_config is None:
        yield "caption_strategy=instanceprompt needs --instance_prompt='a phrase'"


def sharding_trains_whole_models(settings: Settings) -> Iterator[str]:
    """Refuse adapters under FSDP, and adapters at all until they can be trained."""
    if settings.model.model_type == "lora":
        if settings.parallel.fsdp_enable:
            yield "model_type=lora cannot run with FSDP: sharding only slows small adapters; drop fsdp_enable"
        else:
            yield "model_type=lora is not supported yet: this version trains whole models (model_type=full)"


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
    model_is_named,
    pictures_are_named,
    sharding_trains_whole_models,
    wrap_policy_is_known,
    validation_size_is_readable,
    warm_up_ends,
)
