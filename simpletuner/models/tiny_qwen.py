"""Qwen in miniature: its tokenizer with the marks of a chat, and its encoders with random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simpletuner.models.tiny import WORDS, learn_merges

if TYPE_CHECKING:
    from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer, Qwen3Model

WIDTH = 64

PROMPT_WORDS = """
system user assistant Describe the image by detailing the color shape size texture quantity text spatial relationships
of the objects and background
"""
"""Words that Qwen-Image puts before captions; its pipeline drops 34 tokens, which is right if each word is one."""

CHAT = """{%- for message in messages -%}
<|im_start|>{{ message.role + "\n" + message.content }}<|im_end|>{{ "\n" }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant{{ "\n" }}{%- endif -%}
"""
"""How messages become one text."""


def build_qwen_tokenizer() -> Qwen2Tokenizer:
    """Return a byte-level BPE tokenizer to which each known word is one piece, after a space or not."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    letters, space = sorted(ByteLevel.alphabet()), "Ġ"
    merges = learn_merges([[*start, *word] for word in (WORDS + PROMPT_WORDS).split() for start in ("", space)])
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys([*letters, *map("".join, merges)]))}
    marks = {"extra_special_tokens": ["<|im_start|>", "<|im_end|>"], "chat_template": CHAT}
    return Qwen2Tokenizer(vocab=vocabulary, merges=merges, model_max_length=2048, **marks)


def build_qwen3(tokenizer: Qwen2Tokenizer) -> Qwen3Model:
    """Return a random Qwen3."""
    from transformers import Qwen3Config, Qwen3Model

    return with_clear_words(Qwen3Model(Qwen3Config(vocab_size=len(tokenizer), head_dim=WIDTH // 4, **TEXT)))


def build_qwen25_vl(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    """Return a random Qwen2.5-VL; it is never shown a picture, so its eyes are as small as they can be."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    text = TEXT | {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": None, "rope_parameters": rope}
    return with_clear_words(Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=EYES)))


def with_clear_words(encoder: Any) -> Any:
    """Return an encoder whose words are not drowned in attention, as they are at the usual deviation of 0.02."""
    encoder.get_input_embeddings().weight.data.normal_(std=0.3)
    return encoder


TEXT: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

EYES: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": WIDTH,
    "fullatt_block_indexes": [0],
}
