"""`simpletuner config import`: files of the original and of other trainers become ours.

Every difference is a comment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simpletuner.commands.import_writing import (
    DATASETS,
    ReadyRun,
    datasets_path,
    prompts_path,
    ready_run,
    report_unsupported_first,
    write_datasets,
    write_runs,
)
from simpletuner.data.config.dataset_file import DatasetEntry, dataset_entries
from simpletuner.errors import Mistake, SettingsError
from simpletuner.importing.foreign_trainer import ForeignTrainer, Translation, first_existing
from simpletuner.importing.original import (
    Original,
    names_accelerate,
    read_original,
    setting_of,
    split_variables,
)
from simpletuner.importing.original_datasets import ImportedDatasets, import_datasets
from simpletuner.importing.sorting import (
    named_file,
    read_config,
    relocated,
    take_translated,
    take_values,
    working_folder,
)
from simpletuner.importing.toml_document import MARK, sources_of
from simpletuner.importing.trainers.ai_toolkit import AI_TOOLKIT
from simpletuner.importing.trainers.diffusion_pipe import DIFFUSION_PIPE
from simpletuner.importing.trainers.kohya_gui import KOHYA_GUI
from simpletuner.importing.trainers.musubi import MUSUBI_TUNER
from simpletuner.importing.trainers.onetrainer import ONE_TRAINER
from simpletuner.importing.trainers.sd_scripts import SD_SCRIPTS
from simpletuner.importing.translation import OriginalConfig, translate
from simpletuner.models.catalog.registry import check_trainable
from simpletuner.models.catalog.support import check_runnable, check_trains_clips
from simpletuner.report import Report
from simpletuner.settings.declared.sections import SECTION_OF, Data, Model
from simpletuner.settings.files.config_files import CONFIG_ENV, NotParsed
from simpletuner.settings.files.formats import read_entries, read_list, read_text, suffix_of
from simpletuner.settings.files.raw_values import Origin, Source, naming_places
from simpletuner.settings.foreign.recognition import (
    EITHER,
    GUI,
    KOHYA,
    PROGRAMS,
    import_hint,
    is_dataset_file,
    trainer_of,
)
from simpletuner.settings.resolving.loading import Loaded, resolve, settings_as_json
from simpletuner.settings.resolving.sources import from_accelerate, from_env_file
from simpletuner.settings.values.spelling import normalize_name
from simpletuner.system.files.atomic import refuse_overwriting

TRAINERS = {each.name: each for each in (SD_SCRIPTS, KOHYA_GUI, MUSUBI_TUNER, DIFFUSION_PIPE, AI_TOOLKIT, ONE_TRAINER)}


@dataclass(frozen=True)
class ForeignFile:
    """A file of another trainer."""

    path: Path
    trainer: ForeignTrainer
    values: Mapping[str, Any] | list[Any]
    lines: Mapping[str, int]

    @property
    def is_list(self) -> bool:
        """True if it lists datasets alone."""
        return isinstance(self.values, list) or is_dataset_file(self.values)

    @property
    def runs(self) -> list[Mapping[str, Any]]:
        return list(self.trainer.jobs(self.values)) if isinstance(self.values, Mapping) else []


def foreign_file(path: Path, program: str = "") -> ForeignFile | None:
    """Return what a file of another trainer holds; None for other files.

    `program` is the one that the user names. Raises SettingsError for a file that two could have written.
    """
    if path.is_dir() or suffix_of(path) not in (".toml", ".json", ".yaml", ".yml"):
        return None
    lines: dict[str, int] = {}
    values: Any = {}
    try:
        entries = read_entries(path)
        values, lines = {entry.key: entry.value for entry in entries}, {entry.key: entry.line for entry in entries}
    except SettingsError:
        if suffix_of(path) == ".toml":
            raise
        # The reader of the original's files says what is wrong; a list is one of datasets.
        values = read_list(path) or {}
    name = PROGRAMS[program] if program else trainer_of(values)
    if name == EITHER:
        hint = import_hint(path, not isinstance(values, list) and is_dataset_file(values), name)
        raise SettingsError(f"{path} could be a file of {name}", hint)
    return ForeignFile(path, TRAINERS[name], values, lines) if name else None


def import_their_datasets(file: ForeignFile, output: Path | None, partial: bool) -> None:
    """Write a dataset file of another trainer as a list of datasets."""
    run = Translation(file.trainer.name, file.path, {}, only_datasets=True)
    datasets = their_datasets(run, file)
    left_out = [*run.left_out, *datasets.left_out]
    write_datasets(file.path, ImportedDatasets(datasets.entries, left_out, True), output, partial)


def their_datasets(run: Translation, file: ForeignFile) -> ImportedDatasets:
    """Return the datasets of a run, or of a dataset file, as ours."""
    run.datasets_file = file.path
    found = list(file.trainer.entries(run, file.values))
    entries = []
    for each, entry in zip(found, with_different_ids(each.as_entry() for each in found), strict=True):
        conditions = with_different_ids(
            {**other.as_entry(), "id": f"{entry['id']}-{CONDITION_IDS[other.defaults['conditioning_type']]}"}
            for other in each.conditions
        )
        entries += [entry | ({"conditioning_data": [other["id"] for other in conditions]} if conditions else {})]
        entries += conditions
    taken = import_datasets([DatasetEntry.of(entry, file.path) for entry in entries], file.path, Data(), Path(), {})
    left_out = [item for each in found for item in (*each.left_out, *(i for c in each.conditions for i in c.left_out))]
    return ImportedDatasets(taken.entries, [*left_out, *taken.left_out], True)


CONDITION_IDS = {"mask": "masks", "reference_strict": "references", "reference_loose": "references"}
"""Ends of the ids of masks and references, by their conditioning_type."""


def with_different_ids(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return entries of folders of the same name with a number behind it."""
    counts: Counter[str] = Counter()
    different = []
    for entry in entries:
        counts[entry["id"]] += 1
        number = counts[entry["id"]]
        different.append(entry if number == 1 else {**entry, "id": f"{entry['id']}-{number}"})
    return different


