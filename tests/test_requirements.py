"""Floors of requirements with their reasons, extras by their own names, and the other program of this name."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.version import Version

from simpletuner.errors import EnvironmentNotReady
from simpletuner.extras import EXTRAS, check_installation, install_command

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PATCHED = {
    "transformers": "5.10",
    "diffusers": "0.38",
    "pillow": "12.3",
    "pillow-heif": "1.6",
    "starlette": "1.3.1",
    "sentencepiece": "0.2.1",
    "protobuf": "6.33.5",
    "jinja2": "3.1.6",
    "pyarrow": "14.0.1",
    "pyyaml": "5.4",
    "deepspeed": "0.15.1",
}
"""The first versions that have what advisories name mended."""


def floors(requirements: list[str]) -> dict[str, Version]:
    parsed = [Requirement(each) for each in requirements]
    return {each.name.lower(): Version(next(iter(each.specifier)).version) for each in parsed}


def test_floors_are_patched_versions_and_each_says_why():
    extras = PROJECT["optional-dependencies"]
    known = floors([each for listed in (PROJECT["dependencies"], *extras.values()) for each in listed])
    assert {name: str(known[name]) for name, patched in PATCHED.items() if known[name] < Version(patched)} == {}
    needed = floors([each for name in EXTRAS for each in extras[name]]) | floors(PROJECT["dependencies"])
    dev = floors(extras["dev"])
    assert {name for name in dev.keys() & needed.keys() if dev[name] != needed[name]} == set()
    text = (ROOT / "pyproject.toml").read_text().partition("dependencies = [\n")[2].partition("\n]")[0]
    lines = [line for line in text.splitlines() if not line.strip().startswith("#")]
    assert len(lines) == len(PROJECT["dependencies"])
    assert [line for line in lines if not re.search(r'",  # \w', line)] == []
    installed = dict(re.findall(r"(?m)^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text()))
    pinned = {name.lower().replace("_", "-"): version for name, version in installed.items()}
    below = [name for name, floor in needed.items() if Version(pinned[name.replace("_", "-")]) < floor]
    assert below == []


def test_extras_are_installed_by_their_own_names():
    extras = PROJECT["optional-dependencies"]
    assert {name: list(listed) for name, listed in EXTRAS.items()} == {n: v for n, v in extras.items() if n != "dev"}
    assert install_command("s3") == "pip install 'obstore>=0.12' 'boto3>=1.35'"
    known = {each for listed in EXTRAS.values() for each in listed}
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("simpletuner/**/*.py"), *ROOT.glob("*/*.py")]:
        text = path.read_text()
        if path != Path(__file__):
            assert "simpletuner[" not in text, path
            commands = re.findall(r"pip install ([^`\n#]*)", text)
            floored = {each for line in commands for each in re.findall(r"'([\w-]+>=[\d.]+)'", line)}
            assert floored - known == set(), path


@pytest.mark.parametrize("program", ["simpletuner.cli:main", "simpletuner.app:main"])
def test_the_other_program_beside_this_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str):
    folder = tmp_path / "simpletuner-3.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: simpletuner\nVersion: 3.1.0\n")
    (folder / "entry_points.txt").write_text(f"[console_scripts]\nsimpletuner = {program}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    said = check_installation(ROOT / "simpletuner")
    assert said.startswith("simpletuner 3.1.0 in ") == (program == "simpletuner.cli:main")


def test_files_of_the_other_program_among_these_end_every_command(tmp_path: Path):
    package = tmp_path / "simpletuner"
    (package / "helpers").mkdir(parents=True)
    with pytest.raises(EnvironmentNotReady, match=r"holds files of another program of the same name \(helpers\)"):
        check_installation(package)
