"""How long the page takes to show a dataset of 100,000 images: the check of headers, the first paint, filters, memory.

`python benchmarks/page_datasets.py [--count 100000] [--decode]`. Images are hard links to 200 JPEGs, of nine sizes,
each with a caption of its own; medians of 5 requests. `--decode` looks for duplicates, too: 99,800 images are some.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from PIL import Image, ImageDraw

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from browser import chromium  # pyright: ignore[reportMissingImports]
from page_server import page_server  # pyright: ignore[reportMissingImports]

SIDES_PX = ((512, 512), (768, 512), (512, 768), (640, 480), (480, 640), (700, 500), (900, 506), (400, 400), (1024, 256))
ORIGINALS, PER_FOLDER, VISITS = 200, 1000, 5
WORDS = "a photograph of the old harbour in the evening light with boats and a few people walking along the quay"
CONFIG = 'model_family = "sdxl"\nmodel_flavour = "tiny"\ninstance_data_dir = "photos"\nresolution = 512\n'
PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
VIEWS = {
    "first page": {},
    "page 800": {"page": "800"},
    "a word in a name or caption": {"q": "number 4711"},
    "a bucket": {"bucket": "512x512"},
    "a finding": {"finding": "0"},
    "longest caption first": {"order": "longest"},
    "most cropped first": {"order": "cropped"},
}


def write_images(folder: Path, count: int) -> None:
    originals = folder / "originals"
    originals.mkdir()
    for number in range(ORIGINALS):
        size = SIDES_PX[number % len(SIDES_PX)]
        image = Image.new("RGB", size, (number, 255 - number, 128))
        ImageDraw.Draw(image).ellipse((number, number, number + 150, number + 90), "white")
        image.save(originals / f"{number}.jpg")
    for number in range(count):
        place = folder / "photos" / f"{number // PER_FOLDER:03d}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:06d}.jpg").hardlink_to(originals / f"{number % ORIGINALS}.jpg")
        (place / f"{number:06d}.txt").write_text(f"{WORDS}, number {number}\n")


def wait_for_check(server: Any, decode: str) -> float:
    begin = time.perf_counter()
    shown = server.post("/datasets/check", {"file": "run.toml", "decode": decode, "shows": "on"})
    while "/datasets/progress" in shown.text:
        time.sleep(0.1)
        shown = server.get("/datasets/progress", file="run.toml", shows="on")
    assert "The check is done" in shown.text, shown.text
    return time.perf_counter() - begin


def request_seconds(server: Any, query: dict[str, str]) -> float:
    times = []
    for _ in range(VISITS):
        begin = time.perf_counter()
        shown = server.get("/datasets", file="run.toml", **query)
        times.append(time.perf_counter() - begin)
        assert shown.code == 200, shown.text
    return statistics.median(times)


def paint_seconds(page: Any, server: Any) -> tuple[float, float]:
    """Return seconds until the first paint, and until all pictures of the first screen are there."""
    page.goto("about:blank")
    page.goto(f"{server.origin}/datasets?file=run.toml")
    painted = page.evaluate(PAINTED) / 1000
    page.evaluate("document.getElementById('images').scrollIntoView()")
    begin = time.perf_counter()
    page.wait_for_load_state("networkidle")
    return painted, time.perf_counter() - begin


def memory(server: Any) -> str:
    found = psutil.Process(server.process.pid).memory_full_info()
    return f"{found.rss >> 20} MiB, of which {found.uss >> 20} its own"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--count", type=int, default=100_000)
    options.add_argument("--decode", action="store_true")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "work"
        folder.mkdir()
        write_images(folder, chosen.count)
        (folder / "run.toml").write_text(CONFIG)
        with page_server(folder) as server, chromium() as browser:
            server.wait_seconds = 600
            assert server.get("/runs").code == 200
            print(f"{'memory before':32}{memory(server)}")
            print(f"{'headers and captions':32}{wait_for_check(server, ''):8.1f} s")
            print(f"{'again':32}{wait_for_check(server, ''):8.1f} s")
            context = browser.new_context(viewport={"width": 1280, "height": 900})
            name, _, value = server.cookie["Cookie"].partition("=")
            context.add_cookies([{"name": name, "value": value, "url": server.origin}])
            page = context.new_page()
            paints = [paint_seconds(page, server) for _ in range(VISITS)]
            print(f"{'first paint':32}{statistics.median(first for first, _ in paints):8.2f} s")
            print(f"{'pictures, the first visit':32}{paints[0][1]:8.2f} s")
            for title, query in VIEWS.items():
                print(f"{title:32}{request_seconds(server, query):8.3f} s")
            print(f"{'memory':32}{memory(server)}")
            if chosen.decode:
                print(f"{'duplicates and damage':32}{wait_for_check(server, 'on'):8.1f} s")
                print(f"{'a finding of duplicates':32}{request_seconds(server, {'finding': '0'}):8.3f} s")
                print(f"{'memory':32}{memory(server)}")


if __name__ == "__main__":
    main()
