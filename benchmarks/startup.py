"""How long the command line takes to answer, each time in a fresh process, and that it imports nothing heavy."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from interleaved import print_table, seconds_in_turns

from simpletuner.commands.shell.scripts import LINE

HEAVY = ("torch", "numpy", "PIL", "diffusers", "transformers", "accelerate", "deepspeed")
ROUNDS = 9
GOAL_SECONDS = 0.7


@dataclass(frozen=True)
class Question:
    """A command line, the environment that a shell adds to it, and the exit codes of an answer."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    codes: tuple[int, ...] = (0,)


ALL_SETTINGS = "settings.toml"
EVERY_ONE = ("--all", "--model_family=flux", "--model_flavour=tiny", "--instance_data_dir=images", "--output_dir=run")
QUESTIONS = {
    "--help": Question(("--help",)),
    "train --help": Question(("train", "--help")),
    "a settings mistake": Question(("train", "--learning_rate=fast"), codes=(2,)),
    "a tab: train --model_fl": Question((), {LINE: "simpletuner train --model_fl"}),
    "a tab: every flag": Question((), {LINE: "simpletuner train --"}),
    "config validate, all settings": Question(("config", "validate", ALL_SETTINGS)),
    "config export": Question(("config", "export", "--to=json", "--model_family=sdxl")),
    "nfs check --nodes 1": Question(("nfs", "check", "--nodes", "1"), codes=(0, 3)),
    "cache list": Question(("cache", "list")),
    "models": Question(("models",)),
}


def answer(folder: str, question: Question, *python: str, program: str = sys.executable) -> str:
    """Ask in a fresh process of a Python, with flags of it, and return what it says."""
    command = [program, *python, "-m", "simpletuner", *question.arguments]
    environment = {**os.environ, **question.environment}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode in question.codes, f"{question.arguments} ended with {done.returncode}: {done.stdout}"
    return done.stdout


def prepare(folder: str) -> None:
    """Write a file with all settings, and the image folder that it names."""
    draw = Path(__file__).parent.parent / "examples" / "shapes" / "draw.py"
    subprocess.run([sys.executable, str(draw), f"{folder}/images", "--count", "8"], check=True, capture_output=True)
    answer(folder, Question(("config", "export", "--to=toml", f"--output={ALL_SETTINGS}", *EVERY_ONE)))


def heavy_imports(folder: str, question: Question) -> list[str]:
    """Return which heavy packages were imported, as Python's own account of imports says."""
    account = answer(folder, question, "-X", "importtime").splitlines()
    modules = {line.rpartition("|")[2].strip() for line in account if line.startswith("import time:")}
    assert "simpletuner.app" in modules, "no account of imports"
    return [name for name in HEAVY if name in modules]


def main() -> None:
    """Ask each question several times, in turns, and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder)
        asked = {name: partial(answer, folder, question) for name, question in QUESTIONS.items()}
        seconds = seconds_in_turns(asked, ROUNDS)
        rows = [
            [
                name,
                *(f"{of(seconds[name]):.2f}" for of in (statistics.median, min)),
                ", ".join(heavy_imports(folder, question)) or "none",
            ]
            for name, question in QUESTIONS.items()
        ]
    title = f"simpletuner, fresh processes ({ROUNDS} rounds; goal: a median below {GOAL_SECONDS} s, no heavy imports)"
    print_table(title, ["question", "median s", "fastest s", f"imported of {', '.join(HEAVY)}"], rows)


if __name__ == "__main__":
    main()
