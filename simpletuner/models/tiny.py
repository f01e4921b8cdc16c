"""What pipelines in miniature are made of: a real little VAE, tokenizers, and encoders with random weights.

Each family's miniature is its published architecture with few and narrow layers, for the demo and the tests; every
width divides by 4, so that it shards over 4 ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from simpletuner.errors import SettingsError

if TYPE_CHECKING:
    from diffusers import AutoencoderKL
    from transformers import (
        CLIPTextModel,
        CLIPTokenizer,
        Gemma2Model,
        GemmaTokenizer,
        T5EncoderModel,
        T5Tokenizer,
        UMT5EncoderModel,
    )

    from simpletuner.models.family import Traits

VAE_FOLDER = Path(__file__).parent / "tiny_vae"
SEED = 0
CLIP_MAX_LENGTH = 77
WORDS = """
a an the and of on in at with by is to photo picture painting drawing image small large big little bright dark light
red green blue yellow orange purple pink brown black white grey cyan magenta
circle square triangle star cross ring heart shape background left right above below one two three four
"""
"""Words the tokenizers know whole; any other text falls apart into characters."""


def build_tiny(traits: Traits, folder: Path) -> None:
    """Write a family's complete pipeline in miniature, the same one each time. Raises SettingsError without one."""
    if traits.build_tiny is None:
        raise SettingsError("this model_family has no flavour `tiny`", "set --pretrained_model_name_or_path")
    with fixed_seed():
        pipeline = traits.build_tiny()
    pipeline.save_pretrained(folder)


@contextmanager
def fixed_seed() -> Iterator[None]:
    """Draw the same weights each time, and leave the caller's random numbers alone."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        yield


def load_vae() -> AutoencoderKL:
    """Return the trained VAE that comes with the package."""
    from diffusers import AutoencoderKL

    return AutoencoderKL.from_pretrained(VAE_FOLDER)


def build_clip(tokenizer: CLIPTokenizer, width: int, projection: bool = False) -> CLIPTextModel:
    """Return a random CLIP text encoder, with a projected pooled output if asked."""
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
    encoder = (CLIPTextModelWithProjection if projection else CLIPTextModel)(config)
    encoder.get_input_embeddings().weight.data.normal_(std=0.3)  # the usual 0.02 drowns the words in attention
    return encoder


def build_t5(tokenizer: T5Tokenizer, width: int) -> T5EncoderModel:
    """Return a random T5 encoder."""
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
    """Return a random UMT5 encoder."""
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(
        vocab_size=len(tokenizer), d_model=width, d_kv=width // 4, d_ff=2 * width, num_layers=2, num_heads=4
    )
    return UMT5EncoderModel(config)


def build_gemma(tokenizer: GemmaTokenizer, width: int) -> Gemma2Model:
    """Return a random Gemma 2 language model without its head."""
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
    model = Gemma2Model(config)
    model.get_input_embeddings().weight.data.normal_(std=0.3)  # the usual 0.02 drowns the words in attention
    return model


def build_clip_tokenizer() -> CLIPTokenizer:
    """Return a byte-level BPE tokenizer: every byte, with and without the end-of-word mark, then merges up to WORDS."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    letters = sorted(ByteLevel.alphabet())
    merges = learn_merges([[*word[:-1], f"{word[-1]}</w>"] for word in WORDS.split()])
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), *map("".join, merges)]
    pieces += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=CLIP_MAX_LENGTH)


def learn_merges(spelled: list[list[str]]) -> list[tuple[str, str]]:
    """Return the merges that make each word one piece, commonest pair first; `tokenizers` breaks ties by chance."""
    merges = []
    while counts := Counter(pair for pieces in spelled for pair in pairwise(pieces)):
        merges.append(max(counts, key=lambda pair: (counts[pair], pair)))
        spelled = [merge(pieces, merges[-1]) for pieces in spelled]
    return merges


def merge(pieces: list[str], pair: tuple[str, str]) -> list[str]:
    """Join each occurrence of the pair into one piece."""
    merged: list[str] = []
    for piece in pieces:
        if merged and (merged[-1], piece) == pair:
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged


def build_t5_tokenizer() -> T5Tokenizer:
    """Return a Unigram tokenizer that prefers WORDS to characters; characters beyond ASCII are unknown to it."""
    import string

    from transformers import T5Tokenizer

    specials = [(token, 0.0) for token in ("<pad>", "</s>", "<unk>")]
    words = [(f"▁{word}", -4.0) for word in WORDS.split()]
    letters = [(letter, -8.0) for letter in "▁" + string.ascii_letters + string.digits + string.punctuation]
    return T5Tokenizer(vocab=specials + words + letters, extra_ids=0, model_max_length=512)


def build_gemma_tokenizer() -> GemmaTokenizer:
    """Return a BPE tokenizer that begins with <bos>, knows WORDS after a space, and falls back to bytes."""
    import string

    from transformers import GemmaTokenizer

    letters = [*"▁\n", *string.ascii_letters, *string.digits, *string.punctuation]
    merges = learn_merges([["▁", *word] for word in WORDS.split()])
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*letters, *map("".join, merges)]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    return GemmaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True, padding_side="right")
