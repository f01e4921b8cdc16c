"""Choice of samples from the scans of datasets: what is left out and why, and what ends the run."""

# pyright: basic, reportAttributeAccessIssue=false
# pyarrow comes without types.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from simpletuner.data.config.caption_rules import BLANK
from simpletuner.data.config.dataset_parts import TABLE_STRATEGIES
from simpletuner.data.config.dataset_types import LARGEST_PIXELS, ImageDataset
from simpletuner.data.images.geometry import are_within_limits, is_enlarged_within
from simpletuner.data.sampler.stable_choice import choose_by_name
from simpletuner.data.samples.caption_lines import CaptionLines, find_lines
from simpletuner.data.samples.conditioning_files import ASPECT_TOLERANCE, ConditioningFiles
from simpletuner.data.samples.file_remarks import captions_found, formats_read, frames_hint, phrases_found
from simpletuner.data.samples.samples import DatasetSamples, Samples
from simpletuner.data.samples.sizes import sizes_of
from simpletuner.data.scan.captions import caption_file
from simpletuner.data.scan.file_list import OtherFiles, printable
from simpletuner.data.scan.scan import NO_ROW, Scan
from simpletuner.errors import DataError, join_data_errors
from simpletuner.settings.values.shape import Shape
from simpletuner.system.numbers import count_noun

MAX_NAMES = 20
"""Largest number of files that a message names."""
WORDLESS = rf"(^|/)[_{BLANK}]+(/|\.[^./]*)$"
"""File names that leave nothing for a caption."""


@dataclass
class Discovery:
    """The samples of all datasets, what is left out with the reason, and what users should know."""

    scans: Sequence[Scan] = ()
    samples: Samples = field(default_factory=Samples)
    broken: dict[str, str] = field(default_factory=dict)
    unwanted: int = 0
    other_lengths: int = 0
    """Number of videos that min_frames and max_frames leave out."""
    surplus: int = 0
    """Number of images left out by max_num_samples."""
    animated: list[str] = field(default_factory=list)
    others: list[OtherFiles] = field(default_factory=list)
    """Files of the datasets that are not images."""
    uncaptioned: dict[str, list[str]] = field(default_factory=dict)
    """Names of images without a caption, by dataset: samples, unless it has `skip_uncaptioned`."""
    unreadable_captions: dict[str, dict[str, str]] = field(default_factory=dict)
    """Caption files that cannot be read as text, and why, by dataset."""

    caption_lines: dict[str, CaptionLines] = field(default_factory=dict)
    """Caption files of several lines, by dataset."""

    unpaired: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """Names of images without a mask or a reference, by dataset and by its conditioning dataset."""

    @property
    def not_read(self) -> Counter[str]:
        """Number of files of other formats, by suffix."""
        return sum((Counter(each.not_read) for each in self.others), Counter())

    @property
    def skipped(self) -> int:
        """Number of images left out by skip_uncaptioned."""
        return sum(len(self.uncaptioned[scan.dataset.id]) for scan in self.scans if scan.dataset.skip_uncaptioned)

    def errors(self) -> Iterator[DataError]:
        """Yield errors that end a run: no usable image in a dataset, missing or unreadable captions."""
        for scan, part in zip(self.scans, self.samples.parts, strict=True):
            dataset = scan.dataset
            # Images without a mask or a reference are left out, too, which is said below.
            if not len(part) and not any(name == dataset.id for name, _ in self.unpaired):
                yield nothing_usable_error(scan, self)
            if unreadable := self.unreadable_captions[dataset.id]:
                yield unreadable_error(dataset, unreadable)
            if (names := self.uncaptioned[dataset.id]) and not dataset.skip_uncaptioned:
                yield uncaptioned_error(scan, names)
            for conditioning in scan.conditioning:
                if names := self.unpaired.get((dataset.id, conditioning.dataset.id)):
                    yield unpaired_error(dataset, conditioning.dataset, names)

    def check(self) -> None:
        """Raise an error that says all."""
        if errors := list(self.errors()):
            raise join_data_errors(errors)


