"""The same step as diffusers' training scripts take it, with a denoiser of the same class, shapes and recomputation."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from gpu.records import Record
from gpu.steps import Step, forget_peaks, on_gpu, settings_of, shape_of, tell_step, trace
from torch import Tensor, nn

from simpletuner.counting.step_memory import Workload
from simpletuner.models.family.adapter import freeze
from simpletuner.models.family.base import ModelFamily
from simpletuner.parallel.model.attention_backend import attention_by
from simpletuner.report import Report
from simpletuner.tools.plan.estimate import opened_family
from simpletuner.tools.plan.measure import random_inputs


def measure_diffusers_step(name: str, step: Step, tiny: bool) -> None:
    """Take steps as train_text_to_image_sdxl.py and train_dreambooth_lora_flux.py of diffusers do: accelerate, torch's
    AdamW, clipping, and the loss read at each step."""
    from accelerate import Accelerator

    settings = settings_of(step.flags_here(tiny))
    is_lora = "model_type" in step.flags
    accelerator: Any = Accelerator(mixed_precision="bf16", cpu=tiny)
    # torch 2.11 alone ends FLUX's first step on an H100 with an illegal memory access: see `equal_gradient_layouts`.
    own_kernels = attention_by("auto", accelerator.device, torch.bfloat16)
    with own_kernels, opened_family(settings, Report(quiet=True)) as family:
        model = random_model(family, accelerator.device, settings.lora.lora_rank if is_lora else None)
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.999), weight_decay=1e-2, eps=1e-8)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        workload = Workload(family, shape_of(step, step.flags_here(tiny)["resolution"], tiny))
        inputs = random_inputs(settings, workload, accelerator.device)
        latents = inputs.pop("latents")

        def take_step() -> None:
            with accelerator.accumulate(model):
                loss = loss_of(family, model, latents, inputs, is_lora)
                accelerator.gather(loss.repeat(len(latents))).mean().item()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if on_gpu(tiny):
                torch.cuda.synchronize()

        taken: list[float] = []
        for number in range(step.warm_up + step.count):
            if number == step.warm_up:
                forget_peaks(tiny)
            began = time.perf_counter()
            take_step()
            taken.append(time.perf_counter() - began)
        tell_step(f"{name}, as diffusers' script", step, step.resolutions(tiny)[0], tiny, taken[step.warm_up :])
        if step.is_traced:
            trace(f"{name}, as diffusers' script", take_step, tiny)


def loss_of(family: ModelFamily, model: nn.Module, latents: Tensor, inputs: Record, is_lora: bool) -> Tensor:
    noise = torch.randn_like(latents)
    noised = ((latents + noise) / 2).to(torch.bfloat16 if is_lora else latents.dtype)
    timesteps = torch.full((len(latents),), 0.5, device=latents.device)
    predicted = family.predict(model, noised, timesteps, dict(inputs))
    return F.mse_loss(predicted.float(), (noise - latents).float(), reduction="mean")


def random_model(family: ModelFamily, device: torch.device, lora_rank: int | None) -> Any:
    """Return a denoiser with random weights, in float32; with a LoRA, frozen in bf16."""
    model: Any = family.denoiser()
    if lora_rank is not None:
        freeze(model, torch.bfloat16)
    buffers = {name: each.clone() for name, each in model.named_buffers()}
    model.to_empty(device=device)
    with torch.no_grad():
        for each in model.parameters():
            each.normal_(std=0.02)
        for name, each in buffers.items():
            owner, _, own = name.rpartition(".")
            model.get_submodule(owner)._buffers[own] = each.to(device)
    if lora_rank is not None:
        from peft import LoraConfig

        # The layers that ours adapts, 266 of FLUX.1-dev; with 190 of these a step of ours could not be compared.
        targets = list(family.adapter.modules) if family.adapter else None
        model.add_adapter(
            LoraConfig(r=lora_rank, lora_alpha=lora_rank, init_lora_weights="gaussian", target_modules=targets)
        )
    model.enable_gradient_checkpointing()
    return model.train()
