"""A start that is refused leaves the status and the console of the run in its folder; the page says both."""

from __future__ import annotations

import json
import os
from pathlib import Path

import ranks

from simpletuner.run_log import CONSOLE, START_CONSOLE
from simpletuner.runs.condition import KnownStart
from simpletuner.runs.folder import Folders, RunFolder
from simpletuner.runs.listing import summarize
from simpletuner.system.processes.run_status import RunState, StatusWriter

REFUSED = "error: out has a run on dogs\nhint: give this run another output_dir\n"
TAKE = "from pathlib import Path; from simpletuner.training.run_folder.output_dir import keep_console as keep"


def finish(output: Path, config: Path) -> None:
    output.mkdir()
    writer = StatusWriter()
    writer.begin(output, str(config))
    writer.train(50, 50)
    writer.end(RunState.FINISHED)
    os.utime(output / "status.json", (1, 1))


def test_a_refused_start_is_a_notice_on_the_page_of_the_run_that_was_there(tmp_path):
    output, config = tmp_path / "out", tmp_path / "dog.toml"
    config.write_text("seed = 1\n")
    finish(output, config)
    folders = Folders.of([tmp_path])
    summary = summarize(RunFolder(output, folders), KnownStart())
    assert (summary.condition.state, summary.refused, summary.config) == (RunState.FINISHED, None, str(config))
    (output / START_CONSOLE).write_text(REFUSED)
    summary = summarize(RunFolder(output, folders), KnownStart())
    assert (summary.condition.state, summary.status.step, summary.config) == (RunState.FINISHED, 50, str(config))
    assert summary.refused is not None and summary.refused.sentence == "out has a run on dogs"
    assert json.loads((output / "status.json").read_text())["state"] == "finished"
    (output / "status.json").unlink()
    only = summarize(RunFolder(output, folders), KnownStart())
    assert (only.condition.state, only.condition.sentence) == (RunState.FAILED, "out has a run on dogs"), (
        "nothing else is"
    )


def test_what_a_start_prints_becomes_the_console_of_the_run_once_it_has_the_folder(starter, tmp_path):
    def ran(code: str) -> list[int]:
        return starter.start(ranks.run_python, 1, f"{TAKE}; {code}", str(tmp_path)).wait()

    (tmp_path / CONSOLE).write_text("of the run before\n")
    (tmp_path / START_CONSOLE).touch()
    shown = f"import os; os.dup2(os.open({START_CONSOLE!r}, os.O_WRONLY), 1)"
    assert ran(f"{shown}; print('first', flush=True); keep(Path.cwd()); print('second')") == [0]
    assert (tmp_path / CONSOLE).read_text() == "first\nsecond\n" and not (tmp_path / START_CONSOLE).exists()
    (tmp_path / START_CONSOLE).write_text("of a start that was refused")
    assert ran("keep(Path.cwd())") == [0]
    assert (tmp_path / CONSOLE).read_text() == "first\nsecond\n", "a start from a terminal prints to none"
