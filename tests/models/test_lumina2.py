from __future__ import annotations

import pytest
from models.test_inputs import CPU, opened
from torch import float32

from simpletuner.errors import SettingsError
from simpletuner.models.family.base import ModelFamily, family_class
from simpletuner.settings.declared.sections import Data, Model, Settings


def test_captions_longer_than_the_positions_for_them_are_refused_before_they_are_read(pipelines):
    usual = opened("lumina2", pipelines("lumina2"))
    assert usual.config["axes_lens"][0] == 300

    def of_length(tokens: int) -> ModelFamily:
        settings = Settings(model=Model(model_family="lumina2"), data=Data(tokenizer_max_length=tokens))
        return family_class(settings.model).open(usual.folder, settings)

    assert of_length(299).text_encoder(CPU, float32).encode(["a"])["prompt_embeds"].shape[1] == 299
    with pytest.raises(SettingsError, match="tokenizer_max_length is 300, but this model has positions for 299 tokens"):
        of_length(300).text_encoder(CPU, float32).encode(["a"])
