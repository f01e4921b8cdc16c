"""Contradictions of the optimizer with its schedule, its gradients and the engine."""

from __future__ import annotations

from collections.abc import Iterator

from simpletuner.errors import BrokenRule
from simpletuner.settings.declared.errors import broken
from simpletuner.settings.declared.sections import Settings

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
    for other, (is_broken, reason) in reasons.items():
        if is_broken:
            yield broken(f"state_layout = {layout} {reason}", "state_layout", other)


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


def warmup_ends(settings: Settings) -> Iterator[BrokenRule]:
    steps, warmup = settings.training.max_train_steps, settings.optimizer.lr_warmup_steps
    if steps is not None and warmup > steps:
        message = (
            f"lr_warmup_steps = {warmup:.0f} is more than max_train_steps = {steps}: set it to {steps} or less, or "
            "to a fraction of the run, such as 0.05"
        )
        yield broken(message, "lr_warmup_steps", "max_train_steps")
