"""From the scans of the datasets to their samples: what is left out and why, and what ends the run."""

# pyright: basic, reportAttributeAccessIssue=false
# pyarrow comes without types.

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from simpletuner.data.batch_sampler import DATA_VERSION
from simpletuner.data.captions import caption_file
from simpletuner.data.dataset_kinds import LARGEST_PIXELS, ImageDataset
from simpletuner.data.file_list import OtherFiles
from simpletuner.data.geometry import are_within_limits, bucket_sizes, is_enlarged_within, resized_sizes
from simpletuner.data.name_hashes import choose_by_name, hash_names
from simpletuner.data.samples import DatasetSamples, Samples, Sizes
from simpletuner.data.scan import NO_ROW, Scan
from simpletuner.errors import DataError
from simpletuner.system.numbers import count_noun

MAX_NAMES = 20
"""How many files a message names."""
WORDLESS = r"(^|/)[_\s\p{Z}\x0b\x1c-\x1f\x{85}]+\.[^./]*$"
"""File names that leave nothing for a caption."""


@dataclass
class Discovery:
    """The samples of all datasets, what is left out with the reason, and what users should know."""

    samples: Samples = field(default_factory=Samples)
    broken: dict[str, str] = field(default_factory=dict)
    unwanted: int = 0
    surplus: int = 0
    """How many images are left out by max_num_samples."""
    animated: list[str] = field(default_factory=list)
    others: list[OtherFiles] = field(default_factory=list)
    """What the datasets hold beside images."""

    @property
    def not_read(self) -> Counter[str]:
        """How many files of other formats there are, by suffix."""
        return sum((Counter(each.not_read) for each in self.others), Counter())


def discover(scans: Sequence[Scan], alignment_px: int, seed: int, version: int = DATA_VERSION) -> Discovery:
    """Choose the samples among the images that were found.

    Raises DataError when a dataset has no usable image, or when images lack captions.
    """
    found = Discovery()
    parts = []
    for scan in scans:
        found.others.append(scan.others)
        found.broken |= {f"{scan.dataset.id}/{name}": NOT_UTF8 for name in scan.others.undecodable}
        parts.append(choose_samples(scan, alignment_px, seed, version, found))
        if not len(parts[-1]):
            raise nothing_usable_error(scan, found)
    found.samples = Samples(parts)
    return found


NOT_UTF8 = "its name is not UTF-8: rename it"


def choose_samples(scan: Scan, alignment_px: int, seed: int, version: int, found: Discovery) -> DatasetSamples:
    """Return the samples of one dataset, after noting in `found` what is left out."""
    dataset, table = scan.dataset, scan.table
    is_read = pc.equal(table["problem"], "").to_numpy()
    has_row = pc.not_equal(table["caption_problem"], NO_ROW).to_numpy()
    for name, problem in zip(*(pick(table[column], ~is_read) for column in ("name", "problem")), strict=True):
        found.broken[f"{dataset.id}/{name}"] = problem
    rows = np.flatnonzero(is_read & has_row).astype(np.int32)
    sizes = sizes_of(dataset, table, rows, alignment_px, version, seed)
    is_wanted = are_within_limits(dataset, sizes.originals)
    is_wanted &= is_enlarged_within(dataset, sizes.originals, sizes.targets)
    wanted = is_wanted[sizes.index]
    found.unwanted += int((~wanted).sum())
    fits = (sizes.resized.prod(axis=1) <= LARGEST_PIXELS)[sizes.index]
    for position in np.flatnonzero(wanted & ~fits).tolist():
        _, resized, _ = sizes.of(position)
        name = table["name"][int(rows[position])]
        found.broken[f"{dataset.id}/{name}"] = "would be resized to {}x{} px".format(*resized)
    chosen = np.zeros(len(table), bool)
    chosen[rows[wanted & fits]] = True
    if dataset.max_num_samples is not None:
        usable, chosen = chosen, choose_by_name(table["name"], chosen, dataset.max_num_samples, dataset.id)
        found.surplus += int(usable.sum() - chosen.sum())
    check_captions(dataset, table, chosen)
    found.animated += [f"{dataset.id}/{name}" for name in pick(table["name"], chosen & table["animated"].to_numpy())]
    return DatasetSamples(dataset, scan.storage, table, rows, sizes, seed).where(chosen[rows])


