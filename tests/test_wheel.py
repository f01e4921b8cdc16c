"""What a user gets: the built wheel in an empty environment without torch; light commands must do without it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from patience import PATIENCE

from simpletuner import __version__
from simpletuner.commands.shell.scripts import PROGRAMS, script_for
from simpletuner.extras import OTHER_PROGRAM

ROOT = Path(__file__).parent.parent
LIGHT = ("typer", "rich", "pydantic", "pyyaml", "platformdirs", "psutil")
BENEATH_THEM = (
    *("annotated-doc", "annotated-types", "markdown-it-py", "mdurl", "pydantic-core"),
    *("pygments", "shellingham", "typing-extensions", "typing-inspection"),
)
SECONDS = PATIENCE
HELP = """
import contextlib, io, json, os
from simpletuner.app import main

def answer(*words, **environment):
    out, err, code = io.StringIO(), io.StringIO(), None
    os.environ.update(environment)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words)
        except SystemExit as ended:
            code = ended.code
    for name in environment:
        del os.environ[name]
    return code, out.getvalue(), err.getvalue()

waiting, helps = [()], {}
while waiting:
    words = waiting.pop()
    helps[" ".join(words)] = answer(*words, "--help")
    offered = answer(_SIMPLETUNER_LINE=" ".join(["simpletuner", *words, ""]))[1].splitlines()
    names = [line.split(chr(9))[0] for line in offered]
    waiting += [(*words, name) for name in names if f"\\n  {name} " in helps[" ".join(words)][1] and name[0] != "-"]
print(json.dumps(helps))
"""
"""Asks for the help of each command that the tab key offers, in one process."""


def outside() -> dict[str, str]:
    """Return the environment without what leads to the repository: pip would find simpletuner installed there."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=outside())
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(built_once, tmp_path_factory) -> Path:
    """Build the wheel from a copy, so that setuptools leaves nothing in the repository."""

    def build(folder: Path) -> None:
        source = tmp_path_factory.mktemp("source")
        shutil.copytree(ROOT / "simpletuner", source / "simpletuner", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, source)
        pip("wheel", "--quiet", "--no-deps", "--wheel-dir", folder, source)

    [wheel] = built_once("wheel", build).iterdir()
    return wheel


@pytest.fixture(scope="module")
def programs(wheel, built_once) -> Path:
    """Install the wheel and only what the light commands may need; return the folder of its programs."""

    def install(folder: Path) -> None:
        venv.create(folder, with_pip=False)
        constraints = ("-c", ROOT / "constraints.txt")
        pip("--python", folder / "bin" / "python", "install", "--no-deps", *constraints, *LIGHT, *BENEATH_THEM, wheel)

    return built_once("light-environment", install) / "bin"


@pytest.fixture
def start(programs, tmp_path):
    """Run a program of the wheel in an empty folder, knowing nothing of the repository."""

    def run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [programs / program, *arguments]
        where = {"cwd": tmp_path, "env": {**outside(), **environment}, "stdin": subprocess.DEVNULL}
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, **where)

    return run


def test_every_file_of_the_package_is_in_the_wheel(wheel):
    packed = set(zipfile.ZipFile(wheel).namelist())
    files = {path for path in (ROOT / "simpletuner").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path.relative_to(ROOT).as_posix() for path in files} - packed == set()
    assert "simpletuner/models/tiny/vae/diffusion_pytorch_model.safetensors" in packed
    assert {name.split("/")[0] for name in packed} == {"simpletuner", f"simpletuner-{__version__}.dist-info"}


def test_the_dockerfile_names_what_there_is(wheel):
    text, ignored = (ROOT / "Dockerfile").read_text(), (ROOT / ".dockerignore").read_text().splitlines()
    copied = {word for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for word in line.split()[:-1]}
    assert {f"!{name}" for name in copied} == {line for line in ignored if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)
    metadata = zipfile.ZipFile(wheel).read(f"simpletuner-{__version__}.dist-info/METADATA").decode()
    [extras] = re.findall(r"'\.\[(.*)\]'", text)
    assert set(extras.split(",")) == {*re.findall(r"^Provides-Extra: (.*)$", metadata, re.MULTILINE)} - {"dev"}


def test_what_the_light_commands_need_is_declared(wheel):
    metadata = zipfile.ZipFile(wheel).read(f"simpletuner-{__version__}.dist-info/METADATA").decode()
    declared = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.MULTILINE)  # a ; marks an extra
    assert set(LIGHT) - {name.lower() for name in declared} == set()


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_explain_themselves_without_torch(start, program):
    done = start(program, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: {program} ")


def test_the_wheel_knows_its_version(start):
    assert start("simpletuner", "--version").stdout.splitlines() == [__version__, OTHER_PROGRAM]


def test_every_command_and_group_has_help_without_torch(start):
    done = start("python", "-c", HELP)
    assert (done.returncode, done.stderr) == (0, "")
    helps = json.loads(done.stdout)
    assert len(helps) >= 25 and {"train", "config export", "completion"} <= helps.keys()
    for words, (code, out, err) in helps.items():
        assert (code, err) == (0, ""), words
        assert out.startswith(f"Usage: {' '.join(['simpletuner', words]).strip()} "), words


def test_the_page_says_what_installs_it(start):
    done = start("simpletuner", "page")
    assert done.returncode == 3 and "pip install 'starlette>=1.3.1' 'uvicorn>=0.34'" in done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_printed_without_torch(start, shell):
    done = start("simpletuner", "completion", shell)
    assert (done.returncode, done.stdout, done.stderr) == (0, script_for(shell), "")


def test_a_config_file_to_begin_with_is_written_without_torch(start, tmp_path):
    begun = start("simpletuner", "config", "init", "--model_family=sdxl", "--model_flavour=tiny")
    assert begun.returncode == 0, begun.stderr
    [written] = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert 'model_family = "sdxl"' in written.read_text()


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["simpletuner", "train", "--lerning_rate=1"], "did you mean `learning_rate`?"),
        (["simpletuner-train", "--model_family=sdlx", "--instance_data_dir=x"], "did you mean `sdxl`?"),
        (["simpletuner", "completion", "tcsh"], "'tcsh'"),
        (["simpletuner", "trian"], "trian"),
    ],
)
def test_a_mistake_is_answered_with_2_without_torch(start, tmp_path, command, sentence):
    done = start(*command)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
