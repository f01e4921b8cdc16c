from __future__ import annotations

import pytest
import torch
from models.test_inputs import CPU, diffusers_pipeline, opened

from simpletuner.errors import DataError


def test_latents_beyond_the_learned_positions_are_refused_and_those_at_their_edge_are_not(pipelines):
    family = opened("auraflow", pipelines("auraflow"))
    transformer = diffusers_pipeline(family).transformer
    text = family.text_encoder(CPU, torch.float32).encode(["a red circle"])
    assert family.config["pos_embed_max_size"] == 32 * 32

    def answered(height: int, width: int) -> torch.Size:
        with torch.no_grad():
            return family.predict(transformer, torch.zeros(1, 4, height, width), torch.tensor([0.5]), text).shape

    assert answered(64, 8) == (1, 4, 64, 8)
    for height, width in ((66, 8), (8, 66)):
        with pytest.raises(DataError, match=f"latents of {width} x {height} are beyond the 64 x 64"):
            answered(height, width)


def test_the_mask_has_one_number_for_a_token_and_padded_text_is_zero(pipelines):
    family = opened("auraflow", pipelines("auraflow"))
    encoded = family.text_encoder(CPU, torch.float32).encode(["a red circle", ""])
    embeds, mask = encoded["prompt_embeds"], encoded["prompt_attention_mask"]
    assert mask.shape == embeds.shape[:2]
    assert mask.sum(1).tolist() == [4, 1]
    assert (embeds.abs().amax(-1) > 0).equal(mask.bool())
