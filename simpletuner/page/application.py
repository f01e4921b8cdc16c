"""The ASGI application: all routes, and errors as sentences."""

from __future__ import annotations

import http
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from simpletuner.errors import SimpleTunerError, explain_os_error, system_error
from simpletuner.page import configurations, exports, preferences
from simpletuner.page import run_routes as runs
from simpletuner.page.child_processes import AwaitedCommands
from simpletuner.page.datasets import routes as datasets
from simpletuner.page.editing import blocks, builder_dialog, editor, planning
from simpletuner.page.editing.planning import Planning
from simpletuner.page.guard import HEADERS, Guard, Secrets
from simpletuner.page.queue.waiting import RunQueue
from simpletuner.page.rendering import HERE, editor_address, folders_of, render, respond_error
from simpletuner.page.runs.fragments import KeptRows
from simpletuner.page.runs.processes import Processes
from simpletuner.page.runs.results import Exporting
from simpletuner.page.runs.watching import Watched
from simpletuner.runs.folder import Folders
from simpletuner.runs.listing import RunList

PAGES = (configurations, editor, blocks, builder_dialog, planning, exports, datasets, runs, preferences)
BUG = SimpleTunerError("This is a bug in simpletuner.", "the terminal where the page was started shows where")


def build_application(
    folders: Folders, config: Path | None, secrets: Secrets, host: str, entered: Callable[[], None]
) -> Starlette:
    """Page. `config` is the file that opens first; `entered` is called when a browser is let in."""
    static = Mount("/static", StaticFiles(directory=HERE / "static"))
    guard = Middleware(Guard, secrets=secrets, host=host, refuse=refuse, enter=enter)
    # Handlers are plain functions: Starlette runs them in threads, so reading files delays nobody.
    application = Starlette(
        routes=[Route("/", first_page), static, *(route for module in PAGES for route in module.ROUTES)],
        middleware=[guard],
        lifespan=lifespan,
        exception_handlers={
            SimpleTunerError: show_error,
            OSError: show_os_error,
            RuntimeError: show_os_error,
            HTTPException: show_http_error,
            Exception: show_bug,
        },
    )
    application.state.folders, application.state.config = folders, config
    application.state.saving = threading.Lock()  # of the server, not of a visitor: one file is saved after the other
    application.state.commands = commands = AwaitedCommands()
    # Each decoded image takes up to 200 MB, and browsers ask for six at a time.
    application.state.decoding = threading.BoundedSemaphore(2)
    application.state.watched, application.state.rows = Watched(), KeptRows()
    application.state.planning = Planning(commands)
    application.state.exporting, application.state.sampling = Exporting(commands), Exporting(commands, "sampled")
    application.state.processes = processes = Processes()
    application.state.runs = runs_in_folders = RunList(folders, processes)
    application.state.queue = RunQueue(folders, processes, runs_in_folders, application.state.saving)
    application.state.secrets, application.state.csrf = secrets, secrets.csrf
    application.state.entered = entered
    return application


@asynccontextmanager
async def lifespan(application: Starlette) -> AsyncIterator[None]:
    """Start runs that wait while the page is served, and end with it what only the page waits for."""
    application.state.queue.thread.start()
    yield
    application.state.queue.stop()
    application.state.commands.close()


def first_page(request: Request) -> Response:
    """Open the file that was named at the start, or the list of files."""
    config: Path | None = request.app.state.config
    if config is None:
        return RedirectResponse("/configurations", 303)
    return RedirectResponse(editor_address(folders_of(request).shown(config)), 303)


def enter(request: Request) -> Response:
    """Trade the token for a cookie, and go on without it in the address.

    By a page instead of a redirect: where a link in another site led here, browsers would not send a
    SameSite=Strict cookie with the redirected request.
    """
    secrets: Secrets = request.app.state.secrets
    # `//host`, and what browsers take for it (`/\\host`, `/<tab>/host`), would lead to another site.
    path = "/" + quote(request.url.path).lstrip("/")
    response = HTMLResponse(render("enter", path=path))
    response.set_cookie(secrets.cookie, secrets.session, httponly=True, samesite="strict")
    request.app.state.entered()
    return response


def refuse(request: Request, code: int, sentence: str) -> Response:
    return respond_error(request, SimpleTunerError(sentence), code)


def show_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SimpleTunerError)
    return respond_error(request, error)


def show_os_error(request: Request, error: Exception) -> Response:
    if (failed := system_error(error)) is None:
        raise error
    return respond_error(request, explain_os_error(failed))


def show_http_error(request: Request, error: Exception) -> Response:
    """Unknown addresses and methods, as Starlette finds them."""
    assert isinstance(error, HTTPException)
    sentence = {404: "There is no such page.", 405: "This address is not asked in that way."}
    message = sentence.get(error.status_code, http.HTTPStatus(error.status_code).description or error.detail)
    return respond_error(request, SimpleTunerError(message, "the navigation leads to all pages"), error.status_code)


def show_bug(request: Request, error: Exception) -> Response:
    response = respond_error(request, BUG, 500)
    response.headers.update(HEADERS)  # Starlette answers these outside of the guard
    return response
