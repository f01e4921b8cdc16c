"""What is printed: nothing in a name, a prompt or an error can move the cursor or pretend to be another line."""

from __future__ import annotations

import json
import logging
import re
import time

import pytest
import scanning
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from simpletuner import status_line
from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.errors import SimpleTunerError
from simpletuner.preparation.prepare import report_left_out
from simpletuner.report import Report, printable, wrapped_line
from simpletuner.run_log import start_run_log, stop_run_log
from simpletuner.status_line import fitting
from simpletuner.training.metrics.speed import EXPORTING, WRITING, Durations, Pace
from simpletuner.training.run_folder.output_dir import open_log

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


@pytest.mark.parametrize(
    ("line", "rows"),
    [
        ("short", ["short"]),
        ("warning: seven words of a line in 24", ["warning: seven words of", "  a line in 24"]),
        (
            "hint: run `simpletuner config init --x=1`, then",
            ["hint: run", "  `simpletuner config init --x=1`,", "  then"],
        ),
        ("name   columns of a text go on", ["name   columns of a text", "       go on"]),
        ("  an/unbroken/path/that/is/longer here", ["  an/unbroken/path/that/is/longer", "  here"]),
        ("全角文字は二列 を 取るので折り", ["全角文字は二列 を", "  取るので折り"]),
        ("", [""]),
    ],
)
def test_lines_break_between_words_and_never_within_a_command(line, rows):
    assert wrapped_line(line, 24).split("\n") == rows


def test_nothing_is_folded_where_there_is_no_terminal(capsys):
    path = "/".join(["folder"] * 40)
    for tell in WAYS:
        tell(Report(), path)
        said = "".join(capsys.readouterr())
        assert path in said, "scripts and logs find a path in one piece"


def test_json_is_what_it_was(capsys):
    Report().json({"prompt": "\x1b[2J\n熊"})
    assert json.loads(capsys.readouterr().out) == {"prompt": "\x1b[2J\n熊"}


def test_a_broken_picture_cannot_forge_a_line(tmp_path, capsys):
    Image.new("RGB", (64, 64)).save(tmp_path / "good.png")
    (tmp_path / "a\nerror: no disk\x1b[2J.png").write_text("no picture")
    dataset = LocalImages(id="d", instance_data_dir=tmp_path, caption_strategy="filename", resolution=64)
    report_left_out(scanning.found([dataset]), Report())
    said = capsys.readouterr().err
    assert "warning: 1 broken image left out:\n  d/a\\nerror: no disk\\x1b[2J.png: " in said


def test_without_a_terminal_a_line_a_minute_says_what_is_running_and_how_long_the_rest_takes(capsys, monkeypatch):
    monkeypatch.setattr(status_line, "DRAW_SECONDS", 0.01)
    report = Report()
    report.status.line_seconds = 0.2
    with report.phase("loading weights"), report.progress("training", total=8, done=2) as progress:
        progress.update(2)
        progress.began -= 120  # for two steps, so four more take twice as long
        progress.update(4, "loss 1", "1 s/step")
        time.sleep(0.3)
        with report.progress("generating images", 3) as inner:
            inner.update(1)
            time.sleep(0.3)
        report.status.begin("saving")
        time.sleep(0.3)
        report.status.begin("training")
        progress.update(8)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "training: 2/8" and said[-1] == "training: 8/8"
    assert re.fullmatch(r"training: 4/8  0:0(4:00|3:59) left  loss 1  1 s/step", said[1]), said
    for shown in ("generating images: 1/3", "saving"):
        assert [line for line in said if re.fullmatch(rf"{shown}  0:0\d:\d\d left  training: 4/8", line)], said
    assert len(said) <= 8


def test_the_time_left_is_not_guessed_from_the_first_seconds(capsys):
    report = Report()
    with report.progress("reading images", total=100_000) as progress:
        progress.update(1)
        assert progress.time_left() == "" and report.status.parts() == ["reading images: 1/100000"]
        progress.began -= 60
        progress.update(50_000)
        assert progress.time_left() == "0:01:00 left"
    capsys.readouterr()


def test_a_status_line_fits_its_terminal_by_leaving_out_what_is_less_important():
    parts = ["training: 1/8", "0:04:00 left", "loss 1", "1 s/step"]
    assert [fitting(parts, width) for width in (100, 36, 30, 3)] == [
        *("training: 1/8  0:04:00 left  loss 1  1 s/step", "training: 1/8  0:04:00 left  loss 1"),
        *("training: 1/8  0:04:00 left", "training: 1/8"),
    ]


def test_time_left_counts_what_runs_between_the_steps_and_after_the_last(tmp_path):
    durations = Durations(path := tmp_path / "durations.json")
    pace = Pace(100, {"saving": 30, "validation": 0}, durations)
    assert pace.seconds_left(0) is None
    for seconds in (50.0, 1.0, 3.0):  # the first step is not like the others
        pace.add_step(seconds, seconds / 4)
    assert (pace.step_seconds, pace.data_share, pace.seconds_left(10)) == (2.0, 0.25, 180.0)
    durations.measured |= {"saving": [4.0, 6.0], "validation": [60.0]}
    assert pace.seconds_left(10) == 180 + 4 * 5 + 60  # at 30, 60, 90 and 100
    assert pace.seconds_left(90) == 20 + 5 + 60
    pace.expect(["saving"])
    assert pace.seconds_left(90) == 20 + 5 + 5 + 60
    with pace.timed("saving"):
        pass
    assert pace.seconds_left(100) == 0

    durations.measured["saving"] = [5.0]
    durations.estimate(EXPORTING, 7.0)
    durations.measured[WRITING] = [3.0]
    durations.write()
    again = Pace(100, {"saving": 30, "validation": 0}, Durations(path))
    again.add_step(2.0, 0.0)
    assert again.seconds_left(90) == 20 + 5 + 60 + 3 + 7, "a resumed run knows what an earlier start has measured"
    again.durations.measured[EXPORTING] = [1.0]
    assert again.seconds_left(90) == 20 + 5 + 60 + 3 + 1
    Durations(tmp_path / "not" / "there").write()  # which must not end a run
    for value in ('"1"', "1e999", "NaN", "-1e999", "-5.0", "1e12", "9" * 4000, "true", "null", "[1.0]"):
        path.write_text(f'{{"saving": {value}, "validation": 2.5}}')
        kept = Durations(path)
        assert (kept.mean("saving"), kept.mean("validation")) == (0, 2.5), value
    for content in ("[", "[]"):
        path.write_text(content)
        assert Durations(path).mean("saving") == 0
    for seconds in (float("inf"), float("nan"), -float("inf"), 1e300):
        assert status_line.format_seconds(seconds) == "a long time"


def test_what_was_said_before_the_folder_was_known_is_below_the_start_that_said_it(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["simpletuner", "train"])
    (tmp_path / "log.txt").write_text("2026-01-01 10:00:00 error: of an earlier start\n")
    start_run_log("")
    try:
        Report().warn("of its settings")
        open_log(tmp_path, create=True)
        Report().say("training")
    finally:
        stop_run_log()
    lines = [line[20:].partition(" (")[0] for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert lines == ["error: of an earlier start", "started: simpletuner train", "warning: of its settings", "training"]


def test_no_control_character_reaches_a_log(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["simpletuner", "train", "--validation_prompt=a\x1b[2J\u202eb\nerror: c"])
    start_run_log("")
    try:
        open_log(tmp_path, create=True)
        logging.getLogger("library").warning("cannot open \x1b]0;title\x07.png")
    finally:
        stop_run_log()
    first, second, third = (tmp_path / "log.txt").read_text().splitlines()
    assert "'--validation_prompt=a\\x1b[2J\\u202eb" in first and second.startswith("    error: c'")
    assert third.endswith("library: cannot open \\x1b]0;title\\x07.png")
