"""Space of a run's folder against what it has yet to write there, on file systems of known sizes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from simpletuner.checkpoints.disk_usage import DiskUsage, bytes_to_write, room_of
from simpletuner.settings.declared.sections import Checkpoints, Settings, Training, Validation

MB = 1_000_000
USAGE = DiskUsage(1, "counted", 6, 10 * MB, 2, 4 * MB)


def settings_in(folder: Path, limit: int = 5, interval: int = 100, eval_split: float = 0.0, **more: object) -> Settings:
    checkpoints = Checkpoints(checkpoints_total_limit=limit, checkpoint_step_interval=interval, **more)
    validation = Validation(eval_split=eval_split, eval_step_interval=50)
    return Settings(training=Training(output_dir=folder / "run"), checkpoints=checkpoints, validation=validation)


@pytest.mark.parametrize(
    ("present", "step", "steps", "limit", "more", "wanted"),
    [
        ((), 0, 1000, 5, {}, 60),  # five, and the one being written
        ((), 0, 250, 5, {}, 38),  # 100, 200, 250, then two pipelines
        ((), 0, 100, 1, {}, 18),
        ((), 0, 1000, 1, {}, 20),
        ((), 0, 100, 1, {"export_single_file": True}, 26),
        ((), 0, None, 5, {}, 60),
        ((100, 200), 200, 1000, 5, {}, 40),
        ((100, 200, 300, 400, 500), 500, 1000, 5, {}, 10),
        ((500,), 500, 600, 5, {}, 18),  # the others were moved away, and one is to come
        ((), 0, 250, 5, {"export_best": True}, 58),  # one each 50 steps, five in all
        ((1000,), 1000, 1000, 5, {}, 8),  # only exported again
        ((100, 200, 300), 100, 1000, 5, {}, 50),  # later ones are set aside and stay
    ],
)
def test_what_is_to_come_is_counted_beside_what_is_there(present, step, steps, limit, more, wanted, tmp_path):
    for each in present:
        (tmp_path / "run" / "checkpoints" / f"checkpoint-{each:06d}").mkdir(parents=True)
    assert bytes_to_write(settings_in(tmp_path, limit, **more), USAGE, limit, step, steps) == wanted * MB


def test_what_does_not_fit_is_said_with_the_limit_that_does(tmpfs):
    folder = tmpfs("size=48m")  # 50.3 MB
    room = room_of(settings_in(folder), USAGE, 0, 1000)
    assert room.problem is not None and room.fitting_limit == 4, "5 of 10 MB fit, and 4 with two pipelines"
    assert f"{folder / 'run'} has 50.3 MB free, and this run has yet to write 60.0 MB there" in room.problem.message
    assert "6 x 10.0 MB of checkpoints, 2 x 4.0 MB exported" in room.problem.message
    assert "--checkpoints_total_limit=4 fits" in room.problem.hint
    with (folder / "file").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 35 * MB)
    best = room_of(settings_in(folder, eval_split=0.1), USAGE, 0, 1000)
    assert (best.need_bytes, best.fitting_limit) == (70 * MB, 0), "one more is kept"
    problem = room_of(settings_in(folder), USAGE, 0, 1000).problem
    assert problem is not None and problem.hint == "make room, or give another output_dir"
    assert room_of(settings_in(folder, 4), DiskUsage(1, "", 5, 2 * MB, 1, 2 * MB), 0, 1000).problem is None
