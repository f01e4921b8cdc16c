"""Every family trains, plain and sharded alike, resumes, samples, and leaves a pipeline that diffusers opens.

Nothing here names a family: a new preset is tested by being there.
"""

from __future__ import annotations

import re

import pytest
from conftest import base
from PIL import Image

from simpletuner.models.catalog.registry import presets

BY_CLASS = [key for key, preset in presets().items() if preset.has_class]


@pytest.mark.parametrize("key", BY_CLASS)
def test_a_family_trains_shards_resumes_draws_and_exports(key, pipelines, few_shapes, train, tmp_path):
    flags = (
        *base(key, pipelines(key), few_shapes),
        "--aspect_bucket_alignment=32",  # no family wants more
        f"--cache_dir_vae={tmp_path / 'latents'}",
        f"--cache_dir_text={tmp_path / 'text'}",
    )
    drawn = ("--validation_prompt=a red circle", "--validation_num_inference_steps=2", "--validation_resolution=64")
    plain = train(tmp_path / "plain", *flags, *drawn, "--train_batch_size=2", "--max_train_steps=2")
    assert len(plain.losses) == 2
    sharded = (*flags, "--train_batch_size=1", "--fsdp_enable")
    train(tmp_path / "sharded", *sharded, "--max_train_steps=1", world=2)
    sharded = train(tmp_path / "sharded", *sharded, *drawn, "--max_train_steps=2", world=2)
    assert "resuming from" in sharded.said
    unfolded = " ".join(sharded.said.split())
    assert re.search(r"wrapping \w+ x \d+.*% of the weights, recommended", unfolded)
    assert sharded.losses == pytest.approx(plain.losses, rel=1e-5)
    for run in (plain, sharded):
        with Image.open(run.output / "validation" / "grid-000002.png") as grid:
            colours = grid.convert("RGB").getcolors(1 << 20)
            assert colours is not None and len(colours) > 16
    assert opened_by_diffusers(plain.output / "pipeline") == opened_by_diffusers(pipelines(key))


def opened_by_diffusers(folder) -> dict[str, int]:
    """Return the parameters of each component of a pipeline."""
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(folder)
    parts = {name: part for name, part in pipeline.components.items() if hasattr(part, "num_parameters")}
    assert len(parts) >= 3
    return {name: part.num_parameters() for name, part in parts.items()}
