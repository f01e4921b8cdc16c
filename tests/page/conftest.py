"""One server and one Chromium for a module's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browser import chromium
from page_server import PageServer, page_server
from patience import PATIENCE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page


EXPECTED = ("Failed to load resource: the server responded with", "htmx:afterRequest", "htmx:sendAbort")
"""In a console: an error that the server answers with a sentence, and a request that a later one has replaced."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The current folder of the server; a test module may put files there first."""
    made = tmp_path_factory.mktemp("page") / "work"
    made.mkdir()
    return made


@pytest.fixture(scope="module")
def server(folder: Path, fork_server: Any) -> Iterator[PageServer]:
    """A page that is forked, as is what it starts: a run then takes 3 CPU seconds less, and the page 0.6.

    Those of `test_runs.py`, `test_dialogs.py` and `test_security.py` start cold.
    """
    with page_server(folder, fork_server=fork_server) as started:
        yield started


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import expect

    expect.set_options(timeout=PATIENCE * 1000)  # of 5 s a busy machine takes all for one request
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def context(browser: Browser, server: PageServer) -> Iterator[BrowserContext]:
    """One that may enter, for all tabs of a module: a context starts processes, 0.8 CPU seconds, and a tab 0.2."""
    made = browser.new_context(viewport={"width": 1280, "height": 900})
    server.enter(made)
    yield made
    made.close()


@pytest.fixture
def page(context: BrowserContext, server: PageServer) -> Iterator[Page]:
    """An empty tab. Messages of its console, which CSP writes to as well, fail the test."""
    tab = context.new_page()
    tab.set_default_timeout(PATIENCE * 1000)
    said: list[str] = []
    tab.on("console", lambda message: None if message.text.startswith(EXPECTED) else said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    yield tab
    if tab.url.startswith(server.origin):
        tab.evaluate("localStorage.clear()")  # what a page remembers
    for each in context.pages:
        each.close()
    assert said == []
