"""Schema of a recipe's TOML file. A number has a source that was read, or says that it is not proven."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from simpletuner.settings.declared.sections import setting_fields

UNPROVEN = "not proven here"
COMPUTED = "computed here"
YOURS = "yours"
# Words in place of a source: not shown here by anybody, counted by `simpletuner plan`, or dependent on the
# images alone.
OWN_SOURCES = (UNPROVEN, COMPUTED, YOURS)
# Settings that decide every run's result: by a default, their numbers would have no source.
REQUIRED = (
    "model_type", "resolution", "caption_dropout_probability", "train_batch_size", "gradient_accumulation_steps",
    "learning_rate", "lr_scheduler", "lr_warmup_steps", "max_train_steps", "gradient_checkpointing",
    "validation_guidance", "validation_prompt",
)  # fmt: skip
# Settings that a recipe cannot have: they are fields of it, or the user's.
PLACES = ("model_family", "model_flavour", "instance_data_dir", "data_backend_config", "num_processes")

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class RecipePart(BaseModel):
    """A table of the file; unknown names are mistakes."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class RecipeSource(RecipePart):
    """A text that numbers are from."""

    kind: Literal["paper", "model card", "official script", "example script", "library code", "guide"]
    """`official script`: of those who made the model; `example script`: of a library or trainer."""
    title: Text
    url: Annotated[str, StringConstraints(pattern=r"^https://\S+$")]
    commit: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{40})?$")] = ""
    """The one whose file was read."""


class Chosen(RecipePart):
    """A value with its source, and what is written there, or the reason for it."""

    value: Any
    source: Text
    says: str = ""
    because: str = ""

    @model_validator(mode="after")
    def has_grounds(self) -> Chosen:
        if self.source in OWN_SOURCES and not (self.because and not self.says):
            raise ValueError(f"a value that is {self.source} needs `because`, and has no `says`")
        if self.source not in OWN_SOURCES and not self.says:
            raise ValueError("a value with a source needs `says`: the words of the source")
        return self

    def grounds(self) -> str:
        """Return source, words of the source and reason in one line."""
        return ": ".join(filter(None, (self.source, "; ".join(filter(None, (self.says, self.because))))))


class Recipe(RecipePart):
    """A way to train one model for one purpose."""

    name: Text
    """The name of the file, without its suffix."""
    version: Annotated[int, Field(ge=1)]
    date: datetime.date
    """Day on which a number was last changed or looked up again."""
    title: Text
    purpose: Literal["style", "subject", "full", "edit", "video"]
    model_family: Text
    model_flavour: Text
    data: Text
    """Its images or clips: number, subject and captions."""
    expect: Text
    """Signs that it works, and when to stop."""
    memory_gib: float | None = None
    """Memory of one GPU, as `simpletuner plan` counts it with these settings."""
    sources: Mapping[str, RecipeSource] = {}
    settings: Mapping[str, Chosen]
    datasets: list[dict[str, Any]] = []
    """The dataset file that it needs, where a folder of images does not do."""
    dataset_values: Mapping[str, Chosen] = {}
    """Numbers in `datasets`, by key."""

    @field_validator("settings")
    @classmethod
    def knows_settings(cls, settings: Mapping[str, Chosen]) -> Mapping[str, Chosen]:
        if unknown := sorted({*settings} - {*setting_fields()} | {*settings} & {*PLACES}):
            raise ValueError(f"{', '.join(unknown)} cannot be set by a recipe")
        if missing := [name for name in REQUIRED if name not in settings]:
            raise ValueError(f"{', '.join(missing)} is missing")
        return settings

    @model_validator(mode="after")
    def names_its_sources(self) -> Recipe:
        used = {each.source for each in (*self.settings.values(), *self.dataset_values.values())} - {*OWN_SOURCES}
        if used != {*self.sources}:
            raise ValueError(
                f"[sources] and those that values name differ: {', '.join(sorted(used ^ {*self.sources}))}"
            )
        numbers = dict(numbers_in(self.datasets))
        if numbers != {key: each.value for key, each in self.dataset_values.items()}:
            raise ValueError("[dataset_values] must have each number of [[datasets]], by its key")
        return self

    @property
    def label(self) -> str:
        return f"{self.name}, version {self.version} of {self.date}"

    def datasets_text(self) -> str:
        lines = ",\n ".join(json.dumps(each) for each in self.datasets)
        return f"[{lines}]\n"


def numbers_in(value: object, key: str = "") -> Iterator[tuple[str, int | float]]:
    """Yield each number in tables and lists, with the key under which it is."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from numbers_in(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers_in(inner, key)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value
