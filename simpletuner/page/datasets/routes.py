"""The page of datasets: results of a check, pictures, and the captions of images to show, save and undo."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from simpletuner.data.config.caption_rules import is_blank
from simpletuner.errors import SettingsError, SimpleTunerError
from simpletuner.page.configurations import list_files
from simpletuner.page.datasets.captions import CaptionEdit, as_bytes, changed_since, file_in
from simpletuner.page.datasets.checks import Checked, CheckState, check_state, start_check, stop_check
from simpletuner.page.datasets.view import dataset_of, dataset_values, edit_values, edits_of, image_name, number
from simpletuner.page.rendering import field, folders_of, render, respond, toast
from simpletuner.system.files.lease import Holding
from simpletuner.system.files.lease_folder import holder_of
from simpletuner.system.files.locks import RUN_LOCK

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
    """Return file, dataset, name and row of a caption from a request."""
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


CAPTION_ROUTES = [
    Route("/datasets/caption", show_caption, methods=["GET"]),
    Route("/datasets/caption", save_caption, methods=["POST"]),
    Route("/datasets/undo", undo_edit, methods=["POST"]),
]


NO_PICTURE = "/static/no-picture.svg"


def show(request: Request) -> Response:
    files, file = list_files(folders_of(request)), field(request, "file")
    if not file and len(files) == 1:
        file = files[0].name
    values: dict[str, Any] = {"files": files, "file": file, "found": None, "state": None}
    if file:
        checked = Checked.of(request, file)
        found, state = checked.found(), check_state(request, checked)
        values |= {"found": found, "state": state}
        if found is not None:
            values |= {"is_outdated": checked.is_outdated(found), "is_used": is_used(request, checked)}
            values |= dataset_values(request, checked, found)
    return respond(request, "datasets/page", title="Datasets", **values)


def is_used(request: Request, checked: Checked) -> bool:
    """True while a run with this configuration holds its folder."""
    try:
        output = checked.settings(request).training.output_dir
    except SettingsError:  # which the check says
        return False
    return holder_of(output / RUN_LOCK)[1] is not Holding.FREE


def check(request: Request) -> Response:
    file = field(request, "file")
    try:
        start_check(request, Checked.of(request, file), decode=field(request, "decode") == "on")
    except SimpleTunerError as error:  # in the place of the progress, which a page shows while it waits for the first
        state = CheckState(error=error)
        return HTMLResponse(render("datasets/progress", file=file, state=state, shows=field(request, "shows")))
    return progress(request)


def stop(request: Request) -> Response:
    stop_check(Checked.of(request, field(request, "file")))
    return progress(request)


def progress(request: Request) -> Response:
    """Return the progress of a check; once it has ended, its results, or a link to them where a page shows
    older ones."""
    file = field(request, "file")
    state = check_state(request, Checked.of(request, file))
    if not state.is_running and not state.error and field(request, "shows") != "on":
        return Response(headers={"HX-Refresh": "true"})
    return HTMLResponse(render("datasets/progress", file=file, state=state, shows=field(request, "shows")))


def show_picture(request: Request) -> Response:
    from simpletuner.page.datasets.images import EDGES_PX, small_webp

    dataset = dataset_of(request)
    path = file_in(folders_of(request), dataset.facts, image_name(request, dataset))
    edge = max(EDGES_PX) if field(request, "edge") == "large" else min(EDGES_PX)
    with request.app.state.decoding:
        content = small_webp(path, edge)
    if content is None:
        return RedirectResponse(NO_PICTURE, 303)
    # The address has the version of the file, so one that was changed and checked again has another one.
    return Response(content, media_type="image/webp", headers={"Cache-Control": "private, max-age=86400"})


ROUTES = [
    Route("/datasets", show),
    Route("/datasets/check", check, methods=["POST"]),
    Route("/datasets/stop", stop, methods=["POST"]),
    Route("/datasets/progress", progress),
    Route("/datasets/picture", show_picture),
    *CAPTION_ROUTES,
]
