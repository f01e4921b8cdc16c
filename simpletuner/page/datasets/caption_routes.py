"""Show, save and undo the caption of one image."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from simpletuner.data.config.caption_rules import is_blank
from simpletuner.errors import SettingsError
from simpletuner.page.datasets.journal import CaptionEdit, as_bytes, changed_since
from simpletuner.page.datasets.view import dataset_of, edit_values, edits_of, image_name, number
from simpletuner.page.rendering import field, folders_of, render, toast

if TYPE_CHECKING:
    from simpletuner.page.datasets.captions import Caption


def show_caption(request: Request) -> Response:
    """Return the form that edits a caption, or with `shown` the caption alone."""
    caption = caption_of(request)
    if field(request, "shown") == "on":
        return HTMLResponse(shown_caption(request, caption, field(request, "focus") == "on"))
    values = {"text": caption.text, "caption": caption, "has_changed": False}
    return HTMLResponse(render("datasets/caption_form", **place_of(request), **values))


def shown_caption(request: Request, caption: Caption, focus: bool) -> str:
    """Return a caption, and the badges of its image, which take the place of those on the page."""
    dataset, place = dataset_of(request), place_of(request)
    row = dataset.row_of(place["name"])
    edited = changed_since(edits_of(request, dataset.facts), dataset.checked)
    values = {"findings": dataset.row(row).findings, "is_edited": place["name"] in edited}
    return render("datasets/caption", **place, text=caption.text, focus=focus, **values)


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
    return HTMLResponse(shown_caption(request, caption, focus=True) + said + history(request))


def saved_toast(request: Request, edit: CaptionEdit, text: str) -> str:
    return render("datasets/saved", **place_of(request), edit=edit, is_empty=is_blank(text))


def history(request: Request) -> str:
    """Return the list of edits and the count of them, which take the place of those on the page."""
    values = edit_values(request, field(request, "file"), dataset_of(request))
    return render("datasets/edits", **values, is_new=True) + render("datasets/stale", **values, is_new=True)


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
    Route("/datasets/caption", show_caption, methods=["GET"]),
    Route("/datasets/caption", save_caption, methods=["POST"]),
    Route("/datasets/undo", undo_edit, methods=["POST"]),
]
