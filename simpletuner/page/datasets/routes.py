"""The page of datasets: results of a check, pictures, and captions to edit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from simpletuner.errors import SettingsError
from simpletuner.page.configurations import list_files
from simpletuner.page.datasets.checks import Checked, check_state, command_for, start_check, stop_check
from simpletuner.page.datasets.files import file_in, why_hidden, why_no_pictures
from simpletuner.page.datasets.journal import Edit, as_bytes, edits_below
from simpletuner.page.rendering import field, folders_of, render, respond, toast
from simpletuner.system.files.locks import RUN_LOCK, is_locked

if TYPE_CHECKING:
    from simpletuner.page.datasets.captions import Caption
    from simpletuner.page.datasets.images import ImagePage, ImageQuery, ListedDataset

EDITS = 20
"""Edits that the page lists, and offers to undo."""
MAX_DIGITS = 9
TOPICS = ("files", "images", "sizes", "captions", "repeats")
"""Order of findings, as the command prints them."""
NO_PICTURE = "/static/no-picture.svg"


def show(request: Request) -> Response:
    files, file = list_files(folders_of(request)), field(request, "file")
    if not file and len(files) == 1:
        file = files[0].name
    values: dict[str, Any] = {"files": files, "file": file, "found": None, "state": None}
    if file:
        checked = Checked.of(request, file)
        found, state = checked.found(), check_state(request, checked)
        values |= {"found": found, "state": state, "command": command_for(checked)}
        if found is not None:
            values |= {"is_outdated": checked.is_outdated(found), "is_used": is_used(request, checked)}
            values |= dataset_values(request, checked, found)
    return respond(request, "datasets/page", title="Datasets", **values)


def is_used(request: Request, checked: Checked) -> bool:
    """Return whether a run with this configuration is going on."""
    try:
        output = checked.settings(request).training.output_dir
    except SettingsError:  # which the check says
        return False
    return bool(is_locked(output / RUN_LOCK, exclusively=True))


def dataset_values(request: Request, checked: Checked, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page shows of the dataset that a request names, or else of the first one."""
    from simpletuner.page.datasets.images import LEFT_OUT, ORDERS, ListedDataset

    facts = facts_of(found, field(request, "dataset"))
    if facts is None:
        return {"dataset": None}
    dataset, query = ListedDataset.open(checked.run.path, facts), query_of(request)
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
        **edit_values(request, file, facts),
    }


def captions_on_disk(request: Request, facts: Mapping[str, Any], chosen: ImagePage) -> dict[int, str]:
    """Return the captions as they are now, of those on a page that can be edited."""
    from simpletuner.page.datasets.captions import open_caption

    texts: dict[int, str] = {}
    if facts["not_editable"]:
        return texts
    for image in (image for images, _ in chosen.groups for image in images):
        with suppress(SettingsError, OSError):  # a link, or no text: as the check has read it
            texts[image.row] = open_caption(folders_of(request), facts, image.name).text
    return texts


