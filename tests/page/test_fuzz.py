"""A sample of the campaign of random requests, `tests/campaigns/page.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from page_server import PageServer

sys.path.insert(0, str(Path(__file__).parents[1] / "campaigns"))

from page import fuzz, prepare


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    prepare(folder)
    return folder


def test_random_requests_are_answered_in_sentences_and_touch_nothing_outside(server: PageServer):
    codes = fuzz(server, seed=7, count=250)
    assert codes[200] > 50 and codes[400] > 50 and codes[401] and codes[403]
