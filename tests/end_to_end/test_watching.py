"""What a person sees of a run at a terminal, and what its log keeps."""

from __future__ import annotations

import re

import pytest
from conftest import SMALL
from terminal import Terminal

from simpletuner.checkpoints.layout import list_checkpoints

OWN_FAMILY = """
import logging, time, warnings
from simpletuner.models.families.sdxl import SDXL

class Own(SDXL):
    def encode_prompts(self, pipeline, captions):
        warnings.warn("a library warns", FutureWarning)
        logging.getLogger("diffusers").warning("diffusers remarks")
        time.sleep(0.7)
        return super().encode_prompts(pipeline, captions)

    def predict(self, *arguments):
        time.sleep(0.05)
        return super().predict(*arguments)
"""
FRAME = re.compile(r"\r\x1b\[K\x1b\[C\x1b\[J\r ([^\r]*)\r")
"""A status line: it erases what was there, and leaves the cursor at its start."""


@pytest.fixture
def opened():
    terminals = []
    yield terminals.append
    for terminal in terminals:
        terminal.close()


def test_a_terminal_shows_what_is_running_answers_ctrl_c_at_once_and_hides_library_noise(
    sdxl, shapes, opened, tmp_path
):
    (tmp_path / "own.py").write_text(OWN_FAMILY)
    model = ("--model_families=own=own:Own", "--model_family=own", f"--pretrained_model_name_or_path={sdxl}")
    validation = ("--validation_prompt=a circle", "--validation_num_inference_steps=1", "--validation_step_interval=8")
    flags = (*SMALL, *model, *validation, f"--instance_data_dir={shapes}", "--max_train_steps=1000", "--output_dir=run")
    interrupted = Terminal(tmp_path, "train", *flags, kind="xterm")
    opened(interrupted)
    interrupted.wait_for(" importing torch")
    interrupted.press("\x03")
    interrupted.wait_for("stopped by SIGINT")
    assert interrupted.ended() == 130
    terminal = Terminal(tmp_path, "train", *flags, "--train_batch_size=4", kind="xterm", columns=80)
    opened(terminal)
    terminal.wait_for(" importing torch")
    terminal.wait_for(" encoding captions: ")
    terminal.wait_for("samples/s")
    terminal.resize(100)
    terminal.wait_for("data wait ")
    frames = [re.sub(r"\x1b\[[\d;]*m", "", frame).rstrip() for frame in FRAME.findall(terminal.drawn)]
    steps = [frame for frame in frames if frame.startswith("training: ")]
    assert re.fullmatch(
        r"training: \d+/1000  0:\d\d:\d\d left  loss \d\.\d{4}  [\d.]+ s/step  [\d.]+ samples/s.*", steps[-1]
    )
    assert max(map(len, frames)) <= 98 and len(steps[0]) <= 78
    terminal.press("\x03")
    terminal.wait_for(", then saving a checkpoint; press Ctrl-C again to leave without saving")
    assert terminal.ended() == 130
    assert "stopped by SIGINT at step " in terminal.drawn and "error:" not in terminal.drawn
    assert len(list_checkpoints(tmp_path / "run" / "checkpoints")) == 1

    log = (tmp_path / "run" / "log.txt").read_text()
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d started: simpletuner train ", log)
    for noise in ("FutureWarning: a library warns", "diffusers remarks"):
        assert noise in log and noise not in terminal.drawn
    for said in ("simpletuner train\n", "stopping: finishing step ", "stopped by SIGINT at step "):
        assert said in log
    assert re.search(r"\d training: 1/1000", log) and "\x1b" not in log
