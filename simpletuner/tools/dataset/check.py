"""Check the datasets of a run as the run would read them: its own scan, buckets, crops and captions.

Tokens of captions are counted by the model's own tokenizers, if these are here, without its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from simpletuner.caches.latents import decoding_threads
from simpletuner.data.config.dataset_parts import Window
from simpletuner.data.config.places import default_folder
from simpletuner.data.samples.buckets import Buckets, make_buckets
from simpletuner.data.samples.dataset_summary import DatasetSummary, summarize
from simpletuner.data.samples.dataset_warnings import LONG_CAPTION_LETTERS, longest_captions
from simpletuner.data.samples.discovery import discover
from simpletuner.data.samples.json_captions import TRAINED_ON, JsonCaptions
from simpletuner.data.samples.samples import DatasetSamples, Samples, held_out_indices
from simpletuner.data.scan.scan import copy_scans
from simpletuner.errors import DataError, SettingsError, SimpleTunerError
from simpletuner.models.catalog.support import clip_fps, reads_json
from simpletuner.models.family.base import family_class
from simpletuner.models.folder.diffusers_io import component_class
from simpletuner.models.folder.malformed import translate_load_errors
from simpletuner.models.opening.loading import folder_at_hand
from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.world import World, joined_world
from simpletuner.preparation.class_images import ClassImages, class_images_of
from simpletuner.preparation.plan import bucket_alignment
from simpletuner.preparation.prepare import ScannedData, make_plan, scan_data
from simpletuner.report import Report
from simpletuner.session import Session
from simpletuner.settings import Loaded, Settings
from simpletuner.system.numbers import count_noun
from simpletuner.system.processes.signals import StopRequest
from simpletuner.tools.dataset.contact_sheets import choose_images, write_sheets
from simpletuner.tools.dataset.contents import Contents, read_contents
from simpletuner.tools.dataset.duplicates import exact_duplicates, near_duplicates
from simpletuner.tools.dataset.findings import DatasetFinding, finding, findings_of
from simpletuner.tools.dataset.listing import bucket_names, write_tables

BATCH = 1000


@dataclass(frozen=True)
class TokenLimit:
    """A tokenizer of the model, and how many tokens of a caption its text encoder reads."""

    tokenizer: Any
    name: str
    tokens: int

    def count(self, captions: list[str]) -> list[int]:
        """Return the tokens of each caption, with those that mark its beginning and end."""
        # Not verbose: transformers warns of each text that is longer than the model takes.
        return list(map(len, self.tokenizer(captions, truncation=False, verbose=False)["input_ids"]))


def token_limits(settings: Settings) -> list[TokenLimit]:
    """Return the tokenizers of the base model, each kind once; none where the model is not here.

    Raises EnvironmentNotReady for a folder that is malformed.
    """
    folder = folder_at_hand(settings) if settings.model.model_family else None
    if folder is None:
        return []
    with translate_load_errors(folder):
        family = family_class(settings.model).open(folder, settings)
        names = [name for name in family.index if name.startswith("tokenizer") and any(family.index[name] or ())]
        limits: dict[tuple[str, int], TokenLimit] = {}
        for name in names:
            cls = component_class(family.index, name, folder)
            tokenizer = cls.from_pretrained(folder / name)
            # CLIP has as many positions, whatever `tokenizer_max_length` says of the other encoder.
            is_clip, longest = cls.__name__.startswith("CLIP"), family.max_length
            tokens = int(tokenizer.model_max_length if is_clip or longest is None else longest)
            kind = cls.__name__.removesuffix("Fast").removesuffix("Tokenizer")
            limits.setdefault((kind, tokens), TokenLimit(tokenizer, kind, tokens))
    return list(limits.values())


def longest_in_tokens(samples: DatasetSamples, limit: TokenLimit, show: Callable[[int], object]) -> Iterator[int]:
    for start in range(0, len(samples), BATCH):
        captions = [samples[index].captions for index in range(start, min(start + BATCH, len(samples)))]
        texts = list(dict.fromkeys(chain.from_iterable(captions)))
        counts = dict(zip(texts, limit.count(texts), strict=True)) if texts else {}
        yield from (max(map(counts.__getitem__, own), default=0) for own in captions)
        show(start + len(captions))


@dataclass(frozen=True)
class CheckOptions:
    """Options of the check, in addition to headers and captions."""

    decode: bool = True
    sheets: Path | None = None
    listing: Path | None = None


@dataclass(frozen=True)
class CheckedDataset:
    """A dataset: its buckets, findings, contact sheets by bucket, and files that list its images."""

    samples: DatasetSamples
    summary: DatasetSummary
    findings: list[DatasetFinding]
    sheets: dict[str, Path]
    tables: dict[str, str]

    def as_json(self) -> dict[str, object]:
        total = self.summary.total
        return {
            "id": self.summary.id,
            "address": self.summary.address,
            "images": total.images,
            "samples": total.samples,
            "held_out": total.held_out,
            "buckets": [asdict(bucket) for bucket in self.summary.buckets],
            "findings": [each.as_json() for each in self.findings],
            "contact_sheets": {name: str(path) for name, path in self.sheets.items()},
        }


@dataclass
class CheckResult:
    """All datasets, what would end a run, and what could not be checked."""

    datasets: list[CheckedDataset] = field(default_factory=list)
    errors: list[SimpleTunerError] = field(default_factory=list)
    not_checked: dict[str, str] = field(default_factory=dict)
    """Reasons by topic."""

    def as_json(self) -> dict[str, object]:
        return {
            "usable": not self.errors,
            "errors": [{"message": error.message, "hint": error.hint} for error in self.errors],
            "not_checked": self.not_checked,
            "datasets": [each.as_json() for each in self.datasets],
        }


def check_datasets(loaded: Loaded, options: CheckOptions, report: Report) -> CheckResult:
    """Look at all datasets of the settings. Raises what a run would raise before it has scanned them."""
    result, settings = CheckResult(), loaded.settings
    limits = token_limits(settings)
    if not limits:
        what = "its model is not here" if settings.model.model_family else "no model_family is given"
        result.not_checked["captions"] = f"not counted in tokens: {what}"
    if not options.decode:
        result.not_checked |= dict.fromkeys(
            ("images", "repeats"), "not decoded: damaged ones and duplicates stay unknown"
        )
    # A world of one rank: the functions of a run are collective, and are called unchanged.
    with joined_world({}, use_cpu=True) as world, TemporaryDirectory(prefix="simpletuner-") as folder:
        session = Session(loaded, Mesh(world), report, StopRequest())
        scans, kept = (options.listing or Path(folder)) / "scan", default_folder(settings, "scan")
        data = scan_data(session, scans if scans.exists() else copy_scans(kept, scans))
        alignment = bucket_alignment(settings, data.datasets, world, session.stop.check)
        found = [discover([scan], alignment, settings.training.seed) for scan in data.scans]
        samples = Samples([each.samples.parts[0] for each in found])
        result.errors += [error for each in found for error in each.errors()]
        class_images = {each.dataset.id: each for each in class_images_of(settings, samples.parts)}
        # Those that a run has yet to make cannot be decoded.
        to_decode = [options.decode and not is_incomplete(class_images.get(each.dataset.id)) for each in samples.parts]
        contents = [
            decode_all(part, world, report) if decodes else Contents()
            for part, decodes in zip(samples.parts, to_decode, strict=True)
        ]
        # A run leaves them out while it encodes, and ends where the rest fills no batch.
        damaged = [part[index].id for part, own in zip(samples.parts, contents, strict=True) for index in own.damaged]
        whole = samples.without(damaged)
        buckets, held_out = plan_buckets(settings, data, whole, result)
        names, summaries = bucket_names(samples.parts), summarize(whole, buckets, held_out)
        for each, seen, own, summary in zip(found, contents, names, summaries, strict=True):
            part = each.samples.parts[0]
            findings = [
                *findings_of(each, clip_fps(settings.model)),
                *check_lengths(part, limits, report),
                *(check_json(part, result) if reads_json(settings.model) else ()),
                *check_contents(part, seen),
                *find_class_images(class_images.get(part.dataset.id)),
            ]
            sheets = write_all_sheets(part, options.sheets, world, report) if options.sheets else {}
            tables = write_tables(part, own, findings, options.listing) if options.listing else {}
            result.datasets.append(CheckedDataset(part, summary, findings, sheets, tables))
    return result


def is_incomplete(images: ClassImages | None) -> bool:
    return images is not None and bool(images.missing)


def find_class_images(images: ClassImages | None) -> Iterator[DatasetFinding]:
    """Yield what a run would make of a dataset's class images, and how much work that is."""
    if images is not None and (missing := images.missing):
        yield DatasetFinding("images", "class images", missing, f"{images.describe()}; {images.describe_missing()}")


