"""`simpletuner dataset`: what a run would make of its images and captions, and what changed between two starts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simpletuner.commands.help import TakesSettings, path_argument, path_option
from simpletuner.commands.listing import CommandGroup
from simpletuner.commands.options import UNKNOWN_FLAGS, with_settings
from simpletuner.errors import DataError, SettingsError, SimpleTunerError
from simpletuner.report import Report
from simpletuner.settings import load
from simpletuner.system.importing import no_collection
from simpletuner.system.numbers import count_noun
from simpletuner.system.processes.run_status import StatusWriter

if TYPE_CHECKING:
    from simpletuner.data.samples.dataset_summary import BucketSummary
    from simpletuner.runs.data_listing import DataDifference
    from simpletuner.tools.dataset.check import CheckedDataset, CheckResult

NAMES_SHOWN = 10


def dataset_diff(
    folder: Annotated[Path, path_argument("Output folder of the run.")],
    other: Annotated[
        Path | None, path_argument("Output folder of another run, to compare the last starts of both.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts, with all names.")] = False,
) -> None:
    """Show what changed in the data of a run when it last changed between two starts, or how that of two runs differs.

    Images that were added, removed or changed (size and time of change), captions, buckets. Opens no image.
    """
    from simpletuner.runs.data_listing import compare_data, last_change, last_data
    from simpletuner.runs.folder import check_run

    report = Report()
    for each in (folder, *([other] if other else [])):
        check_run(each)
    pair = (last_data(folder), last_data(other)) if other is not None else last_change(folder)
    found = compare_data(*pair) if pair is not None else None
    if as_json:
        report.json(asdict(found) if found is not None else {})
    elif found is None or found.is_empty:
        report.line("the data is the same" if found is not None else "all starts of this run had the same data")
    else:
        show_difference(found, report)


def show_difference(found: DataDifference, report: Report) -> None:
    report.line(f"from {found.before}\nto   {found.after}", style="bold")
    for title, names in (
        ("added", found.added),
        ("removed", found.removed),
        ("changed", found.changed),
        ("held out now, or no longer", found.held_out),
        ("recaptioned", [f"{name}: {old!r} -> {new!r}" for name, old, new in found.recaptioned]),
        ("in another bucket", [f"{move}: {count:,}" for move, count in found.moved.items()]),
    ):
        for line in lines_of(
            title, names, sum(found.moved.values()) if names and title == "in another bucket" else None
        ):
            report.line(line)
    rows = [
        (name, f"{one:,}", f"{two:,}", f"{two - one:+,}") for name, (one, two) in found.buckets.items() if one != two
    ]
    if rows:
        report.data_table("", rows, ("bucket", "before", "after", ""))


def lines_of(title: str, names: list[str], count: int | None = None) -> Iterator[str]:
    """Yield a heading and the first names; nothing where there are none."""
    if not names:
        return
    yield f"{title}: {count_noun(len(names) if count is None else count, 'image')}"
    yield from (f"  {name}" for name in names[:NAMES_SHOWN])
    if (more := len(names) - NAMES_SHOWN) > 0:
        yield f"  and {more:,} more; --json has all"


SHOWN = (
    "instance_data_dir", "data_backend_config", "model_family", "pretrained_model_name_or_path", "caption_strategy",
    "caption_encoding", "caption_lines", "skip_uncaptioned", "resolution", "resolution_type", "crop", "crop_aspect",
    "repeats", "minimum_image_size", "aspect_bucket_alignment", "allow_dataset_oversubscription",
    "train_batch_size", "gradient_accumulation_steps", "global_batch_size", "num_processes", "eval_split", "output_dir",
)  # fmt: skip
TOPICS = {
    "files": "all files with images are read",
    "images": "none is broken or left out",
    "sizes": "none is enlarged much, tiny or extreme",
    "captions": "none is missing or too long",
    "repeats": "none is there twice",
}
"""Subjects of the check, with the sentence where nothing is found."""
IN_PART = {"images": "every header can be read", "captions": "none is missing"}
"""The sentence where only a part of a topic was checked."""
# Topics about which nothing is known unless they are checked.
UNKNOWN = {"repeats"}
STYLES = {"ok": "green", "look": "yellow", "FAIL": "bold red", "-": "dim"}
MAX_BUCKETS = 20


def build_dataset() -> typer.Typer:
    app = CommandGroup("Look at images and captions.")
    app.command("check", cls=TakesSettings, context_settings=UNKNOWN_FLAGS)(with_settings(dataset_check, SHOWN))
    app.command("diff")(dataset_diff)
    return app


def dataset_check(
    flags: Mapping[str, object],
    config: Path | None,
    *,
    contact_sheets: Annotated[
        Path | None, path_option("--contact_sheets", "Write one PNG per bucket, with crops drawn in.", "DIR")
    ] = None,
    headers_only: Annotated[
        bool, typer.Option("--headers_only", help="Decode no image: nothing about duplicates and damaged ones.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts, with all names.")] = False,
    listing: Annotated[
        Path | None, path_option("--listing", "Write all images and their findings as tables, for the page.", "DIR")
    ] = None,
) -> None:
    """Check datasets as a run would use them: buckets, crops, sizes, captions, duplicates, files that are not read.

    Ends with 0 when they can be trained on, with 4 when training would refuse them. Needs no GPU and no weights. All
    settings of `train` are understood.
    """
    loaded = load(flags, config, complete=False)
    data = loaded.settings.data
    if data.instance_data_dir is None and data.data_backend_config is None:
        raise SettingsError("no dataset is given", "set --instance_data_dir or --data_backend_config")
    from simpletuner.data.config.datasets import load_datasets
    from simpletuner.tools.run_check import warnings_about_data

    # Before the import below: huggingface_hub reads HF_HOME and HF_HUB_OFFLINE once, when it is imported.
    loaded.pass_on_variables(os.environ)
    report = Report()
    report.warn_all(
        [*loaded.warnings, *warnings_about_data(loaded, load_datasets(data, loaded.settings.model.model_type)[0])]
    )
    with followed(listing, report) if listing else nullcontext():
        with no_collection():
            from simpletuner.tools.dataset.check import CheckOptions, check_datasets
            from simpletuner.tools.dataset.listing import write_listing

        result = check_datasets(loaded, CheckOptions(not headers_only, contact_sheets, listing), report)
        if listing:
            write_listing(listing, result, decoded=not headers_only)
    if as_json:
        report.json(result.as_json())
    else:
        show(result, report)
    if result.errors:
        raise joined(result.errors)


@contextmanager
def followed(folder: Path, report: Report) -> Iterator[None]:
    """Lock a folder, and keep there what the check is doing and how it ended, as a run does."""
    from simpletuner.system.files.lease import Lease
    from simpletuner.system.files.lease_folder import held_folder

    writer = StatusWriter()
    with held_folder(folder, Lease()), writer.recording():
        writer.begin(folder, "")
        report.status.watch = writer.show
        yield


def joined(errors: list[SimpleTunerError]) -> SimpleTunerError:
    if len(errors) == 1:
        return errors[0]
    return DataError("\n  ".join(error.message for error in errors), "\nhint: ".join(error.hint for error in errors))


def show(result: CheckResult, report: Report) -> None:
    """Print what people look at: buckets, then a line per finding, dataset by dataset."""
    for dataset in result.datasets:
        summary, total = dataset.summary, dataset.summary.total
        count = total.images + total.held_out
        report.line(f"{summary.id}: {count_noun(count, 'image')} in {summary.address}", style="bold")
        if count:
            columns, *rows = bucket_rows([*summary.buckets[:MAX_BUCKETS], *[total] * (len(summary.buckets) > 1)])
            report.data_table("", rows, columns)
        if (more := len(summary.buckets) - MAX_BUCKETS) > 0:
            report.line(f"  and {more:,} smaller buckets", style="dim")
        rows = finding_rows(dataset, result.not_checked)
        # Of no image nothing is fine.
        report.checklist((row for row in rows if count or row[1] not in ("ok", "-")), STYLES)
        if dataset.sheets:
            folder = next(iter(dataset.sheets.values())).parent
            report.line(f"  {count_noun(len(dataset.sheets), 'contact sheet')} in {folder}")


def bucket_rows(buckets: Sequence[BucketSummary]) -> list[list[str]]:
    """Return a heading and a row per bucket, numbers aligned to the right."""
    rows = [["bucket", "images", "per epoch", "held out", "cropped", "at most", "enlarged"]]
    for each in buckets:
        samples = f"{each.samples:,.1f}".removesuffix(".0")
        cropped = [f"{share:.1%}" for share in (each.mean_cropped, each.most_cropped)]
        rows.append([each.name, f"{each.images:,}", samples, f"{each.held_out:,}", *cropped, f"{each.enlarged:,}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [[row[0], *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))] for row in rows]


def finding_rows(dataset: CheckedDataset, not_checked: Mapping[str, str]) -> Iterator[tuple[str, str, str, list[str]]]:
    """Yield topic, status and sentence of each finding, each topic without one, and what was not checked."""
    for topic, nothing in TOPICS.items():
        found = [each for each in dataset.findings if each.topic == topic]
        for each in found:
            yield topic, "FAIL" if each.ends_run else "look", each.sentence, []
        if not found and topic not in UNKNOWN & not_checked.keys():
            yield topic, "ok", IN_PART[topic] if topic in not_checked else nothing, []
        if topic in not_checked:
            yield topic, "-", not_checked[topic], []
