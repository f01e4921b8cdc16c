"""Caption rules of a dataset: removal, replacement and shuffling of tags."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from simpletuner.settings.declared.errors import allowed
from simpletuner.settings.declared.knob import Section
from simpletuner.settings.declared.sections import DatasetSettings
from simpletuner.settings.files.formats import MAX_FILE_BYTES
from simpletuner.settings.values.spelling import normalize_name, normalize_value
from simpletuner.system.files.paths import expand_path
from simpletuner.system.files.regular_files import read_file

# Not all at which str.splitlines() ends a line: U+2028, U+2029, NEL, VT, FF, FS, GS and RS stand within
# captions that were copied from documents and web pages.
LINE_ENDS = re.compile(r"\r\n|\n|\r")
# Characters that make a rule a regular expression. A dot alone does not: it ends sentences.
REGULAR = re.compile(r"[\\^$*+?{}\[\]()|]")
SUBSTITUTION = re.compile(r"s/((?:\\.|[^/\\])+)/((?:\\.|[^/\\])*)(?:/([gi]*))?")


class CaptionShuffle(Section):
    """Shuffle the parts of a caption into `count` more orders; the first `position_start` parts stay."""

    enable: bool = False
    count: int = Field(1, ge=1, le=1000)
    seed: int = Field(0, ge=0)
    split_on: Literal["comma", "space", "period"] = "comma"
    position_start: int = Field(0, ge=0)
    include_original: bool = True


# Letters that show nothing, as within brackets of a regular expression of Python or Arrow: spaces,
# control characters, and Unicode's default ignorable ones, such as the zero-width space of web pages.
BLANK = (
    "\x00-\x20\x7f-\xa0\xad\u034f\u061c\u115f\u1160\u1680\u17b4\u17b5\u180b-\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f"
    "\u2800\u3000\u3164\ufe00-\ufe0f\ufeff\uffa0\U000e0000-\U000e0fff"
)
BLANK_TEXT = re.compile(f"^[{BLANK}]*$")


def is_blank(text: str) -> bool:
    return BLANK_TEXT.match(text) is not None


def split_lines(text: str) -> list[str]:
    return LINE_ENDS.split(text)


def parse_shuffle(value: object) -> Any:
    """Raises ValueError for what is not a table of these keys."""
    if not isinstance(value, Mapping):
        raise ValueError('use a JSON object such as {"enable": true, "count": 3}')
    fields, given = CaptionShuffle.model_fields, {normalize_name(key): own for key, own in value.items()}
    if unknown := given.keys() - fields:
        raise ValueError(f"unknown key `{min(unknown)}`; use {', '.join(fields)}")
    try:
        return CaptionShuffle(**{key: normalize_value(key, fields[key], own) for key, own in given.items()})
    except ValidationError as error:
        key = str(error.errors()[0]["loc"][0])
        raise ValueError(f"{key}: use {allowed(fields[key])}") from None


def read_rules(value: object) -> object:
    """Return the rules of a list, or of a file: JSON, or text with one rule per line.

    Raises ValueError for a file that cannot be read, and for a bad rule, with its place.
    """
    if isinstance(value, list | tuple):
        places = {f"rule {number}": rule for number, rule in enumerate(value, start=1)}
    else:
        path = Path(expand_path(str(value)))
        places = {f"{path}:{number}": rule for number, rule in enumerate(lines_of(path), start=1)}
    for place, rule in places.items():
        try:
            compile_rule(rule)
        except (re.error, IndexError) as error:
            raise ValueError(f"{place} is not a regular expression: {error}") from None
        except ValueError as error:
            raise ValueError(f"{place} {error}") from None
    return tuple(rule for rule in places.values() if rule.strip())


def lines_of(path: Path) -> list[Any]:
    try:
        text = read_file(path, MAX_FILE_BYTES).decode("utf-8-sig")
        rules = json.loads(text) if path.suffix == ".json" else split_lines(text)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not JSON; write one rule per line into a text file") from None
    if not isinstance(rules, list):
        raise ValueError(f"{path} must hold a list of rules")
    return rules


def compile_rule(rule: object) -> Callable[[str], str]:
    """Compile a rule to a function of a caption. Raises re.error or ValueError for an invalid one."""
    if not isinstance(rule, str):
        raise ValueError("must be a text")
    if rule.startswith("s/"):
        found = SUBSTITUTION.fullmatch(rule.strip())
        if found is None:
            raise ValueError("must be s/expression/replacement/, with \\/ for a slash within")
        pattern = re.compile(found[1].replace("\\/", "/"), re.IGNORECASE if "i" in (found[3] or "") else 0)
        replacement = found[2].replace("\\/", "/")
        pattern.sub(replacement, "")  # raises for a replacement that names a group which there is not
        return lambda caption: pattern.sub(replacement, caption)
    # Plain text is removed as whole words: `art` must not leave `py` of `party`.
    pattern = re.compile(rule if REGULAR.search(rule) else rf"(?<!\w){re.escape(rule.strip())}(?!\w)")
    return lambda caption: pattern.sub("", caption)


class CaptionKeys(DatasetSettings):
    only_instance_prompt: bool = False
    disable_multiline_split: bool | None = None
    """The original's name of `caption_lines`: one if it is true, alternatives if it is false."""
    caption_filter_list: Annotated[tuple[str, ...], BeforeValidator(read_rules)] = ()
    caption_shuffle: Annotated[CaptionShuffle | None, BeforeValidator(parse_shuffle)] = None

    @model_validator(mode="before")
    @classmethod
    def use_only_instance_prompt(cls, values: Any) -> object:
        only = isinstance(values, Mapping) and values.get("only_instance_prompt") is True
        return {**values, "caption_strategy": "instanceprompt"} if only else values

    @model_validator(mode="before")
    @classmethod
    def read_disable_multiline_split(cls, values: Any) -> object:
        is_disabled = values.get("disable_multiline_split") if isinstance(values, Mapping) else None
        if not isinstance(is_disabled, bool):
            return values
        lines = "one" if is_disabled else "alternatives"
        return {**values, "caption_lines": lines, "disable_multiline_split": None}

    @model_validator(mode="after")
    def check_captions(self) -> CaptionKeys:
        if self.caption_strategy == "instanceprompt" and not self.instance_prompt:
            message = "caption_strategy instanceprompt needs instance_prompt"
            if self.only_instance_prompt:
                message = "only_instance_prompt needs instance_prompt"
            raise PydanticCustomError("instance_prompt", message)
        return self