def plan_buckets(
    settings: Settings, data: ScannedData, samples: Samples, result: CheckResult
) -> tuple[Buckets, np.ndarray]:
    """Return the buckets that a run begins with, and what is held out; where it would be refused, add why."""
    try:
        plan = make_plan(settings, data.datasets, data.texts, samples)
        if {part.dataset.window for part in samples.parts} == {Window()}:
            return plan.buckets, plan.held_out
    except (DataError, SettingsError) as error:
        if len(samples) or not result.errors:  # otherwise it has been reported
            result.errors.append(error)
    # Datasets that take part in some steps only count as if they did in all.
    held_out = held_out_indices(samples, settings.validation.eval_split)
    return make_buckets(samples, held_out), held_out


def check_lengths(samples: DatasetSamples, limits: Sequence[TokenLimit], report: Report) -> Iterator[DatasetFinding]:
    """Yield the images whose caption a text encoder truncates."""
    for limit in limits:
        with report.progress(f"{samples.dataset.id}: counting tokens", len(samples)) as progress:
            tokens = np.fromiter(longest_in_tokens(samples, limit, progress.update), np.int64, len(samples))
        too_long = longest_first(samples, tokens, limit.tokens, "tokens")
        sentence = f"{{}} with a caption that is cut at {limit.tokens} tokens by {limit.name}"
        yield from finding("captions", f"too long for {limit.name}", sentence, too_long)
    if not limits:
        sentence = f"{{}} with a caption of more than {LONG_CAPTION_LETTERS:,} letters, which no text encoder reads"
        too_long = longest_first(samples, longest_captions(samples), LONG_CAPTION_LETTERS, "letters")
        yield from finding("captions", "too long", sentence, too_long)


