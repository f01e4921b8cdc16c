"""A real Chromium, driven by playwright: Debian's, since playwright's own would have to be downloaded.

Its headless shell is the same engine without the windows that a browser draws around a page: a tab that axe looks at
takes 0.9 CPU seconds instead of 2.1.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
FLAGS = ("--no-sandbox", "--renderer-process-limit=1")
"""Root has no sandbox; and a tab of 0.48 CPU seconds takes 0.41 where it starts no process of its own."""
FOUND = {"resultTypes": ["violations"]}
OF_COLOURS = {**FOUND, "runOnly": ["color-contrast", "link-in-text-block"]}


@contextmanager
def chromium() -> Iterator[Browser]:
    path = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if path is None:
        assert "CI" not in os.environ, "chromium is missing"
        pytest.skip("chromium is not installed (`make tools`)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


def expect_axe_finds_nothing(page: Page) -> None:
    """Try all of axe's rules in light colours; in dark ones those of colours, for nothing else changes."""
    from axe_playwright_python.sync_playwright import Axe

    for scheme, options in zip(SCHEMES, (FOUND, OF_COLOURS), strict=True):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        found = Axe().run(page, options=options)
        assert found.violations_count == 0, found.generate_report()
