"""Keys of a dataset whose images the base model makes: class images, for prior preservation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from simpletuner.settings.declared.sections import DatasetSettings


def read_prompts(value: Any) -> object:
    """Raises ValueError for what is no prompt, and no list of them."""
    prompts = [value] if isinstance(value, str) else value
    if not isinstance(prompts, list | tuple) or not all(isinstance(each, str) and each.strip() for each in prompts):
        raise ValueError('use a prompt, or a list of them, such as ["a photo of a dog", "a dog in a park"]')
    return tuple(" ".join(each.split()) for each in prompts)


def read_class_words(value: Any) -> object:
    """Raises ValueError for what is not a class word for each trigger word."""
    words = [each for pair in value.items() for each in pair] if isinstance(value, Mapping) else []
    if not words or not all(isinstance(each, str) for each in words) or not all(map(str.strip, value)):
        raise ValueError('use the class word of each trigger word, such as {"sks dog": "dog"}')
    return {" ".join(key.split()): " ".join(word.split()) for key, word in value.items()}


class ClassImageKeys(DatasetSettings):
    """Keys of a dataset about the images that the base model makes for it."""

    prior_images: int | None = Field(default=None, ge=1, le=100_000)
    prior_prompt: Annotated[tuple[str, ...], BeforeValidator(read_prompts)] = ()
    """Prompts, one image after the other."""
    prior_captions_of: str | None = None
    """Dataset with the captions that are the prompts, instead of `prior_prompt`."""
    class_words: Annotated[dict[str, str], BeforeValidator(read_class_words)] = {}
    """Words in place of trigger words in those captions."""
    prior_seed: int | None = Field(default=None, ge=0, lt=1 << 62)
    prior_num_inference_steps: int | None = Field(default=None, ge=1, le=1000)
    prior_guidance: float | None = Field(default=None, ge=0, le=1000)

    @model_validator(mode="after")
    def check_class_images(self) -> ClassImageKeys:
        if self.prior_images is None:
            keys = [
                name for name in CLASS_IMAGE_KEYS if getattr(self, name) != ClassImageKeys.model_fields[name].default
            ]
            if keys:
                raise PydanticCustomError("prior_images", "is missing: {keys} belongs to it", {"keys": keys[0]})
            return self
        if bool(self.prior_prompt) == (self.prior_captions_of is not None):
            raise PydanticCustomError("prior_prompt", "prior_images takes one of prior_prompt and prior_captions_of")
        if bool(self.class_words) != (self.prior_captions_of is not None):
            message = "prior_captions_of and class_words belong together: the captions without their trigger words"
            raise PydanticCustomError("class_words", message)
        said = "captions of class images are their prompts: leave it out"
        if self.caption_strategy != "textfile":
            raise PydanticCustomError("caption_strategy", said)
        if self.prepend_instance_prompt:
            raise PydanticCustomError("prepend_instance_prompt", said)
        return self


CLASS_IMAGE_KEYS = tuple(name for name in ClassImageKeys.model_fields if name not in DatasetSettings.model_fields)
OF_CAPTIONS: dict[str, object] = {"caption_strategy": "textfile", "prepend_instance_prompt": False}
"""Values of a dataset of class images in place of the settings that other datasets fall back to."""


def with_class_words(caption: str, class_words: Mapping[str, str]) -> str:
    """Return a caption with class words in place of trigger words, any case, the longest first."""
    found = "|".join(re.escape(each) for each in sorted(class_words, key=len, reverse=True))
    by_lower = {trigger.lower(): word for trigger, word in class_words.items()}
    text = " ".join(caption.split())
    replaced = re.sub(rf"(?<!\w)(?:{found})(?!\w)", lambda each: by_lower[each[0].lower()], text, flags=re.IGNORECASE)
    return " ".join(replaced.split())


def has_trigger_word(captions: Sequence[str], class_words: Mapping[str, str]) -> bool:
    return any(with_class_words(each, class_words) != " ".join(each.split()) for each in captions)
