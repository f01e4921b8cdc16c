from __future__ import annotations

import torch
from models.test_inputs import CPU, diffusers_pipeline, opened, recorded_call, sampling

from simpletuner.models.family.base import family_class
from simpletuner.settings.declared.sections import Data, Model, Settings


def test_of_the_prompt_around_a_caption_only_its_end_is_left(pipelines):
    encoded = opened("qwen_image", pipelines("qwen_image")).text_encoder(CPU, torch.float32).encode(["a red circle"])
    assert encoded["prompt_embeds_mask"].tolist() == [[1] * (3 + 5)]  # im_end, newline, im_start, assistant, newline


def test_a_prompt_longer_than_the_pipeline_s_own_limit_is_drawn_as_it_was_encoded(pipelines):
    model = Model(model_family="qwen_image")
    settings = Settings(model=model, data=Data(tokenizer_max_length=600))
    family = family_class(model).open(pipelines("qwen_image"), settings)
    text = family.text_encoder(CPU, torch.float32).encode(["red " * 700])
    assert text["prompt_embeds"].shape[1] == 600
    denoiser = diffusers_pipeline(family).transformer
    drawn = recorded_call(denoiser, lambda: family.sample(denoiser, family.vae(CPU), sampling(1.0), text, text))
    assert torch.equal(drawn["encoder_hidden_states"], text["prompt_embeds"])