def import_their_runs(file: ForeignFile, output: Path | None, force: bool, partial: bool) -> None:
    """Write the runs of another trainer, each with its datasets and prompts as files of ours."""
    runs = []
    for number, values in enumerate(file.runs, 1):
        written = output if output is None or number == 1 else output.with_stem(f"{output.stem}-{number}")
        runs.append(import_their_run(file, values, written, partial))
    write_runs(runs, force)


def import_their_run(file: ForeignFile, values: Mapping[str, object], output: Path | None, partial: bool) -> ReadyRun:
    original, datasets = Original(file.path, [], is_simpletuner=False), None
    with report_unsupported_first(original, partial):
        run = file.trainer.begin(file.path, values, file.lines)
        if (listed := file_of_datasets(run, file, output)) is not None:
            datasets = their_datasets(run, listed)
            original.left_out += datasets.left_out
            run.defaults[DATASETS] = str(datasets_path(output)) if output else None
            run.defaults = {name: value for name, value in run.defaults.items() if name not in of_all(datasets.entries)}
        run.answer(file.trainer.table)
        if run.prompts:
            run.defaults |= prompts_as_settings(run.prompts, output)
        take_translated(original, run)
        loaded = check_runnable(resolve(sources_of(original, {})))
    prompts = run.prompts if "validation_prompt_file" in run.defaults else []
    return ready_run(original, loaded, datasets, Path(), output, prompts)


def of_all(entries: Sequence[Mapping[str, object]]) -> set[str]:
    """Return the keys that each dataset has for itself, so that the run's own value has no effect."""
    return set[str].intersection(*({*each} for each in entries if "conditioning_type" not in each))


