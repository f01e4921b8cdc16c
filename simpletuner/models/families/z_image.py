"""Z-Image: a flow-matching transformer over one sequence of picture and text, with the last layer but one of Qwen3.

Its time runs from noise (0) to picture (1), and it answers towards the picture.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from simpletuner.models.family import Conditioning, Family, SamplingParams, Traits
from simpletuner.models.objectives import flow_matching
from simpletuner.models.tiny import load_vae
from simpletuner.models.tiny_qwen import WIDTH, build_qwen3, build_qwen_tokenizer


def encode(family: Family, pipeline: Any, captions: list[str]) -> Conditioning:
    """Return prompt_embeds (B, L, D), zero beyond each caption's end, and their mask (B, L)."""
    embeds, _ = pipeline.encode_prompt(
        captions, do_classifier_free_guidance=False, max_sequence_length=family.max_length
    )
    masks = [torch.ones(len(each), dtype=torch.long, device=each.device) for each in embeds]
    return {
        "prompt_embeds": pad_sequence(embeds, batch_first=True),
        "prompt_embeds_mask": pad_sequence(masks, batch_first=True),
    }


def texts(conditioning: Conditioning) -> list[Tensor]:
    """Return each caption's embedding (L, D) without what pads it."""
    lengths = conditioning["prompt_embeds_mask"].sum(1).tolist()  # waits for the device: lengths become shapes
    return [embeds[:length] for embeds, length in zip(conditioning["prompt_embeds"], lengths, strict=True)]


def predict(_: Family, model: nn.Module, noisy_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
    """Call the transformer as ZImagePipeline does, with a list of samples, each a film of one frame."""
    answers = model(
        list(noisy_BCHW.unsqueeze(2)),
        1 - timesteps_B,
        [text.to(noisy_BCHW.dtype) for text in texts(conditioning)],
        return_dict=False,
    )[0]
    return -torch.stack(answers).squeeze(2)


def draw_arguments(positive: Conditioning, negative: Conditioning, sampling: SamplingParams) -> dict[str, Any]:
    """Return what the pipeline is told: its guidance scale counts from 0 for none, where others count from 1."""
    told = sampling.arguments() | {"guidance_scale": sampling.guidance - 1}
    for prefix, conditioning in (("", positive), ("negative_", negative)):
        if conditioning:
            told[f"{prefix}prompt_embeds"] = texts(conditioning)
    return told


def build_tiny() -> Any:
    """Return a pipeline with a transformer of about 1 million parameters."""
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

    tokenizer, transformer = build_qwen_tokenizer(), ZImageTransformer2DModel(**TINY_TRANSFORMER)
    for padding in (transformer.x_pad_token, transformer.cap_pad_token):
        padding.data.normal_(std=0.3)  # zeros are normalised with gradients in the hundreds
    return ZImagePipeline(
        vae=load_vae(),
        text_encoder=build_qwen3(tokenizer),
        tokenizer=tokenizer,
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


TINY_TRANSFORMER: dict[str, Any] = {
    "in_channels": 4,
    "dim": 96,
    "n_layers": 2,
    "n_refiner_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 4,
    "cap_feat_dim": WIDTH,
    "axes_dims": [4, 10, 10],
    "axes_lens": [1536, 512, 512],
}

Z_IMAGE = Traits(
    pipelines=("ZImagePipeline",),
    build_tiny=build_tiny,
    objective=flow_matching,
    encode=encode,
    predict=predict,
    max_length=lambda _: 512,
    draw_arguments=draw_arguments,
)
