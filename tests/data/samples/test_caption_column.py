"""The captions of a run as a column are those that its samples have."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from scanning import drawn

from simpletuner.data.config.caption_rules import CaptionShuffle
from simpletuner.data.samples import dataset_summary
from simpletuner.data.samples.dataset_summary import different_captions, texts_among_captions
from simpletuner.data.samples.samples import DatasetSamples
from simpletuner.data.scan.scan import SCANNED

LINES = [["b, a, c", "two"], ["two"], [], ["é\uffff", "é\U00010000"], ["a red  cat"], ["b, a, c"], ["", "z"], ["last"]]
"""By UTF-16, U+10000 would come before U+FFFF."""


def captioned(lines: list[list[str]], **keys: object) -> DatasetSamples:
    samples = drawn(*[(64, 64)] * len(lines), **keys)  # pyright: ignore[reportArgumentType]
    column = pa.chunked_array([pa.array(each, SCANNED.field("captions").type) for each in (lines[:3], lines[3:])])
    samples.table = samples.table.set_column(2, "captions", column)
    return DatasetSamples(samples.dataset, samples.storage, samples.table, samples.rows, samples.sizes, 0)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"caption_filter_list": ("red",)},
        {"caption_shuffle": CaptionShuffle(enable=True, count=2)},
        {"caption_lines": "one"},
        {"caption_lines": "first"},
        {"prepend_instance_prompt": True, "instance_prompt": "my"},
    ],
)
def test_all_captions_are_there_once_and_sorted(keys, monkeypatch):
    monkeypatch.setattr(dataset_summary, "BLOCK", 3)
    chosen = np.array([True, True, False, True, True, True, True, False])
    parts = [captioned(LINES, **keys).where(chosen), captioned([["two"], ["other"]])]
    expected = sorted({"", "prompt", *(text for part in parts for each in part for text in each.captions)})
    column = different_captions(parts, ["prompt", "", "two"])
    assert list(column) == [column[position] for position in range(len(column))] == expected
    assert "last" not in expected and len(column) == len(expected)
    of_samples = {text for part in parts for each in part for text in each.captions}
    assert texts_among_captions(parts, [*expected, "new"]) == of_samples


def test_captions_that_no_file_holds_are_there(monkeypatch):
    (of_names,) = [captioned(LINES)]
    object.__setattr__(of_names.dataset, "caption_strategy", "filename")
    one = captioned(LINES, instance_prompt="the phrase")
    object.__setattr__(one.dataset, "caption_strategy", "instanceprompt")
    expected = sorted({*(text for each in of_names for text in each.captions), "the phrase"})
    assert list(different_captions([of_names, one], [])) == expected and len(expected) == len(LINES) + 1
