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
    for name, count in (("photos", 1), ("all", 3)):
        lines = re.findall(rf"^simpletuner (.*{name}\.toml[^#\n]*)", README.read_text(), re.MULTILINE)
        init, *others = [shlex.split(line) for line in lines]
        with pytest.raises(SystemExit):
            main(init)
        file = Path(f"{name}.toml")
        text = file.read_text()
        # What `plan --apply` adds to it; the plan itself takes a minute.
        is_planned = any("--apply" in words for words in others)
        file.write_text(text + 'state_layout = "split"\n' * is_planned)
        starts = [words for words in others if words[0] == "train"]
        assert len(starts) == count
        for words in starts:
            with pytest.raises(SystemExit) as ended:
                main([*words, "--dry_run"])
            said = capsys.readouterr().err
            assert ended.value.code == 0 and "usually trained at" not in said, said
