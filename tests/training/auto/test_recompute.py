"""What gradient_checkpointing=auto recomputes, by the memory that there is."""

from __future__ import annotations

import math

from simpletuner.report import Report
from simpletuner.settings import load
from simpletuner.settings.values.shape import Shape
from simpletuner.tools.plan.inputs import opened_family
from simpletuner.training.auto.memory_estimate import estimate_training
from simpletuner.training.auto.recompute import USABLE, choices, choose_recomputation, with_training
from simpletuner.training.auto.workload import Workload


def test_buffers_are_a_row_of_their_own():
    flags = {"model_family": "pixart_sigma", "model_flavour": "tiny", "mixed_precision": "no", "use_cpu": True}
    settings = load(flags, None, complete=False).settings
    with opened_family(settings, Report(quiet=True)) as family:
        rows = {row.name: row.gpu for row in estimate_training(settings, Workload(family, Shape(1, 64, 64))).rows}
        table = family.denoiser(include_buffers=True).pos_embed.pos_embed
    assert rows["buffers"] == table.numel() * table.element_size() > 0


def test_as_little_is_recomputed_as_fits():
    flags = {
        "model_family": "flux",
        "model_flavour": "tiny",
        "gradient_checkpointing": "auto",
        "use_cpu": True,
        "mixed_precision": "no",
    }
    for compiler, count in (("no", 2), ("inductor", 5)):
        settings = load({**flags, "dynamo_backend": compiler}, None, complete=False).settings
        assert settings.training.gradient_checkpointing is None
        with opened_family(settings, Report(quiet=True)) as family:
            workload = Workload(family, Shape(1, 256, 256))
            offered = list(choices(settings))
            needed = [estimate_training(with_training(settings, each), workload) for each in offered]
            sizes = [each.gpu_bytes + each.host_bytes for each in needed]
            assert len(offered) == count and sizes == sorted(sizes, reverse=True) and len(set(sizes)) == count
            for chosen, size in zip(offered, sizes, strict=True):
                assert choose_recomputation(settings, workload, size / USABLE + 1) == (chosen, size)
            assert choose_recomputation(settings, workload, math.inf)[0] == offered[0]
            assert choose_recomputation(settings, workload, 0)[0] == offered[-1], "the least, even if it is too much"
            kept = workload.trace(
                with_training(settings, offered[0]), settings.training.train_batch_size, False
            ).kept_bytes
            assert 0.5 * kept < sizes[0] - sizes[-1] < kept, "one block's activations come back while it is recomputed"
