"""Steps common to all imports: refuse what would train something else, and write the rest."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from simpletuner.errors import Mistake, SettingsError, SimpleTunerError, collect_error
from simpletuner.importing.original import Original, UnmappedValue
from simpletuner.importing.original_datasets import ImportedDatasets
from simpletuner.importing.toml_document import write_toml
from simpletuner.report import Report
from simpletuner.run_log import CONTROLS
from simpletuner.settings.declared.errors import shown_value
from simpletuner.settings.resolving.loading import Loaded
from simpletuner.system.files.atomic import refuse_overwriting, save
from simpletuner.system.numbers import count_noun
from simpletuner.tools.run_check import check_run

DATASETS = "data_backend_config"
PARTIAL = "--partial writes what is left, with these as comments; what is trained then is not what the file asks for"


def lost_of(left_out: Sequence[UnmappedValue]) -> list[UnmappedValue]:
    return [item for item in left_out if item.effect == "lost"]


def refuse_another_meaning(file: Path, left_out: Sequence[UnmappedValue]) -> None:
    """Raise SettingsError with all unsupported values that change what is trained."""
    if lost := lost_of(left_out):
        mistakes = [Mistake(item.name, item.reason, item.place, shown_value(item.name, item.value)) for item in lost]
        what = "\n  ".join(map(str, lost))
        message = f"{file} asks for what this version does not do, so a run would train something else:\n  {what}"
        raise SettingsError(message, PARTIAL, mistakes=mistakes)


@contextmanager
def report_unsupported_first(original: Original, partial: bool) -> Iterator[None]:
    """Raise one error of the unsupported values, which come first, and of the block's own."""
    errors: list[SimpleTunerError] = []
    with collect_error(errors):
        yield
    if not partial:
        with collect_error(errors):
            refuse_another_meaning(original.file, original.left_out)
    if len(errors) > 1:
        other, lost = errors
        mistakes = [mistake for error in (lost, other) for mistake in getattr(error, "mistakes", ())]
        raise SettingsError(f"{lost.message}\n  {other.message}", other.hint, mistakes=mistakes)
    if errors:
        raise errors[0]


@dataclass(frozen=True)
class ReadyRun:
    """An imported run before anything of it is written."""

    original: Original
    loaded: Loaded
    taken: str
    """Sentence on how many settings it has."""
    texts: Mapping[Path | None, str]
    """Texts by file: its datasets and prompts, and last the run itself, which names them; None is stdout."""


def ready_run(
    original: Original,
    loaded: Loaded,
    datasets: ImportedDatasets | None,
    root: Path,
    output: Path | None,
    prompts: Sequence[Mapping[str, object]] = (),
) -> ReadyRun:
    """Return the texts of a run, of its datasets where they changed, and of its prompts."""
    text, count, changed = write_toml(original, loaded, root)
    texts: dict[Path | None, str] = {}
    if datasets is not None and datasets.is_changed and output:
        texts[datasets_path(output)] = as_json(datasets)
    if prompts and output:
        lines = (f"{json.dumps(each, ensure_ascii=False)}\n" for each in prompts)
        texts[prompts_path(output)] = "".join(lines)
    taken = f"{original.file}: {count_noun(count, 'setting')}, {changed} with a remark"
    return ReadyRun(original, loaded, taken, {**texts, output: text})


def write_runs(runs: Sequence[ReadyRun], force: bool) -> None:
    """Write the runs of a file, if none of their files exists, and report what was left out of each."""
    for path in (path for run in runs for path in run.texts if path):
        refuse_overwriting(path, force)
    for run in runs:
        for path, text in run.texts.items():
            write(path, text, force)
        report_left_out(run.taken, run.original.left_out)
        report_written(run, [str(path) for path in run.texts if path])


def report_written(run: ReadyRun, names: Sequence[str]) -> None:
    """Say how the run is started, or why it is refused yet; nothing of what went to stdout."""
    if not names:
        return
    written = ", ".join(names[:-1]) + " and " * (len(names) > 1) + names[-1]
    verb = "are" if len(names) > 1 else "is"
    starts = "starts what is left of the run" if lost_of(run.original.left_out) else "starts the run"
    command = f"`simpletuner train {shlex.quote(f'--config={names[-1]}')}`"
    try:
        check_run(run.loaded)
    except SimpleTunerError as error:  # as `config validate` would, as of a missing tracker
        Report().warn(f"{written} {verb} written, but {command} is refused: {error.message}", error.hint)
    else:
        Report().say(f"{written} {verb} written: {command} {starts}")


def write_datasets(file: Path, datasets: ImportedDatasets, output: Path | None, partial: bool) -> None:
    """Write a list of datasets. Raises SettingsError if it would train on others, unless `partial`."""
    if not partial:
        refuse_another_meaning(file, datasets.left_out)
    write(output, as_json(datasets))
    report_left_out(f"{file}: {count_noun(len(datasets.entries), 'dataset')} taken", datasets.left_out)
    if output is not None:
        Report().say(f"{output} is written: name it with --{DATASETS}")


def datasets_path(output: Path) -> Path:
    return output.with_suffix(".datasets.json")


def prompts_path(output: Path) -> Path:
    return output.with_suffix(".prompts.jsonl")


def as_json(datasets: ImportedDatasets) -> str:
    return json.dumps(datasets.entries, indent=2, ensure_ascii=False) + "\n"


def write(output: Path | None, text: str, force: bool = True) -> None:
    """Write TOML or JSON to a file or to stdout, with control characters escaped as both formats have it."""
    text = CONTROLS.sub(lambda control: f"\\u{ord(control[0]):04x}", text)
    if output is None:
        Report().text(text)
    else:
        save(output, text, force)


def report_left_out(taken: str, left_out: Sequence[UnmappedValue]) -> None:
    report, lost = Report(), lost_of(left_out)
    looks = [item for item in left_out if item.effect == "look"]
    need = f"{len(looks)} need{'s' * (len(looks) == 1)} a look"
    idle = len(left_out) - len(looks) - len(lost)
    report.say(f"{taken}; {idle} left out without effect; {need}{f'; {len(lost)} lost' if lost else ''}")
    report.warn_all(f"lost: {item}" for item in lost)
    report.warn_all(map(str, looks))
