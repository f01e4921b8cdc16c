"""CLIP's cleaning of text, which its tokenizer had in transformers 4 and has no longer in transformers 5.

OpenAI's tokenizer (`basic_clean` of clip/simple_tokenizer.py) and transformers' up to 4 put captions through ftfy and
unescaped HTML before they counted tokens, so Stable Diffusion and FLUX have seen straight quotes alone. Language models
write curly ones, which are other tokens. Of ftfy it is what exchanges characters; broken encodings are not repaired.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Final
from unicodedata import normalize

CLIP_TOKENIZERS: Final = ("CLIPTokenizer", "CLIPTokenizerFast")
ENTITIES: Final = {"&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'", "&apos;": "'", "&nbsp;": "\xa0", "&amp;": "&"}
LIGATURES: Final = "ĲĳǱǲǳǄǅǆǇǈǉǊǋǌﬀﬁﬂﬃﬄﬅﬆ"
WIDE_AND_NARROW: Final = (*range(0xFF01, 0xFFA0), 0x3000)
"""Latin letters and signs of the width of Chinese ones, and Japanese ones of the width of Latin ones."""


@cache
def replacements() -> Mapping[str, str]:
    """Return regular expressions and what replaces them, in this order."""
    letters = {ord(letter): {"ﬅ": "ſt"}.get(letter, normalize("NFKC", letter)) for letter in LIGATURES}
    letters |= {code: normalize("NFKC", chr(code)) for code in WIDE_AND_NARROW}
    return {
        **{re.escape(entity): sign for entity, sign in ENTITIES.items()},
        **{chr(code): letter for code, letter in letters.items() if letter != chr(code)},
        "[\u02bc\u2018-\u201b]": "'",
        "[\u201c-\u201f]": '"',
    }


@cache
def any_replaced() -> re.Pattern[str]:
    return re.compile("|".join(replacements()))


def has_clip(index: Mapping[str, Any]) -> bool:
    """Return whether a pipeline has a tokenizer of CLIP, by its index."""
    return any(isinstance(value, list) and value[-1:] and value[-1] in CLIP_TOKENIZERS for value in index.values())


def is_cleaned(text: str) -> bool:
    """Return whether CLIP's tokenizers have other tokens for a text than transformers 5 alone gives."""
    return any_replaced().search(text) is not None


def clean_texts(pipeline: Any) -> None:
    """Let CLIP's tokenizers in a pipeline clean what they are given; other tokenizers were trained without."""
    from tokenizers import Regex, normalizers

    for part in pipeline.components.values():
        if type(part).__name__ in CLIP_TOKENIZERS and (backend := getattr(part, "backend_tokenizer", None)) is not None:
            rules = [normalizers.Replace(Regex(pattern), sign) for pattern, sign in replacements().items()]
            own = [backend.normalizer] if backend.normalizer is not None else []
            backend.normalizer = normalizers.Sequence([*rules, *own])
