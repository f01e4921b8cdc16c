"""Folders that `simpletuner lora` writes with a card: whole or not at all, never over their sources."""

from __future__ import annotations

import html
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from simpletuner import __version__
from simpletuner.checkpoints.export import check_export, check_targets
from simpletuner.errors import SettingsError
from simpletuner.models.catalog.registry import describe_license, license_of
from simpletuner.models.family.base import ModelFamily
from simpletuner.parallel.world import World
from simpletuner.runs.facts import hub_id
from simpletuner.settings.declared.sections import Model
from simpletuner.system.files.atomic import remove, restore_replaced, unfinished_path, write_file
from simpletuner.system.files.locks import sole_writer
from simpletuner.training.publishing.model_card import CARD, front_matter


@dataclass(frozen=True)
class ResultOrigin:
    """Sources of a result: the command, the base model as it was named, the files with their part."""

    command: str
    base: str
    files: Sequence[tuple[Path, str]]

    def metadata(self) -> dict[str, str]:
        # Names alone: a path says whose machine it was.
        parts = "; ".join(f"{name_of(path)} ({part})" if part else name_of(path) for path, part in self.files)
        found = {"made_by": f"simpletuner {__version__}, lora {self.command}", "made_from": parts}
        return found | ({"base_model": shown(self.base)} if self.base else {})

    def write_card(self, folder: Path, model: Model | None = None) -> None:
        """Write README.md; with the model's settings its first lines are those of a run's card."""
        head = str(front_matter(model, ())) if model else "library_name: diffusers\ntags:\n- lora\n- simpletuner"
        terms = describe_license(license_of(hub_id(model))) if model else ""
        rows = [f"base model: {shown(self.base)}"] * bool(self.base)
        rows += [f"{name_of(path)}, {part}" if part else name_of(path) for path, part in self.files]
        lines = [f"---\n{head}\n---\n", f"# {html.escape(folder_name(folder))}\n"]
        lines += [f"Written by `simpletuner lora {self.command}` ({__version__}) from:\n"]
        lines += [f"- {html.escape(row)}" for row in rows]
        lines += [f"\nLicense of the base model: {terms}."] * bool(terms)
        write_file(folder / CARD, ("\n".join(lines) + "\n").encode())


def shown(base: str) -> str:
    return Path(base).name if Path(base).expanduser().exists() else base


def name_of(path: Path) -> str:
    """Return the name of a file; of one that each folder has, the folder's, too."""
    return (
        path.name
        if path.suffix == ".safetensors" and path.stem != "pytorch_lora_weights"
        else "/".join(path.parts[-2:])
    )


def folder_name(hidden: Path) -> str:
    return hidden.name.removeprefix(".").removesuffix(".unfinished").rstrip(".")


def check_result(target: Path, replace: bool, sources: Sequence[Path]) -> None:
    """Raise SettingsError for a folder that exists, unless it is to be replaced, and for one of the sources.

    Raises EnvironmentNotReady for a folder that simpletuner has not written.
    """
    real = target.resolve()
    for source in sources:
        if real == source.resolve() or real in source.resolve().parents:
            raise SettingsError(f"{target} holds {source}, from which it would be made", "name another --output")
    refuse_existing(target, replace)
    check_targets([target])


def refuse_existing(target: Path, replace: bool) -> None:
    if os.path.lexists(target) and not replace:
        raise SettingsError(f"{target} exists already", "name another --output, or --force to replace it")


@contextmanager
def writing_to(target: Path, family: ModelFamily | None, world: World, replace: bool) -> Iterator[None]:
    """Write a result in the block; what was begun is removed where it fails.

    What a killed command has left, is removed or put back first. Raises EnvironmentNotReady where another
    command writes there, and SettingsError where one has done so meanwhile.
    """
    if family is not None:
        check_export(family, [target])
    with sole_writer(target):
        restore_replaced(target)
        refuse_existing(target, replace)
        try:
            yield
        except BaseException:
            remove(unfinished_path(target, world.lease.record.id))
            raise
