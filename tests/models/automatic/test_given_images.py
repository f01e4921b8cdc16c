"""model_family=auto gives a denoiser references and first frames as the class of the same pipeline does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from diffusers import FluxKontextPipeline, QwenImageEditPipeline, WanImageToVideoPipeline
from diffusers.pipelines.cosmos import pipeline_cosmos2_video2world
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from flags import tokens_of
from foreign import build_foreign
from models.automatic.test_parity import SAME, TOKENS, automatic
from models.automatic.test_refusals import ADVICE, opened_as, planted
from models.test_flux2 import dev  # noqa: F401 (a fixture)
from models.test_image_to_video import given_by as first_frame_of
from models.test_image_to_video import save_ltx, save_wan
from models.test_inputs import CPU, PROMPT, diffusers_denoiser, diffusers_pipeline, opened, recorded_call, same
from models.test_references import FAMILIES, folders, images  # noqa: F401 (a fixture)
from modular import as_modular
from PIL.Image import Image
from torch import Tensor

from simpletuner.data.prefetch import named_references
from simpletuner.errors import SettingsError
from simpletuner.models.automatic.family import SMALLEST, AutomaticFamily
from simpletuner.models.automatic.hooks import ALWAYS, FRAMES
from simpletuner.models.families import qwen_image
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.objectives import sample_losses
from simpletuner.models.family.sampling import SamplingParams
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.models.family.vae import Vae, pixels_of
from simpletuner.settings.values.shape import SampleShape, Shape
from simpletuner.tools.plan.planner import flops_per_sample

SHAPE, CLIP, AREA = Shape(1, 64, 96), Shape(9, 64, 96), "96 * 96"
SIZES = {"edit": [(96, 96)], "plus": [(96, 96), (128, 64)], "klein": [(64, 96), (80, 64)], "dev": [(64, 96), (80, 64)]}
"""Width and height in px of the references of each model; FLUX.1 Kontext has one of 64x96."""
OF_CLIPS = {"2.1-14b": "wan", "2.2-14b": "wan", "2.2-5b": "wan", "ltx-0.9.0": "ltxvideo"}
POSITIONS = {"num_frames", "height", "width", "rope_interpolation_scale", "video_coords"}
"""Positions of LTX-Video, in one of two forms."""


def encoded(family: ModelFamily, given: Sequence[Image], caption: str = PROMPT) -> Conditioning:
    return family.text_encoder(CPU, torch.float32).encode([caption], given if family.reads_references else ())


def cached(family: ModelFamily, vae: Vae, given: Sequence[Image]) -> Conditioning:
    """Return the latents of images as caches hold them."""
    if family.image_to_video != "never":
        return first_frame_of(family, given[0])
    return named_references(vae.encode(pixels_of(each)) for each in given)


def trained(
    family: ModelFamily, vae: Vae, denoiser: torch.nn.Module, conditioning: Conditioning, shape: Shape
) -> tuple[dict[str, Any], Sequence[Tensor]]:
    """Return what the denoiser is given; and the prediction, the loss and all gradients."""
    pixels = torch.rand(1, 3, *shape.axes, generator=torch.Generator().manual_seed(0)) * 2 - 1
    clean = vae.encode(pixels)
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(1))
    noised = family.objective().add_noise(clean, noise, torch.tensor([0.4]))

    def predict() -> Tensor:
        return family.predict(denoiser, noised.x_t, noised.timesteps, conditioning)

    inputs, prediction, mask = recorded_call(denoiser, predict), predict(), torch.ones_like(clean[:, :1])
    replayed = recorded_call(denoiser, predict)  # by `auto` of a trace, as the one before
    assert replayed.keys() == inputs.keys()
    for name, each in inputs.items():
        same(replayed[name], each, name)
    if family.image_to_video != "never" and family.skips_first_frame:
        mask[:, :, 0] = 0
    losses = sample_losses(prediction, noised.target, noised.weights, mask)
    denoiser.zero_grad()
    losses.mean().backward()
    grads = torch.cat([each.grad.flatten() for each in denoiser.parameters() if each.grad is not None])
    return inputs, ((prediction * mask).detach(), losses.detach(), grads)


def expect_parity(hand: ModelFamily, auto: AutomaticFamily, given: Sequence[Image], shape: Shape) -> None:
    """Compare inputs, predictions, losses, gradients and samples with guidance."""
    # Some calls take one sample alone; the denoiser takes several.
    assert auto.found.replays and auto.found.joins == (auto.found.axes is None)
    hand.settings = hand.settings.model_copy(update=SAME)
    denoiser = diffusers_denoiser(hand)
    texts, vaes = [encoded(each, given) for each in (auto, hand)], [each.vae(CPU) for each in (auto, hand)]
    (ours, found), (theirs, expected) = (
        trained(each, vae, denoiser, text | cached(each, vae, given), shape)
        for each, vae, text in zip((auto, hand), vaes, texts, strict=True)
    )
    assert ours.keys() - POSITIONS == theirs.keys() - POSITIONS
    for name in theirs.keys() - POSITIONS:
        same(ours[name], theirs[name], name)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-6 * other.abs().max()
    empty = [encoded(each, given, "") for each in (auto, hand)]
    sampling = SamplingParams(shape, 2, 3.0, seed=7, references=tuple(given))
    samples = [
        each.sample(denoiser, vae, sampling, text, none)
        for each, vae, text, none in zip((auto, hand), vaes, texts, empty, strict=True)
    ]
    torch.testing.assert_close(samples[0].flatten(), samples[1].flatten(), atol=1e-4, rtol=1e-3)


def of_references(key: str) -> SampleShape:
    return SampleShape(SHAPE, tuple(Shape(1, height, width) for width, height in SIZES.get(key, [(64, 96)])))


@pytest.mark.parametrize("key", ["kontext", "klein", "dev", "edit", "plus"])
def test_references_train_and_sample_as_the_class_does(key, folders, monkeypatch):  # noqa: F811
    folder, given = folders[key], images(SIZES.get(key, [(64, 96)]))
    # The defaults of the call and of the class are the same; dev has a message of 92 tokens before each caption.
    tokens = None if key in ("kontext", "dev") else TOKENS
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", 96 * 96)
    family = FAMILIES.get(key, "flux2")
    auto = automatic(folder, proven=False, tokens=tokens)
    hand = opened(family, folder, tokens=tokens if tokens_of(family) else None)
    if key == "edit":  # brings references to the area of 1024 x 1024 px, which takes minutes
        monkeypatch.setattr(qwen_image, "AREA", 96 * 96)
        small = planted(QwenImageEditPipeline, "1024 * 1024", AREA)
        auto = opened_as(small, folder)
        monkeypatch.setattr(type(hand), "pipeline_class", small)
    auto.prove([of_references(key)], CPU)
    assert auto.reads_references == (key in ("edit", "plus"))
    expect_parity(hand, auto, given, SHAPE)
    if auto.reads_references:  # texts of any length: a class counts 512 tokens
        return
    sample = of_references(key)
    assert flops_per_sample(auto, sample) == pytest.approx(flops_per_sample(hand, sample), rel=0.02)


@pytest.mark.parametrize("case", OF_CLIPS)
def test_first_frames_train_and_sample_as_the_class_does(case, pipelines, tmp_path):
    key, name = OF_CLIPS[case], "LTXImageToVideoPipeline" if "ltx" in case else "WanImageToVideoPipeline"
    folder = (save_ltx if key == "ltxvideo" else save_wan)(pipelines(key), tmp_path / "class", case)
    own = shutil.copytree(folder, tmp_path / "auto")
    index = json.loads((own / "model_index.json").read_text())
    (own / "model_index.json").write_text(json.dumps(index | {"_class_name": name}))
    auto, clip = automatic(own, proven=False), Shape(1 + auto_step(key), 64, 64)
    auto.prove([SampleShape(clip, (), True)], CPU)
    hand = opened(key, folder, tokens=TOKENS)
    if key == "ltxvideo":  # whose call has an image by default, and fails without
        assert automatic(own, proven=False).found.images is not None
    assert auto.encodes_first_frame == hand.encodes_first_frame == (case in ("2.1-14b", "2.2-14b"))
    assert auto.skips_first_frame == hand.skips_first_frame
    assert auto.reads_references == hand.reads_references == (case == "2.1-14b")
    plain = SampleShape(CLIP)  # as a plan has it, before the data are known to begin with first frames
    assert auto.input_shapes(CLIP, (), True).keys() >= {"latents", "first_frame"}
    assert (auto.image_to_video == "always") == ("first_frame" in auto.input_shapes(*plain))
    assert flops_per_sample(auto, plain if "wan" in key else SampleShape(CLIP, (), True)) > 0
    expect_parity(hand, auto, images([(CLIP.width, CLIP.height)]), CLIP)


def auto_step(key: str) -> int:
    return 8 if key == "ltxvideo" else 4


@pytest.mark.parametrize("key", ["kontext", "ltx-0.9.0"])
def test_blocks_are_given_images_as_the_class_is(key, folders, pipelines, tmp_path):  # noqa: F811
    if key == "kontext":
        plain, name, family, sample, shape = folders[key], "FluxKontext", "flux", of_references(key), SHAPE
    else:
        plain, name, family, shape = save_ltx(pipelines("ltxvideo"), tmp_path / "plain", key), "LTX", "ltxvideo", CLIP
        sample = SampleShape(Shape(9, 64, 64), (), True)
    auto = automatic(as_modular(plain, tmp_path / "modular", f"{name}ModularPipeline"), proven=False)
    auto.prove([sample], CPU)
    expect_parity(
        opened(family, plain, tokens=TOKENS), auto, images([(64, 96) if sample.references else (96, 64)]), shape
    )


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "image_width // multiple_of * multiple_of",
            "image_width // multiple_of * multiple_of * 2",
            "it brings the image",
        ),
        (
            "if image_ids is not None:\n",
            "if image_ids is not None:\n        image_latents *= 0\n",
            "depends on the image",
        ),
        (
            "prompt=prompt,\n",
            "prompt=prompt if image is None else [str(image.getpixel((0, 0)))],\n",
            "its texts depend on",
        ),
        (
            "self._current_timestep = t\n",
            "self._current_timestep = t\n"
            "            image_latents = latents if i > 1 and image_ids is not None else image_latents\n",
            "step 3",
        ),
    ],
)
def test_a_fault_that_only_references_show_is_refused(old, new, sentence, folders):  # noqa: F811
    family = opened_as(planted(FluxKontextPipeline, old, new), folders["kontext"])
    with pytest.raises(SettingsError) as refusal:
        family.prove([of_references("kontext")], CPU)
    assert sentence in refusal.value.message and refusal.value.hint == ADVICE
    family.prove([SMALLEST], CPU)  # from captions alone it trains


def test_a_call_that_reads_a_value_is_made_as_it_is(folders):  # noqa: F811
    old = "self._current_timestep = t\n"
    family = opened_as(
        planted(FluxKontextPipeline, old, f"{old}            latents = latents if t > -1 else 2 * latents\n"),
        folders["kontext"],
    )
    family.prove([of_references("kontext")], CPU)
    assert not family.found.replays and "replay" not in [each.name for each in family.checks]


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "image = self.video_processor",
            "image = 0.5 * self.video_processor",
            "differs between an image that it is given",
        ),
        (
            "cat([latents, condition]",
            "cat([latents, condition + latents.mean()]",
            "elements of latents, of which there are",
        ),
        (
            "latents, condition = latents_outputs",
            "latents, condition = latents_outputs; condition *= 0",
            "no input of its",
        ),
    ],
)
def test_a_fault_that_only_first_frames_show_is_refused(old, new, sentence, pipelines, tmp_path):
    folder = save_wan(pipelines("wan"), tmp_path / "base", "2.2-14b")
    family = opened_as(planted(WanImageToVideoPipeline, old, new), folder)
    with pytest.raises(SettingsError) as refusal:
        family.prove([SampleShape(Shape(5, 64, 64), (), True)], CPU)
    assert sentence in refusal.value.message and refusal.value.hint == ADVICE


def test_what_a_call_does_not_take_is_said(flux, folders, pipelines, tmp_path, monkeypatch):  # noqa: F811
    kandinsky = build_foreign("Kandinsky5T2VPipeline", tmp_path / "base")
    index = json.loads((kandinsky / "model_index.json").read_text())
    (kandinsky / "model_index.json").write_text(json.dumps(index | {"_class_name": "Kandinsky5I2VPipeline"}))
    with pytest.raises(SettingsError, match="takes the place of noise whose first axis is not of channels"):
        automatic(kandinsky, proven=False).prove([SampleShape(Shape(5, 64, 64), (), True)], CPU)
    for folder in (flux, pipelines("krea2")):
        with pytest.raises(SettingsError, match="no input of its denoiser depends on the image that it is given: its"):
            automatic(folder, proven=False).prove([of_references("kontext")], CPU)
    two = SampleShape(SHAPE, (SMALLEST, SMALLEST))
    with pytest.raises(SettingsError, match="its VAE encodes 2 images at once, so they could not be cached"):
        automatic(folders["kontext"], proven=False).prove([two], CPU)
    with pytest.raises(SettingsError, match="its own call fails with AttributeError: 'NoneType' object"):
        automatic(folders["edit"], proven=False).prove([SMALLEST], CPU)
    with pytest.raises(SettingsError, match="it draws noise twice before the denoiser is called"):
        automatic(pipelines("ltxvideo"), proven=False).prove([SampleShape(CLIP, (), True)], CPU)
    with pytest.raises(SettingsError, match="it does not keep to the size it is asked for: it draws noise of shape"):
        automatic(build_foreign("JoyImageEditPipeline", tmp_path / "joy"), proven=False).prove([SMALLEST], CPU)
    # Its own checker, which diffusers wants, is a package that is not installed.
    monkeypatch.setattr(pipeline_cosmos2_video2world, "CosmosSafetyChecker", torch.nn.Identity)
    world = automatic(build_foreign("Cosmos2VideoToWorldPipeline", tmp_path / "cosmos"), proven=False)
    with pytest.raises(SettingsError, match="FlowMatchEulerDiscreteScheduler is for EDM, which is not trained here"):
        world.prove([SampleShape(Shape(5, 64, 64), (), True)], CPU)
    small = opened_as(planted(QwenImageEditPipeline, "1024 * 1024", AREA), folders["edit"])
    # A plan knows no data: its reference has the size to which the call brings it.
    assert flops_per_sample(small, of_references("edit")) > 0
    assert small.found.images is not None and small.found.images.shapes == (Shape(1, 96, 96),)
    other = SampleShape(SHAPE, (Shape(1, 128, 160),))
    with pytest.raises(
        SettingsError, match="brings the image that it is given from 160x128 px to 96x96 px: train with"
    ):
        small.prove([of_references("edit"), other], CPU)


@pytest.mark.parametrize(("name", "of_captions", "frames"), [("CogVideoX", "CogVideoX", 9), ("Sana", "SanaVideo", 5)])
def test_a_pipeline_without_a_class_samples_from_a_first_frame_what_diffusers_does(name, of_captions, frames, tmp_path):
    wider = {"transformer": {"in_channels": 8}} if name == "CogVideoX" else {}
    folder, clip = build_foreign(f"{of_captions}Pipeline", tmp_path / "base", **wider), Shape(frames, 64, 64)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": f"{name}ImageToVideoPipeline"}))
    family, given = automatic(folder, proven=False), images([(64, 64)])
    family.prove([SampleShape(clip, (), True)], CPU)
    # The VAE of CogVideoX normalizes over frames, so that a clip's latents do not begin with those of its first frame.
    assert (
        family.encodes_frame_alone == family.encodes_first_frame == (not family.skips_first_frame) == (name != "Sana")
    )
    vae, pipeline, text = family.vae(CPU), diffusers_pipeline(family), encoded(family, given)
    sampling = SamplingParams(clip, 2, 1.0, seed=7, references=given)
    ours = vae.decode(family.sample(pipeline.transformer, vae, sampling, text, text)) / 2 + 0.5
    known = dict.fromkeys(FRAMES, frames) | {"width": 64, "height": 64, "num_inference_steps": 2} | ALWAYS
    known |= family.found.arguments | {"generator": torch.Generator().manual_seed(7), "image": given[0]}
    taken = family.predictor(CPU).hooked.parameters
    theirs = pipeline(prompt=PROMPT, output_type="pt", **{key: each for key, each in known.items() if key in taken})[0]
    torch.testing.assert_close(ours, theirs.float().transpose(1, 2), atol=1e-3, rtol=0)
