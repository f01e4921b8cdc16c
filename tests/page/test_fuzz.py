"""A sample of the campaign of random requests, `tests/campaigns/page.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from page_server import PageServer

sys.path.insert(0, str(Path(__file__).parents[1] / "campaigns"))

from page import OWN_FILES, fuzz, poll_together, prepare


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    prepare(folder)
    return folder


def test_random_requests_are_answered_in_sentences_and_touch_nothing_outside(server: PageServer):
    codes = fuzz(server, seed=7, count=300)
    assert codes[200] > 50 and codes[400] > 50 and codes[401] and codes[403]


def test_no_file_of_a_run_stops_its_page_or_the_list(server: PageServer, folder: Path):
    """FIFOs in the place of each file, a bomb of 400 million pixels, EPS, and odd metadata."""
    for run in sorted(path.name for path in (folder / "odd").iterdir()):
        shown = server.get("/runs/watch", run=f"odd/{run}")
        is_run = run != f"fifo-{OWN_FILES.index('.lock')}"
        assert shown.code == (200 if is_run else 400), (run, shown.text)
        assert server.get("/runs/watch/news", run=f"odd/{run}").code == (200 if is_run else 286)
    shown = server.get("/runs/watch", run="odd/images").text
    assert "trained-00.png" in shown and "trained-02.png" not in shown and "trained-03.png" not in shown
    for number in range(9):
        image = {"run": "odd/images", "step": "5", "name": f"trained-{number:02d}.png", "edge": "160"}
        assert server.get("/runs/image", **image).code == (400 if number in (1, 2, 3) else 200), number
    assert "fifo-0" in server.get("/runs/rows").text
    (folder / "start.toml").write_text(
        f"output_dir = 'odd/fifo-{OWN_FILES.index('console.start.txt')}'\n"
        "model_family = 'sdxl'\nmodel_flavour = 'tiny'\ninstance_data_dir = 'config'\n"
    )
    refused = server.post("/runs/start", {"file": "start.toml"})
    assert refused.code == 400 and "console.start.txt" in refused.text, refused.text
    assert len(poll_together(server, clients=20, polls=2)) == 40
