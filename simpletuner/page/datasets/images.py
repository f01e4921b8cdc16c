"""Choose, sort and page the images of a dataset: columns are mapped from the files of a check.

Thumbnails are made when they are asked for; browsers keep them.
"""

# pyright: basic, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from simpletuner.data.images.images import DECODE_ERRORS, read_rgb, read_stored
from simpletuner.data.scan.scan import intact_files, open_table
from simpletuner.errors import EnvironmentNotReady
from simpletuner.runs.images import SHOWN_PIXELS, thumbnail
from simpletuner.system.files.regular_files import MALFORMED, open_regular

if TYPE_CHECKING:
    from simpletuner.tools.dataset.listing import DatasetListing, ListedFacts

# pyarrow comes without types.


PER_PAGE = 60
GROUPS_PER_PAGE = 20
MAX_OF_GROUP = 12
"""Images that are shown of a group of duplicates."""
# Group of images without a bucket; no bucket has such a name.
LEFT_OUT = "left out"
ORDERS = {
    "": "as in the dataset",
    "largest": "largest first",
    "smallest": "smallest first",
    "cropped": "most cropped first",
    "longest": "longest caption first",
    "shortest": "shortest caption first",
}
CELL = (240, 200)
"""Largest (width, height) px at which a picture is shown."""


@dataclass(frozen=True)
class ImageQuery:
    """Choice of images, as an address has it."""

    text: str = ""
    bucket: str = ""
    finding: int | None = None
    order: str = ""
    page: int = 1


@dataclass(frozen=True)
class ListedImage:
    """A row of the list of images; sizes in px."""

    row: int
    name: str
    version: str
    problem: str
    width: int
    height: int
    bucket: str
    caption: str
    resized_width: int
    resized_height: int
    target_width: int
    target_height: int
    left: int
    top: int
    why: str = ""
    """Reason or measure of the finding by which the images were chosen."""
    findings: Sequence[Mapping[str, object]] = ()
    """All findings about it, as in the listing."""

    @property
    def cropped(self) -> float:
        """Share of the image that its crop leaves out."""
        whole = self.resized_width * self.resized_height
        return 1 - self.target_width * self.target_height / whole if whole else 0.0

    @property
    def shown_size(self) -> tuple[int, int]:
        """Return the (width, height) that fits into a cell, enlarged where it is smaller."""
        if not (self.width and self.height):
            return CELL
        scale = min(CELL[0] / self.width, CELL[1] / self.height)
        return max(1, round(self.width * scale)), max(1, round(self.height * scale))


@dataclass(frozen=True)
class ImagePage:
    """Page of the images that were chosen: in groups for duplicates, else one group."""

    groups: Sequence[tuple[Sequence[ListedImage], int]]
    """Each with how many more images it has."""
    count: int
    page: int
    pages: int


