"""`simpletuner config import`: turn the original's files into ours, with every difference as a comment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from simpletuner.data.dataset_file import read_entries
from simpletuner.data.original_datasets import ImportedDatasets, import_datasets
from simpletuner.errors import SettingsError
from simpletuner.models.support import check_runnable
from simpletuner.report import CONTROLS, Report
from simpletuner.settings.config_files import CONFIG_ENV
from simpletuner.settings.file_entries import NotParsed
from simpletuner.settings.formats import read_text
from simpletuner.settings.loading import Loaded, resolve, settings_as_json
from simpletuner.settings.original_import import (
    LeftOut,
    Original,
    first_existing,
    read_original,
    split_variables,
    take_values,
    working_folder,
)
from simpletuner.settings.original_toml import MARK, sources_of, write_toml
from simpletuner.settings.sections import SECTION_OF, Data
from simpletuner.settings.sources import ACCELERATE_CONFIG, from_accelerate
from simpletuner.settings.variables import from_env_file
from simpletuner.system.numbers import count_noun
from simpletuner.system.output_file import refuse_overwriting, save

DATASETS = "data_backend_config"
OPTIONAL = ("validation", "logging")
"""Sections that do not change what is trained: settings of theirs that cannot be run are left out."""
ALSO_OPTIONAL = ("lr_warmup_steps", "aspect_bucket_alignment")


def import_files(path: Path, output: Path | None, force: bool) -> None:
    """Write our form of a file or folder of the original. Raises SettingsError where nothing is left that could run."""
    head = "" if path.is_dir() else first_text(path)
    if head.startswith(f"# {MARK}"):
        raise SettingsError(f"{path} is imported already: there is nothing to do", f"simpletuner train --config={path}")
    is_list = head.startswith("[") and path.suffix.lower() == ".json"
    suffix = ".json" if is_list else ".toml"
    if output is not None:
        if output.suffix != suffix:
            raise SettingsError(f"{output}: a {suffix} file is written", f"name it {output.with_suffix(suffix)}")
        refuse_overwriting(output, force)
    (import_dataset_file if is_list else import_run)(path, output, force)


def first_text(path: Path) -> str:
    """Return the first characters of a file. Raises SettingsError where it cannot be read."""
    try:
        return read_text(path).lstrip()[:80]
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}", "check the path") from None
    except NotParsed:
        return ""  # its reader names the line


def import_dataset_file(path: Path, output: Path | None, force: bool) -> None:
    datasets = import_datasets(read_entries(path), path, Data(), working_folder(path), {})
    write(output, as_json(datasets))
    report_left_out(f"{path}: {len(datasets.entries)} datasets taken", datasets.left_out)
    if output is not None:
        Report().say(f"{output} is written: name it with --{DATASETS}")


def import_run(path: Path, output: Path | None, force: bool) -> None:
    original = read_original(path)
    split_variables(original)
    root = working_folder(original.file)
    take_values(original, root)
    loaded = resolve_taken(original)
    beside = output and output.with_suffix(".datasets.json")
    datasets = take_datasets(original, loaded, root, beside)
    if datasets is not None:
        loaded = resolve_taken(original)
    text, count, changed = write_toml(original, loaded, root)
    written = [output] if output else []
    if datasets is not None and datasets.is_changed and beside:
        refuse_overwriting(beside, force)
        write(beside, as_json(datasets))
        written.insert(0, beside)
    write(output, text)
    report_left_out(f"{original.file}: {count_noun(count, 'setting')}, {changed} with a remark", original.left_out)
    if Path(CONFIG_ENV).is_file() and from_env_file(Path(CONFIG_ENV)).values:
        Report().warn(f"{CONFIG_ENV} is read by every run in this folder: leave only variables of other programs in it")
    if output is not None:
        names = " and ".join(map(str, written))
        verb = "are" if len(written) > 1 else "is"
        Report().say(f"{names} {verb} written: `simpletuner train --config={output}` starts the run")


def resolve_taken(original: Original) -> Loaded:
    """Return the settings that were taken, after leaving out optional ones that contradict others.

    Raises SettingsError for what cannot be run.
    """
    while True:
        try:
            return resolve_all(original)
        except SettingsError as error:
            optional = [
                mistake
                for mistake in error.mistakes
                if mistake.setting in original.taken
                and (SECTION_OF.get(mistake.setting) in OPTIONAL or mistake.setting in ALSO_OPTIONAL)
            ]
            if not optional:
                raise
            for mistake in optional:
                original.drop(mistake.setting, mistake.message)


def resolve_all(original: Original) -> Loaded:
    named = original.taken.get(ACCELERATE_CONFIG)
    accelerate = from_accelerate(named.value.value, {}) if named else []
    _, own = sources_of(original, {})
    loaded = check_runnable(resolve([*accelerate, own]))
    values = settings_as_json(loaded)
    defaults, own = sources_of(original, {name: values[name] for name in loaded.origins})
    return check_runnable(resolve([defaults, *accelerate, own]))


def take_datasets(original: Original, loaded: Loaded, root: Path, new: Path | None) -> ImportedDatasets | None:
    """Import the dataset file, and set the run's path to it, or to its copy `new` where it must change."""
    taken = original.taken.get(DATASETS)
    if taken is None or loaded.settings.data.data_backend_config is None:
        return None
    folders = dict.fromkeys((root, original.file.parent, original.file.parent.parent))
    file = first_existing(str(taken.given.value), folders)
    if file is None:
        places = ", ".join(str(folder.absolute()) for folder in folders)
        message = f"{DATASETS} = {taken.given.value} ({taken.given.place}): there is no such file in {places}"
        raise SettingsError(message, "the original's own examples come with it: copy the file here")
    names = {name: str(value) for name, value in settings_as_json(loaded).items()}
    datasets = import_datasets(read_entries(file), file, loaded.settings.data, root, names)
    original.left_out += datasets.left_out
    if datasets.is_changed and new is None:
        reason = "this version refuses parts of it: --output writes a copy without them, too"
        original.leave_out(replace(taken.given, value=str(file)), reason)
    path = new if datasets.is_changed and new else file
    is_same = root == Path() and path.resolve() == Path(str(taken.given.value)).resolve()
    value = replace(taken.value, value=taken.given.value if is_same else str(path))
    original.taken[DATASETS] = replace(taken, value=value)
    return datasets


def as_json(datasets: ImportedDatasets) -> str:
    return json.dumps(datasets.entries, indent=2, ensure_ascii=False) + "\n"


def write(output: Path | None, text: str) -> None:
    """Write TOML or JSON to a file or to stdout, with control characters escaped as both formats have it."""
    text = CONTROLS.sub(lambda control: f"\\u{ord(control[0]):04x}", text)
    if output is None:
        Report().text(text)
    else:
        save(output, text)


def report_left_out(taken: str, left_out: Sequence[LeftOut]) -> None:
    report, looks = Report(), [item for item in left_out if item.needs_look]
    need = f"{len(looks)} need{'s' * (len(looks) == 1)} a look"
    report.say(f"{taken}; {len(left_out) - len(looks)} left out without effect; {need}")
    report.warn_all(map(str, looks))