def edit_values(request: Request, file: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    is_editable = not facts["not_editable"] and not why_hidden(folders_of(request), facts)
    edits = edits_of(request, facts)[:EDITS] if is_editable else []
    return {"file": file, "facts": facts, "is_editable": is_editable, "edits": edits}


def edits_of(request: Request, facts: Mapping[str, Any]) -> list[Edit]:
    return list(edits_below(folders_of(request).resolve(facts["folder"])))


def facts_of(found: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Return the dataset of this name, or the first one where none is given."""
    named = [each for each in found["datasets"] if each["id"] == name or not name]
    return named[0] if named else None


def query_of(request: Request) -> ImageQuery:
    from simpletuner.page.datasets.images import ImageQuery

    finding, page = number(field(request, "finding")), number(field(request, "page"))
    return ImageQuery(field(request, "q"), field(request, "bucket"), finding, field(request, "order"), page or 1)


def number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS else None


def check(request: Request) -> Response:
    """Begin a check, and show its progress."""
    checked = Checked.of(request, field(request, "file"))
    start_check(request, checked, decode=field(request, "decode") == "on")
    return progress(request)


def stop(request: Request) -> Response:
    stop_check(Checked.of(request, field(request, "file")))
    return progress(request)


def progress(request: Request) -> Response:
    """Return how far a check is; once it has ended, its results, or where a page shows older ones, a link to them."""
    file = field(request, "file")
    state = check_state(request, Checked.of(request, file))
    if not state.is_running and not state.error and field(request, "shows") != "on":
        return Response(headers={"HX-Refresh": "true"})
    return HTMLResponse(render("datasets/progress", file=file, state=state, shows=field(request, "shows")))


def dataset_of(request: Request) -> ListedDataset:
    """Return the dataset that a request names. Raises SettingsError where a check has not found it."""
    from simpletuner.page.datasets.images import ListedDataset

    checked = Checked.of(request, field(request, "file"))
    found = checked.found()
    facts = found and facts_of(found, field(request, "dataset"))
    if not facts:
        raise SettingsError("there is no such dataset", "the page of datasets shows those there are")
    return ListedDataset.open(checked.run.path, facts)


def image_name(request: Request, dataset: ListedDataset) -> str:
    """Return the name of an image in a request, which must be one of the dataset's."""
    name = field(request, "name")
    if dataset.row_of(name) < 0:
        raise SettingsError("there is no such image", "check the datasets again if it is new")
    return name


def show_picture(request: Request) -> Response:
    from simpletuner.page.datasets.thumbnails import EDGES_PX, thumbnail

    dataset = dataset_of(request)
    path = file_in(folders_of(request), dataset.facts, image_name(request, dataset))
    edge = max(EDGES_PX) if field(request, "edge") == "large" else min(EDGES_PX)
    with request.app.state.decoding:
        content = thumbnail(path, edge)
    if content is None:
        return RedirectResponse(NO_PICTURE, 303)
    # The address has the version of the file, so one that was changed and checked again has another one.
    return Response(content, media_type="image/webp", headers={"Cache-Control": "private, max-age=86400"})


def show_caption(request: Request) -> Response:
    """Return the form that edits a caption, or with `shown` the caption alone."""
    caption = caption_of(request)
    is_shown = field(request, "shown") == "on"
    values = {"text": caption.text, "caption": caption, "has_changed": False, "focus": field(request, "focus") == "on"}
    return HTMLResponse(render(f"datasets/{'caption' if is_shown else 'caption_form'}", **place_of(request), **values))


def caption_of(request: Request) -> Caption:
    from simpletuner.page.datasets.captions import open_caption

    dataset = dataset_of(request)
    return open_caption(folders_of(request), dataset.facts, image_name(request, dataset))


def place_of(request: Request) -> dict[str, Any]:
    """Return what names a caption, and its place on the page."""
    return {name: field(request, name) for name in ("file", "dataset", "name")} | {
        "row": number(field(request, "row")) or 0
    }


def save_caption(request: Request) -> Response:
    """Write a caption; not over what somebody else has written meanwhile, which is shown beside it."""
    from simpletuner.page.datasets import captions

    text = field(request, "text")
    with request.app.state.saving:
        caption = caption_of(request)
        if caption.checksum != field(request, "checksum"):
            values = {"text": text, "caption": caption, "has_changed": True}
            return HTMLResponse(render("datasets/caption_form", **place_of(request), **values))
        edit = captions.save(caption, text)
    said = saved_toast(request, edit, text) if edit else toast("nothing has changed", caption.path.name)
    caption = replace(caption, content=as_bytes(edit.after)) if edit else caption
    values = {"text": caption.text, "caption": caption, "focus": True}
    return HTMLResponse(render("datasets/caption", **place_of(request), **values) + said + history(request))


def saved_toast(request: Request, edit: Edit, text: str) -> str:
    return render("datasets/saved", **place_of(request), edit=edit, is_empty=not text.strip())


def history(request: Request) -> str:
    """Return the list of edits, which takes the place of the one on the page."""
    facts = dataset_of(request).facts
    return render("datasets/edits", **edit_values(request, field(request, "file"), facts), is_new=True)


def undo_edit(request: Request) -> Response:
    """Bring back the text before an edit; the caption on the page is asked to show itself again."""
    from simpletuner.page.datasets import captions

    dataset = dataset_of(request)
    edit = next((each for each in edits_of(request, dataset.facts) if each.id == field(request, "edit")), None)
    if edit is None:
        raise SettingsError("there is no such edit", "the list of edits shows those there are")
    with request.app.state.saving:
        caption = captions.open_caption(folders_of(request), dataset.facts, edit.image)
        captions.undo(caption, edit)
    said = toast(f"{caption.path.name} is as it was before")
    changed = json.dumps({f"caption-of-{dataset.row_of(edit.image)}": {}})
    return HTMLResponse(said + history(request), headers={"HX-Reswap": "none", "HX-Trigger": changed})


ROUTES = [
    Route("/datasets", show),
    Route("/datasets/check", check, methods=["POST"]),
    Route("/datasets/stop", stop, methods=["POST"]),
    Route("/datasets/progress", progress),
    Route("/datasets/picture", show_picture),
    Route("/datasets/caption", show_caption, methods=["GET"]),
    Route("/datasets/caption", save_caption, methods=["POST"]),
    Route("/datasets/undo", undo_edit, methods=["POST"]),
]
