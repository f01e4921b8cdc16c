"""The page of datasets: results of a check, and pictures."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from simpletuner.errors import SettingsError, SimpleTunerError
from simpletuner.page.configurations import list_files
from simpletuner.page.datasets import caption_routes
from simpletuner.page.datasets.checks import Checked, CheckState, check_state, start_check, stop_check
from simpletuner.page.datasets.files import file_in
from simpletuner.page.datasets.view import dataset_of, dataset_values, image_name
from simpletuner.page.rendering import field, folders_of, render, respond
from simpletuner.system.files.lease import Holding
from simpletuner.system.files.lease_folder import holder_of
from simpletuner.system.files.locks import RUN_LOCK

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
    """Return whether a run with this configuration is going on."""
    try:
        output = checked.settings(request).training.output_dir
    except SettingsError:  # which the check says
        return False
    return holder_of(output / RUN_LOCK)[1] is not Holding.FREE


def check(request: Request) -> Response:
    """Begin a check, and show its progress."""
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
    """Return how far a check is; once it has ended, its results, or where a page shows older ones, a link to them."""
    file = field(request, "file")
    state = check_state(request, Checked.of(request, file))
    if not state.is_running and not state.error and field(request, "shows") != "on":
        return Response(headers={"HX-Refresh": "true"})
    return HTMLResponse(render("datasets/progress", file=file, state=state, shows=field(request, "shows")))


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


ROUTES = [
    Route("/datasets", show),
    Route("/datasets/check", check, methods=["POST"]),
    Route("/datasets/stop", stop, methods=["POST"]),
    Route("/datasets/progress", progress),
    Route("/datasets/picture", show_picture),
    *caption_routes.ROUTES,
]
