"""Sets of weights that a round samples with: equal ones once, those of the base model once per run."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import HashStore

from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.world import World
from simpletuner.training.validation.validator import Validator


@pytest.mark.parametrize(
    ("variants", "starts_as_base", "at_start"),
    [
        ("base trained ema", True, [["base", "trained", "ema"]]),
        ("base trained ema", False, [["base"], ["trained", "ema"]]),  # lora_init
        ("trained ema", True, [["trained", "ema"]]),
        ("trained", True, [["trained"]]),
    ],
)
def test_equal_weights_are_sampled_once_before_the_first_step(variants, starts_as_base, at_start, tmp_path):
    variants, mesh = tuple(variants.split()), Mesh(World(0, 1, 0, torch.device("cpu"), HashStore()))
    nothing = dict.fromkeys(("family", "engine", "vae", "ema", "metrics"))
    more = {"images": [], "dtype": torch.float32, "folder": tmp_path / "validation", "interval": 1, "base": "a model"}
    validator = Validator(mesh=mesh, variants=variants, starts_as_base=starts_as_base, **nothing, **more)
    assert validator._to_sample(0) == at_start
    assert validator._to_sample(5) == [[each] for each in variants]
    (tmp_path / "validation" / "step-000000").mkdir(parents=True)  # which lacks none of no images
    assert validator._to_sample(5) == [[each] for each in variants if each != "base"]
