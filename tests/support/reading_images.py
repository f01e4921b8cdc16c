"""A processor of Qwen2.5-VL without its part for videos, which needs torchvision: the pipelines only read images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline, QwenImagePipeline
from transformers import AutoTokenizer, ProcessorMixin, Qwen2VLImageProcessor

MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")


def save_qwen_edit(base: Path, folder: Path, pipeline: type[DiffusionPipeline]) -> Path:
    """Make a pipeline that edits images of the tiny Qwen-Image, whose text encoder sees few and large patches."""
    parts = QwenImagePipeline.from_pretrained(base).components
    tokenizer, reader = parts["tokenizer"], parts["text_encoder"]
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    reader.resize_token_embeddings(len(tokenizer))
    start, pad, end = tokenizer.convert_tokens_to_ids(list(MARKS))
    for name, value in (("vision_start_token_id", start), ("image_token_id", pad), ("vision_end_token_id", end)):
        setattr(reader.config, name, value)
    images = Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=84 * 84)
    pipeline(**parts, processor=ImageAndTextProcessor(images, tokenizer)).save_pretrained(folder)
    return folder


class ImageAndTextProcessor(ProcessorMixin):  # which diffusers saves and loads
    """Turns images and texts into what Qwen2.5-VL takes: as many placeholders as an image has merged patches."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer

    @classmethod
    def from_pretrained(cls, folder: str | Path, **_: Any) -> ImageAndTextProcessor:
        return cls(Qwen2VLImageProcessor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))

    def save_pretrained(self, folder: str | Path, **_: Any) -> None:
        self.image_processor.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def __call__(self, text: list[str], images: Any, padding: bool, return_tensors: str) -> Any:
        shown = self.image_processor(images=images, return_tensors=return_tensors)
        counts = iter((shown["image_grid_thw"].prod(-1) // self.image_processor.merge_size**2).tolist())
        pieces = [each.split("<|image_pad|>") for each in text]
        expanded = [own[0] + "".join("<|image_pad|>" * next(counts) + piece for piece in own[1:]) for own in pieces]
        shown.update(self.tokenizer(expanded, padding=padding, return_tensors=return_tensors))
        return shown
