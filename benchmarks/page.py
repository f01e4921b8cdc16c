"""How long the page takes to start, and each view of it until it is painted and can be used, in a real Chromium.

`python benchmarks/page.py`; medians of 5 visits, the browser's cache warm after the first. Then what open pages cost
while they are watched: CPU time of the server per poll of a list of 200 runs, how long 20 clients wait, and CPU time of
one new line after a million.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

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
    "essentials": EDITOR,
    "all settings": f"{EDITOR}&view=all",
    "Hardware -> Accelerate": f"{EDITOR}&view=accelerate",
    "an export": "/export?file=run.toml&to=toml",
    "Preferences": "/preferences?file=run.toml",
    "list of runs": "/runs",
}
ROWS = 100_000
MANY_ROWS = 1_000_000
RUNS, CLIENTS, POLLS, POLL_SECONDS = 200, 20, 5, 2.0
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


def write_run(folder: Path, count: int = ROWS) -> None:
    """Write what a run of so many steps leaves for the page."""
    folder.mkdir()
    (folder / ".lock").touch()
    numbers = ((step, math.exp(-step / count) + math.sin(step) / 9) for step in range(1, count + 1))
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
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)


def write_ended(folder: Path) -> None:
    """Write what the list shows of a run that has ended."""
    folder.mkdir(parents=True)
    (folder / ".lock").write_text("elsewhere 1\n")
    (folder / "status.json").write_text(json.dumps({"state": "finished", "step": 2000, "max_steps": 2000, "loss": 0.1}))
    (folder / "settings.json").write_text('{"model_family": "sdxl"}')


def cpu_seconds(server: Any, work: Callable[[], object], times: int) -> float:
    """Return the CPU time of the server for one call."""
    process = psutil.Process(server.process.pid)
    before = process.cpu_times()
    for _ in range(times):
        work()
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / times


def seen(server: Any, path: str, **query: str) -> dict[str, str]:
    """Return the parts that a page has, as its polls send them."""
    return dict(re.findall(r'name="(seen-\w+)" value="([^"]+)"', server.get(path, **query).text))


def watch_list(server: Any) -> None:
    parts = seen(server, "/runs")
    assert server.get("/runs/rows", **parts).code == 204
    spent = cpu_seconds(server, lambda: server.get("/runs/rows", **parts), 200)
    print(f"{'poll of 200 runs, no news':32}{spent * 1000:8.2f} ms of CPU, goal below 5")
    waits: list[float] = []

    def poll() -> None:
        for _ in range(POLLS):
            begin = time.perf_counter()
            server.get("/runs/rows", **parts)
            waits.append(time.perf_counter() - begin)
            time.sleep(max(0.0, POLL_SECONDS - waits[-1]))

    clients = [threading.Thread(target=poll) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    print(
        f"{f'{CLIENTS} clients, a poll':32}{statistics.median(waits):8.3f} s{max(waits):8.3f} s at most, goal below 1"
    )


def watch_long_run(server: Any, folder: Path) -> None:
    query = {"run": folder.name}
    server.wait_seconds = 300  # the first view reads a million lines
    parts = seen(server, "/runs/watch", **query)
    added = itertools.count(MANY_ROWS + 1)

    def append_and_poll() -> None:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": next(added), "loss": 0.5, "grad_norm": 1.0, "learning_rate": 1e-5}) + "\n")
        assert "live-curves" in server.get("/runs/watch/news", **query, **parts).text

    spent = cpu_seconds(server, append_and_poll, 100)
    print(f"{f'a new line after {MANY_ROWS:,}':32}{spent * 1000:8.2f} ms of CPU, goal below 20")


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
            name, _, value = server.cookie["Cookie"].partition("=")
            page.context.add_cookies([{"name": name, "value": value, "url": server.origin}])
            for name, path in VIEWS.items():
                painted, loaded = zip(*(visit(page, server, path) for _ in range(VISITS)), strict=True)
                print(f"{name:32}{statistics.median(painted):8.2f} s painted{statistics.median(loaded):8.2f} s loaded")
            firsts = [visit(page, server, RUN.format(number))[1] for number in range(FIRST_VIEWS)]
            later = [visit(page, server, RUN.format(0))[1] for _ in range(VISITS)]
            of_rows = f"a run of {ROWS:,} steps"
            print(f"{of_rows:32}{statistics.median(firsts):8.2f} s at first{statistics.median(later):8.2f} s later")
            checks = [check_seconds(page, server) for _ in range(VISITS)]
            print(f"{'a mistake beside its field':32}{statistics.median(checks):8.2f} s")


def watch() -> None:
    """Measure what pages that stay open cost."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "work"
        for number in range(RUNS):
            write_ended(folder / "runs" / f"run-{number}")
        write_run(folder / "long", MANY_ROWS)
        with page_server(folder / "runs") as server:
            watch_list(server)
        with page_server(folder) as server:
            watch_long_run(server, folder / "long")


if __name__ == "__main__":
    main()
    watch()