def file_of_datasets(run: Translation, file: ForeignFile, output: Path | None) -> ForeignFile | None:
    """Return the dataset file that a run names, or its own file if that lists them; None without."""
    trainer = file.trainer
    name = run.get(trainer.dataset_file) if trainer.dataset_file else None
    run.values.pop(trainer.dataset_file, None)
    listed = None if name else trainer.folders(run)
    if not name and trainer.dataset_file and not listed:
        return None
    if output is None:
        message = f"{file.path} names datasets{f' in {name}' if name else ''}, which become a file of their own"
        raise SettingsError(message, "give --output=run.toml")
    if not name:
        return replace(file, values=listed or file.values)
    # Where a program is started, its files of datasets are below it, or beside the configuration.
    folders = (Path(), file.path.parent, file.path.parent.parent)
    if (path := first_existing(str(name), folders)) is None:
        where = ", ".join(dict.fromkeys(str(folder.absolute()) for folder in folders))
        raise SettingsError(f"{file.path} names datasets in {name}, which is not in {where}", "check that path")
    # The file of datasets is of the run's program: the GUI's are those of sd-scripts.
    owner = KOHYA if trainer.name == GUI else trainer.name
    listed = foreign_file(path, next(word for word, name in PROGRAMS.items() if name == owner))
    if listed is None or not listed.is_list:
        raise SettingsError(f"{path} lists no datasets as {trainer.name} has them", "name its file of datasets")
    return listed


def prompts_as_settings(prompts: Sequence[Mapping[str, object]], output: Path | None) -> dict[str, object]:
    """Return the setting of the prompts: a list, or a file beside the run's if they are not only texts."""
    if output is None or all(list(prompt) == ["prompt"] for prompt in prompts):
        return {"validation_prompt": [prompt["prompt"] for prompt in prompts]}
    return {"validation_prompt_file": str(prompts_path(output))}


MODEL = ("model_family", "model_flavour", "pretrained_model_name_or_path")
# Sections that do not change what is trained: settings of theirs that cannot be run are left out.
OPTIONAL = ("validation", "logging", "compile")
ONLY_FASTER = ("fuse_qkv_projections",)


def import_files(path: Path, output: Path | None, force: bool, partial: bool = False, program: str = "") -> None:
    """Write our form of a file or folder of the original, or of a file of another trainer.

    Raises SettingsError where nothing is left that could run, or, unless `partial`, where it would be another run.
    """
    head = "" if path.is_dir() else first_text(path)
    if head.startswith(f"# {MARK}"):
        raise SettingsError(f"{path} is imported already: there is nothing to do", f"simpletuner train --config={path}")
    foreign = foreign_file(path, program)
    is_list = (head.startswith("[") and path.suffix.lower() == ".json") or (foreign is not None and foreign.is_list)
    suffix = ".json" if is_list else ".toml"
    if output is not None:
        if output.suffix != suffix:
            raise SettingsError(f"{output}: a {suffix} file is written", f"name it {output.with_suffix(suffix)}")
        refuse_overwriting(output, force)
    if foreign and is_list:
        import_their_datasets(foreign, output, partial)
    elif foreign:
        import_their_runs(foreign, output, force, partial)
    else:
        (import_dataset_file if is_list else import_run)(path, output, force, partial)


def first_text(path: Path) -> str:
    """Return the first characters of a file. Raises SettingsError where it cannot be read."""
    try:
        return read_text(path).lstrip()[:80]
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}", "check the path") from None
    except NotParsed:
        return ""  # its reader names the line


def import_dataset_file(path: Path, output: Path | None, force: bool, partial: bool) -> None:
    write_datasets(
        path, import_datasets(dataset_entries(path), path, Data(), working_folder(path), {}), output, partial
    )


def import_run(path: Path, output: Path | None, force: bool, partial: bool) -> None:
    original = read_original(path)
    split_variables(original)
    check_model(original)
    root = working_folder(original.file)
    accelerate = accelerate_of(original, root)
    take_values(original, read_config(original, accelerate), root)
    beside = output and datasets_path(output)
    with report_unsupported_first(original, partial):
        loaded = resolve_taken(original, accelerate)
        datasets = take_datasets(original, loaded, root, beside)
        if datasets is not None:
            # Again: importing the datasets may have replaced the path to their file.
            loaded = resolve_taken(original, accelerate)
    write_runs([ready_run(original, loaded, datasets, root, output)], force)
    if Path(CONFIG_ENV).is_file() and from_env_file(Path(CONFIG_ENV)).values:
        Report().warn(f"{CONFIG_ENV} is read by every run in this folder: leave only variables of other programs in it")


