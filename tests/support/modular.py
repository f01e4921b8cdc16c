"""Tiny modular pipelines of diffusers, built without a hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from simpletuner.models.catalog.registry import presets
from simpletuner.models.tiny.build import assemble, build_component, build_preset, fixed_seed, save

TINY: dict[str, dict[str, Any]] = {
    "MiniMaxH3ModularPipeline": {
        "text_encoder": {"encoder": "qwen3_vl_causal", "num_hidden_layers": 51, "hidden_size": 16},  # it reads layer 50
        "vae": {
            "class_name": "AutoencoderKLMiniMaxH3",
            "latent_channels": 4,
            "block_out_channels": [8, 8, 8, 8],
            "layers_per_block": 1,
            "spatial_downsample_factors": [2, 2, 1, 1],
            "temporal_downsample_factors": [1, 2, 2, 1],
            "norm_num_groups": 4,
            "decoder_num_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_attention_head_dim": 16,
            "latents_mean": [0.0] * 4,
            "latents_std": [1.0] * 4,
        },
        "audio_vae": {
            "class_name": "AutoencoderKLMiniMaxH3Audio",
            "encoder_dim": 8,
            "latent_dim": 32,
            "latent_channels": 4,
            "num_attention_heads": 2,
            "decoder_dim": 128,
        },
        "transformer": {
            "class_name": "MiniMaxH3Transformer3DModel",
            "num_attention_heads": 2,
            "attention_head_dim": 32,
            "hidden_size": 64,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "ffn_dim": 64,
            "in_channels": 4,
            "audio_in_channels": 4,
            "text_dim": 16,
            "freq_dim": 32,
            "time_embed_hidden_dim": 32,
            "time_embed_dim": 32,
            "rope_freq_dim": 4,
        },
        "scheduler": {"class_name": "MiniMaxH3Scheduler"},
        "audio_scheduler": {"class_name": "MiniMaxH3Scheduler"},
    },
}
TRAINED = ("AnimaModularPipeline", "Flux3ModularPipeline")


def build_modular(name: str, folder: Path) -> Path:
    """Write a tiny modular pipeline by diffusers' own save_pretrained."""
    import diffusers

    if name not in TINY:
        [tiny] = (each.tiny for each in presets().values() if name in each.pipelines and each.tiny)
        save(build_preset(tiny), folder)
        return folder
    with fixed_seed():
        components: dict[str, Any] = {}
        for part, entry in TINY[name].items():
            components |= build_component(part, {**entry})
        save(assemble(getattr(diffusers, name), components, {}), folder)
    return folder


def as_modular(folder: Path, target: Path, cls: str, **changes: Any) -> Path:
    """Copy a plain pipeline's folder, with the index of a modular one whose components are its publisher's."""
    shutil.copytree(folder, target)
    plain = json.loads((target / "model_index.json").read_text())
    (target / "model_index.json").unlink()
    index: dict[str, Any] = {"_class_name": cls}
    for name, value in plain.items():
        if isinstance(value, list) and not any(value):
            continue
        if isinstance(value, list):
            source = {"pretrained_model_name_or_path": "publisher/model", "subfolder": name, "type_hint": value}
            index[name] = [*value, source]
        elif not name.startswith("_"):
            index[name] = value
    (target / "modular_model_index.json").write_text(json.dumps(index | changes))
    return target
