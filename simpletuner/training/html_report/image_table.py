"""Validation images as a table: prompts across and steps down, or runs across and prompts down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simpletuner.training.html_report.thumbnails import GalleryImage, PromptRounds

Cell = Sequence[tuple[str, GalleryImage]]
"""Images with their labels."""


@dataclass(frozen=True)
class TableHead:
    """The head of a row or of a column."""

    title: str
    note: str = ""


@dataclass(frozen=True)
class ImageTable:
    """Rows of cells, with what is above and before them."""

    corner: str
    columns: list[TableHead]
    rows: list[tuple[TableHead, list[Cell]]]

    @property
    def has_pairs(self) -> bool:
        """True where a cell has several images, such as those of the trained weights and of the EMA."""
        return any(len(cell) > 1 for _, cells in self.rows for cell in cells)


def prompt_head(prompt: PromptRounds) -> TableHead:
    negative = f" · negative: {prompt.negative_prompt}" if prompt.negative_prompt else ""
    return TableHead(prompt.prompt or "(empty prompt)", f"{prompt.note}{negative}")


def rounds_table(prompts: Sequence[PromptRounds]) -> ImageTable | None:
    """Return the rounds of a run, those of each prompt in a column; None where it has no images."""
    rows: list[tuple[TableHead, list[Cell]]] = []
    if any(prompt.before for prompt in prompts):
        base: list[Cell] = [[("base", prompt.before)] if prompt.before else [] for prompt in prompts]
        rows.append((TableHead("before"), base))
    by_step = [dict(prompt.rounds) for prompt in prompts]
    for step in sorted({step for rounds in by_step for step in rounds}):
        cells: list[Cell] = [[(each.info.weights, each) for each in rounds.get(step, ())] for rounds in by_step]
        rows.append((TableHead(f"step {step:,}"), cells))
    return ImageTable("prompt", [prompt_head(prompt) for prompt in prompts], rows) if rows else None


def runs_table(prompts: Sequence[tuple[PromptRounds, Mapping[str, tuple[int, GalleryImage]]]]) -> ImageTable | None:
    """Return images of the same prompts, those of each run in a column; None where there are none."""
    names = list(dict.fromkeys(name for _, images in prompts for name in images))
    rows: list[tuple[TableHead, list[Cell]]] = []
    for prompt, images in prompts:
        shown = [images.get(name) for name in names]
        rows.append((prompt_head(prompt), [[(f"step {each[0]:,}", each[1])] if each else [] for each in shown]))
    return ImageTable("prompt", [TableHead(name) for name in names], rows) if rows else None
