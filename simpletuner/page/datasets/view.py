"""Values of a dataset's page, from the address of a request: dataset, image or choice of images."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from starlette.requests import Request

from simpletuner.errors import SettingsError
from simpletuner.page.datasets.captions import CaptionEdit, changed_since, edits_below, why_hidden, why_no_pictures
from simpletuner.page.datasets.checks import Checked
from simpletuner.page.rendering import field, folders_of

if TYPE_CHECKING:
    from simpletuner.page.datasets.images import ImagePage, ImageQuery, ListedDataset
    from simpletuner.tools.dataset.listing import DatasetListing, ListedFacts

EDITS = 20
"""Edits that the page lists, and offers to undo."""
MAX_DIGITS = 9
TOPICS = ("files", "images", "sizes", "captions", "repeats")
"""Order of findings, as the command prints them."""


def dataset_of(request: Request) -> ListedDataset:
    """Return the dataset that a request names. Raises SettingsError where a check has not found it."""
    from simpletuner.page.datasets.images import ListedDataset

    checked = Checked.of(request, field(request, "file"))
    found = checked.found()
    facts = found and dataset_named(found, field(request, "dataset"))
    if not found or not facts:
        raise SettingsError("there is no such dataset", "the page of datasets shows those there are")
    return ListedDataset.open(checked.run.path, facts, found)


def image_name(request: Request, dataset: ListedDataset) -> str:
    """Return the name of an image in a request, which must be one of the dataset's."""
    name = field(request, "name")
    if dataset.row_of(name) < 0:
        raise SettingsError("there is no such image", "check the datasets again if it is new")
    return name


def dataset_values(request: Request, checked: Checked, found: DatasetListing) -> dict[str, object]:
    """Return the page's values of the dataset that a request names, or of the first one."""
    from simpletuner.page.datasets.images import LEFT_OUT, ORDERS, ListedDataset

    facts = dataset_named(found, field(request, "dataset"))
    if facts is None:
        return {"dataset": None}
    dataset, query = (
        ListedDataset.open(checked.run.path, facts, found),
        query_of(request, len(facts["findings"])),
    )
    hidden = why_hidden(folders_of(request), facts)
    chosen = None if hidden else dataset.choose(query)
    file, id_ = str(checked.document.path), facts["id"]

    def link(**changes: object) -> str:
        """An address of this page with another choice; a filter begins at the first page."""
        choice = {
            "bucket": query.bucket,
            "finding": query.finding,
            "q": query.text,
            "order": query.order,
            "page": None,
            **changes,
        }
        given = {name: value for name, value in choice.items() if value not in (None, "")}
        return f"/datasets?{urlencode({'file': file, 'dataset': id_, **given})}#images"

    return {
        "dataset": dataset,
        "facts": facts,
        "query": query,
        "findings": sorted(enumerate(facts["findings"]), key=lambda each: TOPICS.index(each[1]["topic"])),
        "chosen": chosen,
        "captions": captions_on_disk(request, facts, chosen) if chosen else {},
        "hidden": hidden,
        "no_pictures": why_no_pictures(facts),
        "orders": ORDERS,
        "left_out_name": LEFT_OUT,
        "link": link,
        **edit_values(request, file, dataset),
    }


def captions_on_disk(request: Request, facts: ListedFacts, chosen: ImagePage) -> dict[int, str]:
    """Return the current captions of a page's editable images."""
    from simpletuner.page.datasets.captions import open_caption

    texts: dict[int, str] = {}
    if facts["not_editable"]:
        return texts
    for image in (image for images, _ in chosen.groups for image in images):
        with suppress(SettingsError, OSError):  # a link, or no text: as the check has read it
            texts[image.row] = open_caption(folders_of(request), facts, image.name).text
    return texts


def edit_values(request: Request, file: str, dataset: ListedDataset) -> dict[str, object]:
    facts = dataset.facts
    is_editable = not facts["not_editable"] and not why_hidden(folders_of(request), facts)
    edits = edits_of(request, facts) if is_editable else []
    # What the check says of these captions is about texts that are not there any more.
    edited = changed_since(edits, dataset.checked)
    values = {"edits": edits[:EDITS], "edited": edited, "decoded": dataset.decoded}
    return {"file": file, "facts": facts, "is_editable": is_editable, **values}


def edits_of(request: Request, facts: ListedFacts) -> list[CaptionEdit]:
    return list(edits_below(folders_of(request).resolve(facts["folder"])))


def dataset_named(found: DatasetListing, name: str) -> ListedFacts | None:
    """Return the dataset of this name, or the first one where none is given."""
    named = [each for each in found["datasets"] if each["id"] == name or not name]
    return named[0] if named else None


def query_of(request: Request, findings: int) -> ImageQuery:
    """Choice of images in an address; a finding that is none of them, as after another check, is none."""
    from simpletuner.page.datasets.images import ImageQuery

    finding, page = number(field(request, "finding")), number(field(request, "page"))
    finding = finding if finding is not None and finding < findings else None
    return ImageQuery(field(request, "q"), field(request, "bucket"), finding, field(request, "order"), page or 1)


def number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS else None
