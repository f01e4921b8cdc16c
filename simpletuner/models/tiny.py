"""Build complete pipelines in miniature, with random weights and a real little VAE, for the demo and the tests.

Each is the published architecture with few and narrow layers; every width divides by 4, so that it shards over 4 ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffusers import AutoencoderKL
    from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5Tokenizer

VAE_FOLDER = Path(__file__).parent / "tiny_vae"
SEED = 0
CLIP_MAX_LENGTH = 77
WORDS = """
a an the and of on in at with by is to photo picture painting drawing image small large big little bright dark light
red green blue yellow orange purple pink brown black white grey cyan magenta
circle square triangle star cross ring heart shape background left right above below one two three four
"""
"""Words the tokenizers know whole; any other text falls apart into characters."""


def build_tiny_sdxl(folder: Path) -> None:
    """Write a Stable Diffusion XL pipeline with a U-Net of about 2 million parameters."""
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

    tokenizer = build_clip_tokenizer()
    with fixed_seed():
        pipeline = StableDiffusionXLPipeline(
            vae=load_vae(),
            text_encoder=build_clip(tokenizer, width=32),
            text_encoder_2=build_clip(tokenizer, width=64, projection=True),
            tokenizer=tokenizer,
            tokenizer_2=tokenizer,
            unet=UNet2DConditionModel(**SDXL_UNET),
            scheduler=EulerDiscreteScheduler(**SDXL_SCHEDULER),
        )
    pipeline.save_pretrained(folder)


def build_tiny_flux(folder: Path) -> None:
    """Write a FLUX.1-dev pipeline with a transformer of about 1 million parameters."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    clip_tokenizer, t5_tokenizer = build_clip_tokenizer(), build_t5_tokenizer()
    with fixed_seed():
        pipeline = FluxPipeline(
            vae=load_vae(),
            text_encoder=build_clip(clip_tokenizer, width=32),
            text_encoder_2=build_t5(t5_tokenizer, width=64),
            tokenizer=clip_tokenizer,
            tokenizer_2=t5_tokenizer,
            transformer=FluxTransformer2DModel(**FLUX_TRANSFORMER),
            scheduler=FlowMatchEulerDiscreteScheduler(**FLUX_SCHEDULER),
        )
    pipeline.save_pretrained(folder)


SDXL_UNET: dict[str, Any] = {
    "sample_size": 16,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "block_out_channels": [32, 64, 64],
    "norm_num_groups": 16,
    "layers_per_block": 1,
    "transformer_layers_per_block": [1, 1, 2],
    "attention_head_dim": [2, 4, 4],
    "use_linear_projection": True,
    "cross_attention_dim": 32 + 64,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 32,
    "projection_class_embeddings_input_dim": 64 + 6 * 32,
}

SDXL_SCHEDULER: dict[str, Any] = {
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "prediction_type": "v_prediction",  # SDXL says epsilon, which leaves a tint and noise after a run of minutes
    "timestep_spacing": "leading",
    "steps_offset": 1,
}

FLUX_TRANSFORMER: dict[str, Any] = {
    "in_channels": 4 * 4,  # the VAE's 4 channels, 2 x 2 cells to a token
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 24,
    "num_attention_heads": 4,
    "axes_dims_rope": [4, 10, 10],
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
    "guidance_embeds": True,
}

FLUX_SCHEDULER: dict[str, Any] = {
    "shift": 3.0,
    "use_dynamic_shifting": True,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
    "base_shift": 0.5,
    "max_shift": 1.15,
}


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


def build_clip_tokenizer() -> CLIPTokenizer:
    """Return a byte-level BPE tokenizer: every byte, with and without the end-of-word mark, then merges up to WORDS."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    letters = sorted(ByteLevel.alphabet())
    merges = learn_merges(WORDS.split())
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), *map("".join, merges)]
    pieces += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=CLIP_MAX_LENGTH)


def learn_merges(words: list[str]) -> list[tuple[str, str]]:
    """Return the merges that make each word one piece, commonest pair first; `tokenizers` breaks ties by chance."""
    spelled = [[*word[:-1], f"{word[-1]}</w>"] for word in words]
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
