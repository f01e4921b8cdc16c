"""Parts of tiny pipelines: small trained VAEs of this package, text encoders with random weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpletuner.models.tiny.tokenizers import (
    CLIP_MAX_LENGTH,
    MOTION_WORDS,
    build_byt5_tokenizer,
    build_clip_tokenizer,
    build_gemma_tokenizer,
    build_glm_tokenizer,
    build_qwen_tokenizer,
    build_t5_tokenizer,
    build_t5gemma_tokenizer,
)

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, AutoencoderKLWan
    from transformers import (
        CLIPTextModel,
        CLIPTokenizer,
        Gemma2Model,
        Gemma3ForConditionalGeneration,
        GemmaTokenizer,
        GlmModel,
        LlavaProcessor,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLTextModel,
        Qwen2Tokenizer,
        Qwen3ForCausalLM,
        Qwen3Model,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        Qwen3VLModel,
        T5EncoderModel,
        T5GemmaEncoderModel,
        T5Tokenizer,
        UMT5EncoderModel,
    )

VAE_FOLDER = Path(__file__).parent / "vae"
VIDEO_VAE_FOLDER = Path(__file__).parent / "video_vae"

QWEN_WIDTH = 64

QWEN_TEXT: dict[str, object] = {
    "hidden_size": QWEN_WIDTH,
    "intermediate_size": 2 * QWEN_WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

# No image ever reaches the vision part of Qwen2.5-VL here, so it is as small as its class allows.
QWEN_VISION: dict[str, object] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": QWEN_WIDTH,
    "fullatt_block_indexes": [0],
}


QWEN_ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}

QWEN_DEEP: dict[str, object] = {
    "num_hidden_layers": 28,  # FLUX.2's pipeline reads layers 9, 18 and 27
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def build_encoder(kind: str, **config: object) -> tuple[object, object]:
    """Return the tokenizer and the text encoder of a kind that presets name."""
    build_tokenizer, build = ENCODERS[kind]
    tokenizer = build_tokenizer()
    return tokenizer, build(tokenizer, **config)


def spread_embeddings(encoder: Any) -> Any:
    """Initialise word embeddings with a deviation of 0.3 and return the encoder."""
    # At the usual 0.02 attention averages the words away, and all captions get nearly the same embedding.
    encoder.get_input_embeddings().weight.data.normal_(std=0.3)
    return encoder


def load_vae() -> AutoencoderKL:
    from diffusers import AutoencoderKL

    return AutoencoderKL.from_pretrained(VAE_FOLDER)


def load_video_vae() -> AutoencoderKLWan:
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan.from_pretrained(VIDEO_VAE_FOLDER)


def build_clip(tokenizer: CLIPTokenizer, width: int, projection: bool = False) -> CLIPTextModel:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CLIP_MAX_LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return spread_embeddings((CLIPTextModelWithProjection if projection else CLIPTextModel)(config))


def build_t5(tokenizer: T5Tokenizer, width: int) -> T5EncoderModel:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=width // 4,
        d_ff=2 * width,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    return T5EncoderModel(config)


def build_umt5(tokenizer: T5Tokenizer, width: int) -> UMT5EncoderModel:
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(
        vocab_size=len(tokenizer), d_model=width, d_kv=width // 4, d_ff=2 * width, num_layers=2, num_heads=4
    )
    return UMT5EncoderModel(config)


def build_gemma(tokenizer: GemmaTokenizer, width: int) -> Gemma2Model:
    from transformers import Gemma2Config, Gemma2Model

    config = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        query_pre_attn_scalar=width // 4,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return spread_embeddings(Gemma2Model(config))


def build_gemma3(tokenizer: GemmaTokenizer, width: int) -> Gemma3ForConditionalGeneration:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 8}
    tokens = {"boi_token_index": 0, "eoi_token_index": 0, "image_token_index": 0, "mm_tokens_per_image": 4}
    config = Gemma3Config(text_config=text, vision_config=vision, **tokens)
    return spread_embeddings(Gemma3ForConditionalGeneration(config))


def build_qwen3(tokenizer: Qwen2Tokenizer) -> Qwen3Model:
    from transformers import Qwen3Config, Qwen3Model

    return spread_embeddings(Qwen3Model(Qwen3Config(vocab_size=len(tokenizer), head_dim=QWEN_WIDTH // 4, **QWEN_TEXT)))


def build_qwen25_vl(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = QWEN_TEXT | {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": QWEN_ROPE,
    }
    return spread_embeddings(
        Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=QWEN_VISION))
    )


def build_qwen3_causal(tokenizer: Qwen2Tokenizer, width: int) -> Qwen3ForCausalLM:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "head_dim": width // 4}
    return spread_embeddings(Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **sizes, **QWEN_DEEP)))


def build_qwen25_vl_text(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLTextModel:
    """Build the text part of Qwen2.5-VL alone, as HunyuanVideo 1.5 has it."""
    from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

    config = Qwen2_5_VLTextConfig(vocab_size=len(tokenizer), rope_parameters=QWEN_ROPE, **QWEN_TEXT)
    return spread_embeddings(Qwen2_5_VLTextModel(config))


def qwen3_vl_config(vocab_size: int, **sizes: object) -> Qwen3VLConfig:
    from transformers import Qwen3VLConfig

    rope = QWEN_ROPE | {"mrope_interleaved": True}
    text = QWEN_TEXT | {"vocab_size": vocab_size, "head_dim": QWEN_WIDTH // 4, "rope_parameters": rope} | sizes
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": QWEN_WIDTH}
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    return Qwen3VLConfig(text_config=text, vision_config=vision)


def build_qwen3_vl(tokenizer: Qwen2Tokenizer, **sizes: object) -> Qwen3VLModel:
    from transformers import Qwen3VLModel

    return spread_embeddings(Qwen3VLModel(qwen3_vl_config(len(tokenizer), **sizes)))


def build_qwen_processor() -> LlavaProcessor:
    # Qwen3-VL's own needs torchvision; no image ever reaches this one.
    from transformers import CLIPImageProcessor, LlavaProcessor

    tokenizer = build_qwen_tokenizer()
    return LlavaProcessor(CLIPImageProcessor(), tokenizer, patch_size=14, chat_template=tokenizer.chat_template)


def build_qwen3_vl_causal(processor: LlavaProcessor, **sizes: object) -> Qwen3VLForConditionalGeneration:
    from transformers import Qwen3VLForConditionalGeneration

    config = qwen3_vl_config(len(processor.tokenizer), **sizes)
    return spread_embeddings(Qwen3VLForConditionalGeneration(config))


def build_glm(tokenizer: GemmaTokenizer) -> GlmModel:
    from transformers import GlmConfig, GlmModel

    config = GlmConfig(vocab_size=len(tokenizer), head_dim=16, pad_token_id=0, eos_token_id=0, **QWEN_TEXT)
    return spread_embeddings(GlmModel(config))


def build_t5gemma(tokenizer: GemmaTokenizer, width: int) -> T5GemmaEncoderModel:
    from transformers import T5GemmaConfig, T5GemmaEncoderModel, T5GemmaModuleConfig

    part = T5GemmaModuleConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        query_pre_attn_scalar=width // 4,
        pad_token_id=tokenizer.pad_token_id,
    )
    return spread_embeddings(T5GemmaEncoderModel(T5GemmaConfig(encoder=part, decoder=part, is_encoder_decoder=False)))


ENCODERS: dict[str, tuple[Callable[[], object], Callable[..., object]]] = {
    "clip": (build_clip_tokenizer, build_clip),
    "t5": (build_t5_tokenizer, build_t5),
    "umt5": (partial(build_t5_tokenizer, MOTION_WORDS), build_umt5),
    "gemma": (build_gemma_tokenizer, build_gemma),
    "gemma3": (build_gemma_tokenizer, build_gemma3),
    "qwen3": (build_qwen_tokenizer, build_qwen3),
    "qwen3_causal": (build_qwen_tokenizer, build_qwen3_causal),
    "qwen25_vl": (build_qwen_tokenizer, build_qwen25_vl),
    "qwen25_vl_text": (build_qwen_tokenizer, build_qwen25_vl_text),
    "qwen3_vl": (build_qwen_tokenizer, build_qwen3_vl),
    "qwen3_vl_causal": (build_qwen_processor, build_qwen3_vl_causal),
    "glm": (build_glm_tokenizer, build_glm),
    "t5gemma": (build_t5gemma_tokenizer, build_t5gemma),
    "byt5": (build_byt5_tokenizer, build_t5),
}
