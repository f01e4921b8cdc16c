"""Validation prompts: `validation_prompt` and the lines of `validation_prompt_file`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from simpletuner.errors import Mistake, SettingsError
from simpletuner.settings.declared.errors import did_you_mean
from simpletuner.settings.declared.knob import Section
from simpletuner.settings.declared.sections import Validation
from simpletuner.settings.files.config_files import NotParsed, explain_parsing, json_mistake
from simpletuner.settings.files.formats import read_text
from simpletuner.settings.values.shape import normalize_shapes
from simpletuner.system.files.paths import shown_path

if TYPE_CHECKING:
    from simpletuner.data.config.dataset_file import DatasetEntry

PAGE = "docs/validation.md lists what a line may have"


class ValidationPrompt(Section):
    """A line of the file, whose keys are named like the settings that they replace for this prompt."""

    prompt: str
    negative_prompt: str | None = None
    seed: int | None = Field(default=None, ge=0)
    resolution: Annotated[str, AfterValidator(normalize_shapes)] = ""
    guidance: float | None = Field(default=None, ge=0)
    num_inference_steps: int | None = Field(default=None, ge=1)
    images: list[Path] = []
    """References, in place of `validation_images`."""

    @model_validator(mode="after")
    def check_images(self) -> ValidationPrompt:
        if missing := next((path for path in self.images if not path.is_file()), None):
            raise PydanticCustomError("images", "{path} is no file", {"path": str(missing)})
        return self


def load_prompts(validation: Validation, read: Callable[[Path], str] = read_text) -> list[ValidationPrompt]:
    """All prompts, the file's last. Raises SettingsError with every mistake in the file."""
    shared = validation.validation_images
    if missing := next((path for path in shared if not path.is_file()), None):
        raise SettingsError(f"validation_images = {missing}: there is no such file", "name images, not folders")
    prompts = [ValidationPrompt(prompt=text) for text in validation.validation_prompt]
    if (path := validation.validation_prompt_file) is not None:
        with explain_parsing(path, "check validation_prompt_file", PAGE):
            prompts += parse_prompts(path, read(path))
    return [each if each.images else each.model_copy(update={"images": shared}) for each in prompts]


def parse_prompts(path: Path, text: str) -> list[ValidationPrompt]:
    """Read JSON lines. Raises NotParsed for a line that is no JSON, and SettingsError for other mistakes."""
    from simpletuner.data.config.dataset_parsing import mistake_of

    prompts: list[ValidationPrompt] = []
    mistakes: list[Mistake] = []
    for entry in entries_of(path, text):
        unknown = entry.as_dict.keys() - ValidationPrompt.model_fields.keys()
        mistakes += [
            entry.mistake(key, "unknown key", did_you_mean(key, ValidationPrompt.model_fields), show_value=False)
            for key in sorted(unknown)
        ]
        try:
            known = {key: value for key, value in entry.as_dict.items() if key not in unknown}
            prompts.append(ValidationPrompt(**known))
        except ValidationError as error:
            mistakes += [mistake_of(item, ValidationPrompt.model_fields, entry) for item in error.errors()]
    if mistakes:
        raise SettingsError(mistakes=mistakes, hint=PAGE)
    if not prompts:
        raise SettingsError(f"{shown_path(path)} holds no prompts", PAGE)
    return prompts


def entries_of(path: Path, text: str) -> Iterator[DatasetEntry]:
    """Yield the object of each line; empty lines are left out."""
    from simpletuner.data.config.dataset_file import DatasetEntry

    # Not splitlines(), which also breaks at U+2028, as JSON allows it within a text.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            found = json_mistake(error)
            raise NotParsed(number, found.reason, f"one JSON object per line: {found.hint}") from None
        if not isinstance(values, dict):
            raise NotParsed(number, "it is no object", 'write {"prompt": "..."} on each line')
        yield DatasetEntry.of(values, path, number)
