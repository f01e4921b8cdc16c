"""Files of state, damaged or of a newer version: what is in them is kept and named, whoever writes there next."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from simpletuner.data.storage.hub_datasets import HubFiles
from simpletuner.page.datasets import captions
from simpletuner.page.queue.entries import Need, QueueEntry, QueueFile
from simpletuner.preparation.shared_download import read_record
from simpletuner.report import Report
from simpletuner.runs.settings_record import append, last_start, write_settings
from simpletuner.system.files.regular_files import latest_set_aside
from simpletuner.training.metrics.metrics import drop_rows_after
from simpletuner.training.metrics.sample_losses import cut_after
from simpletuner.training.metrics.tracker_process import read_tracker_state


class Warnings(Report):
    """A report whose warnings are also collected."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.texts: list[str] = []

    def warn(self, text: str, hint: str = "") -> None:
        self.texts.append(text)


STATES: dict[str, tuple[Callable[[Path, Report], object], object]] = {
    "settings.json": (lambda path, report: write_settings(path, {"seed": 2}, report.warn), [["seed"]]),
    "wandb.json": (lambda path, report: read_tracker_state(path, report.warn), {"id": "1", "sent": {"train": "2"}}),
    "hub_datasets.json": (lambda path, report: read_record(path, report), {"cats": {"commit": "abc", "shards": []}}),
}
"""By name, what reads and rewrites it, and content of a newer version."""
DAMAGES: dict[str, Callable[[Path, str], object]] = {
    "cut short": lambda path, newer: path.write_text(newer[:-3]),
    "of a newer version": lambda path, newer: path.write_text(newer),
    "nested": lambda path, newer: path.write_text("[" * 100_000),
    "not UTF-8": lambda path, newer: path.write_bytes(b"\xff"),
    "empty": lambda path, newer: path.write_bytes(b""),
    "a folder": lambda path, newer: path.mkdir(),
    "a FIFO": lambda path, newer: os.mkfifo(path),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", STATES)
def test_what_cannot_be_read_is_moved_aside_and_named(tmp_path: Path, name: str, damage: str):
    path, (use, newer), report = tmp_path / name, STATES[name], Warnings()
    use(path, report)
    path.unlink(missing_ok=True)
    assert report.texts == []
    DAMAGES[damage](path, json.dumps(newer))
    before = path.read_bytes() if path.is_file() else None
    use(path, report)
    aside = latest_set_aside(path)
    assert aside is not None and (aside.read_bytes() if aside.is_file() else None) == before
    assert len(report.texts) == 1 and f"{path} cannot be read" in report.texts[0] and aside.name in report.texts[0]
    use(path, report)
    assert len(report.texts) == 1 and len(list(tmp_path.glob("*.unread"))) == 1


def test_what_can_be_read_stays(tmp_path: Path):
    report = Warnings()
    (tmp_path / "wandb.json").write_text(json.dumps({"id": "1", "sent": {"train": 2}, "newer": [3]}))
    assert read_tracker_state(tmp_path / "wandb.json", report.warn)["newer"] == [3]
    found = {"dataset_name": "a/b", "revision": "main", "commit": "abc", "files": []}
    known = {name: found.get(name, {}) for name in HubFiles.__annotations__}
    (tmp_path / "hub.json").write_text(json.dumps({"cats": known}))
    assert read_record(tmp_path / "hub.json", report)["cats"].commit == "abc" and report.texts == []


@pytest.mark.parametrize("unread", [b'{"epoch": 2, "losses": [1]}', b"\xff\0", b"[" * 10_000])
def test_lines_of_another_version_are_kept_by_a_run_that_goes_back(tmp_path: Path, unread: bytes):
    """It drops later rows, and what a kill has torn, alone: other programs read the metrics, nobody else the losses."""
    rows = [json.dumps({"step": step, "loss": 0.5, "ids": []}).encode() for step in (1, 2, 3)]
    content = b"\n".join([rows[0], unread, rows[1], rows[2], rows[2][:9]])
    losses, metrics, report = tmp_path / "sample_losses.jsonl", tmp_path / "metrics.jsonl", Warnings()
    for path in (losses, metrics):
        path.write_bytes(content)
    cut_after(losses, 2)
    assert losses.read_bytes().splitlines() == [rows[0], unread, rows[1]]
    drop_rows_after(metrics, 2, report.warn)
    aside = latest_set_aside(metrics)
    assert metrics.read_bytes().splitlines() == rows[:2] and aside is not None and aside.read_bytes() == content
    assert len(report.texts) == 1 and aside.name in report.texts[0]
    cut_after(losses, 0)
    drop_rows_after(metrics, 0, report.warn)
    assert losses.read_bytes() == metrics.read_bytes() == b"", "a run that begins again has no rows"


def test_a_torn_line_of_history_takes_no_other_with_it(tmp_path: Path):
    path = tmp_path / "settings_history.jsonl"
    path.write_text('{"time": "2026-01-01T00:00')
    append(path, {"time": "2026-01-02T00:00:00+00:00", "step": 7})
    append(path, {"time": "2026-01-03T00:00:00+00:00", "step": 9})
    assert len(path.read_text().splitlines()) == 3 and "at step 9" in last_start(path)


def test_the_journal_shows_edits_of_a_newer_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SIMPLETUNER_HOME", str(tmp_path / "home"))
    captions.record(tmp_path / "a.txt", "a.png", b"one", b"two")
    path = captions.journal_path()
    row = json.loads(path.read_bytes())
    with path.open("a") as file:
        file.write(json.dumps({**row, "id": "newer", "author": "ada"}) + "\n[1]\n")
    before = path.read_bytes()
    assert [each.id for each in captions.edits_below(tmp_path)] == ["newer", row["id"]]
    captions.record(tmp_path / "a.txt", "a.png", b"two", None)
    assert path.read_bytes().startswith(before)


def test_an_entry_of_the_queue_keeps_what_a_newer_version_wrote(tmp_path: Path):
    file = QueueFile(tmp_path / "host.json")
    with file.edited() as entries:
        entries += [QueueEntry("/a.toml", "/out", "here", Need(1)), QueueEntry("/b.toml", "/out", "here", Need(1))]
    rows = json.loads(file.path.read_text())
    file.path.write_text(json.dumps([{**row, "priority": {"level": 3}} for row in rows]))
    with file.edited() as entries:
        entries.pop()
    [row] = json.loads(file.path.read_text())
    assert row == {**rows[0], "priority": {"level": 3}} and file.warning() == ""
