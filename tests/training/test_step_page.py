from __future__ import annotations

import inspect
import re
from pathlib import Path

from simpletuner.training import trainer

PAGE = Path(__file__).parents[2] / "docs" / "step.md"
CODE = re.compile(r"`([^`\n]+)`")


def test_every_line_that_the_page_quotes_is_in_the_trainer_in_that_order():
    source = inspect.getsource(trainer.Trainer) + inspect.getsource(trainer.seed_dropout)
    step = inspect.getsource(trainer.Trainer.next_batch) + inspect.getsource(trainer.Trainer.train_step)
    numbered = [quoted[1] for line in PAGE.read_text().splitlines() if (quoted := re.match(r"\d+\. `([^`]+)`", line))]
    assert len(numbered) == 10 and all(line in step for line in numbered), numbered
    assert sorted(numbered, key=step.index) == numbered
    calls = [code for code in CODE.findall(PAGE.read_text()) if code.startswith("self.")]
    assert len(calls) == 4 and all(code in source for code in calls), calls


def test_every_file_that_the_page_names_exists_and_the_page_stays_short():
    links = re.findall(r"\]\((\.\./[^)]+)\)", PAGE.read_text())
    assert links and all((PAGE.parent / link).exists() for link in links)
    assert len(PAGE.read_text().splitlines()) <= 46
