"""The meaning of a dataset's caption files: lines are alternatives, or each file is one caption."""

# pyarrow comes without types.
# pyright: basic, reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.data.scan.captions import caption_file
from simpletuner.system.numbers import count_noun


@dataclass(frozen=True)
class CaptionLines:
    """Number of caption files of several lines in a dataset, and of those that look like one text."""

    files: int
    texts: int
    forms: tuple[str, ...] = ()
    example: str = ""

    @property
    def are_one(self) -> bool:
        return 2 * self.texts >= self.files > 0

    def remark(self, dataset: ImageDataset) -> str:
        """Return a sentence about what was decided; empty where all files look like alternatives."""
        if not self.texts:
            return ""
        counted = f"{self.texts:,} of {count_noun(self.files, 'caption file')} with several lines"
        found = (
            f"dataset `{dataset.id}`: {counted} look like one text ({', '.join(self.forms)}; such as {self.example})"
        )
        if self.are_one:
            return f"{found}: each file is one caption; caption_lines=alternatives makes one of each line"
        return f"{found}, the others like alternatives: each line is a caption; caption_lines=one reads files whole"


def find_lines(dataset: ImageDataset, table: pa.Table) -> CaptionLines:
    """Examine all caption files of a scan (SCANNED) for `caption_lines=auto`, so that all ranks agree."""
    if dataset.caption_strategy != "textfile" or dataset.caption_lines != "auto":
        return CaptionLines(0, 0)
    several, texts = of_several_lines(table.select(["captions"])), one_text_files(table)
    example = caption_file(texts["name"][0].as_py()) if len(texts) else ""
    return CaptionLines(len(several), len(texts), tuple(sorted(pc.unique(texts["caption_form"]).to_pylist())), example)


def of_several_lines(table: pa.Table) -> pa.Table:
    return table.filter(pc.greater(pc.list_value_length(table["captions"]), 1))


def one_text_files(table: pa.Table) -> pa.Table:
    """Return the names of images whose caption file looks like one text, and its form."""
    several = of_several_lines(table.select(["name", "captions", "caption_form"]))
    return several.filter(pc.not_equal(several["caption_form"], "")).drop_columns("captions")
