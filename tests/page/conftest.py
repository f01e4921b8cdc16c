"""One server and one Chromium for a module's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser import chromium
from page_server import PageServer, page_server
from patience import PATIENCE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


EXPECTED = ("Failed to load resource: the server responded with", "htmx:afterRequest", "htmx:sendAbort")
"""In a console: an error that the server answers with a sentence, and a request that a later one has replaced."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The current folder of the server; a test module may put files there first."""
    made = tmp_path_factory.mktemp("page") / "work"
    made.mkdir()
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[PageServer]:
    with page_server(folder) as started:
        yield started


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import expect

    expect.set_options(timeout=PATIENCE * 1000)  # of 5 s a busy machine takes all for one request
    with chromium() as opened:
        yield opened


@pytest.fixture
def page(browser: Browser, server: PageServer) -> Iterator[Page]:
    """A tab that has entered. Messages of its console, which CSP writes to as well, fail the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    tab = context.new_page()
    tab.set_default_timeout(PATIENCE * 1000)
    said: list[str] = []
    tab.on("console", lambda message: None if message.text.startswith(EXPECTED) else said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    name, _, value = server.cookie["Cookie"].partition("=")
    context.add_cookies([{"name": name, "value": value, "url": server.origin}])
    tab.goto(server.origin)
    tab.wait_for_url(server.origin + "/configurations*")
    yield tab
    context.close()
    assert said == []
