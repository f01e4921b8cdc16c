"""Pipelines of two denoisers, for high and low noise, and clips with a clean first frame at time 0."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.errors import SettingsError
from simpletuner.models.catalog.registry import flavour_of, flavours_of, load_preset
from simpletuner.models.folder.diffusers_io import cast_always, diffusers_class
from simpletuner.models.folder.malformed import read_json, translate_load_errors
from simpletuner.models.folder.weights import weights_files
from simpletuner.settings.declared.sections import Model
from simpletuner.settings.values.shape import Shape

# Components of the two denoisers in diffusers' pipelines: above the boundary of noise levels, and below.
FIRST, SECOND = "transformer", "transformer_2"


def chosen_denoiser(folder: Path, index: Mapping[str, object], model: Model) -> tuple[str, str]:
    """Return the component to train and the other one, which is empty where the pipeline has one.

    Raises SettingsError if the flavour names none, or one that the pipeline does not have.
    """
    flavour = flavour_of(model)
    asked = flavour.denoiser if flavour else ""
    if not (has_component(index, FIRST) and has_component(index, SECOND)):
        if asked == SECOND and not has_component(index, SECOND):
            raise SettingsError(f"{folder} has no {SECOND}, which {named(model)} trains", "leave model_flavour out")
        return FIRST, ""
    if not asked or index.get("boundary_ratio") is None:
        preset, pipeline = load_preset(model.model_family), index.get("_class_name")
        first = preset.pipelines[0] if preset else ""
        two = {name: each for name, each in flavours_of(model.model_family).items() if each.denoiser}
        names = [name for name, each in two.items() if each.index.get("_class_name", first) == pipeline]
        raise SettingsError(
            f"{folder} has two denoisers, {FIRST} and {SECOND}, and a run trains one of them"
            if not asked
            else f"{folder} has two denoisers, and its model_index.json no boundary_ratio between their noise levels",
            f"choose one with model_flavour: {' or '.join(names)}" if not asked else "copy or download the model again",
        )
    return asked, FIRST if asked == SECOND else SECOND


def has_component(index: Mapping[str, Any], name: str) -> bool:
    return any(index.get(name) or ())


def named(model: Model) -> str:
    return f"model_flavour={model.model_flavour}"


def load_frozen(
    folder: Path, variant: str | None, device: torch.device, dtype: torch.dtype, float32_inputs: Collection[str]
) -> nn.Module:
    """Load the denoiser that is not trained, for sampling, in the dtype that it computes in.

    Its weights stay in host memory, page-locked, and each block is copied to the GPU when it runs: beside a
    denoiser that is being trained there may be no room for another one of its size.
    """
    with translate_load_errors(folder):
        weights_files(folder, variant)
        cls = diffusers_class(read_json(folder / "config.json")["_class_name"])
        model = cls.from_pretrained(folder, dtype=dtype, use_safetensors=True, variant=variant)
    model.requires_grad_(False).eval()
    is_gpu = device.type == "cuda"  # then the next block is copied while one runs
    model.enable_group_offload(device, offload_type="block_level", num_blocks_per_group=1, use_stream=is_gpu)
    cast_always(model, dtype, float32_inputs)
    return model


def per_token_timesteps(timesteps_B: Tensor, tokens: Shape) -> Tensor:
    """Return a timestep for each token, (B, frames * height * width)."""
    return timesteps_B[:, None].repeat(1, tokens.frames * tokens.area)


def condition_on_first_frame(
    first: Tensor, noised: Tensor, timesteps_B: Tensor, tokens: Shape
) -> tuple[Tensor, Tensor]:
    """Latents (B, C, F, H, W) with another first frame, and timesteps of all tokens, 0 in that frame."""
    times = per_token_timesteps(timesteps_B, tokens)
    times[:, : tokens.area] = 0
    return torch.cat([first.to(noised.dtype), noised[:, :, 1:]], dim=2), times
