"""Qwen-Image: a flow-matching transformer over 2x2 latent patches, with the text side of Qwen2.5-VL.

Its VAE is one for films, its texts are as long as the caption, and it is guided by a negative prompt.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.models.families.flux import packed, unpacked
from simpletuner.models.family import Conditioning, Family, SamplingParams, Traits, with_guidance
from simpletuner.models.objectives import flow_matching, rounded
from simpletuner.models.tiny_qwen import WIDTH, build_qwen25_vl, build_qwen_tokenizer

LONGEST_PROMPT = 1024
"""What the pipeline takes at most; it asks for half of it unless told otherwise."""


def encode(family: Family, pipeline: Any, captions: list[str]) -> Conditioning:
    """Return prompt_embeds (B, L, D), zero beyond each caption's end, and their mask (B, L)."""
    embeds, mask = pipeline.encode_prompt(captions, max_sequence_length=family.max_length)
    if mask is None:  # all captions are equally long
        mask = torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device)
    return {"prompt_embeds": embeds, "prompt_embeds_mask": mask}


def predict(
    family: Family, model: nn.Module, noisy_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning
) -> Tensor:
    """Call the transformer as QwenImagePipeline does: with a mask only where one text is shorter than another."""
    batch, _, height, width = noisy_BCHW.shape
    mask = conditioning["prompt_embeds_mask"]
    lengths: list[int] = mask.sum(1).tolist()  # waits for the device: lengths become shapes
    longest = max(lengths)
    tokens = model(
        hidden_states=packed(noisy_BCHW),
        timestep=timesteps_B,
        encoder_hidden_states_mask=mask[:, :longest] if min(lengths) < longest else None,
        encoder_hidden_states=conditioning["prompt_embeds"][:, :longest].to(noisy_BCHW.dtype),
        img_shapes=[[(1, height // 2, width // 2)]] * batch,
        return_dict=False,
    )[0]
    return unpacked(tokens, (height, width))


def draw_arguments(positive: Conditioning, negative: Conditioning, sampling: SamplingParams) -> dict[str, Any]:
    """Return what the pipeline is told: its guidance_scale is for distilled models, of which none is published."""
    told = with_guidance(positive, negative if sampling.guidance > 1 else {}, sampling)
    return told | {
        "guidance_scale": None,
        "true_cfg_scale": sampling.guidance,
        "max_sequence_length": LONGEST_PROMPT,
    }


def idle(family: Family) -> tuple[str, ...]:
    """Return what makes the last block's text, of which nothing is read."""
    last = f"transformer_blocks.{family.config['num_layers'] - 1}"
    return (f"{last}.attn.add_q_proj", f"{last}.attn.norm_added_q", f"{last}.attn.to_add_out", f"{last}.txt_mlp")


def build_tiny() -> Any:
    """Return a pipeline with a transformer of about 1 million parameters; its VAE is random."""
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )

    tokenizer = build_qwen_tokenizer()
    return QwenImagePipeline(
        vae=AutoencoderKLQwenImage(**TINY_VAE),
        text_encoder=build_qwen25_vl(tokenizer),
        tokenizer=tokenizer,
        transformer=QwenImageTransformer2DModel(**TINY_TRANSFORMER),
        scheduler=FlowMatchEulerDiscreteScheduler(**TINY_SCHEDULER),
    )


TINY_VAE: dict[str, Any] = {
    "base_dim": 16,
    "z_dim": 4,
    "dim_mult": [1, 2, 2, 2],
    "num_res_blocks": 1,
    "latents_mean": [-0.2, 0.05, -0.24, -0.07],  # measured over the drawn shapes
    "latents_std": [0.07, 0.05, 0.05, 0.05],
}

TINY_TRANSFORMER: dict[str, Any] = {
    "in_channels": 4 * 4,  # the VAE's 4 channels, 2 x 2 cells to a token
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 24,
    "num_attention_heads": 4,
    "axes_dims_rope": [4, 10, 10],
    "joint_attention_dim": WIDTH,
}

TINY_SCHEDULER: dict[str, Any] = {
    "use_dynamic_shifting": True,
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "shift_terminal": 0.02,
}

QWEN = Traits(
    pipelines=("QwenImagePipeline",),
    build_tiny=build_tiny,
    objective=flow_matching,
    level_in_bf16=rounded,
    encode=encode,
    predict=predict,
    max_length=lambda _: 512,
    draw_arguments=draw_arguments,
    drawn_latents=unpacked,
    idle=idle,
)