def discover(scans: Sequence[Scan], alignment: Shape, seed: int) -> Discovery:
    """Choose the samples among the images that were found; `Discovery.check` raises what ends a run.

    Sides of buckets are multiples of the side of `alignment`, and clip lengths a multiple of its frames, plus
    one.
    """
    found = Discovery(scans)
    parts = []
    for scan in scans:
        found.others.append(scan.others)
        found.broken |= {f"{scan.dataset.id}/{name}": NOT_UTF8 for name in scan.others.undecodable}
        parts.append(choose_samples(scan, alignment, seed, found))
    found.samples = Samples(parts)
    return found


NOT_UTF8 = "its name is not UTF-8: rename it"


def choose_samples(scan: Scan, alignment: Shape, seed: int, found: Discovery) -> DatasetSamples:
    """Return the samples of one dataset, after noting in `found` what is left out."""
    conditioning = tuple(pair_with(scan, each, alignment, seed) for each in scan.conditioning)
    dataset, table = scan.dataset, with_captions_of(scan, conditioning)
    is_read = pc.equal(table["problem"], "").to_numpy()
    has_row = pc.not_equal(table["caption_problem"], NO_ROW).to_numpy()
    for name, problem in zip(*(pick(table[column], ~is_read) for column in ("name", "problem")), strict=True):
        found.broken[f"{dataset.id}/{name}"] = problem
    rows = np.flatnonzero(is_read & has_row).astype(np.int32)
    sizes, is_long_enough = sizes_of(dataset, table, rows, alignment, seed)
    is_wanted = are_within_limits(dataset, sizes.originals)
    is_wanted &= is_enlarged_within(dataset, sizes.originals, sizes.targets)
    fits = np.multiply(*sizes.resized.T, dtype=np.int64) * sizes.frames <= LARGEST_PIXELS
    found.unwanted += int(sizes.images_where(~is_wanted).sum())
    found.other_lengths += int(sizes.images_where(is_wanted & ~is_long_enough).sum())
    is_wanted &= is_long_enough
    for position in np.flatnonzero(sizes.images_where(is_wanted & ~fits)).tolist():
        _, resized, _ = sizes.of(position)
        name = table["name"][int(rows[position])]
        found.broken[f"{dataset.id}/{name}"] = f"would be resized to {resized} px"
    chosen = np.zeros(len(table), bool)
    chosen[rows] = ~sizes.images_where(~is_wanted | ~fits)
    has_none, is_unreadable = find_caption_problems(dataset, table)
    skipped = chosen & has_none & dataset.skip_uncaptioned
    chosen &= ~skipped
    if dataset.max_num_samples is not None:
        # By a hash of names, so that adding an image changes at most one of the others that are chosen.
        usable, chosen = chosen, choose_by_name(table["name"], chosen, dataset.max_num_samples, dataset.id)
        found.surplus += int(usable.sum() - chosen.sum())
    found.uncaptioned[dataset.id] = pick(table["name"], skipped | (chosen & has_none))
    names, reasons = (pick(table[column], chosen & is_unreadable) for column in ("name", "caption_problem"))
    found.unreadable_captions[dataset.id] = dict(zip(map(caption_file, names), reasons, strict=True))
    found.animated += [f"{dataset.id}/{name}" for name in pick(table["name"], chosen & table["animated"].to_numpy())]
    for each in conditioning:
        if missing := pick(table["name"], chosen & (each.rows < 0)):
            found.unpaired[dataset.id, each.dataset.id] = missing
        chosen &= each.rows >= 0
        for row, why in unusable_conditioning(table, each, chosen):
            found.broken[f"{dataset.id}/{table['name'][row]}"] = why
            chosen[row] = False
    lines = found.caption_lines[dataset.id] = find_lines(dataset, table)
    if lines.are_one:
        dataset = dataset.model_copy(update={"caption_lines": "one"})
    return DatasetSamples(dataset, scan.storage, table, rows, sizes, seed, conditioning).where(chosen[rows])


