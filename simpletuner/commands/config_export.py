"""`simpletuner config export --to ai-toolkit` and the like: a run as a file of another trainer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from simpletuner.data.config.dataset_file import dataset_entries
from simpletuner.errors import SettingsError
from simpletuner.importing.exporting import foreign_run
from simpletuner.importing.writers import WRITERS
from simpletuner.report import Report
from simpletuner.settings.files.formats import toml_document
from simpletuner.settings.resolving.loading import Loaded
from simpletuner.system.files.atomic import save


def export_to_trainer(loaded: Loaded, to: str, output: Path | None) -> None:
    """Write a run, and its datasets beside it where the trainer has a file for them; say what neither holds.

    Raises SettingsError for a run that the trainer cannot have.
    """
    writer, report = WRITERS[to], Report()
    run = foreign_run(writer, loaded, entries_of(loaded))
    trainer, suffix = writer.trainer, writer.suffix
    if output is not None and output.suffix != suffix:
        raise SettingsError(f"{output}: a {suffix} file is written", f"name it {output.with_suffix(suffix)}")
    written = [output] if output else []
    if run.datasets:
        if output is None:
            raise SettingsError(
                f"{trainer.name} has a file of datasets beside that of the run", f"give --output=run{suffix}"
            )
        written.append(output.with_suffix(f".datasets{suffix}"))
        run.keys[trainer.dataset_file] = str(written[-1])
        save(written[-1], as_text(run.datasets, suffix))
    text = as_text(run.values, suffix)
    if output is None:
        report.text(text)
    else:
        save(output, text)
        report.say(
            f"{' and '.join(map(str, written))} {'are' if len(written) > 1 else 'is'} written for {trainer.name}"
        )
    report.warn_all(f"not said there: {each}" for each in run.unsaid)


def entries_of(loaded: Loaded) -> list[Mapping[str, object]]:
    """Return the datasets of a run that are trained on, or the one of its folder."""
    data = loaded.settings.data
    if data.data_backend_config is None:
        return [{"id": "images", "instance_data_dir": str(data.instance_data_dir)}] if data.instance_data_dir else []
    listed = [entry.as_dict for entry in dataset_entries(data.data_backend_config)]
    return [entry for entry in listed if entry.get("dataset_type", "image") not in ("text_embeds", "image_embeds")]


def as_text(values: Mapping[str, object], suffix: str) -> str:
    if suffix == ".json":
        return json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    if suffix == ".toml":
        return "\n".join(toml_document(values)).lstrip() + "\n"
    import yaml

    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
