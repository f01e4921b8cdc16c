"""What runs of adapters are compared by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def checkpoint(output: Path, step: int, group: str) -> dict[str, torch.Tensor]:
    files = (output / "checkpoints" / f"checkpoint-{step:06d}" / group).glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def predictions_of_flux(transformer: Any) -> torch.Tensor:
    torch.manual_seed(0)
    config = transformer.config
    with torch.no_grad():
        return transformer(
            hidden_states=torch.randn(1, 4, config.in_channels),
            timestep=torch.full((1,), 0.5),
            guidance=torch.ones(1) if config.guidance_embeds else None,
            pooled_projections=torch.randn(1, config.pooled_projection_dim),
            encoder_hidden_states=torch.randn(1, 8, config.joint_attention_dim),
            txt_ids=torch.zeros(8, 3),
            img_ids=torch.zeros(4, 3),
        ).sample


def numbers(steps: list[list[float]]) -> list[float]:
    return [number for step in steps for number in step]