def pair_with(scan: Scan, conditioning: Scan, alignment: Shape, seed: int) -> ConditioningFiles:
    """Pair the images of a scan with the masks or references of another one."""
    sizes, others = None, conditioning.table
    if conditioning.dataset.conditioning_type == "reference_loose":
        for side in ("width", "height"):  # 0 of what cannot be read, and has no aspect
            place = others.schema.get_field_index(side)
            others = others.set_column(place, side, pc.max_element_wise(others[side], 1).cast(pa.int32()))
        sizes, _ = sizes_of(conditioning.dataset, others, np.arange(len(others), dtype=np.int32), alignment, seed)
    return ConditioningFiles.pair(scan.table["name"], conditioning, sizes)


def with_captions_of(scan: Scan, conditioning: Sequence[ConditioningFiles]) -> pa.Table:
    """Return the table of a scan with captions of references for images that have none beside them."""
    table = scan.table
    if scan.dataset.caption_strategy != "textfile":
        return table
    for each in conditioning:
        own, others = table["captions"].combine_chunks(), each.scan.table["captions"].combine_chunks()
        taken = others.take(pa.array(each.rows, mask=each.rows < 0))
        has_none = pc.equal(pc.list_value_length(own), 0)
        if pc.any(pc.and_kleene(has_none, pc.greater(pc.list_value_length(taken), 0))).as_py():
            is_taken = pc.and_(has_none, pc.is_valid(taken))
            captions = pc.if_else(is_taken, taken, own)
            table = table.set_column(table.schema.get_field_index("captions"), "captions", captions)
            forms = each.scan.table["caption_form"].take(pa.array(each.rows, mask=each.rows < 0))
            forms = pc.if_else(is_taken, forms, table["caption_form"])
            table = table.set_column(table.schema.get_field_index("caption_form"), "caption_form", forms)
    return table


def unusable_conditioning(table: pa.Table, files: ConditioningFiles, chosen: np.ndarray) -> Iterator[tuple[int, str]]:
    """Yield rows of images whose mask or reference cannot be used, and why."""
    rows, noun = np.flatnonzero(chosen), files.dataset.conditioning_noun
    names, problems = (files.of(rows, column, "") for column in ("name", "problem"))
    width, height = (files.of(rows, side, 1) for side in ("width", "height"))
    differs = np.zeros(len(rows), bool)
    if files.sizes is None:  # it is cropped as its image
        own = table["width"].to_numpy()[rows] / table["height"].to_numpy()[rows]
        differs = np.abs(width / np.maximum(1, height) / own - 1) > ASPECT_TOLERANCE
    loose = " (reference_loose takes it)" * files.dataset.are_references
    for place in np.flatnonzero((problems != "") | differs).tolist():
        size = f"has {width[place]}x{height[place]} px, which is another shape{loose}"
        yield int(rows[place]), f"its {noun} {names[place]} {problems[place] or size}"


def pick(column: pa.ChunkedArray, mask: np.ndarray) -> list:
    return column.take(pa.array(np.flatnonzero(mask))).to_pylist() if mask.any() else []


