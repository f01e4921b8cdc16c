"""Count what `config import` makes of a folder of another trainer's files, by reason.

`python tests/campaigns/imports.py FOLDER [PROGRAM]`: whole, partial (with --partial, by what is lost) or refused.
PROGRAM is a name as recognition has it, such as OneTrainer; files of other programs are left out then. `original` is
the original SimpleTuner, whose config.json files are counted, and config.json.example: FOLDER is then its repository.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from simpletuner.commands.config_import import foreign_file, import_files
from simpletuner.errors import SettingsError, SimpleTunerError

SUFFIXES = (".json", ".toml", ".yaml", ".yml")


def outcome(file: Path, output: Path) -> tuple[str, list[str]]:
    """Return whole, partial or refused, and the reasons of what is lost."""
    lost: list[str] = []
    for partial in (False, True):
        try:
            import_files(file, output, force=True, partial=partial)
        except SimpleTunerError as error:
            mistakes = error.mistakes if isinstance(error, SettingsError) else []
            if partial or not mistakes:
                return "refused", [error.message.replace(str(file), "FILE").splitlines()[0]]
            lost = [f"{each.setting}: {each.message}" for each in mistakes]
        else:
            return ("partial" if partial else "whole"), lost
    raise AssertionError


def files_of(folder: Path, program: str) -> Iterator[tuple[Path, str]]:
    """Yield (file, suffix of the file to write) of a program's files; of any program's if it is empty.

    A file that cannot be recognised is yielded, too: its import says why.
    """
    if program == ORIGINAL:
        for example in folder.rglob("config.json.example"):
            shutil.copyfile(example, example.with_suffix(""))
        yield from ((file, ".toml") for file in sorted(folder.rglob("config.json")))
        return
    for file in sorted(file for file in folder.rglob("*") if file.suffix in SUFFIXES):
        try:
            found = foreign_file(file)
        except SimpleTunerError:
            yield file, ".toml"
        else:
            if found is not None and program in ("", found.trainer.name):
                yield file, ".json" if found.is_list else ".toml"


ORIGINAL = "original"


def main(folder: Path, program: str = "") -> None:
    counts, reasons = Counter[str](), Counter[str]()
    with chdir(folder):  # the original's files name others from its repository's folder on
        for file, suffix in files_of(Path(), program):
            with tempfile.TemporaryDirectory() as made, redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                what, why = outcome(file, Path(made, f"run{suffix}"))
            counts[what] += 1
            reasons.update(f"{what}: {PLACES.sub('', each)}" for each in dict.fromkeys(why))
            print(f"{what:8} {file}  {'; '.join(why)}")
    print("\n" + ", ".join(f"{number} {what}" for what, number in counts.items()))
    for reason, number in reasons.most_common():
        print(f"{number:4}  {reason}")


PLACES = re.compile(r" \[[^][]*FILE:\d+[^][]*\]| \(FILE:\d+\)")
"""Lines of a file in the reason why it is refused."""


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3])
