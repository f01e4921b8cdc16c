"""The length of a run, and how far its schedule is, when epochs or the batch change at a resume."""

from __future__ import annotations

from itertools import islice

import pytest
from buckets import sampler_of

from simpletuner.checkpoints.layout import Checkpoint
from simpletuner.report import Report
from simpletuner.settings.declared.sections import Optimizer, Settings, Training
from simpletuner.training.optimizers import Schedule, new_schedule, resumed_schedule
from simpletuner.training.run_folder.resuming import warn_of_other_rate

SAMPLER = sampler_of({"a": range(40)}, 0)


def settings_of(epochs: int, batch_size: int = 4) -> Settings:
    training = Training(num_train_epochs=epochs, train_batch_size=batch_size)
    return Settings(training=training, optimizer=Optimizer(lr_warmup_steps=2))


def resumed(epochs: int, batch_size: int = 4) -> Schedule:
    """Resume after 6 of 20 steps, which are two epochs of 10 steps."""
    begun = new_schedule(settings_of(2), SAMPLER)
    assert begun == Schedule(20, 2)
    *_, (_, sixth) = islice(SAMPLER.batches(SAMPLER.start(4)), 6)
    position = SAMPLER.with_batch_size(sixth, batch_size)
    return resumed_schedule(settings_of(epochs, batch_size), SAMPLER, {"step": 6, **begun.as_json()}, position)


def test_what_is_resumed_as_it_began_has_the_same_schedule():
    assert resumed(2) == Schedule(20, 2)


def test_another_number_of_epochs_stretches_the_schedule_over_all_of_them():
    assert resumed(4) == Schedule(40, 4)
    assert resumed(4).progress(6, 2) == (6 - 2) / (40 - 2)


def test_with_another_batch_progress_goes_on_from_where_it_was_to_its_end_in_even_steps():
    schedule = resumed(2, batch_size=8)
    assert (schedule.max_steps, schedule.start_step) == (13, 6)  # 16 + 40 images in batches of 8
    values = [schedule.progress(step, 2) for step in range(6, 14)]
    assert values == pytest.approx([(6 - 2) / 18 + (14 / 18) * done / 7 for done in range(8)])
    assert schedule.progress(99, 2) == 1


def test_during_warm_up_nothing_is_done():
    assert [Schedule(20).progress(step, 8) for step in (0, 7, 8, 14, 20, 30)] == [0, 0, 0, 0.5, 1, 1]


def test_a_run_that_resumes_within_its_warm_up_finishes_it():
    schedule = Schedule(20, start_step=2)
    assert [schedule.progress(step, 8) for step in (2, 5, 8, 14)] == [0, 0, 0, 0.5]


@pytest.mark.parametrize(
    ("scheduler", "step", "steps", "said"),
    [
        (
            "cosine",
            4,
            6,
            "jumps from 0.000146 to 0.00025 after step 4: lr_scheduler=cosine was to end at step 4, and now ends",
        ),
        ("linear", 2, 8, "jumps from 0.0005 to 0.00075 after step 2"),
        ("linear", 2, 3, "jumps from 0.0005 to 0.000333 after step 2"),
        ("constant", 4, 6, ""),
        ("cosine", 2, 4, ""),
    ],
)
def test_a_rate_that_jumps_since_the_schedule_has_another_length_is_named(
    scheduler, step, steps, said, tmp_path, capsys
):
    """P19: of 4 steps that went on to 6, the table of changes named max_train_steps alone."""
    optimizer = Optimizer(lr_scheduler=scheduler, learning_rate=1e-3)
    checkpoint = Checkpoint(tmp_path, {"step": step, **Schedule(4).as_json()})
    warn_of_other_rate(Report(), Settings(optimizer=optimizer), Schedule(steps), checkpoint)
    found = " ".join(capsys.readouterr().err.split())
    assert said in found and bool(said) == bool(found)
