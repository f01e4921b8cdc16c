"""Published pipelines without their weights: the configs that a family reads, from the presets."""

from __future__ import annotations

import json
from pathlib import Path

from simpletuner.models.catalog.preset import Architecture
from simpletuner.models.catalog.registry import flavour_of, preset_of
from simpletuner.models.family.base import ModelFamily, family_class
from simpletuner.models.folder.diffusers_io import build_on_meta
from simpletuner.settings.declared.sections import Settings


def open_without_weights(architecture: Architecture, settings: Settings, folder: Path) -> ModelFamily:
    """Write the configs of a denoiser as published into an empty folder, and open it as a family.

    Nothing that needs weights works: no encoders, no VAE, no denoiser off the meta device.
    """
    cls, preset = family_class(settings.model), preset_of(settings.model)
    flavour = flavour_of(settings.model)
    name = (flavour.denoiser if flavour else "") or cls.denoiser_name
    denoiser = build_on_meta({**architecture.config, "_class_name": architecture.class_name}, include_buffers=True)
    files = {
        "model_index.json": {
            "_class_name": cls.pipelines[0],
            cls.denoiser_name: ["diffusers", architecture.class_name],
            **(flavour.index if flavour else {}),
        },
        f"{name}/config.json": json.loads(denoiser.to_json_string()),
        "vae/config.json": {
            "spatial_compression_ratio": architecture.cell_px or (preset.cell_px if preset else 8),
            "temporal_compression_ratio": (preset.frame_step if preset else 0) or 1,
        },
        "scheduler/scheduler_config.json": {},
    }
    for path, content in files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(json.dumps(content), encoding="utf-8")
    return cls.open(folder, settings)
