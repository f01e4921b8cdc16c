"""How long the command line takes to answer, each time in a fresh process, and that it imports nothing heavy."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from functools import partial

from interleaved import print_table, seconds_in_turns

HEAVY = ("torch", "numpy", "diffusers", "transformers", "accelerate")
ROUNDS = 9
GOAL_SECONDS = 1.0
MISTAKE = ["train", "--learning_rate=fast"]
QUESTIONS = {"--help": ["--help"], "train --help": ["train", "--help"], "a settings mistake": MISTAKE}


def answer(arguments: list[str], *python: str) -> str:
    """Ask in a fresh process, in an empty folder, and return what it says."""
    command = [sys.executable, *python, "-m", "simpletuner", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.returncode == (2 if arguments == MISTAKE else 0), process.stdout
    return process.stdout


def heavy_imports(arguments: list[str]) -> list[str]:
    """Return which heavy packages were imported, as Python's own account of imports says."""
    account = answer(arguments, "-X", "importtime").splitlines()
    modules = {line.rpartition("|")[2].strip() for line in account if line.startswith("import time:")}
    assert "simpletuner.app" in modules, "no account of imports"
    return [name for name in HEAVY if name in modules]


def main() -> None:
    """Ask each question several times, in turns, and print the table."""
    contestants = {name: partial(answer, given) for name, given in QUESTIONS.items()}
    seconds = seconds_in_turns(contestants, ROUNDS)
    rows = [
        [name, f"{statistics.median(seconds[name]):.2f}", ", ".join(heavy_imports(given)) or "none"]
        for name, given in QUESTIONS.items()
    ]
    title = f"simpletuner, fresh processes (median of {ROUNDS}; goal: below {GOAL_SECONDS:.0f} s, no heavy imports)"
    print_table(title, ["question", "seconds", f"imported of {', '.join(HEAVY)}"], rows)


if __name__ == "__main__":
    main()