@dataclass(frozen=True)
class ListedDataset:
    """A dataset of a kept result; `facts` are those of its entry in the listing."""

    facts: ListedFacts
    images: pa.Table
    found: pa.Table
    checked: float = 0.0
    """Time of the check, in seconds since 1970."""
    decoded: bool = False
    """False where it read headers alone."""

    @classmethod
    def open(cls, folder: Path, facts: ListedFacts, found: DatasetListing) -> ListedDataset:
        """Raises EnvironmentNotReady where the files of a result are gone."""
        try:
            paths = [folder / facts["tables"][name] for name in ("images", "found")]
            if not {*paths} <= {*intact_files(folder, "images"), *intact_files(folder, "found")}:
                raise ValueError("Arrow may crash on rows of a damaged file")
            images, about = (open_table(path)[0] for path in paths)
        except (OSError, *MALFORMED, pa.ArrowException):
            raise EnvironmentNotReady(
                f"what was found in {facts.get('id')} cannot be read", "check the datasets again"
            ) from None
        return cls(facts, images, about, found["checked"], found["decoded"])

    def choose(self, query: ImageQuery) -> ImagePage:
        """Return a page of images; one that does not exist is the last one."""
        found = self._found(query.finding)
        rows = found["row"].to_numpy() if found is not None else np.arange(len(self.images))
        kept = self._matches(query)[rows]
        rows = rows[kept]
        topic = self.facts["findings"][query.finding]["topic"] if query.finding is not None else ""
        if found is not None and topic == "repeats":
            return self._page_of_groups(rows, found["group"].to_numpy()[kept], query.page)
        places = np.flatnonzero(kept)
        if (key := self._sort_key(query.order)) is not None:
            order = np.argsort(key[rows], kind="stable")
            rows, places = rows[order], places[order]
        pages = max(1, -(-len(rows) // PER_PAGE))
        page = min(max(1, query.page), pages)
        here = slice((page - 1) * PER_PAGE, page * PER_PAGE)
        why = found["why"].take(pa.array(places[here])).to_pylist() if found is not None else []
        return ImagePage([(self.rows(rows[here], why), 0)], len(rows), page, pages)

    def rows(self, numbers: np.ndarray, why: Sequence[str] = ()) -> list[ListedImage]:
        picked = self.images.take(pa.array(numbers, pa.int64())).to_pylist()
        about = self.found.filter(pc.is_in(self.found["row"], value_set=pa.array(numbers, pa.int32())))
        pairs = dict.fromkeys(zip(about["row"].to_pylist(), about["finding"].to_pylist(), strict=True))
        of_rows: dict[int, list[Mapping[str, object]]] = {}
        for row, finding in pairs:
            of_rows.setdefault(row, []).append(self.facts["findings"][finding])
        reasons = why or [""] * len(picked)
        return [
            ListedImage(row=row, why=reason, findings=of_rows.get(row, ()), **values)
            for row, reason, values in zip(numbers.tolist(), reasons, picked, strict=True)
        ]

    def row(self, number: int) -> ListedImage:
        return self.rows(np.array([number]))[0]

    def row_of(self, name: str) -> int:
        """Return the row of an image; -1 where none has this name."""
        try:
            name.encode()
        except UnicodeEncodeError:
            return -1
        return pc.index(self.images["name"], pa.scalar(name, pa.large_string())).as_py()

    def counts(self) -> list[int]:
        """Count the rows of each finding: files that are no images have none."""
        numbers = self.found["finding"].to_numpy()
        return np.bincount(numbers, minlength=len(self.facts["findings"])).tolist()

    @property
    def left_out(self) -> int:
        return pc.sum(pc.equal(self.images["bucket"], "")).as_py() or 0

    def _found(self, finding: int | None) -> pa.Table | None:
        return None if finding is None else self.found.filter(pc.equal(self.found["finding"], finding))

    def _matches(self, query: ImageQuery) -> np.ndarray:
        mask = np.ones(len(self.images), bool)
        if query.bucket:
            wanted = "" if query.bucket == LEFT_OUT else query.bucket
            mask &= pc.equal(self.images["bucket"], wanted).to_numpy()
        for word in query.text.split():
            either = [
                pc.match_substring(self.images[name], word, ignore_case=True).to_numpy() for name in ("name", "caption")
            ]
            mask &= np.logical_or(*either)
        return mask

    def _sort_key(self, order: str) -> np.ndarray | None:
        """Return numbers by which images are sorted, the smallest first."""
        if order in ("largest", "smallest"):
            width, height = (self.images[side].to_numpy().astype(np.int64) for side in ("width", "height"))
            return width * height * (-1 if order == "largest" else 1)
        if order in ("longest", "shortest"):
            letters = pc.utf8_length(self.images["caption"]).to_numpy()
            return letters * (-1 if order == "longest" else 1)
        if order == "cropped":
            whole, target = (
                np.multiply(
                    *(self.images[f"{kind}_{side}"].to_numpy().astype(np.int64) for side in ("width", "height"))
                )
                for kind in ("resized", "target")
            )
            return target / np.maximum(whole, 1) + (whole == 0)  # what is left out comes last
        return None

    def _page_of_groups(self, rows: np.ndarray, numbers: np.ndarray, page: int) -> ImagePage:
        """Return whole groups: their images are there to be compared."""
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        groups = np.split(rows, starts[1:]) if len(rows) else []
        pages = max(1, -(-len(groups) // GROUPS_PER_PAGE))
        page = min(max(1, page), pages)
        shown = groups[(page - 1) * GROUPS_PER_PAGE : page * GROUPS_PER_PAGE]
        here = [(self.rows(each[:MAX_OF_GROUP]), max(0, len(each) - MAX_OF_GROUP)) for each in shown]
        return ImagePage(here, len(rows), page, pages)


# Longer sides: in the grid, for screens of several dots per px, and of the picture that a click opens.
EDGES_PX = (320, 1600)
MAX_FILE_BYTES = 256 << 20
MAX_JPEG_PIXELS = 1 << 28  # decoded at an eighth of their sides


def small_webp(path: Path, edge: int) -> bytes | None:
    """Return an image as WebP; None where it cannot be decoded, or is too large to be."""
    try:
        with open_regular(path, MAX_FILE_BYTES) as file:
            image = read_stored(file)
            width, height = image.stored
            if width * height > (MAX_JPEG_PIXELS if image.image_format == "JPEG" else SHOWN_PIXELS):
                return None
            return thumbnail(read_rgb(file, (edge, edge)), edge, quality=80, method=2)[0]
    except DECODE_ERRORS:
        return None
