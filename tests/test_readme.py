"""The commands of the README that start a run do what its page says, with the file that its first commands write."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from PIL import Image

from simpletuner.app import main

README = Path(__file__).parents[1] / "README.md"


def test_every_command_for_photos_can_start_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for number in range(36):
        Image.new("RGB", (1024, 1024), (number, 0, 0)).save(f"photos/{number}.png")
        Path(f"photos/{number}.txt").write_text("a photo")
    lines = re.findall(r"^simpletuner (.*photos\.toml[^#\n]*)", README.read_text(), re.MULTILINE)
    init, *others = [shlex.split(line) for line in lines]
    with pytest.raises(SystemExit):
        main(init)
    text = Path("photos.toml").read_text()
    # What `plan --apply` adds to it; the plan itself takes a minute.
    Path("photos.toml").write_text(re.sub(r"(?m)^instance_data_dir = .*$", 'instance_data_dir = "photos"', text))
    Path("photos.toml").write_text(Path("photos.toml").read_text() + 'state_layout = "split"\n')
    starts = [words for words in others if words[0] == "train"]
    assert len(starts) == 3
    for words in starts:
        with pytest.raises(SystemExit) as ended:
            main([*words, "--dry_run"])
        assert ended.value.code == 0, capsys.readouterr().err
