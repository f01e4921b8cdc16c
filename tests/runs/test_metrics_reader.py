"""Reading metrics.jsonl: whole, as it grows, after it was replaced, and where it is torn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from simpletuner.runs import metrics
from simpletuner.runs.metrics import METRICS, MetricColumns, MetricsReader, last_row, read_columns, rows_in
from simpletuner.training.metrics.metrics import Metrics


def line(step: int, loss: float = 0.5, **more: object) -> str:
    return json.dumps({"step": step, "loss": loss, **more}) + "\n"


def append(path: Path, *lines: str) -> None:
    with path.open("a") as file:
        file.writelines(lines)


def points_of(columns: MetricColumns, name: str) -> list[tuple[float, float]]:
    return list(zip(*(each.tolist() for each in columns.finite(name)), strict=True))


def test_only_what_was_appended_is_parsed_and_a_line_is_left_until_it_is_whole(tmp_path):
    reader = MetricsReader(path := tmp_path / METRICS)
    assert reader.read() == ([], True), "no file yet"
    append(path, line(1), line(2)[:9])
    assert reader.read() == ([{"step": 1, "loss": 0.5}], True)
    assert reader.read() == ([], False) == reader.read()
    append(path, line(2)[9:-1])
    assert reader.read() == ([], False), "without its newline it may go on"
    append(path, "\n", "torn {\n", line(3))
    before, reader.path = reader.path, tmp_path / "with-other-begin"
    reader.path.write_bytes(before.read_bytes().replace(b'"step": 1', b'"stop": 1'))  # same length, same last line
    assert [row["step"] for row in reader.read()[0]] == [2, 3], "what was read is not read again"


def test_columns_grow_and_follow_a_file_that_is_cut_replaced_or_removed(tmp_path):
    path, columns = tmp_path / METRICS, MetricColumns(tmp_path / METRICS)
    for start in range(1, 1000, 111):
        append(path, *(line(step, 1 / step, grad_norm=step) for step in range(start, start + 111)))
        append(path, json.dumps({"step": start, "eval_loss": 2.0, "note": "text"}) + "\n")
        columns.update()
    assert points_of(columns, "loss") == [(step, 1 / step) for step in range(1, 1000)]
    assert points_of(columns, "eval_loss") == [(start, 2.0) for start in range(1, 1000, 111)]
    assert not points_of(columns, "note") and not points_of(columns, "absent")

    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert len(points_of(columns.update(), "loss")) == len([row for row in rows_in(path.read_bytes()) if "loss" in row])
    assert points_of(columns, "loss") == points_of(read_columns(path), "loss")
    # A start drops rows, writes another file, and has come further when it is looked at again.
    path.write_bytes(b"".join(line(step, 9.0).encode() for step in range(1, 2000)))
    assert points_of(columns.update(), "loss") == [(step, 9.0) for step in range(1, 2000)]
    assert not points_of(columns, "grad_norm")
    path.unlink()
    assert not points_of(columns.update(), "loss")
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        columns.update()


def test_a_resumed_run_is_followed_through_the_rows_that_it_drops(tmp_path):
    columns = MetricColumns(tmp_path / METRICS)
    for steps, after in ((range(1, 10), 0), (range(5, 12), 4)):
        written = Metrics(tmp_path, after)
        for step in steps:
            written.write({"step": step, "loss": after + 1 / step})
        columns.update()
        written.close()
    assert points_of(columns, "loss") == [*((s, 1 / s) for s in range(1, 5)), *((s, 4 + 1 / s) for s in range(5, 12))]


@pytest.mark.parametrize("number", ["1e999", "NaN", "-1e999", "9" * 400, '"1"', "null"])
def test_a_row_whose_numbers_are_none_is_left_out(number, tmp_path):
    rows = f'{{"step": {number}, "loss": 1.0}}\n{{"step": 2, "loss": 2.0}}\n'.encode()
    assert [row["step"] for row in rows_in(rows)] == [2]
    (tmp_path / METRICS).write_bytes(f'{{"step": 1, "loss": {number}}}\n'.encode() + rows)
    assert points_of(read_columns(tmp_path / METRICS), "loss")[-1] == (2, 2.0)


def test_only_the_metrics_that_are_asked_for_are_kept_and_a_run_of_ten_times_the_steps_takes_no_more_memory(tmp_path):
    columns, held = MetricColumns(tmp_path / METRICS, names={"loss"}), []
    text = f', "more": "{"m" * 2000}"}}\n'
    tracemalloc.start()
    try:
        for steps in (range(4_000), range(4_000, 40_000)):
            append(tmp_path / METRICS, *(line(step, step / 8)[:-2] + text for step in steps))
            columns.update()
            # Allocated by the reader itself: what else is counted, also of other threads, comes and goes.
            ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, metrics.__file__)])
            held.append(sum(trace.size for trace in ours.traces))
        tracemalloc.reset_peak()
        again = MetricColumns(tmp_path / METRICS, names={"loss"}).update()
        assert tracemalloc.get_traced_memory()[1] < (tmp_path / METRICS).stat().st_size / 2, "in pieces"
    finally:
        tracemalloc.stop()
    assert columns.columns.keys() == {"loss"}
    assert held[1] < held[0] + 1_000 < 3 * 16 * metrics.MAX_BLOCKS + 10_000, "blocks, and no points beside them"
    assert points_of(again, "loss") == points_of(columns, "loss") and again.column("loss").points == 40_000


def test_what_cannot_be_drawn_is_left_out_of_curves_alone(tmp_path):
    append(tmp_path / METRICS, line(1, 1.0), line(2, float("nan")), line(3, float("inf")))
    columns = read_columns(tmp_path / METRICS)
    assert columns.column("loss").last_step == 3
    assert [each.tolist() for each in columns.finite("loss")] == [[1], [1]]


@pytest.mark.parametrize("torn", [b"", b"{", b'{"step": 3}\n', b'{"step": "3", "loss": 1}\n', b"[" * 10_000 + b"\n"])
def test_the_last_row_is_found_at_the_end_of_a_long_file_whatever_follows_it(torn, tmp_path):
    path = tmp_path / METRICS
    assert last_row(path) == {}
    append(path, *(line(step, more=1.0) for step in range(1, 3000)), '{"step": 2999, "eval_loss": 1.0}\n')
    with path.open("ab") as file:
        file.write(torn)
    assert last_row(path)["step"] == 2999


def test_reading_metrics_needs_no_torch():
    modules = "simpletuner.runs.metrics, simpletuner.training.metrics.tracker_process"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_rows_with_other_names_and_values_that_are_no_numbers_go_into_their_columns_in_order(tmp_path):
    path = tmp_path / METRICS
    append(path, line(1, more=1.0), line(2, more="much"), line(3), line(4, more=2), line(5, more=None), line(6, more=3))
    columns = read_columns(path)
    assert points_of(columns, "more") == [(1, 1.0), (4, 2.0), (6, 3.0)]
    assert [step for step, _ in points_of(columns, "loss")] == [1, 2, 3, 4, 5, 6]
    torn = (
        b'{"step": 1, "loss": 1.0\n"more": 1}\n'  # joined by a comma, these are one row
        b'{"step": 2, "loss": 1.0}, {"step": 3, "loss": 1.0}\n{"step": 4, "loss": 1}\n'
    )
    assert [row["step"] for row in rows_in(torn)] == [4], "lines are parsed one by one where one of them is damaged"
