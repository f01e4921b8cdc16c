"""Count the tokens of captions by the model's own tokenizers, where these are here; its weights are not needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from simpletuner.data.samples.samples import DatasetSamples
from simpletuner.models.family.lookup import family_class
from simpletuner.models.folder.diffusers_io import component_class
from simpletuner.models.folder.malformed import opening
from simpletuner.models.opening.loading import folder_at_hand
from simpletuner.settings import Settings

BATCH = 1000


@dataclass(frozen=True)
class TokenLimit:
    """A tokenizer of the model, and how many tokens of a caption its text encoder reads."""

    tokenizer: Any
    name: str
    tokens: int

    def count(self, captions: list[str]) -> list[int]:
        """Return the tokens of each caption, with those that mark its beginning and end."""
        # Not verbose: transformers warns of each text that is longer than the model takes.
        return list(map(len, self.tokenizer(captions, truncation=False, verbose=False)["input_ids"]))


def token_limits(settings: Settings) -> list[TokenLimit]:
    """Return the tokenizers of the base model, each kind once; none where the model is not here.

    Raises EnvironmentNotReady for a folder that is malformed.
    """
    folder = folder_at_hand(settings) if settings.model.model_family else None
    if folder is None:
        return []
    with opening(folder):
        family = family_class(settings.model).open(folder, settings)
        names = [name for name in family.index if name.startswith("tokenizer") and any(family.index[name] or ())]
        limits: dict[tuple[str, int], TokenLimit] = {}
        for name in names:
            cls = component_class(family.index, name, folder)
            tokenizer = cls.from_pretrained(folder / name)
            # CLIP has as many positions, whatever `tokenizer_max_length` says of the other encoder.
            is_clip, longest = cls.__name__.startswith("CLIP"), family.max_length
            tokens = int(tokenizer.model_max_length if is_clip or longest is None else longest)
            kind = cls.__name__.removesuffix("Fast").removesuffix("Tokenizer")
            limits.setdefault((kind, tokens), TokenLimit(tokenizer, kind, tokens))
    return list(limits.values())


def longest_in_tokens(samples: DatasetSamples, limit: TokenLimit, show: Callable[[int], object]) -> Iterator[int]:
    """Yield the tokens of each sample's longest caption."""
    for start in range(0, len(samples), BATCH):
        captions = [samples[index].captions for index in range(start, min(start + BATCH, len(samples)))]
        texts = list(dict.fromkeys(chain.from_iterable(captions)))
        counts = dict(zip(texts, limit.count(texts), strict=True)) if texts else {}
        yield from (max(map(counts.__getitem__, own), default=0) for own in captions)
        show(start + len(captions))
