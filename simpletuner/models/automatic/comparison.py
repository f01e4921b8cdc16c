"""Comparison of a family's class with the run of the same folder's pipeline, on its own components."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from simpletuner.data.images.geometry import Geometry
from simpletuner.models.automatic.components import load_shared
from simpletuner.models.automatic.family import AutomaticFamily
from simpletuner.models.automatic.findings import Check
from simpletuner.models.automatic.proof import CLOSE, distance
from simpletuner.models.automatic.study import CAPTIONS, random
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.parallel.engine import compute_dtype
from simpletuner.settings.values.shape import Shape


@torch.no_grad()
def compare_class(by_class: ModelFamily, auto: AutomaticFamily, shape: Shape, device: torch.device) -> Iterator[Check]:
    """Yield a class's results for an image and captions, each with the proven pipeline's."""
    name, pipeline = type(by_class).__name__, auto.pipeline_class.__name__
    picture = random((3, *shape.axes), 6).clamp(-1, 1)
    latents, ours = (family.vae(device).encode(picture).float().cpu() for family in (auto, by_class))
    # A pipeline may draw noise as tokens, or images with an axis for frames; a class has BCHW or BCFHW.
    alike = latents.numel() == ours.numel()
    off = distance(ours.flatten(), latents.flatten()) if alike else float("inf")
    yield Check("latents", f"of {name} are those that {pipeline} decodes", off, CLOSE)

    module = load_shared(auto, device).requires_grad_(False)
    noised = random(latents.shape[1:], 7).to(device)
    time = auto.found.schedule.timesteps(0.5).to(device)
    sides: list[list[Conditioning]] = [texts_of(each, shape, device) for each in (auto, by_class)]
    for number, (expected, text) in enumerate(zip(*sides, strict=True)):
        predicted: list[Tensor] = [
            family.predict(module, noised.view(-1, *like.shape[1:]), time, each).flatten().cpu()
            for family, like, each in ((auto, latents, expected), (by_class, ours, text))
        ]
        off = distance(predicted[1], predicted[0])
        yield Check("prediction", f"of {name} is that of {pipeline}, caption {number + 1}", off, CLOSE)


def texts_of(family: ModelFamily, shape: Shape, device: torch.device) -> list[Conditioning]:
    """Conditioning of captions of two lengths and of an image that is not cropped, a batch of one each."""
    encoder = family.text_encoder(device, compute_dtype(family.settings))
    size = family.size_conditioning(Geometry(shape, shape, (0, 0), shape))
    return [
        {name: value.to(device) for name, value in encoder.encode([caption]).items()}
        | {name: value[None].to(device) for name, value in size.items()}
        for caption in CAPTIONS[:2]
    ]