def pick(column: pa.ChunkedArray, mask: np.ndarray) -> list:
    """Return the values of a column where `mask` is true."""
    return column.take(pa.array(np.flatnonzero(mask))).to_pylist() if mask.any() else []


def sizes_of(
    dataset: ImageDataset, table: pa.Table, rows: np.ndarray, alignment_px: int, version: int, seed: int
) -> Sizes:
    """Find the bucket of each size that occurs; there are far fewer sizes than images."""
    width, height = (table[side].to_numpy()[rows].astype(np.int64) for side in ("width", "height"))
    encoded = pa.array(width << 32 | height).dictionary_encode()
    codes, index, choices = encoded.dictionary.to_numpy(), encoded.indices.to_numpy(), None
    if dataset.crop and dataset.crop_aspect == "random":
        count = np.uint64(len(dataset.aspects))
        drawn = hash_names(table["name"], seed, dataset.id, "aspect")[rows] % count
        of_both, index = np.unique(index.astype(np.uint64) * count + drawn, return_inverse=True)
        codes, choices, index = codes[of_both // count], of_both % count, index.astype(np.int32)
    originals = np.stack([codes >> 32, codes & 0xFFFFFFFF], axis=1)
    targets = bucket_sizes(dataset, originals, alignment_px, version, choices)
    resized = resized_sizes(dataset, originals, targets)
    originals, resized, targets = (each.astype(np.int32) for each in (originals, resized, targets))
    return Sizes(originals, resized, targets, index)


def check_captions(dataset: ImageDataset, table: pa.Table, chosen: np.ndarray) -> None:
    """Raise DataError that names chosen images without a caption, or whose caption file is not text."""
    if dataset.caption_strategy == "instanceprompt":
        return
    if dataset.caption_strategy == "filename":
        raise_if_uncaptioned(
            dataset, pick(table["name"], chosen & pc.match_substring_regex(table["name"], WORDLESS).to_numpy())
        )
        return
    unreadable = chosen & pc.not_equal(table["caption_problem"], "").to_numpy()
    empty = chosen & ~unreadable & pc.equal(pc.list_value_length(table["captions"]), 0).to_numpy()
    raise_if_unreadable(dataset, pick(table["name"], unreadable), pick(table["caption_problem"], unreadable))
    raise_if_uncaptioned(dataset, pick(table["name"], empty))


def raise_if_unreadable(dataset: ImageDataset, names: Sequence[str], problems: Sequence[str]) -> None:
    """Raise DataError that names caption files that are not text, and why."""
    if names:
        named = format_names([f"{caption_file(name)} {why}" for name, why in sorted(zip(names, problems, strict=True))])
        raise DataError(
            f"dataset `{dataset.id}`: {count_noun(len(names), 'caption file')} cannot be read as text:{named}",
            "save them as UTF-8, for example `iconv -f WINDOWS-1252 -t UTF-8 old.txt > new.txt`",
        )


def raise_if_uncaptioned(dataset: ImageDataset, names: Sequence[str]) -> None:
    """Raise DataError that names the images without a caption."""
    if names:
        where = {"filename": "their file name", "textfile": "their .txt file next to them"}
        table = f"the table {dataset.parquet.path}" if dataset.parquet else ""
        raise DataError(
            f"dataset `{dataset.id}`: {count_noun(len(names), 'image')} without a caption in "
            f"{where.get(dataset.caption_strategy, table)}:{format_names(names)}",
            "write captions, or set another caption_strategy: textfile, filename, instanceprompt or parquet",
        )


def nothing_usable_error(scan: Scan, found: Discovery) -> DataError:
    counts = {
        "broken": len(found.broken),
        "outside the size limits": found.unwanted,
        "not read": found.not_read.total(),
    }
    left_out = ", ".join(f"{count} {why}" for why, count in counts.items() if count)
    such = f"; {found.not_read.most_common(1)[0][0]} is not" if found.not_read else ""
    return DataError(
        f"dataset `{scan.dataset.id}`: no usable image in {scan.storage.describe()}"
        + (f" ({left_out})" if left_out else ""),
        f"JPEG, PNG and WebP are read, with all subfolders{such}",
    )


def format_names(names: Sequence[str]) -> str:
    """Return names on lines of their own, only the first ones if there are many."""
    more = [f"and {len(names) - MAX_NAMES:,} more"] * (len(names) > MAX_NAMES)
    return "".join(f"\n  {name}" for name in [*names[:MAX_NAMES], *more])
