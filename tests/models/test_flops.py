"""FLOPs of a training step, counted on the meta device; `python tests/models/test_flops.py` writes the golden anew."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from models.test_inputs import CPU, PROMPT, SIZE, TRAINABLE, opened
from models.test_predictions import conditioning_of, rows

from simpletuner.models.diffusers_io import build_on_meta
from simpletuner.models.family import ModelFamily
from simpletuner.models.flops import FlopCounter, HostTensorsMoved, backward, flop_counter, shapes_of, trained_on_meta
from simpletuner.models.registry import family_class, flavours_of
from simpletuner.settings.sections import Lora, Model, Settings

GOLDEN = Path(__file__).with_name("flops.txt")

INPUTS = {
    "sdxl": ("base-1.0", (1024, 1024), (4, 8), (77, 2048), {"pooled_prompt_embeds": (1280,), "time_ids": (6,)}),
    "sd1x": ("1.5", (512, 512), (4, 8), (77, 768), {}),
    "sd2x": ("2.1", (768, 768), (4, 8), (77, 1024), {}),
    "sd3": ("medium", (1024, 1024), (16, 8), (333, 4096), {"pooled_prompt_embeds": (2048,)}),
    "flux": ("dev", (1024, 1024), (16, 8), (512, 4096), {"pooled_prompt_embeds": (768,)}),
    "flux2": ("klein-9b", (1024, 1024), (128, 16), (512, 12288), {}),
    "chroma": ("base", (1024, 1024), (16, 8), (512, 4096), {"prompt_attention_mask": (512,)}),
    "pixart_sigma": ("600M-1024", (1024, 1024), (4, 8), (300, 4096), {"prompt_attention_mask": (300,)}),
    "sana": ("sana1.5-1.6b-1024", (1024, 1024), (32, 32), (300, 2304), {"prompt_attention_mask": (300,)}),
    "auraflow": ("v0.3", (1024, 1024), (4, 8), (256, 2048), {"prompt_attention_mask": (256,)}),
    "lumina2": ("2.0", (1024, 1024), (16, 8), (256, 2304), {"prompt_attention_mask": (256,)}),
    "qwen_image": ("v1.0", (1024, 1024), (16, 8), (512, 3584), {"prompt_embeds_mask": (512,)}),
    "z_image": ("base", (1024, 1024), (16, 8), (512, 2560), {"prompt_embeds_mask": (512,)}),
    "wan": ("t2v-480p-1.3b-2.1", (832, 480), (16, 8), (512, 4096), {}),
    "ltxvideo": ("0.9.5", (1024, 1024), (128, 32), (128, 4096), {"prompt_attention_mask": (128,)}),
}
"""Of one flavour of each family: width and height in px, channels of latents and px per cell, the longest prompt in
tokens and its width, and other conditioning."""


def published(key: str, folder: Path) -> ModelFamily:
    """Write the configs that a family reads of a published pipeline, without weights, and open it."""
    flavour, _, (_, cell_px), *_ = INPUTS[key]
    architecture, model = flavours_of(key)[flavour].architecture, Model(model_family=key)
    cls = family_class(model)
    denoiser = build_on_meta({**architecture.config, "_class_name": architecture.class_name})
    files = {
        "model_index.json": {"_class_name": cls.pipelines[0]},
        f"{cls.denoiser_name}/config.json": json.loads(denoiser.to_json_string()),
        "vae/config.json": {"spatial_compression_ratio": cell_px},
        "scheduler/scheduler_config.json": {},
    }
    for path, content in files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(json.dumps(content))
    return cls.open(folder, Settings(model=model))


def listed() -> str:
    """One line per family: flavour, size, and the FLOPs of forward and backward of one sample."""
    return "".join(map(line_of, INPUTS))


def line_of(key: str) -> str:
    flavour, (width, height), (channels, cell_px), text, more = INPUTS[key]
    conditioning = {
        name: torch.empty(1, *shape, device="meta", dtype=torch.long if "mask" in name else torch.float32)
        for name, shape in {"prompt_embeds": text, **more}.items()
    }
    latents = torch.empty(1, channels, height // cell_px, width // cell_px, device="meta")
    with TemporaryDirectory() as folder:
        flops = FlopCounter(published(key, Path(folder))).count(latents, conditioning)
    return f"{key} {flavour}, {width}x{height} px, {text[0]} tokens: {flops / 1e12:.2f} TFLOP\n"


def test_the_flops_of_published_models_are_the_reviewed_ones():
    assert INPUTS.keys() == set(TRAINABLE)
    assert listed() == GOLDEN.read_text(encoding="utf-8"), (
        "if that is meant, run `python tests/models/test_flops.py`, and review and commit tests/models/flops.txt"
    )


def batch_of(family: ModelFamily) -> tuple[Tensor, dict[str, Tensor]]:
    """Return latents and conditioning of two samples with captions of equal length."""
    text = rows(family.text_encoder(CPU, torch.float32).encode([PROMPT, PROMPT]))
    return family.vae(CPU).encode(torch.zeros(2, 3, SIZE[1], SIZE[0])), conditioning_of(family, text)


def counted_as_a_whole(family: ModelFamily, latents: Tensor, conditioning: dict[str, Tensor]) -> tuple[int, int]:
    """Return the FLOPs of forward, and of forward and backward, without leaving any block out."""
    model = trained_on_meta(family)
    inputs = {
        name: value.to("meta").requires_grad_() if value.is_floating_point() else value
        for name, value in {"latents": latents, **conditioning}.items()
    }
    with flop_counter() as counter, HostTensorsMoved():
        assert not torch.nn.modules.module._global_forward_pre_hooks, "modules of other threads would run them"
        prediction = family.predict(model, inputs.pop("latents"), torch.empty(len(latents), device="meta"), inputs)
        forward = counter.get_total_flops()
        backward([prediction])
    return forward, counter.get_total_flops()


@pytest.mark.parametrize("key", TRAINABLE)
def test_equal_blocks_are_counted_once_for_all_and_samples_add_up(key, pipelines):
    family = opened(key, pipelines(key))
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
