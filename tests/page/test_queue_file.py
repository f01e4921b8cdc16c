"""The file of the queue, damaged or of another version: what waits in it is kept, and named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from simpletuner.page.queue.entries import Need, QueueEntry, QueueFile
from simpletuner.system.files.atomic import write_json

ENTRY = QueueEntry("/a.toml", "/out", "here", Need(1))


UNREADABLE: dict[str, Callable[[Path], object]] = {
    "cut short": lambda path: path.write_text(json.dumps([asdict(ENTRY)])[:-20]),
    "of another version": lambda path: write_json(path, {"version": 2, "entries": [asdict(ENTRY)]}),
    "of an unknown state": lambda path: write_json(path, [{**asdict(ENTRY), "state": "paused"}]),
    "nested": lambda path: path.write_text("[" * 100_000),
    "not UTF-8": lambda path: path.write_bytes(b"\xff"),
    "a folder": lambda path: path.mkdir(),
    "a FIFO": lambda path: os.mkfifo(path),
    "a loop": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_queue_that_cannot_be_read_is_set_aside_and_named(tmp_path: Path, kind: str):
    file = QueueFile(tmp_path / "host.json")
    assert file.read() == [] and file.warning() == ""
    UNREADABLE[kind](file.path)
    before = file.path.read_bytes() if file.path.is_file() else None
    assert file.read() == [] and str(file.path) in file.warning(), "looking changes nothing"
    with file.edited() as entries:
        entries.append(ENTRY)
    assert file.read() == [ENTRY]
    [aside] = tmp_path.glob("*.unread")
    assert f"set aside as {aside}" in file.warning()
    assert (aside.read_bytes() if aside.is_file() and not aside.is_symlink() else None) == before