def find_caption_problems(dataset: ImageDataset, table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Rows of images without a caption, and of images whose caption file is not text."""
    none = np.zeros(len(table), bool)
    if dataset.caption_strategy == "instanceprompt":
        return none, none
    if dataset.caption_strategy == "filename":
        return pc.match_substring_regex(table["name"], WORDLESS).to_numpy(), none
    is_unreadable = pc.not_equal(table["caption_problem"], "").to_numpy()
    return ~is_unreadable & pc.equal(pc.list_value_length(table["captions"]), 0).to_numpy(), is_unreadable


def unreadable_error(dataset: ImageDataset, problems: Mapping[str, str]) -> DataError:
    named = format_names([f"{name} {why}" for name, why in sorted(problems.items())])
    return DataError(
        f"dataset `{dataset.id}`: {count_noun(len(problems), 'caption file')} cannot be read as text:{named}",
        "name their encoding, such as --caption_encoding=windows-1252, or save them as UTF-8: "
        "`iconv -f WINDOWS-1252 -t UTF-8 old.txt > new.txt`",
    )


def unpaired_error(dataset: ImageDataset, conditioning: ImageDataset, names: Sequence[str]) -> DataError:
    noun, white = conditioning.conditioning_noun, "; a white mask trains on the whole image" * conditioning.are_masks
    return DataError(
        f"dataset `{dataset.id}`: {count_noun(len(names), 'image')} without a {noun} in `{conditioning.id}`:"
        f"{format_names(names)}",
        f"name each {noun} like its image (any suffix){white}",
    )


def uncaptioned_error(scan: Scan, names: Sequence[str]) -> DataError:
    dataset = scan.dataset
    if dataset.caption_strategy in TABLE_STRATEGIES and scan.others.unmatched_rows and len(names) == len(scan.table):
        return no_row_error(scan)
    beside = "".join(f"\n{said}" for said in (*captions_found(scan.others), *phrases_found(scan.others)))
    return DataError(
        f"dataset `{dataset.id}`: {count_noun(len(names), dataset.noun)} without a caption in "
        f"{dataset.captions_are_in}:{format_names(names)}{beside}",
        f"write captions, leave such images out with --skip_uncaptioned, or {dataset.other_captions}",
    )


def no_row_error(scan: Scan) -> DataError:
    table, others, images = scan.dataset.parquet, scan.others, scan.table["name"]
    assert table is not None
    rows = f"{count_noun(others.unmatched_rows, 'row')}, the first `{printable(others.first_unmatched)}`"
    named = f"none of {count_noun(len(images), scan.dataset.noun)}, the first `{printable(images[0].as_py())}`"
    return DataError(
        f"dataset `{scan.dataset.id}`: the table {table.path} has {rows}, but {named}, in {scan.storage.describe()}",
        f"parquet.filename_column is `{table.filename_column}`: it has paths below that folder, or names alone, all "
        "with or all without their suffix (identifier_includes_extension)",
    )


def nothing_usable_error(scan: Scan, found: Discovery) -> DataError:
    if (
        scan.others.unmatched_rows
        and len(scan.table)
        and pc.all(pc.equal(scan.table["caption_problem"], NO_ROW)).as_py()
    ):
        return no_row_error(scan)
    limits = scan.dataset.clips.length_limits if scan.dataset.clips else ""
    counts = {
        "broken": len(found.broken),
        "outside the size limits": found.unwanted,
        f"shorter or longer than {limits} allow": found.other_lengths,
        "without a caption": found.skipped,
        "not read": found.not_read.total(),
    }
    left_out = ", ".join(f"{count} {why}" for why, count in counts.items() if count)
    beside = [*captions_found(scan.others), *phrases_found(scan.others)]
    if found.skipped and not found.broken and not found.unwanted:
        return DataError(
            f"dataset `{scan.dataset.id}`: no usable {scan.dataset.noun} in {scan.storage.describe()} ({left_out})",
            "; ".join(beside) or "write captions, or set another caption_strategy: filename or instanceprompt",
        )
    if 0 < found.other_lengths == sum(counts.values()):
        return DataError(
            f"dataset `{scan.dataset.id}`: no usable video in {scan.storage.describe()} ({left_out})",
            "change that to what the videos have; `fps` in the block `video` leaves frames out",
        )
    such = f"; {found.not_read.most_common(1)[0][0]} is not" if found.not_read else ""
    if found.not_read[".tar"]:  # beside a table for each, which is none of the images either
        such = (
            "; .tar is not: unpack it (`for F in *.tar; do tar -xf $F; done`), or have img2dataset write output_format "
        )
        such += "parquet, which type huggingface reads"
    such += frames_hint([scan.dataset], found.not_read)
    return DataError(
        f"dataset `{scan.dataset.id}`: no usable {scan.dataset.noun} in {scan.storage.describe()}"
        + (f" ({left_out})" if left_out else ""),
        f"{formats_read(scan.dataset)} are read, with all subfolders{such}",
    )


def format_names(names: Sequence[str]) -> str:
    """Return names on lines of their own, only the first ones if there are many."""
    more = [f"and {len(names) - MAX_NAMES:,} more"] * (len(names) > MAX_NAMES)
    shown = [name.replace("\n", "\\n") for name in names[:MAX_NAMES]]  # a file's name may have a newline
    return "".join(f"\n  {name}" for name in [*shown, *more])
