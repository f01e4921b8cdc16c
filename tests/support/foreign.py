"""Tiny pipelines of diffusers that no family of ours has, built without a hub; those of families are in presets."""

from __future__ import annotations

import inspect
import string
from pathlib import Path
from typing import Any

from torch import nn

from simpletuner.models.catalog.registry import presets
from simpletuner.models.tiny.build import build_component, build_preset, fixed_seed
from simpletuner.models.tiny.encoders import QWEN_TEXT, build_qwen3_vl_causal, build_qwen_processor, spread_embeddings
from simpletuner.models.tiny.tokenizers import WORDS, build_qwen_tokenizer

FLOW = {"class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
DIFFUSION = {"class_name": "DDIMScheduler", "clip_sample": False, "set_alpha_to_one": True}
T5 = {"encoder": "t5", "width": 64}
VAE = {"pretrained": "vae"}
VAE_8PX = {
    "class_name": "AutoencoderKL",
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [8, 16, 16, 16],
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "latent_channels": 4,
    "scaling_factor": 4.0,
}
DIT = {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2}

VIDEO_VAE = {"pretrained": "video_vae"}

FOREIGN: dict[str, dict[str, Any]] = {
    "JoyImageEditPipeline": {
        "text_encoder": None,
        "vae": VIDEO_VAE,
        "transformer": {
            "class_name": "JoyImageEditTransformer3DModel",
            "in_channels": 8,
            "hidden_size": 64,
            "num_attention_heads": 2,
            "text_dim": 64,
            "num_layers": 2,
            "rope_dim_list": [8, 12, 12],
        },
        "scheduler": FLOW,
    },
    "Cosmos2VideoToWorldPipeline": {
        "text_encoder": T5,
        "vae": VIDEO_VAE,
        "transformer": {
            "class_name": "CosmosTransformer3DModel",
            "in_channels": 9,
            "out_channels": 8,
            "num_attention_heads": 2,
            "attention_head_dim": 32,
            "num_layers": 2,
            "text_embed_dim": 64,
            "adaln_lora_dim": 8,
            "max_size": [8, 32, 32],
            "extra_pos_embed_type": None,
        },
        "scheduler": FLOW | {"use_karras_sigmas": True},
    },
    "HunyuanVideoPipeline": {
        "text_encoder": None,
        "text_encoder_2": {"encoder": "clip", "width": 32},
        "vae": {
            "class_name": "AutoencoderKLHunyuanVideo",
            "latent_channels": 4,
            "block_out_channels": [8, 8, 8, 8],
            "layers_per_block": 1,
            "norm_num_groups": 4,
            "mid_block_add_attention": False,
        },
        "transformer": DIT
        | {
            "class_name": "HunyuanVideoTransformer3DModel",
            "attention_head_dim": 32,
            "in_channels": 4,
            "out_channels": 4,
            "num_single_layers": 2,
            "num_refiner_layers": 1,
            "text_embed_dim": 64,
            "pooled_projection_dim": 32,
            "rope_axes_dim": [8, 12, 12],
        },
        "scheduler": FLOW,
    },
    "HunyuanDiTPipeline": {
        "text_encoder": None,
        "text_encoder_2": {"encoder": "t5", "width": 32},
        "vae": VAE_8PX,
        "transformer": DIT
        | {
            "class_name": "HunyuanDiT2DModel",
            "in_channels": 4,
            "patch_size": 2,
            "sample_size": 8,
            "hidden_size": 64,
            "cross_attention_dim": 32,
            "cross_attention_dim_t5": 32,
            "pooled_projection_dim": 16,
            "text_len": 77,
            "text_len_t5": 256,
        },
        "scheduler": DIFFUSION | {"prediction_type": "v_prediction"},
    },
    "PixArtAlphaPipeline": {
        "text_encoder": {"encoder": "t5", "width": 32},
        "vae": VAE,
        "transformer": DIT
        | {
            "class_name": "PixArtTransformer2DModel",
            "sample_size": 16,
            "cross_attention_dim": 64,
            "caption_channels": 32,
        },
        "scheduler": {"class_name": "DPMSolverMultistepScheduler", "beta_schedule": "linear"},
    },
    "LuminaPipeline": {
        "text_encoder": {"encoder": "gemma", "width": 32},
        "vae": VAE_8PX,
        "transformer": {
            "class_name": "LuminaNextDiT2DModel",
            "sample_size": 8,
            "hidden_size": 96,
            "num_layers": 2,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "multiple_of": 32,
            "cross_attention_dim": 32,
        },
        "scheduler": FLOW,
    },
    "AllegroPipeline": {
        "text_encoder": T5,
        "vae": {
            "class_name": "AutoencoderKLAllegro",
            "block_out_channels": [8, 8, 8, 8],
            "layers_per_block": 1,
            "norm_num_groups": 2,
        },
        "transformer": DIT
        | {
            "class_name": "AllegroTransformer3DModel",
            "attention_head_dim": 24,
            "sample_height": 8,
            "sample_width": 8,
            "sample_frames": 8,
            "cross_attention_dim": 96,
            "caption_channels": 64,
        },
        "scheduler": {"class_name": "EulerAncestralDiscreteScheduler"},
    },
    "MochiPipeline": {
        "text_encoder": T5,
        "vae": {
            "class_name": "AutoencoderKLMochi",
            "latent_channels": 12,
            "encoder_block_out_channels": [32, 32, 32, 32],
            "decoder_block_out_channels": [32, 32, 32, 32],
            "layers_per_block": [1, 1, 1, 1, 1],
            "latents_mean": [0.1] * 12,
            "latents_std": [0.9] * 12,
        },
        "transformer": DIT
        | {
            "class_name": "MochiTransformer3DModel",
            "pooled_projection_dim": 32,
            "in_channels": 12,
            "text_embed_dim": 64,
            "time_embed_dim": 4,
        },
        "scheduler": {"class_name": "FlowMatchEulerDiscreteScheduler", "invert_sigmas": True},
    },
    "CogVideoXPipeline": {
        "text_encoder": T5,
        "vae": {
            "class_name": "AutoencoderKLCogVideoX",
            "block_out_channels": [8, 8, 8, 8],
            "layers_per_block": 1,
            "norm_num_groups": 2,
            "latent_channels": 4,
        },
        "transformer": DIT
        | {
            "class_name": "CogVideoXTransformer3DModel",
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 8,
            "text_embed_dim": 64,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 9,
            "use_rotary_positional_embeddings": True,
        },
        "scheduler": {"class_name": "CogVideoXDDIMScheduler", "prediction_type": "v_prediction"},
    },
    "LattePipeline": {
        "text_encoder": T5,
        "vae": VAE_8PX,
        "transformer": DIT
        | {
            "class_name": "LatteTransformer3DModel",
            "in_channels": 4,
            "out_channels": 8,
            "patch_size": 2,
            "sample_size": 8,
            "cross_attention_dim": 64,
            "caption_channels": 64,
            "num_embeds_ada_norm": 1000,
            "norm_type": "ada_norm_single",
            "norm_elementwise_affine": False,
            "activation_fn": "gelu-approximate",
            "attention_bias": True,
            "video_length": 1,
        },
        "scheduler": DIFFUSION,
    },
    "KolorsPipeline": {
        "text_encoder": None,
        "vae": VAE,
        "unet": {
            "class_name": "UNet2DConditionModel",
            "sample_size": 16,
            "layers_per_block": 1,
            "block_out_channels": [16, 32],
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
            "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
            "attention_head_dim": [2, 4],
            "cross_attention_dim": 32,
            "norm_num_groups": 8,
            "use_linear_projection": True,
            "encoder_hid_dim": 32,
            "encoder_hid_dim_type": "text_proj",
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 6 * 8 + 32,
        },
        "scheduler": {"class_name": "EulerDiscreteScheduler", "beta_schedule": "scaled_linear"},
    },
}


def build_foreign(name: str, folder: Path, **changes: Any) -> Path:
    """Write a tiny pipeline; `changes` replace entries of components' configs, by component."""
    import diffusers

    if name not in FOREIGN:
        [tiny] = (each.tiny for each in presets().values() if name in each.pipelines and each.tiny)
        build_preset(tiny, **changes).save_pretrained(folder)
        return folder
    cls = getattr(diffusers, name)
    with fixed_seed():
        components: dict[str, Any] = {}
        for part, entry in FOREIGN[name].items():
            own = entry(folder) if callable(entry) else build_component(part, {**entry, **changes.get(part, {})})
            components |= own
        optional = {
            each: None for each in inspect.signature(cls.__init__).parameters if each in cls._optional_components
        }
        cls(**optional | components).save_pretrained(folder)
    return folder


def build_llama(_: Path) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaModel

    tokenizer = build_qwen_tokenizer()
    config = LlamaConfig(vocab_size=len(tokenizer), head_dim=16, pad_token_id=0, **QWEN_TEXT)
    return {"text_encoder": spread_embeddings(LlamaModel(config)), "tokenizer": tokenizer}


def build_bert(_: Path) -> dict[str, Any]:
    from transformers import BertConfig, BertModel, BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys(WORDS.split()), *string.ascii_lowercase]
    words += [f"##{letter}" for letter in string.ascii_lowercase]
    tokenizer = BertTokenizer(vocab={word: number for number, word in enumerate(words)})
    config = BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    return {"text_encoder": spread_embeddings(BertModel(config)), "tokenizer": tokenizer}


