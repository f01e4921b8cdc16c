"""model_family=auto makes of a modular pipeline what the class of its plain pipeline makes of the same components."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3, ModularPipeline
from models.automatic.test_parity import automatic, expect_parity
from models.automatic.test_refusals import ADVICE
from models.test_inputs import CPU
from models.test_wan import VAE_OF_2_2
from modular import as_modular, build_modular

from simpletuner.checkpoints.export import copy_other_components
from simpletuner.errors import EnvironmentNotReady, SettingsError
from simpletuner.models.automatic.components import open_pipeline
from simpletuner.models.automatic.family import AutomaticFamily
from simpletuner.models.automatic.pipeline_run import without_package
from simpletuner.models.automatic.study import Study
from simpletuner.models.folder.weights import MODULAR_INDEX, read_index
from simpletuner.models.tiny.build import fixed_seed
from simpletuner.settings.declared.sections import Hub, Model, Settings
from simpletuner.settings.values.shape import Shape

MODULAR = {
    "flux": "FluxModularPipeline",
    "sdxl": "StableDiffusionXLModularPipeline",
    "sd3": "StableDiffusion3ModularPipeline",
    "qwen_image": "QwenImageModularPipeline",
    "z_image": "ZImageModularPipeline",
    "wan": "WanModularPipeline",
    "flux2": "Flux2KleinBaseModularPipeline",
}


@pytest.mark.parametrize("key", MODULAR)
def test_auto_trains_and_samples_by_blocks_as_the_class_does(key, pipelines, tmp_path):
    base = with_plain_vae(pipelines(key), tmp_path / "plain") if key == "wan" else pipelines(key)
    expect_parity(key, lambda _: base, as_modular(base, tmp_path / "modular", MODULAR[key]))


def with_plain_vae(folder: Path, made: Path) -> Path:
    """Save a Wan whose VAE has no patches: WanModularPipeline counts the pixels of a cell without them."""
    from diffusers import AutoencoderKLWan, WanPipeline

    patches = ("in_channels", "out_channels", "patch_size", "is_residual", "scale_factor_spatial")
    with fixed_seed():
        vae = AutoencoderKLWan(**{name: value for name, value in VAE_OF_2_2.items() if name not in patches})
    WanPipeline.from_pretrained(folder, vae=vae).save_pretrained(made)
    return made


def test_modular_folders_that_cannot_be_trained_are_refused(flux, tmp_path):
    name, publisher = "FluxModularPipeline", {"pretrained_model_name_or_path": "publisher/model"}
    other = ["diffusers", "Ideogram4Transformer2DModel", publisher]
    two = as_modular(flux, tmp_path / "a", "Ideogram4ModularPipeline", unconditional_transformer=other)
    shutil.copytree(two / "transformer", two / "unconditional_transformer")
    code = as_modular(flux, tmp_path / "b", name)
    (code / "modular_config.json").write_text('{"auto_map": {"ModularPipelineBlocks": "block.MyBlocks"}}')
    for folder, sentence in (
        (two, "it has two denoisers, transformer and unconditional_transformer"),
        (code, "its blocks are in its folder, whose code is never run"),
        (as_modular(flux, tmp_path / "c", name, _blocks_class_name="MyBlocks"), "its blocks are MyBlocks, no class of"),
        (as_modular(flux, tmp_path / "d", "Cosmos3OmniModularPipeline"), "none of its blocks encodes text"),
        (as_modular(flux, tmp_path / "e", "ModularPipeline"), "its blocks are None, no class of diffusers"),
    ):
        with pytest.raises(SettingsError) as refusal:
            automatic(folder)
        assert sentence in refusal.value.message and refusal.value.hint == ADVICE


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")  # by its VAE
def test_minimax_h3_is_refused_for_its_lengths_and_makes_no_video_without_its_sound(tmp_path):
    """It has three reasons, and who mends one finds the next: lengths, two draws of noise, one sequence of both."""
    folder, clip = build_modular("MiniMaxH3ModularPipeline", tmp_path / "base"), Shape(124, 32, 32)
    with pytest.raises(SettingsError, match="MiniMaxH3ModularPipeline cannot .* between 5.0 and 15.0 seconds"):
        automatic(folder)
    vae = AutoencoderKLMiniMaxH3.from_pretrained(folder / "vae")
    hooked = open_pipeline(automatic(folder, proven=False), CPU, torch.float32, vae)
    study = Study(hooked, torch.nn.Identity(), clip, encoded=[hooked.encode(["a"], clip)])
    draws = r"draws noise of shape \(1, 4, 37, 8, 8\) for 124 frames, and \(1, 4, 42, 8, 8\) for 128"
    with pytest.raises(SettingsError, match=f"does not keep to the frames it is asked for: it {draws}"):
        study.find_layout({})
    noise = torch.randn(1, 4, 37, 8, 8, generator=torch.Generator().manual_seed(0))
    with pytest.raises(SettingsError, match="it draws noise twice before the denoiser is called"):
        study.run(study.encoded[0], noise, torch.zeros(1), {})

    blocks = ModularPipeline.from_pretrained(folder).blocks
    del blocks.sub_blocks["decode"]
    pipeline = blocks.init_pipeline(folder)
    pipeline.load_components()
    pipeline.set_progress_bar_config(disable=True)
    given = {"height": 32, "width": 32, "num_frames": 124, "num_inference_steps": 2, "latents": noise}
    sounds = (torch.zeros(2, 4, 207), torch.ones(2, 4, 207))
    silent, loud = (pipeline(prompt="a", **given, audio_latents=each, output="latents") for each in sounds)
    assert abs(silent - loud).max() > 1e-4 * abs(silent).max()


def test_a_component_that_is_elsewhere_is_named(flux, tmp_path):
    folder = as_modular(flux, tmp_path / "modular", "FluxModularPipeline")
    shutil.rmtree(folder / "text_encoder_2")
    with pytest.raises(EnvironmentNotReady, match=f"has no text_encoder_2: {MODULAR_INDEX} takes it from publisher/mo"):
        automatic(folder)


def test_the_package_that_resizes_a_padding_mask_is_named():
    for name, package in (("transforms", "torchvision"), ("ftfy", "ftfy")):
        error = without_package("AnimaModularPipeline", NameError(f"name '{name}' is not defined", name=name))
        assert isinstance(error, EnvironmentNotReady) and error.message.endswith(f"needs the package {package}")


def test_an_index_names_classes_of_components_that_were_not_loaded(tmp_path):
    hint = {"type_hint": ["diffusers", "AutoencoderKL"], "pretrained_model_name_or_path": "publisher/model"}
    nowhere = hint | {"pretrained_model_name_or_path": None}
    index = {"vae": [None, None, hint], "unet": [None, None, nowhere], "sizes": [4, 8], "is_distilled": True}
    Path(tmp_path / MODULAR_INDEX).write_text(json.dumps(index))
    classes = {"vae": ["diffusers", "AutoencoderKL"], "unet": [None, None]}
    assert read_index(tmp_path) == index | classes


@pytest.mark.parametrize(("hub", "place"), [(Hub(push_to_hub=True, hub_model_id="me/mine"), "me/mine"), (Hub(), None)])
def test_an_exported_index_never_leads_to_the_publisher_s_denoiser(hub, place, flux, tmp_path):
    model = Model(model_family="auto")
    family = AutomaticFamily(as_modular(flux, tmp_path / "base", MODULAR["flux"]), Settings(model=model, hub=hub))
    copy_other_components(family, tmp_path / "exported")
    index = json.loads((tmp_path / "exported" / MODULAR_INDEX).read_text())
    sources = {name: value[-1] for name, value in index.items() if isinstance(value, list)}
    assert {"transformer", "vae", "text_encoder", "tokenizer_2", "scheduler"} <= sources.keys()
    assert {each["pretrained_model_name_or_path"] for each in sources.values()} == {place}
    assert all(each["subfolder"] == name for name, each in sources.items())
