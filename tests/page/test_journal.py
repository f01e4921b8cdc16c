"""Edits of captions that are no UTF-8: shown as text that an answer can hold, undone as the bytes that they were."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from simpletuner.page.datasets import captions
from simpletuner.page.rendering import render


@pytest.mark.parametrize("encoding", ["utf-16", "cp1252", "shift_jis", "utf-8-sig"])
def test_an_edit_of_a_caption_in_another_encoding_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
):
    monkeypatch.setenv("SIMPLETUNER_HOME", str(tmp_path / "home"))
    text = "a caf\u00e9" if encoding != "shift_jis" else "\u732b"
    before, after = f"{text} 1".encode(encoding), f"{text} 2".encode(encoding)
    captions.record(tmp_path / "a.txt", "a\udce9.png", before, after)
    [edit] = captions.edits_below(tmp_path)
    assert (captions.as_bytes(edit.before), captions.as_bytes(edit.after)) == (before, after)
    page = render("datasets/edits", edits=[edit], file="a.toml", facts={"id": "d"}, is_new=False)
    assert page.encode("utf-8") and (text in page) == encoding.startswith("utf")


def test_a_journal_that_is_a_fifo_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nobody waits for a reader: the page would save nothing any more."""
    monkeypatch.setenv("SIMPLETUNER_HOME", str(tmp_path))
    os.mkfifo(captions.journal_path())
    with pytest.raises(OSError, match="caption_edits.jsonl"):
        captions.record(tmp_path / "a.txt", "a.png", b"before", b"after")
