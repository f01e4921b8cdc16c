"""Make the pictures of README and docs again, from a finished `make demo` and a real page in Chromium.

    .venv/bin/python tests/campaigns/pictures.py

Takes a minute; look at each picture before it is committed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "support"))

from browser import chromium  # noqa: E402
from page_server import PageServer, page_server  # noqa: E402

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

DOCS, DEMO = ROOT / "docs", ROOT / "demo"
STEPS = (0, 250, 1000)
CARD = "RTX-4090"


def main() -> None:
    stack_grids()
    with tempfile.TemporaryDirectory() as place, chromium() as browser:
        report = browser.new_page(viewport={"width": 1280, "height": 1150})
        report.goto((DEMO / "output" / "report.html").as_uri())
        report.screenshot(path=DOCS / "report.png")
        folder = workspace(Path(place) / "work")
        with page_server(folder) as server:
            picture_page(entered(browser, server), server.origin)


def stack_grids() -> None:
    """Write the grids of three rounds below one another."""
    grids = [Image.open(DEMO / "output" / "validation" / f"grid-{step:06d}.png").convert("RGB") for step in STEPS]
    stacked = Image.new("RGB", (grids[0].width, sum(grid.height for grid in grids)), "white")
    top = 0
    for grid in grids:
        stacked.paste(grid, (0, top))
        top += grid.height
    stacked.quantize(255).save(DOCS / "demo.png", optimize=True)


def workspace(folder: Path) -> Path:
    """Return a folder with the demo's run and images, and a new configuration of a published model."""
    shutil.copytree(DEMO, folder / "demo")
    shutil.copytree(ROOT / "examples" / "shapes", folder / "examples" / "shapes")
    shutil.copytree(DEMO / "pictures", folder / "pictures")
    program = Path(sys.executable).with_name("simpletuner")
    for recipe, file in (("sdxl-style", "config/config.toml"), ("sdxl-full", "config/full.toml")):
        subprocess.run([program, "config", "init", f"--recipe={recipe}", f"--output={file}"], cwd=folder, check=True)
    return folder


def entered(browser: Browser, server: PageServer) -> Page:
    context = browser.new_context(viewport={"width": 1280, "height": 940})
    server.enter(context)
    page = context.new_page()
    page.set_default_timeout(300_000)
    return page


def picture_page(page: Page, origin: str) -> None:
    page.goto(f"{origin}/configurations/edit?file=config/config.toml")
    page.get_by_label("GPU", exact=True).select_option(CARD)
    page.get_by_role("button", name="Plan", exact=True).click()
    page.get_by_text("Predicted, not measured").wait_for()
    page.evaluate("scrollTo(0, 0)")
    page.screenshot(path=DOCS / "page-editor.png")

    page.goto(f"{origin}/configurations/edit?file=config/full.toml&view=accelerate")
    page.get_by_role("button", name="Detect Blocks").click()
    page.get_by_text("Apply Selection").wait_for()
    page.get_by_text("BasicTransformerBlock").first.wait_for()
    page.screenshot(path=DOCS / "page-blocks.png")

    page.set_viewport_size({"width": 1280, "height": 1700})
    page.goto(f"{origin}/runs/watch?run=demo/output")
    page.locator(".prompts .beside img").last.wait_for()
    page.wait_for_load_state("load")
    page.screenshot(path=DOCS / "page-run.png")


if __name__ == "__main__":
    main()
