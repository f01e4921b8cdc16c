"""Build the pipeline of a family's flavour `tiny`.

Every width divides by 4, so that the models shard over 4 ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from simpletuner.errors import SettingsError
from simpletuner.models.diffusers_io import choose_accelerator
from simpletuner.models.family import ModelFamily
from simpletuner.models.registry import import_object

SEED = 0


def build_tiny(family: type[ModelFamily], folder: Path) -> None:
    """Write a family's tiny pipeline, with the same weights each time. Raises SettingsError if it has none."""
    if not family.tiny_pipeline:
        raise SettingsError("this model_family has no flavour `tiny`", "set --pretrained_model_name_or_path")
    choose_accelerator()
    build = import_object(
        family.tiny_pipeline, f"{family.__name__}.tiny_pipeline = {family.tiny_pipeline}", "package.module:function"
    )
    with fixed_seed():
        pipeline = build()
    pipeline.save_pretrained(folder)


@contextmanager
def fixed_seed() -> Iterator[None]:
    """Seed torch's random numbers within the block; those of the caller go on as if it were not there."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        yield