def check_model(original: Original) -> None:
    """Raise SettingsError for a model that cannot be trained, before anything else is imported."""
    given = {setting_of(each): each for each in reversed(original.values)}
    if "model_family" not in given or "model_families" in given:
        return  # what is missing is said with the rest
    names = [name for name in MODEL if name in given and isinstance(given[name].value, str)]
    values = {name: translate(given[name], OriginalConfig({}))[0].value for name in names}
    if (
        "model_type" in given and normalize_name(given["model_type"].value) == "lora"
    ):  # which some pipelines cannot load
        values["model_type"] = "lora"
    with naming_places({name: Origin(given[name].place, given[name].value) for name in names}, *MODEL[:2]):
        check_trainable(Model(**values))


def accelerate_of(original: Original, root: Path) -> list[Source]:
    """Read the accelerate file that a file of the original names; empty if it names none."""
    named = next((each.value for each in original.values if names_accelerate(each) and each.value), None)
    return from_accelerate(relocated(named, root), {}) if named else []


def resolve_taken(original: Original, accelerate: Sequence[Source]) -> Loaded:
    """Return the settings that were taken, after leaving out optional ones that contradict others.

    Raises SettingsError for what cannot be run.
    """
    while True:
        try:
            return resolve_all(original, accelerate)
        except SettingsError as error:
            # Ends: each round drops a setting, or raises.
            dropped = [mistake for mistake in error.mistakes if mistake.setting in original.taken and can_drop(mistake)]
            if not dropped:
                raise
            for mistake in dropped:
                is_lost = mistake.setting == "lr_warmup_steps"
                original.drop(mistake.setting, mistake.message, "lost" if is_lost else "look")


def can_drop(mistake: Mistake) -> bool:
    """True for a setting that does not change the trained weights, or is counted as lost."""
    name = mistake.setting
    return SECTION_OF.get(name) in OPTIONAL or name in ONLY_FASTER or name == "lr_warmup_steps"


def resolve_all(original: Original, accelerate: Sequence[Source]) -> Loaded:
    _, own = sources_of(original, {})
    loaded = check_runnable(resolve([*accelerate, own]))
    values = settings_as_json(loaded)  # which of the original's defaults count depends on the others
    defaults, own = sources_of(original, {name: values[name] for name in loaded.origins})
    return check_runnable(resolve([defaults, *accelerate, own]))


def take_datasets(original: Original, loaded: Loaded, root: Path, new: Path | None) -> ImportedDatasets | None:
    """Import the dataset file, and set the run's path to it, or to its copy `new` where it must change."""
    taken = original.taken.get(DATASETS)
    if taken is None or loaded.settings.data.data_backend_config is None:
        return None
    file = named_file(str(taken.given.value), root, original)
    if file is None:
        folders = dict.fromkeys((root, original.file.parent, original.file.parent.parent))
        places = ", ".join(str(folder.absolute()) for folder in folders)
        message = f"{DATASETS} = {taken.given.value} ({taken.given.place}): there is no such file in {places}"
        raise SettingsError(message, "the original's own examples come with it: copy the file here")
    names = {name: str(value) for name, value in settings_as_json(loaded).items()}
    datasets = import_datasets(dataset_entries(file), file, loaded.settings.data, root, names)
    for entry in datasets.entries:
        if entry.get("dataset_type") == "video":
            check_trains_clips(loaded.settings.model, entry["id"])
    original.left_out += datasets.left_out
    if datasets.is_changed and new is None:
        reason = "this version refuses parts of it: --output writes a copy without them, too"
        original.leave_out(replace(taken.given, value=str(file)), reason)
    path = new if datasets.is_changed and new else file
    is_same = root == Path() and path.resolve() == Path(str(taken.given.value)).resolve()
    value = replace(taken.value, value=taken.given.value if is_same else str(path))
    original.taken[DATASETS] = replace(taken, value=value)
    return datasets
