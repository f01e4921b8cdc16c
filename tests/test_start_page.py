"""docs/start.md quotes the calls of a start as they stand in the source, in their order."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from simpletuner import worker
from simpletuner.commands.train import train, train_rank

PAGE = Path(__file__).parents[1] / "docs" / "start.md"


def test_the_calls_of_a_start_are_in_the_source_in_that_order():
    stages = [train, train_rank, worker.run_rank, worker.run, worker.resume, worker.train]
    source = "".join(map(inspect.getsource, stages))
    quoted = re.findall(r"^\d+\. `([^`]+)`", PAGE.read_text(), re.MULTILINE)
    assert len(quoted) == 15
    assert [code for code in quoted if code not in source] == []
    assert sorted(quoted, key=source.index) == quoted


def test_every_place_that_the_page_names_exists_and_it_stays_short():
    links = re.findall(r"\]\(([^)#]+)\)", PAGE.read_text())
    assert links and all((PAGE.parent / link).exists() for link in links)
    assert len(PAGE.read_text().splitlines()) <= 45
