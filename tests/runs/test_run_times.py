"""When a run was trained, how long and with how much energy, from what several starts have left."""

from __future__ import annotations

import json

import pytest

from simpletuner.runs.facts import describe_energy, describe_times, read_starts
from simpletuner.runs.metrics import MetricColumns

STARTS = [
    {"time": "2026-01-01T00:00:00+00:00", "step": 0, "gpus": 8, "gpu_watts": 400.0},
    {"time": "2026-01-02T10:00:00+02:00", "step": 0, "gpus": 1, "gpu_watts": 700.0},
    {"time": "2026-01-03T10:00:00+00:00", "step": 6, "gpus": 2, "gpu_watts": 300.0},
    {"time": "2026-01-04T10:00:00+00:00", "step": 4, "gpus": 2, "gpu_watts": 300.0},
]


def columns_of(folder, steps: int) -> MetricColumns:
    rows = [{"step": step, "loss": 1.0, "seconds": 3600.0} for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return MetricColumns(folder / "metrics.jsonl").update()


def write_starts(folder, starts) -> None:
    lines = [json.dumps(start) for start in starts]
    (folder / "settings_history.jsonl").write_text("\n".join([*lines, '{"torn": ', "[]", '{"time": 3}']))


def test_time_and_energy_are_those_of_the_starts_whose_steps_are_left(tmp_path):
    write_starts(tmp_path, STARTS)
    starts, columns = read_starts(tmp_path), columns_of(tmp_path, 10)
    assert [start.step for start in starts] == [0, 6, 4], "what began again in the same folder is another run"
    assert describe_times(starts, columns) == [
        ("started", "2026-01-02 08:00 UTC; 3 starts, the last 2026-01-04 10:00 UTC"),
        ("trained for", "10:00:00 in 10 steps"),
    ]
    # 4 h x 700 W, and from step 4 on 6 h x 2 x 300 W
    assert describe_energy(starts, columns).startswith("at most 6.4 kWh (estimate: ")
    assert "1 GPU of 700 W and 2 GPUs of 300 W" in describe_energy(starts, columns)


@pytest.mark.parametrize("lacking", [{"gpu_watts": 0.0}, {"gpus": 0}])
def test_nothing_is_estimated_where_a_limit_is_not_known(lacking, tmp_path):
    write_starts(tmp_path, [*STARTS[1:2], {**STARTS[2], **lacking}])
    assert describe_energy(read_starts(tmp_path), columns_of(tmp_path, 10)).startswith("not estimated")
    assert describe_energy(read_starts(tmp_path), columns_of(tmp_path, 6)).startswith("at most 4.2 kWh")


def test_a_folder_without_a_record_says_what_its_metrics_say(tmp_path):
    assert read_starts(tmp_path) == [] and describe_times([], columns_of(tmp_path, 2)) == [
        ("trained for", "2:00:00 in 2 steps")
    ]
