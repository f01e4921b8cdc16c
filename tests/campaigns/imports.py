"""Count what `config import` makes of a folder of another trainer's files, by reason.

`python tests/campaigns/imports.py FOLDER [PROGRAM]`: whole, partial (with --partial, by what is lost) or refused.
PROGRAM is a name as recognition has it, such as OneTrainer; files of other programs are left out then.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
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


def main(folder: Path, program: str = "") -> None:
    counts, reasons = Counter[str](), Counter[str]()
    for file in sorted(file for file in folder.rglob("*") if file.suffix in SUFFIXES):
        with tempfile.TemporaryDirectory() as made, redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            try:
                found = foreign_file(file)
            except SimpleTunerError as error:
                found, what, why = None, "refused", [error.message.replace(str(file), "FILE").splitlines()[0]]
            else:
                if found is None or (program and found.trainer.name != program):
                    continue
                what, why = outcome(file, Path(made, "datasets.json" if found.is_list else "run.toml"))
        counts[what] += 1
        reasons.update(f"{what}: {each}" for each in dict.fromkeys(why))
        print(f"{what:8} {file.relative_to(folder)}  {'; '.join(why)}")
    print("\n" + ", ".join(f"{number} {what}" for what, number in counts.items()))
    for reason, number in reasons.most_common():
        print(f"{number:4}  {reason}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3])
