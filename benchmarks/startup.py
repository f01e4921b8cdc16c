"""How long the command line takes to answer, each time in a fresh process, and that it imports nothing heavy.

    python benchmarks/startup.py [CHECKOUT [ROUNDS]]

With CHECKOUT, another checkout of this repository whose .venv is installed, CPU seconds of both in turns instead: of
commands, and of `plan` at first (nothing kept by earlier commands) and again.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

from interleaved import print_table, ratio, seconds_in_turns

from simpletuner.commands.shell.scripts import LINE

HEAVY = ("torch", "numpy", "PIL", "diffusers", "transformers", "accelerate", "deepspeed")
ROUNDS = 9
GOAL_SECONDS = 0.7
HOME = "home"


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


PLANS = (
    ("--model_family=sdxl",),
    ("--model_family=flux",),
    ("--model_family=sdxl", "--model_type=lora"),
    ("--model_family=flux", "--model_type=lora"),
    ("--model_family=flux", "--auto", "--num_processes=8"),
    ("--model_family=sdxl", "--auto"),
)


def answer(folder: str, question: Question, *python: str, program: str = sys.executable) -> str:
    """Ask in a fresh process of a Python, with flags of it, and return what it says."""
    command = [program, *python, "-m", "simpletuner", *question.arguments]
    home = {"SIMPLETUNER_HOME": str(Path(folder) / HOME)}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", **home, **question.environment}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode in question.codes, f"{question.arguments} ended with {done.returncode}: {done.stdout}"
    return done.stdout


def prepare(folder: str, program: str = sys.executable) -> None:
    """Write a file with all settings, and the image folder that it names."""
    draw = Path(__file__).parent.parent / "examples" / "shapes" / "draw.py"
    subprocess.run([sys.executable, str(draw), f"{folder}/images", "--count", "8"], check=True, capture_output=True)
    answer(folder, Question(("config", "export", "--to=toml", f"--output={ALL_SETTINGS}", *EVERY_ONE)), program=program)


def heavy_imports(folder: str, question: Question) -> list[str]:
    """Return which heavy packages were imported, as Python's own account of imports says."""
    account = answer(folder, question, "-X", "importtime").splitlines()
    modules = {line.rpartition("|")[2].strip() for line in account if line.startswith("import time:")}
    assert "simpletuner.app" in modules, "no account of imports"
    return [name for name in HEAVY if name in modules]


def children_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def command_row(folder: Path, name: str, rounds: int, programs: Mapping[str, str]) -> list[str]:
    """Return the CPU seconds of each program's answer, and their ratio."""
    question = QUESTIONS[name]
    asked = {each: partial(answer, str(folder / each), question, program=path) for each, path in programs.items()}
    seconds = seconds_in_turns(asked, rounds, clock=children_cpu_seconds)
    return [name, *(f"{statistics.median(seconds[each]):.2f}" for each in programs), f"{ratio(seconds, *programs):.2f}"]


def plan_row(folder: Path, flags: Sequence[str], programs: Mapping[str, str]) -> list[str]:
    """Return the CPU seconds of a plan of each program where nothing is kept, and again, and their ratios."""
    seconds: dict[str, list[float]] = {}
    for each, program in programs.items():
        shutil.rmtree(folder / each / HOME, ignore_errors=True)
        ends = [children_cpu_seconds()]
        for _ in range(2):
            answer(str(folder / each), Question(("plan", "--gpu=H100", *flags), codes=(0, 3)), program=program)
            ends.append(children_cpu_seconds())
        seconds[each] = [after - before for before, after in pairwise(ends)]
    ratios = [f"{one / another:.2f}" for one, another in zip(*seconds.values(), strict=True)]
    return [" ".join(flags), *(f"{each:.2f}" for both in seconds.values() for each in both), *ratios]


def print_beside(checkout: Path, rounds: int) -> None:
    """Print CPU seconds of commands and plans here and in another checkout."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    programs = {"here": sys.executable, "there": str(checkout / ".venv" / "bin" / "python")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for each, program in programs.items():
            (folder / each).mkdir()
            prepare(str(folder / each), program)
        rows = [command_row(folder, question, rounds, programs) for question in QUESTIONS]
        print_table(f"CPU seconds, load {os.getloadavg()[0]:.1f}", ["command", *programs, "ratio"], rows)
        plan_row(folder, ("--model_family=sdxl", "--model_flavour=tiny"), programs)  # compiles modules
        columns = ["plan", *(f"{each}, {when}" for each in (*programs, "ratio") for when in ("first", "again"))]
        for flags in PLANS:
            row = plan_row(folder, flags, programs)
            print_table(f"CPU seconds, load {os.getloadavg()[0]:.1f}", columns, [row])


def print_alone() -> None:
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


def main() -> None:
    if len(sys.argv) > 1:
        print_beside(Path(sys.argv[1]), int([*sys.argv, ROUNDS][2]))
    else:
        print_alone()


if __name__ == "__main__":
    main()
