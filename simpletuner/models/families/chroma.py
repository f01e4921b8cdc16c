"""Chroma: FLUX.1-schnell without its modulation layers and CLIP, with T5-XXL text that is masked and real guidance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from simpletuner.models.families.flux import packed, position_ids, unpacked
from simpletuner.models.family import Conditioning, Family, Traits
from simpletuner.models.objectives import flow_matching, rounded_times_1000
from simpletuner.models.tiny import build_t5, build_t5_tokenizer, load_vae


def encode(family: Family, pipeline: Any, captions: list[str]) -> Conditioning:
    """Return prompt_embeds (B, max_length, D) and their mask (B, max_length), which keeps one token of padding."""
    encoded = pipeline.encode_prompt(captions, do_classifier_free_guidance=False, max_sequence_length=family.max_length)
    return {"prompt_embeds": encoded[0], "prompt_attention_mask": encoded[2]}


def predict(_: Family, model: nn.Module, noisy_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
    """Call the transformer as ChromaPipeline does.

    The mask goes over text and picture, in numbers: attention adds its ones to the scores, as it does when a picture is
    drawn. To leave padding out altogether, as Chroma was trained, it would have to be booleans, which diffusers does
    not give (its issue 13619).
    """
    height, width = noisy_BCHW.shape[-2:]
    dtype, device = noisy_BCHW.dtype, noisy_BCHW.device
    tokens, embeds = packed(noisy_BCHW), conditioning["prompt_embeds"].to(dtype)
    text_mask = conditioning["prompt_attention_mask"].to(dtype)
    mask = torch.cat([text_mask, text_mask.new_ones(tokens.shape[:2])], dim=1)
    keep_mask_when_recomputing(model, mask)
    answer = model(
        hidden_states=tokens,
        timestep=timesteps_B,
        encoder_hidden_states=embeds,
        txt_ids=torch.zeros(embeds.shape[1], 3, device=device, dtype=dtype),
        img_ids=position_ids(height, width).to(device, dtype),
        attention_mask=mask,
        return_dict=False,
    )[0]
    return unpacked(answer, (height, width))


def keep_mask_when_recomputing(model: nn.Module, mask: Tensor) -> None:
    """Give the mask to the single-stream blocks, too, which diffusers forgets where it recomputes activations."""
    denoiser: Any = getattr(model, "module", model)  # DistributedDataParallel has it inside

    def run(block: nn.Module, *arguments: Any) -> Any:
        """Run a block that keeps no activations; the mask is its last argument."""
        masked = arguments if any(each is mask for each in arguments) else (*arguments, mask)
        return checkpoint(block, *masked, use_reentrant=False)

    if denoiser.gradient_checkpointing:
        denoiser.enable_gradient_checkpointing(run)


def build_tiny() -> Any:
    """Return a pipeline with a transformer of about 0.7 million parameters."""
    from diffusers import ChromaPipeline, ChromaTransformer2DModel, FlowMatchEulerDiscreteScheduler

    tokenizer = build_t5_tokenizer()
    return ChromaPipeline(
        vae=load_vae(),
        text_encoder=build_t5(tokenizer, width=64),
        tokenizer=tokenizer,
        transformer=ChromaTransformer2DModel(**TINY_TRANSFORMER),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


TINY_TRANSFORMER: dict[str, Any] = {
    "in_channels": 4 * 4,  # the VAE's 4 channels, 2 x 2 cells to a token
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 24,
    "num_attention_heads": 4,
    "axes_dims_rope": [4, 10, 10],
    "joint_attention_dim": 64,
    "approximator_hidden_dim": 64,
    "approximator_layers": 2,
}

CHROMA = Traits(
    pipelines=("ChromaPipeline",),
    build_tiny=build_tiny,
    objective=flow_matching,
    level_in_bf16=rounded_times_1000,
    encode=encode,
    predict=predict,
    max_length=lambda _: 512,
    drawn_latents=unpacked,
)
