"""The published checkpoints draw with other schedulers than the miniatures do; each states betas and target its way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from simpletuner.models.family.base import ModelFamily, family_class
from simpletuner.models.family.objectives import Diffusion
from simpletuner.models.family.sampling import SamplingParams
from simpletuner.settings.declared.sections import Model, Settings
from simpletuner.settings.values.shape import Shape

PUBLISHED = [
    ("sd1x", {"_class_name": "PNDMScheduler", "skip_prk_steps": True, "set_alpha_to_one": False}),
    ("sd1x", {"_class_name": "DEISMultistepScheduler", "solver_order": 2}),
    ("sd2x", {"_class_name": "DDIMScheduler", "clip_sample": False, "set_alpha_to_one": False}),
    ("sd2x", {"_class_name": "DDIMScheduler", "clip_sample": False, "rescale_betas_zero_snr": True}),
]


def with_scheduler(folder: Path, target: Path, changes: dict[str, Any]) -> Path:
    """Copy a pipeline and exchange its scheduler's config, as far as it is mentioned."""
    shutil.copytree(folder, target)
    path = target / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    index = json.loads((target / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", changes["_class_name"]]
    (target / "model_index.json").write_text(json.dumps(index))
    return target


def opened(key: str, folder: Path) -> ModelFamily:
    model = Model(model_family=key)
    return family_class(model).open(folder, Settings(model=model))


@pytest.mark.parametrize(("key", "changes"), PUBLISHED)
def test_the_objective_is_that_of_the_published_scheduler(key, changes, pipelines, tmp_path):
    family = opened(key, with_scheduler(pipelines(key), tmp_path / key, changes))
    scheduler, objective = family.load_pipeline(vae=None).scheduler, family.objective()
    assert isinstance(objective, Diffusion)
    assert type(scheduler).__name__ == changes["_class_name"]
    assert objective.prediction == {"sd1x": "epsilon", "sd2x": "v_prediction"}[key]
    torch.testing.assert_close(objective.alphas_cumprod, scheduler.alphas_cumprod)
    assert (float(objective.alphas_cumprod[-1]) == 0) == changes.get("rescale_betas_zero_snr", False)


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context:DeprecationWarning")  # diffusers' DEIS
@pytest.mark.parametrize(("key", "changes"), PUBLISHED)
def test_the_published_scheduler_draws_as_in_diffusers(key, changes, pipelines, tmp_path):
    from diffusers import DiffusionPipeline

    folder = with_scheduler(pipelines(key), tmp_path / key, changes)
    family, cpu = opened(key, folder), torch.device("cpu")
    sampling = SamplingParams(Shape(1, height=64, width=96), 4, 4.0, seed=7)
    theirs = DiffusionPipeline.from_pretrained(folder)
    theirs.set_progress_bar_config(disable=True)
    encoder = family.text_encoder(cpu, torch.float32)
    positive, negative = encoder.encode(["a red circle"]), encoder.encode([""])
    ours = family.sample(theirs.unet, family.vae(cpu), sampling, positive, negative)
    torch.testing.assert_close(ours, theirs("a red circle", **sampling.kwargs())[0], atol=1e-4, rtol=1e-4)
