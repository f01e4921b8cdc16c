"""Ideogram 4: its pipeline's inputs, guidance by a second denoiser that stays as it is, and long captions."""

from __future__ import annotations

import pytest
import torch
from models.test_inputs import CPU, PROMPT, SHAPE, diffusers_pipeline, opened, recorded_call, same, sampling
from models.test_predictions import conditioning_of, rows, steps_of

from simpletuner.errors import SettingsError
from simpletuner.models.family.base import family_class
from simpletuner.settings.declared.sections import Data, Model, Settings


def test_a_denoiser_sees_what_the_pipeline_shows_it_and_the_other_one_guides(pipelines):
    family = opened("ideogram4", pipelines("ideogram4"))
    pipeline, text = diffusers_pipeline(family), family.text_encoder(CPU, torch.float32).encode([PROMPT])
    length = text["prompt_embeds"].shape[1]
    arguments = family.pipeline_kwargs({}, {}, sampling(1.0)) | {"max_sequence_length": length}
    theirs = recorded_call(pipeline.transformer, lambda: pipeline(prompt=PROMPT, **arguments), 2)
    latents = family.unpack_latents(theirs["hidden_states"][:, length:], SHAPE.in_cells(family.cell))
    ours = recorded_call(
        pipeline.transformer,
        lambda: family.predict(
            pipeline.transformer, latents, 1 - theirs["timestep"], conditioning_of(family, rows(text))
        ),
    )
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        same(ours[name], value, name)

    time, noisy, guided = steps_of(family, diffusers_pipeline(family), guidance=4.0)[1]
    with torch.no_grad():
        with_text = family.predict(pipeline.transformer, noisy, time, conditioning_of(family, rows(text)))
        none = conditioning_of(family, [{name: each[0, :0] for name, each in text.items()}])
        without = family.predict(pipeline.unconditional_transformer, noisy, time, none)
    torch.testing.assert_close(without + 4.0 * (with_text - without), guided, atol=1e-5, rtol=1e-4)


def test_a_caption_that_is_too_long_is_named_with_the_setting(pipelines):
    settings = Settings(model=Model(model_family="ideogram4"), data=Data(tokenizer_max_length=8))
    family = family_class(settings.model).open(pipelines("ideogram4"), settings)
    with pytest.raises(SettingsError, match="a caption of 120 characters.*max_sequence_length=8") as caught:
        family.text_encoder(CPU, torch.float32).encode(["a red circle" * 10])
    assert "tokenizer_max_length" in str(caught.value.hint)