def build_chatglm(folder: Path) -> dict[str, Any]:
    """Build ChatGLM as Kolors has it, with a SentencePiece model of a few words."""
    from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig, ChatGLMModel
    from diffusers.pipelines.kolors.tokenizer import ChatGLMTokenizer
    from sentencepiece import SentencePieceTrainer

    vocabulary = folder / "tokenizer" / "tokenizer.model"  # where saving reads it again
    vocabulary.parent.mkdir(parents=True)
    words = [*WORDS.split(), *string.printable.strip()]
    with vocabulary.open("wb") as file:
        SentencePieceTrainer.train(
            sentence_iterator=iter(words), model_writer=file, vocab_size=200, hard_vocab_limit=False, minloglevel=2
        )
    tokenizer = ChatGLMTokenizer(str(vocabulary))
    # The rest as in the published config.json.
    config = ChatGLMConfig(
        num_layers=2, padded_vocab_size=300, hidden_size=32, ffn_hidden_size=64, kv_channels=8, num_attention_heads=4,
        seq_length=256, multi_query_attention=True, multi_query_group_num=2, add_qkv_bias=True, original_rope=True,
    )  # fmt: skip
    encoder = ChatGLMModel(config)
    for each in encoder.parameters():  # its class leaves them as the memory was
        nn.init.normal_(each, std=0.3) if each.ndim > 1 else nn.init.ones_(each)
    return {"text_encoder": encoder, "tokenizer": tokenizer}


def build_qwen3_vl_reader(_: Path) -> dict[str, Any]:
    reader = build_qwen_processor()
    return {"text_encoder": build_qwen3_vl_causal(reader), "tokenizer": reader.tokenizer, "processor": reader}


FOREIGN["JoyImageEditPipeline"]["text_encoder"] = build_qwen3_vl_reader
FOREIGN["KolorsPipeline"]["text_encoder"] = build_chatglm
FOREIGN["HunyuanVideoPipeline"]["text_encoder"] = build_llama
FOREIGN["HunyuanDiTPipeline"]["text_encoder"] = build_bert
