"""Add a run to the queue, remove one, and change their order."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from simpletuner.errors import SettingsError
from simpletuner.page.queue.waiting import RunQueue
from simpletuner.page.rendering import field, folders_of, toast
from simpletuner.page.runs.fragments import Fragment, made

UNCHANGED = {"HX-Reswap": "none"}


def queue_of(request: Request) -> RunQueue:
    return request.app.state.queue


def queue_fragment(request: Request) -> Fragment:
    queue, folders = queue_of(request), folders_of(request)
    entries = queue.shown()
    names = {each.id: folders.shown(Path(each.file)) for each in entries}
    return made(
        "queue",
        queue=queue,
        warning=queue.file.warning(),
        entries=entries,
        names=names,
        free=queue.free(queue.file.read()),
    )


def add(request: Request) -> Response:
    name = field(request, "file")
    if not name:
        raise SettingsError("which configuration?", "choose a file")
    entry = queue_of(request).add(name, field(request, "checkpoint"))
    return HTMLResponse(
        toast(f"{name} is in the queue for {entry.need}", "the page of runs shows it"), headers=UNCHANGED
    )


def remove(request: Request) -> Response:
    entry = queue_of(request).remove(field(request, "entry"))
    said = toast(f"{entry.file.rpartition('/')[2]} is no longer in the queue")
    return HTMLResponse(said + queue_fragment(request).html(), headers=UNCHANGED)


def move(request: Request) -> Response:
    queue_of(request).move(field(request, "entry"), -1 if field(request, "to") == "up" else 1)
    return HTMLResponse(queue_fragment(request).html(), headers=UNCHANGED)


ROUTES = [
    Route("/runs/queue/add", add, methods=["POST"]),
    Route("/runs/queue/remove", remove, methods=["POST"]),
    Route("/runs/queue/move", move, methods=["POST"]),
]