def check_json(samples: DatasetSamples, result: CheckResult) -> Iterator[DatasetFinding]:
    """Yield the images whose captions are not JSON; damaged ones would end a run."""
    captions = JsonCaptions.of(samples)
    if error := captions.error():
        result.errors.append(error)
    yield from finding("captions", "damaged JSON", "{} with a caption in damaged JSON", captions.damaged, ends_run=True)
    yield from finding("captions", "plain text", f"{{}} with a caption of plain text; {TRAINED_ON}", captions.plain)


def longest_first(samples: DatasetSamples, lengths: np.ndarray, limit: int, unit: str) -> dict[str, str]:
    order = np.argsort(-lengths, kind="stable")[: int((lengths > limit).sum())].tolist()
    return {samples[index].name: f"{lengths[index]:,} {unit}" for index in order}


def decode_all(samples: DatasetSamples, world: World, report: Report) -> Contents:
    with report.progress(f"{samples.dataset.id}: reading images", len(samples)) as progress:
        return read_contents(samples, decoding_threads(samples, world), progress.update)


def check_contents(samples: DatasetSamples, contents: Contents) -> Iterator[DatasetFinding]:
    """Yield images that cannot be decoded or are there more than once."""
    names = {index: samples[index].name for index in contents.damaged}
    damaged = {names[index]: why for index, why in sorted(contents.damaged.items())}
    yield from finding("images", "damaged", "{} that cannot be decoded: left out", damaged)
    doubtful = {samples[index].name: each.doubt for index, each in sorted(contents.images.items()) if each.doubt}
    yield from finding("images", "doubtful scale", "{} that may be meant brighter or darker", doubtful)
    masks = {
        samples[index].name: each.doubt_of_mask for index, each in sorted(contents.images.items()) if each.doubt_of_mask
    }
    yield from finding("images", "doubtful masks", "{} whose mask may be meant otherwise", masks)
    for kind, groups, sentence in (
        ("exact duplicates", exact_duplicates(contents.images), "{} with the same bytes as another"),
        ("near duplicates", near_duplicates(contents.images), "{} looking like another"),
    ):
        again = {samples[group[0]].name: [samples[index].name for index in group[1:]] for group in groups}
        if again:
            first, others = next(iter(again.items()))
            count = sum(map(len, again.values()))
            counted = sentence.format(count_noun(count, "image"))
            yield DatasetFinding("repeats", kind, count, f"{counted} ({others[0]} and {first})", again)


def write_all_sheets(samples: DatasetSamples, folder: Path, world: World, report: Report) -> dict[str, Path]:
    buckets = sum(1 for _ in choose_images(samples))
    with report.progress(f"{samples.dataset.id}: contact sheets", buckets) as progress:
        return dict(write_sheets(samples, folder, decoding_threads(samples, world), progress.update))
