"""What gradient_checkpointing=auto recomputes, by the memory that there is."""

from __future__ import annotations

import math
from typing import Any

import pytest

from simpletuner.counting.step_memory import Workload, estimate_training, estimate_without_step
from simpletuner.report import Report
from simpletuner.settings import Settings, load
from simpletuner.settings.values.shape import SampleShape, Shape
from simpletuner.system.numbers import format_gib
from simpletuner.tools.plan.estimate import opened_family
from simpletuner.training.auto import KEPT, NOTES, RECOMPUTED, USABLE, counted_before, with_training
from simpletuner.training.recomputation import choose_recomputation, needed_bytes


def test_buffers_are_a_row_of_their_own():
    flags = {"model_family": "pixart_sigma", "model_flavour": "tiny", "mixed_precision": "no", "use_cpu": True}
    settings = load(flags, None, complete=False).settings
    with opened_family(settings, Report(quiet=True)) as family:
        rows = {
            row.name: row.gpu
            for row in estimate_training(settings, Workload(family, SampleShape(Shape(1, 64, 64)))).rows
        }
        table = family.denoiser(include_buffers=True).pos_embed.pos_embed
    assert rows["buffers"] == table.numel() * table.element_size() > 0


def test_weights_that_no_prediction_depends_on_have_no_gradients(pipelines):
    flags = {"model_family": "ltxvideo2", "mixed_precision": "no", "use_cpu": True, "train_batch_size": 1}
    settings = load(
        flags | {"pretrained_model_name_or_path": str(pipelines("ltxvideo2"))}, None, complete=False
    ).settings
    with opened_family(settings, Report(quiet=True)) as family:
        estimate = estimate_training(settings, Workload(family, SampleShape(Shape(1, 64, 64))))
        sizes = {each.requires_grad: 0 for each in family.meta_denoiser.parameters()}
        for each in family.meta_denoiser.parameters():
            sizes[each.requires_grad] += each.numel()
    rows = {row.name: row for row in estimate.rows}
    assert estimate.inputs.unused_parameters == sizes[False] > 0.1 * sizes[True]
    assert rows["gradients"].gpu <= 4 * sizes[True] and rows["weights"].gpu == 4 * sum(sizes.values())
    assert f"; {format_gib(4 * sizes[True])} at its end" in rows["gradients"].formula


def test_as_little_is_recomputed_as_fits():
    flags = {
        "model_family": "flux",
        "model_flavour": "tiny",
        "gradient_checkpointing": "auto",
        "use_cpu": True,
        "mixed_precision": "no",
    }
    for compiler in ("no", "inductor"):
        settings = load({**flags, "dynamo_backend": compiler}, None, complete=False).settings
        assert settings.training.gradient_checkpointing is None
        with opened_family(settings, Report(quiet=True)) as family:
            workload = Workload(family, SampleShape(Shape(1, 256, 256)))

            def choose(limit: float, settings=settings, workload=workload) -> tuple[dict[str, Any], int]:
                return choose_recomputation(settings, workload, limit / USABLE)

            ends = {id(each): needed_bytes(with_training(settings, each), workload) for each in (KEPT, RECOMPUTED)}
            least, most = ends[id(RECOMPUTED)], ends[id(KEPT)]
            assert choose(math.inf) == choose(most + 1) == (KEPT, most)
            assert choose(0) == (RECOMPUTED, least), "the least, even if it is too much"
            budgets = []
            for limit in range(most - 1, least, (least - most) // 8):
                chosen, needed = choose(limit)
                budgets.append(chosen.get("activation_memory_budget", 0.0))
                taken = needed_bytes(with_training(settings, chosen), workload)
                assert least <= taken <= needed <= limit, "no more is kept than fits, and no more than is said"
            assert budgets == sorted(budgets, reverse=True) and len({*budgets}) > 2 and budgets[0] > 0.9
            kept = workload.trace(with_training(settings, KEPT), settings.training.train_batch_size, False).kept_bytes
            assert 0.5 * kept < most - least < kept, "one block's activations come back while it is recomputed"


def test_bytes_that_an_earlier_start_has_counted_are_not_counted_again(tmp_path, monkeypatch):
    monkeypatch.setenv("SIMPLETUNER_HOME", str(tmp_path / "home"))
    flags = {"model_family": "pixart_sigma", "model_flavour": "tiny", "use_cpu": True, "output_dir": tmp_path}
    settings = load(flags, None, complete=False).settings
    longer = load(
        {**flags, "max_train_steps": 7, "learning_rate": 1e-3, "output_dir": tmp_path / "next"}, None, complete=False
    ).settings
    other = load({**flags, "train_batch_size": 1}, None, complete=False).settings
    with opened_family(settings, Report(quiet=True)) as family:

        def start(settings: Settings, limit: float = math.inf) -> tuple[Any, int, bool]:
            workload = Workload(family, SampleShape(Shape(1, 64, 64)))
            with counted_before(family, settings, workload.largest) as counted:
                chosen, needed = choose_recomputation(settings, workload, limit, counted)
            return chosen, needed, bool(workload.traces)

        chosen, needed, was_counted = start(settings)
        assert was_counted and chosen == {"gradient_checkpointing": False}
        assert start(longer) == (chosen, needed, False)
        assert start(longer, limit=0)[0] == {"gradient_checkpointing": True}, "the limit is today's"
        assert start(other)[1:] == (pytest.approx(needed, rel=0.9), True) and not start(settings)[2]
        (note,) = [each for each in (tmp_path / "home" / NOTES).iterdir() if str(needed) in each.read_text()]
        for damaged in ("", "[]", '{"bytes": 3}', note.read_text().replace(str(needed), '"a"')):
            note.write_text(damaged)
            assert start(settings) == (chosen, needed, True)


def test_what_does_not_fit_without_activations_is_traced_in_no_other_way(tmp_path, monkeypatch):
    monkeypatch.setenv("SIMPLETUNER_HOME", str(tmp_path / "home"))
    settings = load({"model_family": "pixart_sigma", "model_flavour": "tiny", "use_cpu": True}, None, complete=False)
    with opened_family(settings.settings, Report(quiet=True)) as family:
        workload = Workload(family, SampleShape(Shape(1, 64, 64)))
        least = estimate_without_step(settings.settings, workload)
        floor = (least.gpu_bytes + least.host_bytes) / USABLE
        assert choose_recomputation(settings.settings, workload, floor - 1)[0] == {"gradient_checkpointing": True}
        assert len(workload.traces) == 1
        choose_recomputation(settings.settings, workload, floor + 1)
        assert len(workload.traces) == 3
