"""Small real tokenizers, built from a list of words: no files are needed."""

from __future__ import annotations

import string
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import ByT5Tokenizer, CLIPTokenizer, GemmaTokenizer, Qwen2Tokenizer, T5Tokenizer

CLIP_MAX_LENGTH = 77

# Words that are one token each; any other text falls apart into characters.
WORDS = """
a an the and of on in at with by is to photo picture painting drawing image small large big little bright dark light
red green blue yellow orange purple pink brown black white grey cyan magenta
circle square triangle star cross ring heart shape background left right above below one two three four
"""

MOTION_WORDS = "moves up down"
"""The same, of models of clips."""

# The words of the template that Qwen-Image puts before captions. Its pipeline drops the template's 34 tokens
# from the embeddings, a number that is right only if each of these words is one token.
QWEN_WORDS = """
system user assistant Describe the image by detailing the color shape size texture quantity text spatial relationships
of the objects and background
"""

CHAT_TEMPLATE = """{%- for message in messages -%}
{%- set text = message.content if message.content is string else message.content[0].text -%}
<|im_start|>{{ message.role + "\n" + text }}<|im_end|>{{ "\n" }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant{{ "\n" }}{%- endif -%}
"""


def build_clip_tokenizer() -> CLIPTokenizer:
    """Byte-level BPE: every byte, with and without the end-of-word mark, then merges up to WORDS."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    letters = sorted(ByteLevel.alphabet())
    merges = learn_merges([[*word[:-1], f"{word[-1]}</w>"] for word in WORDS.split()])
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), *map("".join, merges)]
    pieces += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=CLIP_MAX_LENGTH)


def build_t5_tokenizer(more_words: str = "") -> T5Tokenizer:
    """Unigram: prefers WORDS to characters; characters beyond ASCII are unknown to it."""
    from transformers import T5Tokenizer

    specials = [(token, 0.0) for token in ("<pad>", "</s>", "<unk>")]
    # Scores are logarithms of probabilities: -4 for a word beats -8 for each of its characters.
    words = [(f"▁{word}", -4.0) for word in (WORDS + more_words).split()]
    letters = [(letter, -8.0) for letter in "▁" + string.ascii_letters + string.digits + string.punctuation]
    return T5Tokenizer(vocab=specials + words + letters, extra_ids=0, model_max_length=512)


def build_gemma_tokenizer() -> GemmaTokenizer:
    """BPE: begins with <bos>, knows WORDS after a space, and falls back to bytes."""
    from transformers import GemmaTokenizer

    letters = [*"▁\n", *string.ascii_letters, *string.digits, *string.punctuation]
    merges = learn_merges([["▁", *word] for word in WORDS.split()])
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*letters, *map("".join, merges)]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    return GemmaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True, padding_side="right")


def build_glm_tokenizer() -> GemmaTokenizer:
    tokenizer = build_gemma_tokenizer()  # it begins with a token of its own, as GLM's does
    tokenizer.padding_side = "left"
    return tokenizer


def build_t5gemma_tokenizer() -> GemmaTokenizer:
    tokenizer = build_gemma_tokenizer()
    tokenizer.model_max_length = 256  # as PRX pads to
    return tokenizer


def build_byt5_tokenizer() -> ByT5Tokenizer:
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()  # bytes need no vocabulary


def build_qwen_tokenizer() -> Qwen2Tokenizer:
    """Byte-level BPE: each word is one token, after a space or not."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    letters, space = sorted(ByteLevel.alphabet()), "Ġ"
    merges = learn_merges([[*start, *word] for word in (WORDS + QWEN_WORDS).split() for start in ("", space)])
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys([*letters, *map("".join, merges)]))}
    marks = {"extra_special_tokens": ["<|im_start|>", "<|im_end|>"], "chat_template": CHAT_TEMPLATE}
    return Qwen2Tokenizer(vocab=vocabulary, merges=merges, model_max_length=2048, **marks)


def learn_merges(spelled: list[list[str]]) -> list[tuple[str, str]]:
    """Learn the merges that make each word one piece, the most frequent pair first."""
    # The trainers of `tokenizers` break ties by chance; here the larger pair wins: all builds are the same.
    merges = []
    while counts := Counter(pair for pieces in spelled for pair in pairwise(pieces)):
        merges.append(max(counts, key=lambda pair: (counts[pair], pair)))
        spelled = [merge(pieces, merges[-1]) for pieces in spelled]
    return merges


def merge(pieces: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for piece in pieces:
        if merged and (merged[-1], piece) == pair:
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged
