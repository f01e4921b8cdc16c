"""Streams that break under a run, as the operating system breaks them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simpletuner.report import Report
from simpletuner.run_log import start_run_log, stop_run_log, write_log_to
from simpletuner.system.processes import console
from simpletuner.system.processes.console import lasting


@pytest.fixture
def log(tmp_path):
    """The log of a run that has begun to print before it knew its folder."""
    yield tmp_path / "log.txt"
    stop_run_log()


def begin_log(path: Path) -> None:
    start_run_log("")
    write_log_to(path, create=True)


def test_a_full_disk_below_the_log_ends_nothing_and_is_said_once_in_the_log(log, monkeypatch):
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        with lasting("stderr"):
            Report().say("before it is known which run this is")
            begin_log(log)
            for step in range(300):  # more than Python keeps
                Report().say(f"step {step} " + "x" * 100)
        assert sys.stderr is full
        full.write("the interpreter's last flush\n")  # would raise, and end the process with 120
        full.flush()
    text = log.read_text()
    assert text.count("stderr cannot be written (No space left on device): the run goes on") == 1 and "step 299" in text


def test_a_pipe_without_a_reader_is_left_also_by_what_other_code_writes(log, monkeypatch):
    reading, writing = os.pipe()
    begin_log(log)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with lasting("stdout"):
            print("read")
            assert os.read(reading, 100) == b"read\n"
            os.close(reading)
            print("lost")
            assert os.write(pipe.fileno(), b"C++ writes past Python") == 22
    assert log.read_text().count("stdout cannot be written (Broken pipe)") == 1


def test_a_reader_that_stops_reading_is_waited_for_once_and_gets_what_comes_after_it_goes_on(log, monkeypatch):
    monkeypatch.setattr(console, "PATIENCE_SECONDS", 0.05)
    reading, writing = os.pipe()
    begin_log(log)
    with os.fdopen(writing, "w") as pipe, os.fdopen(reading, "rb") as reader:
        monkeypatch.setattr(sys, "stderr", pipe)
        with lasting("stderr"):
            for _ in range(200):  # a pipe takes 64 KiB
                Report().say("x" * 1000)
            assert len(os.read(reading, 1 << 20)) >= 60_000
            Report().say("read again")
        pipe.close()
        assert reader.read().endswith(b"read again\n")
    assert "stderr cannot be written (nobody reads it)" in log.read_text()


RESULT = """
import sys
from simpletuner.app import main
from simpletuner.report import Report
from simpletuner.system.processes.console import open_standard_streams
open_standard_streams()
Report().line("größe"); Report().text("größe\\n"); Report().say("größe")
"""


@pytest.mark.parametrize(("redirection", "results"), [("", "gr\\xf6\\xdfe\ngröße\n"), (">&- 2>&- <&-", "")])
def test_no_encoding_and_no_closed_stream_is_a_bug(redirection, results):
    """Lines for people are escaped; the content of a file is UTF-8 whatever a console can show."""
    command = ["sh", "-c", f'"$0" -c "$1" {redirection}', sys.executable, RESULT]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=100)
    assert (done.returncode, done.stdout.decode()) == (0, results), done.stderr


def test_listings_end_quietly_where_their_reader_has_read_enough():
    command = f'"{sys.executable}" -m simpletuner models | head -1; echo "${{PIPESTATUS[*]}}"'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=100)
    assert done.stdout.endswith(" 0\n") and done.stdout.count("\n") == 2
    # On a loaded machine `head` leaves after the last line was written, and the hint below it follows.
    assert done.stderr == "" or (done.stderr.startswith("hint: ") and done.stderr.count("\n") == 1), done.stderr


@pytest.mark.parametrize("command", [[], ["config"]])
def test_a_command_without_its_subcommand_prints_its_help_as_an_error(command):
    done = subprocess.run([sys.executable, "-m", "simpletuner", *command], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("Usage: simpletuner") and "Commands:" in done.stderr
