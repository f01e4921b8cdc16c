"""The page in a real Chromium: entering, navigation, errors, and what assistive technology is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from browser import expect_axe_finds_nothing
from page_server import PageServer
from playwright.sync_api import Page, expect

EDITOR = "/configurations/edit?file=config/run.toml"
PAGES = (
    "/configurations",
    EDITOR,
    EDITOR + "&view=accelerate",
    "/export?file=good.toml",
    "/export?file=config/run.toml",
    "/preferences",
    "/nowhere",
)


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    """Files with every kind of mistake, since these are shown in colours of their own."""
    (folder / "config").mkdir()
    (folder / "good.toml").write_text('model_family = "sdxl"\ninstance_data_dir = "."\n')
    mistakes = 'learning_rate = "fast"\nsede = 1\nfsdp_enable = true\nzero_stage = 2\n'
    (folder / "config" / "run.toml").write_text(f'model_family = "sdxl"\n{mistakes}')
    return folder


def test_entering_and_moving_about(page: Page, server: PageServer):
    page.goto(server.origin)
    page.wait_for_url(server.origin + "/configurations*")
    assert "token" not in page.url
    page.get_by_role("link", name="Runs").click()
    page.wait_for_url("**/runs")
    expect(page.locator("nav a[aria-current]")).to_have_text("Runs")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.goto(server.origin + "/nowhere")
    assert "There is no such page." in page.locator("main").inner_text()
    page.go_back()
    expect(page).to_have_title(re.compile("^Runs"))


@pytest.mark.parametrize("path", PAGES)
def test_axe_finds_nothing(page: Page, server: PageServer, path: str):
    page.goto(server.origin + path)
    expect_axe_finds_nothing(page)
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_the_keyboard_alone_suffices(page: Page, server: PageServer, folder: Path):
    """Find a setting, change it, save, open a dialog, choose in it and leave it, without a mouse."""
    page.goto(f"{server.origin}/configurations/edit?file=good.toml&view=accelerate")
    page.keyboard.press("/")
    page.keyboard.type("num_processes")
    page.keyboard.press("Tab")
    while page.evaluate("document.activeElement.name") != "num_processes":
        page.keyboard.press("Tab")
    page.keyboard.type("2")
    while page.evaluate("document.activeElement.textContent.trim().slice(0, 4)") != "Save":
        page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    page.locator("#toasts .done").wait_for()
    assert "num_processes = 2" in (folder / "good.toml").read_text()
    assert page.evaluate("document.activeElement.id") == "save", "focus stays though the form is a new one"
    page.keyboard.press("/")
    page.keyboard.press("Control+A")
    page.keyboard.type("deepspeed_config")
    while page.evaluate("document.activeElement.textContent") != "DeepSpeed Builder":
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    while page.evaluate("document.activeElement.name") != "build_zero_stage":
        page.keyboard.press("Tab")
    page.keyboard.press("3")
    page.locator("#preview pre", has_text='"stage": 3').wait_for()
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.textContent") == "DeepSpeed Builder", "focus returns to where it was"
