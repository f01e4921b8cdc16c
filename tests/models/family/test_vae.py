from __future__ import annotations

import json

import pytest
import torch
from diffusers import AsymmetricAutoencoderKL

from simpletuner.caches.latents import latents_dtype
from simpletuner.errors import SettingsError
from simpletuner.models.family.vae import Vae
from simpletuner.settings.declared.sections import Data, Model, Settings

CPU = torch.device("cpu")


def test_tiles_and_slices_take_their_part_of_the_image_at_once(sdxl):
    edge = 2 * json.loads((sdxl / "vae" / "config.json").read_text())["sample_size"]
    pixels = torch.rand(2, 3, edge, edge, generator=torch.Generator().manual_seed(0)) * 2 - 1
    encoded, decoded, largest = {}, {}, {}
    for name in ("whole", "vae_enable_tiling", "vae_enable_slicing"):
        vae = Vae(sdxl / "vae", CPU, Model(**({} if name == "whole" else {name: True})))
        sizes: list[int] = []
        for part in (vae.model.encoder, vae.model.decoder):
            part.register_forward_pre_hook(lambda _, inputs, seen=sizes: seen.append(inputs[0].numel()))
        encoded[name] = vae.encode(pixels)
        decoded[name] = vae.decode(encoded["whole"])
        largest[name] = max(sizes)
    assert largest["vae_enable_tiling"] == largest["whole"] / 4
    assert largest["vae_enable_slicing"] == largest["whole"] / 2
    torch.testing.assert_close(encoded["vae_enable_slicing"], encoded["whole"])
    torch.testing.assert_close(decoded["vae_enable_slicing"], decoded["whole"])
    # Tiles do not see one another, so latents differ, most at their edges; they are other records of the cache.
    assert encoded["vae_enable_tiling"].shape == encoded["whole"].shape
    assert 0 < (encoded["vae_enable_tiling"] - encoded["whole"]).norm() / encoded["whole"].norm() < 0.2
    assert decoded["vae_enable_tiling"].shape == pixels.shape


def test_latents_of_tiles_are_other_records():
    stored = Data(vae_cache_dtype="bf16")
    assert latents_dtype(Settings(data=stored)) == "fp32, stored in bf16"
    assert latents_dtype(Settings(model=Model(vae_enable_tiling=True), data=stored)) == "fp32, stored in bf16, tiled"


def test_a_vae_without_tiles_is_refused(tmp_path):
    AsymmetricAutoencoderKL(
        down_block_out_channels=(8,), up_block_out_channels=(8,), norm_num_groups=4
    ).save_pretrained(tmp_path)
    with pytest.raises(SettingsError) as caught:
        Vae(tmp_path, CPU, Model(vae_enable_tiling=True))
    assert caught.value.message == "vae_enable_tiling: AsymmetricAutoencoderKL has no tiling"
