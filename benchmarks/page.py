"""How long the page takes to start, and each view of it until it is painted and can be used, in a real Chromium.

`python benchmarks/page.py`; medians of 5 visits, the browser's cache warm after the first.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from browser import chromium  # pyright: ignore[reportMissingImports]
from page_server import page_server  # pyright: ignore[reportMissingImports]

if TYPE_CHECKING:
    from playwright.sync_api import Page

VISITS = 5
CONFIG = 'model_family = "sdxl"\ninstance_data_dir = "."\nnum_processes = 2\n'
EDITOR = "/configurations/edit?file=run.toml"
VIEWS = {
    "list of configurations": "/configurations",
    "all settings": EDITOR,
    "Hardware -> Accelerate": f"{EDITOR}&view=accelerate",
    "an export": "/export?file=run.toml&to=toml",
    "Preferences": "/preferences?file=run.toml",
    "list of runs": "/runs",
}
ROWS = 100_000
FIRST_VIEWS = 3
RUN = "/runs/watch?run=run-{}"
PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
LOADED = "performance.getEntriesByType('navigation')[0].loadEventEnd"


def start_seconds(folder: Path) -> float:
    """From the command to the first answer."""
    begin = time.perf_counter()
    with page_server(folder) as server:
        assert server.get("/configurations").code == 200
        return time.perf_counter() - begin


def visit(page: Page, server: Any, path: str) -> tuple[float, float]:
    """Return seconds until the first paint, and until the page and its scripts are loaded."""
    page.goto("about:blank")
    page.goto(server.origin + path)
    page.wait_for_function(f"{LOADED} > 0")
    return page.evaluate(PAINTED) / 1000, page.evaluate(LOADED) / 1000


def write_run(folder: Path) -> None:
    """Write what a run of ROWS steps leaves for the page."""
    folder.mkdir()
    (folder / ".lock").touch()
    numbers = ((step, math.exp(-step / ROWS) + math.sin(step) / 9) for step in range(1, ROWS + 1))
    rows = (
        {
            "step": step,
            "loss": loss,
            "learning_rate": 1e-5,
            "grad_norm": 2 * loss,
            "seconds": 0.5,
            "samples_per_second": 8,
        }
        for step, loss in numbers
    )
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def check_seconds(page: Page, server: Any) -> float:
    """From a key in a field until its mistake is shown, without the 0.25 s in which more keys are waited for."""
    page.goto(server.origin + EDITOR)
    page.locator("#f-seed").press("x")
    begin = time.perf_counter()
    page.locator("#note-seed .mistake").wait_for()
    seconds = time.perf_counter() - begin - 0.25
    page.locator("#f-seed").fill("")
    return seconds


def main() -> None:
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "work"
        folder.mkdir()
        (folder / "run.toml").write_text(CONFIG)
        for number in range(FIRST_VIEWS):
            write_run(folder / f"run-{number}")
        starts = [start_seconds(folder) for _ in range(VISITS)]
        print(f"{'start, until the first answer':32}{statistics.median(starts):8.2f} s")
        with page_server(folder) as server, chromium() as browser:
            page = browser.new_page()
            page.goto(server.address)
            page.wait_for_url("**/configurations")
            for name, path in VIEWS.items():
                painted, loaded = zip(*(visit(page, server, path) for _ in range(VISITS)), strict=True)
                print(f"{name:32}{statistics.median(painted):8.2f} s painted{statistics.median(loaded):8.2f} s loaded")
            firsts = [visit(page, server, RUN.format(number))[1] for number in range(FIRST_VIEWS)]
            later = [visit(page, server, RUN.format(0))[1] for _ in range(VISITS)]
            of_rows = f"a run of {ROWS:,} steps"
            print(f"{of_rows:32}{statistics.median(firsts):8.2f} s at first{statistics.median(later):8.2f} s later")
            checks = [check_seconds(page, server) for _ in range(VISITS)]
            print(f"{'a mistake beside its field':32}{statistics.median(checks):8.2f} s")


if __name__ == "__main__":
    main()
