"""Models that continue a first frame are given it as diffusers' own pipeline gives it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    LTXConditionPipeline,
    LTXImageToVideoPipeline,
    LTXPipeline,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from models.test_inputs import CPU, PROMPT, opened, recorded_call, same, sampling
from models.test_ltxvideo import save_0_9_0
from PIL import Image
from tiny_configs import tiny_config
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

from simpletuner.data.prefetch import FIRST_FRAME
from simpletuner.models.families.ltxvideo import LTXVideo
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.vae import encode_first_frame, pixels_of
from simpletuner.settings.values.shape import Shape

SHAPE = Shape(9, 64, 96)
OF_WAN = ["2.2-14b", "2.1-14b", "2.2-5b"]
OWN = dict.fromkeys(OF_WAN, WanImageToVideoPipeline)
OWN |= {"ltx-0.9.0": LTXImageToVideoPipeline, "ltx-0.9.5": LTXConditionPipeline}
ASKED = ["2.2-5b", "ltx-0.9.0", "ltx-0.9.5"]
"""Models that also generate clips without a first frame."""
POSITIONS = {"num_frames", "height", "width", "rope_interpolation_scale", "video_coords"}
"""What LTX-Video's denoiser is given in one of two forms; its answers are compared."""


def save_wan(base: Path, folder: Path, case: str) -> Path:
    """Make a tiny Wan that continues a first frame: by channels, by a CLIP as well, or by its latents and time 0."""
    parts = WanPipeline.from_pretrained(base).components
    if case == "2.2-5b":
        WanPipeline(**parts, expand_timesteps=True).save_pretrained(folder)
        return folder
    config, channels = tiny_config("wan", "transformer"), parts["vae"].config.z_dim
    config |= {"in_channels": 2 * channels + 4}
    parts.pop("transformer_2", None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if case == "2.1-14b":
            width = config["num_attention_heads"] * config["attention_head_dim"]
            config |= {"image_dim": 32, "added_kv_proj_dim": width}
            seeing = CLIPVisionConfig(
                hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, patch_size=14
            )
            parts |= {"image_encoder": CLIPVisionModel(seeing), "image_processor": CLIPImageProcessor()}
        parts["transformer"] = WanTransformer3DModel(**config)
    WanImageToVideoPipeline(**parts).save_pretrained(folder)
    return folder


def save_ltx(base: Path, folder: Path, case: str) -> Path:
    """Make a tiny LTX-Video whose VAE has no spread: its pipelines draw a first frame's latents from the posterior."""
    cls = LTXPipeline if case == "ltx-0.9.0" else LTXConditionPipeline
    pipeline = cls.from_pretrained(save_0_9_0(base, folder) if case == "ltx-0.9.0" else base)
    with torch.no_grad():
        last = pipeline.vae.encoder.conv_out.conv  # its last channel is the logarithm of the variance
        last.weight[-1], last.bias[-1] = 0, -30
    pipeline.save_pretrained(folder)
    return folder


def key_of(case: str) -> str:
    return "wan" if case in OF_WAN else "ltxvideo"


@pytest.fixture(scope="module")
def folders(pipelines, tmp_path_factory) -> dict[str, Path]:
    save = {"wan": save_wan, "ltxvideo": save_ltx}
    return {case: save[key_of(case)](pipelines(key_of(case)), tmp_path_factory.mktemp(case), case) for case in OWN}


def first_image() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (SHAPE.height, SHAPE.width, 3), np.uint8))


def clip_of(image: Image.Image) -> torch.Tensor:
    """Return a clip (1, 3, F, H, W) that begins with an image."""
    others = torch.rand(1, 3, SHAPE.frames - 1, *SHAPE[1:], generator=torch.Generator().manual_seed(1)) * 2 - 1
    return torch.cat([pixels_of(image).unsqueeze(2), others], dim=2)


def given_by(family: ModelFamily, image: Image.Image) -> dict[str, torch.Tensor]:
    """Return the conditioning on a first frame as caches hold it."""
    vae, clip = family.vae(CPU), clip_of(image)
    first = encode_first_frame(vae, clip) if family.encodes_first_frame else vae.encode(clip)[:, :, :1]
    return {FIRST_FRAME: first}


def noised_as(family: ModelFamily, theirs: dict[str, Any], clean: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Return the noised latents (1, C, F, H, W) of a clip that the pipeline has given its denoiser."""
    cells, channels = SHAPE.in_cells(family.cell), clean.shape[1]
    shown = theirs["hidden_states"].clone()
    noised = shown[:, :channels] if shown.ndim == 5 else family.unpack_latents(shown, cells)
    if isinstance(family, LTXVideo) and family.is_conditioned:
        noise = (noised[:, :, :1] - clean) / (0.15 * sigma**2)
        noised[:, :, :1] = (1 - sigma) * clean + sigma * noise
    elif family.image_to_video == "optional":
        noised[:, :, 0] = 7  # what stands there is replaced
    return noised


@pytest.mark.parametrize("case", OWN)
def test_a_first_frame_is_given_as_diffusers_own_pipeline_gives_it(case, folders):
    family, image = opened(key_of(case), folders[case]), first_image()
    assert family.image_to_video == ("optional" if case in ASKED else "always")
    pipeline = OWN[case].from_pretrained(folders[case])
    pipeline.set_progress_bar_config(disable=True)
    params = sampling(1.0, SHAPE, (image,))
    arguments = family.pipeline_kwargs({}, {}, params) | {"image": image}
    theirs = recorded_call(pipeline.transformer, lambda: pipeline(prompt=PROMPT, **arguments), number=2)

    encoder = family.text_encoder(CPU, torch.float32)
    text = encoder.encode([PROMPT], (image,) if family.reads_references else ())
    given = given_by(family, image)
    times = pipeline.scheduler.timesteps[1:2] / 1000
    noised = noised_as(family, theirs, given[FIRST_FRAME], times)

    def predict() -> torch.Tensor:
        return family.predict(pipeline.transformer, noised, times, text | given)

    ours = recorded_call(pipeline.transformer, predict)
    assert ours.keys() - POSITIONS == theirs.keys() - POSITIONS
    for name in theirs.keys() - POSITIONS:
        same(ours[name], theirs[name], name)
    with torch.no_grad():
        answer, predicted = pipeline.transformer(**theirs, return_dict=False)[0], predict()
    same(predicted, family.unpack_latents(answer, SHAPE.in_cells(family.cell)), "answer")

    guided = sampling(4.0, SHAPE, (image,))
    drawn = family.pipeline_kwargs({}, {}, guided) | {"image": image, "output_type": "pt", "negative_prompt": ""}
    expected = pipeline(prompt=PROMPT, **drawn)[0]
    negative = encoder.encode([""], (image,) if family.reads_references else ())
    with torch.no_grad():
        latents = family.sample(pipeline.transformer, family.vae(CPU), guided, text, negative)
    found = (family.vae(CPU).decode(latents) + 1) / 2
    torch.testing.assert_close(found, expected.transpose(1, 2).float(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", OF_WAN)
def test_what_a_plan_counts_with_is_what_the_denoiser_is_given(case, folders):
    family = opened("wan", folders[case])
    shapes = family.input_shapes(SHAPE, has_first_frame=True)
    assert shapes[FIRST_FRAME] == tuple(given_by(family, first_image())[FIRST_FRAME].shape[1:])
    index = json.loads((folders[case] / "model_index.json").read_text())
    assert family.reads_references == (case == "2.1-14b") == bool(index.get("image_encoder", [None])[0])
