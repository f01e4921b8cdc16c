"""Change one line of the package at a time, and see that the tests that mirror it notice.

    .venv/bin/python tests/campaigns/mutants.py --results=mutants.jsonl            # some hours; goes on where it was
    .venv/bin/python tests/campaigns/mutants.py --only='parallel/*' --only=t19

`mutants.toml` lists them: the file, exact text that stands there once, what it becomes, and the tests that must fail.
Each runs in a copy of the checkout, whose package comes first on sys.path and PYTHONPATH, where all tests pass before.
A mutant with `equivalent` changes nothing that anyone could see, for the reason given, and is not run.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest
from results import add_result, read_results

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutants.toml")
SECONDS = 900
"""After which a mutant counts as killed: its tests hang."""
VERDICTS = {0: "survived", 1: "killed", 2: "does not load", 4: "no such test", 5: "no such test"}
"""By the exit code of pytest."""


@dataclass(frozen=True)
class Mutant:
    """A change of behaviour."""

    name: str
    file: str
    before: str
    after: str
    tests: str
    equivalent: str = ""

    def is_named_by(self, patterns: list[str]) -> bool:
        return not patterns or any(fnmatch(self.name, each) or fnmatch(self.file, each) for each in patterns)

    def applied(self, root: Path) -> str:
        """Return the file's text with the change. Raises ValueError unless the text to change stands there once."""
        text = (root / "simpletuner" / self.file).read_text()
        if text.count(self.before) != 1:
            raise ValueError(f"{self.name}: its text stands {text.count(self.before)} times in {self.file}")
        return text.replace(self.before, self.after)


def read_mutants() -> list[Mutant]:
    return [Mutant(**row) for row in tomllib.loads(LIST.read_text())["mutant"]]


def run_tests(copy: Path, tests: str) -> str:
    """Run tests in a copy of the checkout, forked from this process, which has torch loaded; return the verdict."""
    process = multiprocessing.get_context("fork").Process(target=become_pytest, args=(copy, shlex.split(tests)))
    process.start()
    process.join(SECONDS)
    hangs = process.is_alive()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # with all that it has left
    process.join()
    return "killed (hangs)" if hangs else VERDICTS.get(process.exitcode, "killed")


def become_pytest(copy: Path, tests: list[str]) -> None:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    os.dup2(1, 2)
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path.insert(0, str(copy))
    ignored = "ignore::pytest.PytestAssertRewriteWarning"  # of plugins that are loaded already, as `anyio` is
    os._exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-W", ignored, *tests]))


def copied_checkout(folder: Path) -> Path:
    """Copy what git has, and share what DeepSpeed has compiled. Raises RuntimeError if another package is imported."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    if (ROOT / ".torch_extensions").exists():
        (folder / ".torch_extensions").symlink_to(ROOT / ".torch_extensions")
    command = [sys.executable, "-P", "-c", "import simpletuner; print(simpletuner.__file__)"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    found = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    if not Path(found.strip()).is_relative_to(folder):
        raise RuntimeError(f"tests would import {found}")
    return folder


def run_mutant(copy: Path, mutant: Mutant) -> str:
    """Apply a mutant, run its tests, and take it back; return the verdict."""
    path = copy / "simpletuner" / mutant.file
    text = path.read_text()
    path.write_text(mutant.applied(copy))
    try:
        return run_tests(copy, mutant.tests)
    finally:
        path.write_text(text)


def main() -> None:
    """Run the mutants in a copy of the checkout, and print what became of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="names or files, with wildcards; several")
    parser.add_argument("--results", type=Path, help="a file of JSON lines to append to, and to go on from")
    given = parser.parse_args()
    mutants = [each for each in read_mutants() if each.is_named_by(given.only)]
    for mutant in mutants:
        mutant.applied(ROOT)  # before hours of tests
    for library in ("diffusers", "torch.distributed.tensor", "transformers"):
        importlib.import_module(library)  # once for all mutants; nothing here may load the package
    with tempfile.TemporaryDirectory() as name:
        results = given.results or Path(name) / "results.jsonl"
        copy, passing = copied_checkout(Path(name) / "copy"), {}
        done = {row["mutant"] for row in read_results(results)}
        for mutant in mutants:
            if mutant.equivalent or mutant.name in done:
                continue
            if mutant.tests not in passing:
                passing[mutant.tests] = run_tests(copy, mutant.tests) == "survived"
            verdict = run_mutant(copy, mutant) if passing[mutant.tests] else "fails unchanged"
            print(f"{mutant.name:8} {verdict:16} {mutant.file}: {mutant.tests}", flush=True)
            if passing[mutant.tests]:
                add_result(results, {"mutant": mutant.name, "verdict": verdict})
        verdicts = Counter(row["verdict"] for row in read_results(results))
    equivalent = sum(bool(each.equivalent) for each in mutants)
    print(f"{dict(verdicts)}, {equivalent} equivalent")
    raise SystemExit(not set(verdicts) <= {"killed", "killed (hangs)"})


if __name__ == "__main__":
    main()
