"""CPU seconds of writing report.html: the first page of a start, and one that is renewed after 100 more steps."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
from interleaved import print_table

from simpletuner.report import Report
from simpletuner.runs.facts import RunFacts
from simpletuner.runs.metrics import METRICS
from simpletuner.runs.report import HtmlReport

STEPS, MORE, ROUNDS = (1_000, 10_000, 100_000), 100, 5


def write_rows(path: Path, steps: range) -> None:
    """Append rows with all that a run on a GPU writes."""
    losses = np.random.default_rng(steps.start).random(len(steps)).tolist()
    with path.open("a", encoding="utf-8") as file:
        for step, loss in zip(steps, losses, strict=True):
            row = {"step": step, "epoch": 1, "learning_rate": 1e-5, "data_seconds": loss / 100, "seconds": 1 + loss}
            row |= {"loss": loss, "grad_norm": 1 + loss, "samples_per_second": 4 / (1 + loss), "mfu": loss}
            file.write(json.dumps(row | {"tflops_per_second": 300 * loss}) + "\n")


def seconds_of(page: HtmlReport) -> float:
    began = time.process_time()
    page.write("running")
    return time.process_time() - began


def measure(steps: int) -> list[str]:
    with TemporaryDirectory() as folder:
        metrics, last = Path(folder) / METRICS, steps
        facts = RunFacts("run", [], [], [], 0, [], "simpletuner train")
        write_rows(metrics, range(1, steps + 1))
        page = HtmlReport(Path(folder), facts, 10 * steps, Report())
        first, renewed = seconds_of(page), []
        for _ in range(ROUNDS):
            write_rows(metrics, range(last + 1, last + MORE + 1))
            last += MORE
            renewed.append(seconds_of(page))
        page.worker.close()
    return [f"{steps:,}", f"{first:.3f}", f"{median(renewed):.3f}"]


if __name__ == "__main__":
    with TemporaryDirectory() as nothing:  # imports, and the compiled template
        seconds_of(HtmlReport(Path(nothing), RunFacts("run", [], [], [], 0, [], ""), 1, Report()))
    print_table("report.html, CPU seconds", ["steps", "first page", "renewed"], [measure(steps) for steps in STEPS])
