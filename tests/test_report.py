"""What is printed: nothing in a name, a prompt or an error can move the cursor or pretend to be another line."""

from __future__ import annotations

import json
import re

import pytest
import scanning
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from simpletuner.data.dataset_kinds import LocalImages
from simpletuner.errors import SimpleTunerError
from simpletuner.preparation import report_left_out
from simpletuner.report import Report, printable

BAD = "x\x1b[2J\x07\x9b1m\u202ey\r\nerror: forged\ud800.png"
SHOWN = "x\\x1b[2J\\x07\\x9b1m\\u202ey\\r\n  error: forged\\ud800.png"


@given(st.text())
def test_no_control_character_is_printed_and_no_line_begins_with_what_a_name_holds(text):
    shown = printable(f"warning: {text} is left out")
    assert all(character.isprintable() or character in "\n\t " or ord(character) > 159 for character in shown)
    assert all(line.startswith(("  ", "warning: ")) or not line for line in shown.split("\n"))
    shown.encode()
    assert printable(shown) == shown


def test_ordinary_text_stays_as_it_is():
    text = "2 mistakes:\n  résumé = 熊 🐻 \\x1b\n  two\ttabs\n"
    assert printable(text) == text


WAYS = [
    lambda report, text: report.say(text),
    lambda report, text: report.warn(text, text),
    lambda report, text: report.error(SimpleTunerError(text, text)),
    lambda report, text: report.table(text, [("name", text)]),
    lambda report, text: report.data_table(text, [("name", text)], ["a", "b"]),
    lambda report, text: report.line(text),
    lambda report, text: report.checklist([(text, "ok", text, [text])], {}),
]


@pytest.mark.parametrize("tell", WAYS)
def test_names_that_look_like_markup_or_emoji_stay_as_they_are(tell, capsys):
    tell(Report(), "run:key:[bold]1[/bold]")
    said = "".join(capsys.readouterr()).replace("run:key:[bold]1[/bold]", "")
    assert "run" not in said and "1" not in said


@pytest.mark.parametrize("tell", WAYS)
def test_every_way_to_print_escapes(tell, capsys):
    tell(Report(), BAD)
    said = "".join(capsys.readouterr())
    assert "x\\x1b[2J\\x07\\x9b1m\\u202ey\\r" in said
    assert not set("\x1b\x07\x9b\u202e\r") & set(said)
    assert not [line for line in said.splitlines() if line.startswith("error: forged")]


def test_json_is_what_it_was(capsys):
    Report().json({"prompt": "\x1b[2J\n熊"})
    assert json.loads(capsys.readouterr().out) == {"prompt": "\x1b[2J\n熊"}


def test_a_broken_picture_cannot_forge_a_line(tmp_path, capsys):
    Image.new("RGB", (64, 64)).save(tmp_path / "good.png")
    (tmp_path / "a\nerror: no disk\x1b[2J.png").write_text("no picture")
    dataset = LocalImages(id="d", instance_data_dir=tmp_path, caption_strategy="filename", resolution=64)
    report_left_out(scanning.found([dataset]), Report())
    said = capsys.readouterr().err
    assert "warning: 1 broken image left out:\n  d/a\n  error: no disk\\x1b[2J.png: " in said


def test_a_line_of_progress_says_how_long_the_rest_takes_once_something_is_done(capsys):
    progress = Report().progress("training", total=8, done=2)
    progress.line_seconds = 0
    progress.update(2)
    progress.began -= 120  # for two steps, so four more take twice as long
    progress.update(4, "loss 1")
    progress.update(8)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "training: 2/8" and said[2] == "training: 8/8"
    assert re.fullmatch(r"training: 4/8  loss 1  0:04:0\d left", said[1]), said
