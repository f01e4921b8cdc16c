"""FLOPs of a training step, counted on the meta device; `make goldens` writes the golden."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode as TorchFlopCounterMode

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from models.test_inputs import BY_CLASS, CPU, PROMPT, SHAPE, opened_for_short_captions
from models.test_predictions import conditioning_of, rows

from simpletuner.counting.flops import (
    FlopCounter,
    HostTensorsMoved,
    autocast_of_meta,
    backward,
    convolution_backward,
    shapes_of,
)
from simpletuner.models.catalog.registry import flavours_of
from simpletuner.models.family.base import ModelFamily, family_class
from simpletuner.models.opening.published import open_without_weights
from simpletuner.settings.declared.sections import Lora, Model, Settings
from simpletuner.settings.values.shape import SampleShape, Shape
from simpletuner.tools.plan.planner import flops_per_sample

aten = torch.ops.aten
GOLDEN = Path(__file__).with_name("flops.txt")

INPUTS = {
    "sdxl": ("base-1.0", (1024, 1024)),
    "sd1x": ("1.5", (512, 512)),
    "sd2x": ("2.1", (768, 768)),
    "sd3": ("medium", (1024, 1024)),
    "flux": ("dev", (1024, 1024)),
    "flux2": ("klein-9b", (1024, 1024)),
    "chroma": ("base", (1024, 1024)),
    "pixart_sigma": ("600M-1024", (1024, 1024)),
    "sana": ("sana1.5-1.6b-1024", (1024, 1024)),
    "auraflow": ("v0.3", (1024, 1024)),
    "lumina2": ("2.0", (1024, 1024)),
    "qwen_image": ("v1.0", (1024, 1024)),
    "ideogram4": ("4.0", (1024, 1024)),
    "z_image": ("base", (1024, 1024)),
    "wan": ("t2v-480p-1.3b-2.1", (832, 480)),
    "ltxvideo": ("0.9.5", (1024, 1024)),
    "ltxvideo2": ("dev", (1024, 1024)),
}
"""One flavour of each family, and width and height in px."""


def listed() -> str:
    """One line per family: flavour, size, and the FLOPs of forward and backward of one sample."""
    return "".join(map(line_of, INPUTS))


def line_of(key: str) -> str:
    flavour, (width, height) = INPUTS[key]
    shape = Shape(1, height, width)
    settings = Settings(model=Model(model_family=key))
    with TemporaryDirectory() as folder:
        family = open_without_weights(flavours_of(key)[flavour].architecture, settings, Path(folder))
        shapes, flops = family.input_shapes(shape), flops_per_sample(family, SampleShape(shape))
    latents, tokens = shapes["latents"], shapes["prompt_embeds"][0]
    return f"{key} {flavour}, {shape} px, latents {latents}, {tokens} tokens: {flops / 1e12:.2f} TFLOP\n"


def test_the_flops_of_published_models_are_the_reviewed_ones():
    assert INPUTS.keys() == set(BY_CLASS)
    assert listed() == GOLDEN.read_text(encoding="utf-8"), (
        "if that is meant, run `make goldens`, and review and commit tests/counting/flops.txt"
    )


def batch_of(family: ModelFamily) -> tuple[Tensor, dict[str, Tensor]]:
    """Return latents and conditioning of two samples with captions of equal length."""
    text = rows(family.text_encoder(CPU, torch.float32).encode([PROMPT, PROMPT]))
    return family.vae(CPU).encode(torch.zeros(2, 3, *SHAPE[1:])), conditioning_of(family, text)


def counted_as_a_whole(family: ModelFamily, latents: Tensor, conditioning: dict[str, Tensor]) -> tuple[int, int]:
    """Return the FLOPs of forward, and of forward and backward, without leaving any block out."""
    model = family.trained_on_meta
    inputs = {
        name: value.to("meta").requires_grad_() if value.is_floating_point() else value
        for name, value in {"latents": latents, **conditioning}.items()
    }
    by_torch = TorchFlopCounterMode(display=False, custom_mapping={aten.convolution_backward: convolution_backward})
    with by_torch as counter, HostTensorsMoved(), autocast_of_meta():
        prediction = family.predict(model, inputs.pop("latents"), torch.empty(len(latents), device="meta"), inputs)
        forward = counter.get_total_flops()
        backward([prediction])
    return forward, counter.get_total_flops()


@pytest.mark.parametrize("key", BY_CLASS)
def test_equal_blocks_are_counted_once_for_all_and_samples_add_up(key, pipelines):
    family = opened_for_short_captions(key, pipelines(key))
    latents, conditioning = batch_of(family)
    # texts of any length are counted at a multiple of 32
    counter = FlopCounter(family)
    rounded = {name: shape for name, shape, _ in counter.rounded(shapes_of(latents, conditioning))}
    conditioning = {
        name: value if value.shape[1:] == rounded[name] else value.new_ones(2, *rounded[name])
        for name, value in conditioning.items()
    }
    masks = {name: torch.ones_like(value) for name, value in conditioning.items() if not value.is_floating_point()}
    counted = counter.count(latents, conditioning)
    assert not any("forward" in vars(module) for module in family.meta_denoiser.modules())
    assert not any(parameter.grad is not None for parameter in family.meta_denoiser.parameters())
    forward, total = counted_as_a_whole(family, latents, conditioning | masks)
    assert counted == total
    # less than three times by what is computed of the timesteps alone, which have no gradient, and by unused weights
    assert (2.6 if family.unused_parameters() else 2.99) * forward < total <= 3 * forward


def test_a_lora_has_no_gradients_of_frozen_weights(pipelines):
    folder, model = pipelines("flux"), Model(model_family="flux", model_type="lora")
    family = family_class(model).open(folder, Settings(model=model, lora=Lora(lora_rank=2)))
    latents, conditioning = batch_of(family)
    forward, total = counted_as_a_whole(family, latents, conditioning)
    assert FlopCounter(family).count(latents, conditioning) == total
    assert 2 * forward < total < 2.6 * forward


if __name__ == "__main__":
    GOLDEN.write_text(listed(), encoding="utf-8")
