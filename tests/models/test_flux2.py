from __future__ import annotations

import json
import shutil
from importlib.util import find_spec

import pytest
import torch
from diffusers import Flux2KleinPipeline, Flux2Pipeline, Flux2Transformer2DModel
from models.test_inputs import CPU, expect_same_inputs, expect_same_picture, opened, sampling
from tiny_configs import tiny_config
from transformers import Mistral3Config, Mistral3ForConditionalGeneration, MistralConfig, PixtralVisionConfig

from simpletuner.errors import EnvironmentNotReady
from simpletuner.models.families.flux2 import position_ids, unpack
from simpletuner.settings.values.shape import Shape

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 31,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}

MESSAGES = "{%- for message in messages -%}{{ message.role + ' ' + message.content[0].text }}{%- endfor -%}"


@pytest.fixture(scope="module")
def dev(pipelines, tmp_path_factory):
    """A tiny FLUX.2-dev. Its processor needs torchvision; here a tokenizer does the same."""
    klein = Flux2KleinPipeline.from_pretrained(pipelines("flux2"))
    klein.tokenizer.chat_template = MESSAGES
    text = MistralConfig(vocab_size=len(klein.tokenizer), **TEXT)
    seeing = PixtralVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        mistral = Mistral3ForConditionalGeneration(Mistral3Config(vision_config=seeing, text_config=text))
        mistral.get_input_embeddings().weight.data.normal_(std=0.3)
        transformer = Flux2Transformer2DModel(**(tiny_config("flux2", "transformer") | {"guidance_embeds": True}))
    parts = {"scheduler": klein.scheduler, "vae": klein.vae, "tokenizer": klein.tokenizer}
    folder = tmp_path_factory.mktemp("dev")
    Flux2Pipeline(text_encoder=mistral, transformer=transformer, **parts).save_pretrained(folder)
    return folder


def test_dev_is_shown_mistral_s_text_and_a_guidance_scale(dev):
    expect_same_inputs(opened("flux2", dev))


def test_dev_draws_with_embedded_guidance(dev):
    expect_same_picture(opened("flux2", dev))


def test_dev_is_shown_a_scale_even_if_its_config_is_older_than_the_question(dev):
    family = opened("flux2", dev)
    del family.config["guidance_embeds"]
    expect_same_inputs(family)


def test_the_pipeline_that_a_folder_names_decides_its_arguments(dev, pipelines):
    text = {"prompt_embeds": torch.zeros(1, 2, 3)}
    families = [opened("flux2", folder) for folder in (dev, pipelines("flux2"))]
    kwargs = [family.pipeline_kwargs(text, text, sampling(guidance=1.0)) for family in families]
    assert ["negative_prompt_embeds" in each for each in kwargs] == [False, True]


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_package_that_the_published_processor_needs_is_named(dev, tmp_path):
    folder = shutil.copytree(dev, tmp_path / "dev")
    index = json.loads((folder / "model_index.json").read_text())
    index["tokenizer"] = ["transformers", "PixtralProcessor"]
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(EnvironmentNotReady, match="^PixtralProcessor requires the Torchvision library"):
        opened("flux2", folder).text_encoder(CPU, torch.float32)


def test_positions_are_those_of_the_pipeline():
    latents, words = torch.zeros(2, 16, 6, 4), torch.zeros(2, 7, 8)
    assert torch.equal(position_ids(2, 6, 4, 1, CPU), Flux2KleinPipeline._prepare_latent_ids(latents))
    assert torch.equal(position_ids(2, 1, 1, 7, CPU), Flux2KleinPipeline._prepare_text_ids(words))


def test_tokens_are_packed_as_the_pipeline_packs_them():
    latents = torch.arange(2 * 16 * 6 * 4.0).view(2, 16, 6, 4)
    assert torch.equal(unpack(Flux2KleinPipeline._pack_latents(latents), Shape(1, 6, 4)), latents)


def test_latents_are_patches_normalised_as_the_pipeline_normalises_pictures(pipelines):
    pipeline = Flux2KleinPipeline.from_pretrained(pipelines("flux2"))
    pixels = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(0)) * 2 - 1
    vae = opened("flux2", pipelines("flux2")).vae(CPU)
    with torch.no_grad():
        theirs = pipeline._encode_vae_image(pixels, generator=torch.Generator())
    torch.testing.assert_close(vae.encode(pixels), theirs)
