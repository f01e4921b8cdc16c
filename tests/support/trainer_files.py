"""Files of other trainers for tests: vocabularies, values at dotted paths, and all answers to a file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simpletuner.importing.foreign_trainer import ForeignTrainer, Translation
from simpletuner.importing.original import UnmappedValue

FOLDER = Path(__file__).parents[1] / "importing" / "vocabulary"


def vocabulary(program: str) -> Iterator[tuple[str, Any, str]]:
    for line in (FOLDER / f"{program}.txt").read_text().splitlines():
        name, default, kind = line.split("\t")
        try:
            yield name, ast.literal_eval(default), kind
        except (SyntaxError, ValueError):
            yield name, default, kind


def answers(trainer: ForeignTrainer, values: dict[str, Any]) -> list[UnmappedValue]:
    """Answers to all keys of a file that are no settings."""
    said: list[UnmappedValue] = []
    for job in trainer.jobs(values):
        run = trainer.begin(Path("theirs"), job)
        found: list[Translation] = list(trainer.entries(run, values))
        run.answer(trainer.table)
        said += [item for each in (run, *found) for item in each.left_out]
    return said


def entries(trainer: ForeignTrainer, values: dict[str, Any]) -> list[UnmappedValue]:
    """Answers to all keys of a file of datasets that are no keys of ours."""
    run = Translation(trainer.name, Path("theirs"), {}, only_datasets=True)
    found = list(trainer.entries(run, values))
    return [item for each in (run, *found) for item in each.left_out]


def put(target: Any, path: str, value: Any) -> None:
    """Set a value at a dotted path; a list on the way is entered at its only element."""
    *sections, name = path.split(".")
    for section in sections:
        target = target.setdefault(section, {})
        target = target[0] if isinstance(target, list) else target
    target[name] = value


def value_of(own: Any, setting: str) -> Any:
    """Return a setting's value, whatever its section."""
    return next(getattr(section, setting) for _, section in own if hasattr(section, setting))
