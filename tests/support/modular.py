"""Tiny modular pipelines of diffusers, built without a hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from foreign import DIT, FLOW

from simpletuner.models.tiny.build import build_component, fixed_seed
from simpletuner.models.tiny.encoders import QWEN_ROPE, QWEN_TEXT, QWEN_WIDTH, spread_embeddings
from simpletuner.models.tiny.tokenizers import build_qwen_tokenizer, build_t5_tokenizer

AXES = [4, 4, 4, 4]
FLUX2_VAE = {
    "class_name": "AutoencoderKLFlux2",
    "down_block_types": ["DownEncoderBlock2D"] * 3,
    "up_block_types": ["UpDecoderBlock2D"] * 3,
    "block_out_channels": [8, 16, 16],
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "latent_channels": 4,
    "mid_block_add_attention": False,
}
QWEN_VAE = {
    "class_name": "AutoencoderKLQwenImage",
    "base_dim": 16,
    "z_dim": 4,
    "dim_mult": [1, 2, 2, 2],
    "num_res_blocks": 1,
    "latents_mean": [-0.2, 0.05, -0.24, -0.07],
    "latents_std": [0.07, 0.05, 0.05, 0.05],
}
DEEP, DEEPEST = {"num_hidden_layers": 33}, {"num_hidden_layers": 51, "hidden_size": 16}
"""Qwen3-VL, of which FLUX.3 reads layers 4 to 32, and MiniMax-H3 layer 50."""

TINY: dict[str, dict[str, Any]] = {
    "AnimaModularPipeline": {
        "text_encoder": {"encoder": "qwen3"},
        "t5_tokenizer": {"tokenizer": "t5"},
        "text_conditioner": {
            "class_name": "AnimaTextConditioner",
            "source_dim": QWEN_WIDTH,
            "target_dim": 32,
            "model_dim": 32,
            "num_layers": 1,
            "num_attention_heads": 4,
            "target_vocab_size": len(build_t5_tokenizer()),
        },
        "vae": QWEN_VAE,
        "transformer": DIT
        | {
            "class_name": "CosmosTransformer3DModel",
            "in_channels": 4,
            "out_channels": 4,
            "text_embed_dim": 32,
            "adaln_lora_dim": 16,
            "max_size": [4, 128, 128],
            "attention_head_dim": 24,
            "extra_pos_embed_type": None,
            "concat_padding_mask": False,  # torchvision would resize it
        },
        "scheduler": FLOW,
    },
    "Flux3ModularPipeline": {
        "text_encoder": DEEP,
        "vae": FLUX2_VAE,
        "transformer": DIT
        | {
            "class_name": "Flux3Transformer2DModel",
            "in_channels": 16,
            "cond_in_channels": 16,
            "num_single_layers": 2,
            "joint_attention_dim": 8 * QWEN_WIDTH,
            "axes_dims_rope": AXES,
        },
        "scheduler": FLOW,
    },
    "MiniMaxH3ModularPipeline": {
        "text_encoder": DEEPEST,
        "vae": {
            "class_name": "AutoencoderKLMiniMaxH3",
            "latent_channels": 4,
            "block_out_channels": [8, 8, 8, 8],
            "layers_per_block": 1,
            "spatial_downsample_factors": [2, 2, 1, 1],
            "temporal_downsample_factors": [1, 2, 1, 1],
            "norm_num_groups": 4,
            "decoder_num_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_attention_head_dim": 16,
            "latents_mean": [0.0] * 4,
            "latents_std": [1.0] * 4,
        },
        "audio_vae": {
            "class_name": "AutoencoderKLMiniMaxH3Audio",
            "encoder_dim": 8,
            "latent_dim": 32,
            "latent_channels": 4,
            "num_attention_heads": 2,
            "decoder_dim": 128,
        },
        "transformer": {
            "class_name": "MiniMaxH3Transformer3DModel",
            "num_attention_heads": 2,
            "attention_head_dim": 32,
            "hidden_size": 64,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "ffn_dim": 64,
            "in_channels": 4,
            "audio_in_channels": 4,
            "text_dim": 16,
            "freq_dim": 32,
            "time_embed_hidden_dim": 32,
            "time_embed_dim": 32,
            "rope_freq_dim": 4,
        },
        "scheduler": {"class_name": "MiniMaxH3Scheduler"},
        "audio_scheduler": {"class_name": "MiniMaxH3Scheduler"},
    },
}
TRAINED = ("AnimaModularPipeline", "Flux3ModularPipeline")


def build_modular(name: str, folder: Path) -> Path:
    """Write a tiny modular pipeline by diffusers' own save_pretrained."""
    import diffusers

    cls = getattr(diffusers, name)
    with fixed_seed():
        components: dict[str, Any] = {}
        for part, entry in TINY[name].items():
            components |= build_qwen3_vl(**entry) if entry in (DEEP, DEEPEST) else build_component(part, {**entry})
    if "processor" in (pipeline := cls()).component_names:
        components["processor"], components["tokenizer"] = components["tokenizer"], components["tokenizer"].tokenizer
    pipeline.update_components(**components)
    pipeline.save_pretrained(str(folder), overwrite_modular_index=True)
    return folder


def build_qwen3_vl(**text: Any) -> dict[str, Any]:
    """Return Qwen3-VL with its head, and a processor of which only the tokenizer is used."""
    from transformers import CLIPImageProcessor, LlavaProcessor, Qwen3VLConfig, Qwen3VLForConditionalGeneration

    tokenizer = build_qwen_tokenizer()
    rope = QWEN_ROPE | {"mrope_interleaved": True}
    sizes = QWEN_TEXT | {"vocab_size": len(tokenizer), "head_dim": QWEN_WIDTH // 4, "rope_parameters": rope} | text
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": QWEN_WIDTH}
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    encoder = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=sizes, vision_config=vision))
    # That of Qwen3-VL needs torchvision.
    processor = LlavaProcessor(CLIPImageProcessor(), tokenizer, chat_template=tokenizer.chat_template)
    return {"text_encoder": spread_embeddings(encoder), "tokenizer": processor}


def as_modular(folder: Path, target: Path, cls: str, **changes: Any) -> Path:
    """Copy a plain pipeline's folder, with the index of a modular one whose components are its publisher's."""
    shutil.copytree(folder, target)
    plain = json.loads((target / "model_index.json").read_text())
    (target / "model_index.json").unlink()
    index: dict[str, Any] = {"_class_name": cls}
    for name, value in plain.items():
        if isinstance(value, list) and not any(value):
            continue
        if isinstance(value, list):
            source = {"pretrained_model_name_or_path": "publisher/model", "subfolder": name, "type_hint": value}
            index[name] = [*value, source]
        elif not name.startswith("_"):
            index[name] = value
    (target / "modular_model_index.json").write_text(json.dumps(index | changes))
    return target
