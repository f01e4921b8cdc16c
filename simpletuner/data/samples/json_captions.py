"""Captions of models that were trained on JSON alone: to them, a damaged one is an unknown form."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from simpletuner.data.samples.discovery import format_names
from simpletuner.data.samples.samples import DatasetSamples
from simpletuner.data.scan.captions import caption_file
from simpletuner.errors import DataError
from simpletuner.system.numbers import count_noun


@dataclass
class JsonCaptions:
    """Images of one dataset whose captions are not JSON."""

    dataset: str
    damaged: dict[str, str] = field(default_factory=dict)
    """Line and column of a mistake, by image."""
    plain: dict[str, str] = field(default_factory=dict)
    """Beginning of a caption that is no object in JSON, by image."""
    files: list[str] = field(default_factory=list)
    """Caption files, or else images, of those that are damaged."""

    @classmethod
    def of(cls, samples: DatasetSamples) -> JsonCaptions:
        found, in_files = cls(samples.dataset.id), samples.dataset.caption_strategy == "textfile"
        for index in range(len(samples)):
            sample = samples[index]
            for caption in sample.captions:
                if not caption.startswith("{"):
                    found.plain.setdefault(sample.name, repr(caption[:40]))
                elif (why := json_error(caption)) and sample.name not in found.damaged:
                    found.damaged[sample.name] = why
                    found.files.append(caption_file(sample.name) if in_files else sample.name)
        return found

    def error(self) -> DataError | None:
        """Return what ends a run; None if no caption is damaged."""
        if not self.damaged:
            return None
        named = format_names([": ".join(each) for each in zip(self.files, self.damaged.values(), strict=True)])
        return DataError(
            f"dataset `{self.dataset}`: {count_noun(len(self.damaged), 'caption')} in damaged JSON:{named}",
            "correct them at these places; the model was trained on captions in JSON",
        )

    def remark(self) -> str:
        """Return a sentence about captions that are plain text; empty if all are JSON."""
        if not self.plain:
            return ""
        name, text = next(iter(self.plain.items()))
        counted = count_noun(len(self.plain), "image")
        return f"dataset `{self.dataset}`: {counted} with a caption of plain text ({name} {text}); {TRAINED_ON}"


TRAINED_ON = "the model was trained on captions in JSON alone (docs/families.md)"


def json_error(text: str) -> str:
    """Return where a text is no JSON, counted from 1, and why; empty if it is."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return f"line {error.lineno}, column {error.colno}: {error.msg}"
    except RecursionError:
        return "line 1, column 1: too many brackets within one another"
    return ""
