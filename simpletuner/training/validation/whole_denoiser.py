"""Sample with a denoiser beside no training engine: whole on one device, or in shards of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from accelerate.utils import set_module_tensor_to_device
from torch import Tensor, nn

from simpletuner.caches.sources import without_caption
from simpletuner.caches.texts import without_padding
from simpletuner.checkpoints.tensors import read_tensors
from simpletuner.models.family.adapter import (
    adapter_parameters,
    allocate_on_cpu,
    is_kept_in_float32,
)
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.text_encoding import Conditioning, TextEncoder
from simpletuner.models.family.vae import Vae
from simpletuner.models.folder.weights import weights_files
from simpletuner.models.opening.stored_weights import denoiser_weights
from simpletuner.parallel.engine import compute_dtype
from simpletuner.parallel.fsdp2 import shard
from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.model.blocks import recommended_blocks
from simpletuner.parallel.precision.precision import allocate
from simpletuner.preparation.sampled_prompts import Images
from simpletuner.settings import Settings
from simpletuner.training.validation.validator import PlannedImage

if TYPE_CHECKING:
    from simpletuner.data.images.sounds import Sound

Read = Callable[[str], Tensor]


def encode_pair(
    family: ModelFamily, encoder: TextEncoder, prompt: str, negative_prompt: str, references: Images = ()
) -> dict[str, Conditioning]:
    """Encode both prompts as a run's cache has them, without a batch axis, with any references."""

    def read(text: str) -> Conditioning:
        if family.reads_references:
            return {name: each[0] for name, each in encoder.encode([text], references).items()}
        return {name: each[0] for name, each in without_padding(family, encoder.encode([text])).items()}

    negative = read(negative_prompt)
    return {"positive": read(prompt), "negative": negative if negative_prompt else without_caption(family, negative)}


def build_denoiser(family: ModelFamily, read: Read | None, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Build the denoiser on a device with a set of weights, cast one by one; None: the base's."""
    model = family.denoiser()
    base = denoiser_weights(family)
    own = read if read is not None and family.adapter is None else base.read
    for name in [*model.state_dict()]:
        value = own(name)
        if value.is_floating_point():
            value = value.to(torch.float32 if is_kept_in_float32(model, name) else dtype)
        set_module_tensor_to_device(model, name, device, value, value.dtype)
    if family.adapter is not None and read is not None:
        family.adapter.attach(model)
        allocate_on_cpu(model)
        for name, parameter in adapter_parameters(model).items():
            parameter.data.copy_(read(name))
    return model.to(device).eval()


def build_sharded_denoiser(family: ModelFamily, settings: Settings, mesh: Mesh) -> nn.Module:
    """Build the base model's denoiser with `build_denoiser`'s values, sharded block by block. Collective.

    By FSDP2 for DeepSpeed's stage 3 too, whose engine would need an optimizer.
    """
    model, dtype, device = family.denoiser().requires_grad_(False), compute_dtype(settings), mesh.world.device
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if is_kept_in_float32(model, name) else dtype)
    offloads = settings.parallel.fsdp_offload_params or settings.parallel.offload_param != "none"
    parallel = settings.parallel.model_copy(update={"fsdp_offload_params": offloads})
    shard(model, recommended_blocks(model), parallel, torch.float32, mesh)  # float32: gathered as they are
    allocate(model, device, torch.device("cpu") if offloads else device)
    folder = family.folder / family.denoiser_name
    read_tensors(weights_files(folder, settings.model.variant), model.state_dict(), str(folder))
    return model.eval()


def sample_pixels(
    family: ModelFamily, model: nn.Module, vae: Vae, image: PlannedImage, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Sound | None]:
    """Return the decoded image (1CHW), or clip (1CFHW) with its sound."""
    batch = [as_batch(each, device, dtype) for each in (image.prompt.positive, image.prompt.negative)]
    latents, sound = family.sample_with_sound(model, vae, image.sampling, *batch)
    return vae.decode(latents), sound


def as_batch(conditioning: Conditioning, device: torch.device, dtype: torch.dtype) -> Conditioning:
    return {
        name: each[None].to(device, dtype if each.is_floating_point() else None) for name, each in conditioning.items()
    }
