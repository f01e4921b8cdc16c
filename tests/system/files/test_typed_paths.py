from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.settings import load
from simpletuner.settings.files.config_files import NotParsed
from simpletuner.settings.files.formats import FORMATS
from simpletuner.system.files.paths import ensure_home, expand_path

REFUSED = {
    "$SCRATCH/out": "$SCRATCH is replaced by a shell, not here: write {env:SCRATCH}",
    "a/${HOME}": "${HOME} is replaced by a shell, not here: write {env:HOME}",
    "${X:-y}/b": "write {env:X}",
    "%USERPROFILE%\\out": "write {env:USERPROFILE}",
    "out ": "it ends with a blank (U+0020): remove it",
    " logs": "it begins with a blank (U+0020): remove it",
    "out\r": "it ends with a carriage return (U+000D): remove it",
    "out\n": "it ends with a line feed (U+000A): remove it",
    "out\u200b": "it ends with a zero width space (U+200B): remove it",
    "\ufeffout": "it begins with a zero width no-break space (U+FEFF): remove it",
    "out\xa0": "it ends with a no-break space (U+00A0): remove it",
    "runs\new\try": "it has a line feed (U+000A) in it: write / for \\, or put it in single quotes",
    "a\u202eb": "it has a right-to-left override (U+202E) in it: remove it",
}


@pytest.mark.parametrize(("typed", "said"), REFUSED.items())
def test_what_only_a_shell_replaces_and_nobody_sees_is_refused(typed, said):
    with pytest.raises(ValueError) as caught:
        expand_path(typed)
    assert said in str(caught.value)
    for section in ({"output_dir": typed}, {"pretrained_model_name_or_path": typed}, {"validation_images": [typed]}):
        with pytest.raises(Exception, match="remove it|write"):
            load(section, complete=False, environment={})
    with pytest.raises(ValueError, match="remove it|write"):
        LocalImages(id="a", instance_data_dir=typed)


@pytest.mark.parametrize(
    "name", ["100%20", "a b", "[x]", "a$", "$5", "50%", "größe", "x\u200dy", "café", "#a", "a\xa0b"]
)
def test_other_names_are_taken_as_they_are(name):
    assert expand_path(name) == Path(name)


def test_a_path_that_is_there_is_meant_unless_the_variable_is_set(tmp_path, monkeypatch):
    for name in ("$RECYCLE.BIN", "a\nb"):
        (tmp_path / name).mkdir()
        assert expand_path(tmp_path / name) == tmp_path / name
    monkeypatch.setenv("RECYCLE", "x")
    with pytest.raises(ValueError, match="{env:RECYCLE}"):
        expand_path(tmp_path / "$RECYCLE.BIN")


def test_a_path_of_windows_in_toml_gets_a_hint():
    for text in ('a = "D:\\Users"', 'a = "D:\\xx"', 'a = "D:\\work"'):
        with pytest.raises(NotParsed) as caught:
            list(FORMATS[".toml"](text))
        assert "single quotes" in caught.value.hint


def test_a_user_without_home_and_name_gets_a_folder(tmp_path):
    assert ensure_home({"HOME": "/x"}) == ""
    assert ensure_home({}) == ""  # the list of users has one
    nameless = "import pwd\ndef none(*_): raise KeyError('uid not found')\npwd.getpwuid = none\n"
    (tmp_path / "sitecustomize.py").write_text(nameless)
    environment = {"TMPDIR": str(tmp_path), "PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "simpletuner", "config", "show", "--json", "--output_dir=~/out"]
    ran = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    home = tmp_path / f"home-{os.getuid()}"
    assert ran.returncode == 0 and f"{home} is used; set HOME" in ran.stderr
    assert json.loads(ran.stdout)["output_dir"]["value"] == f"{home}/out" and home.stat().st_mode & 0o77 == 0
