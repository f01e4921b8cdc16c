from __future__ import annotations

import pytest
import torch
from models.test_inputs import CPU, opened

from simpletuner.errors import SettingsError
from simpletuner.models.families.stable_diffusion import SD1
from simpletuner.settings.declared.sections import Model, Settings


@pytest.mark.parametrize("key", ["sana", "lumina2"])
def test_the_empty_caption_is_what_the_pipeline_takes_for_none_wherever_it_stands_in_a_batch(key, pipelines):
    family = opened(key, pipelines(key))
    encoder = family.text_encoder(CPU, torch.float32)
    with torch.no_grad():
        _, _, negative, negative_mask = encoder.pipeline.encode_prompt("")
    instructed, blank = encoder.encode(["a red circle"]), encoder.encode([" "])
    assert not torch.allclose(blank["prompt_embeds"], negative, atol=0.1), "an instruction stands before any caption"
    together = encoder.encode(["", "a red circle", ""])
    for place in (0, 2):
        torch.testing.assert_close(together["prompt_embeds"][place], negative[0])
        assert torch.equal(together["prompt_attention_mask"][place], negative_mask[0])
    torch.testing.assert_close(together["prompt_embeds"][1], instructed["prompt_embeds"][0])
    assert torch.equal(together["prompt_attention_mask"][1], instructed["prompt_attention_mask"][0])


def test_a_family_that_returns_no_prompt_embeds_is_refused_with_what_it_returns(pipelines):
    class Own(SD1):
        def encode_prompts(self, pipeline, captions):
            return {"text": super().encode_prompts(pipeline, captions)["prompt_embeds"]}

    encoder = Own(pipelines("sd1x"), Settings(model=Model(model_family="sd1x"))).text_encoder(CPU, torch.float32)
    with pytest.raises(SettingsError, match="^Own.encode_prompts returns text, but no prompt_embeds$"):
        encoder.encode(["a red circle"])
