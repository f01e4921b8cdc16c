"""Mistake in a value: its place, allowed values, and the nearest name; never a secret."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from simpletuner.credentials import MASK, mask_credentials
from simpletuner.errors import BrokenRule, Mistake, SettingsError
from simpletuner.settings.declared.knob import bounds_of, kind_of
from simpletuner.settings.declared.sections import Settings, setting_fields
from simpletuner.settings.files.raw_values import is_reference
from simpletuner.settings.values.spelling import choices_of, normalize_name

if TYPE_CHECKING:
    from simpletuner.settings.files.raw_values import Origin

# Not `tokenizer`, nor sd-scripts' class_tokens, keep_tokens, max_token_length and the like.
# Names of what is never shown, among those that are no settings.
SECRET = re.compile(
    r"(?<!class_)(?<!keep_)(?<!no_)token(?!izer|_length|_warmup|_dropout)"
    r"|secret|(?:access|api|private)[_-]?key|passw|credential|webhook",
    re.IGNORECASE,
)


IN_TEXT = re.compile(
    rf"((?:--[\w-]*(?:{SECRET.pattern})[\w-]*[ =]|[\w-]*(?:{SECRET.pattern})[\w-]*=)\s*)[^\s'\"]+", re.IGNORECASE
)
"""Secrets among the arguments of a command that stand in one text."""


def is_secret(name: object) -> bool:
    """True for settings of a secret type, and for other names that read like a secret (token, password)."""
    field = setting_fields().get(str(name))
    return kind_of(field.annotation) is SecretStr if field else SECRET.search(str(name)) is not None


def without_secrets(value: object) -> object:
    """Return JSON with dots instead of secrets, at any depth."""
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    if isinstance(value, dict):
        return {name: MASK if is_secret(name) else without_secrets(item) for name, item in value.items()}
    return value


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line as it was typed, with dots instead of secrets."""
    shown: list[str] = []
    is_value = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        hides = name.startswith("--") and is_secret(normalize_name(name.lstrip("-")))
        if is_value and not name.startswith("--"):
            argument = argument if is_reference(argument) else MASK
        elif hides and equals and not is_reference(value):
            argument = f"{name}={MASK}"
        is_value = hides and not equals
        shown.append(mask_credentials(argument))
    return shown


TYPES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text in quotes",
    SecretStr: "text in quotes",
    Path: "a path in quotes",
    list: "text or a list of texts",
    dict: "a JSON object",
}
BOUNDS = {"ge": "of at least", "gt": "above", "le": "at most", "lt": "below"}
FLOAT8 = "float8 is float8=true (whole models) or base_model_precision=float8 (a LoRA's frozen base), over bf16"
FP16_NEEDS = "fp16 would need its loss scaled, bf16 does not"
REASONS = {
    **dict.fromkeys((("mixed_precision", name) for name in ("fp8", "float8")), FLOAT8),
    **dict.fromkeys((("mixed_precision", name) for name in ("fp16", "float16", "half", "16")), FP16_NEEDS),
    ("lr_scheduler", "sine"): "no schedule rises again",
    ("lr_scheduler", "cosine_with_restarts"): "no schedule rises again: cosine falls once",
    **dict.fromkeys(
        [("optimizer", name) for name in ("adamw8bit", "adamw_8bit", "bnb_adamw8bit", "adamw_bf16")],
        "optimizer=adamw with state_layout=split has moments of 8 bits, 6 bytes per weight in all",
    ),
}
"""Values that users of other tools have in their files, and why they are refused."""

# A mistake that a list of settings helps with; the mistake of a value says what to write instead.
UNKNOWN = "unknown setting"
MAX_LENGTH = 80
"""Characters of a value that are shown."""


class InvalidSettings(SettingsError):
    """All mistakes of the settings, and the settings as far as valid, for checks that can still be made."""

    def __init__(
        self,
        settings: Settings,
        invalid: frozenset[str],
        origins: Mapping[str, Origin],
        mistakes: Sequence[Mistake],
        hint: str = "",
    ) -> None:
        hints = (
            "`--help-all` lists every setting" if each.message == UNKNOWN else each.hint * isinstance(each, BrokenRule)
            for each in mistakes
        )
        super().__init__(hint=hint or next(filter(None, hints), ""), mistakes=mistakes)
        self.settings = settings
        self.invalid = invalid
        """Names of settings that are at their default instead."""
        self.origins = origins


def to_mistake(item: Any, field: FieldInfo, origin: Origin) -> Mistake:
    """Convert one of pydantic's errors about what was given for a setting."""
    name, given, file = str(item["loc"][0]), origin.given, origin.file
    if is_secret(name) and not is_reference(item["input"]):
        given = None  # the mistake is in what was written, which the reference does not show
    message, hint = f"use {allowed(field)}", ""
    if item["type"] == "value_error":
        message = str(item["ctx"]["error"])
    elif item["type"] == "finite_number" and len(item["loc"]) > 1:
        path = ".".join(map(str, item["loc"][1::2]))  # every other part is the type that pydantic tried
        return Mistake(
            path if file else f"{name}.{path}", "use a finite number", file or origin.place, shorten(item["input"])
        )
    elif reason := REASONS.get((name, normalize_name(str(given)))):
        message = f"{reason}; {message}"
    elif given is not None:
        hint = did_you_mean(str(given), map(str, choices_of(field.annotation)))
    return Mistake(name, message, origin.place, MASK if is_secret(name) and given is None else shorten(given), hint)


def shown_value(name: str, value: object) -> str:
    """Return a value as it was written, shortened, or dots instead of a secret."""
    return MASK if is_secret(name) and not is_reference(value) else shorten(value)


def shorten(value: object) -> str:
    """Value as it was written, without secrets inside it, and without its middle where it is long."""
    is_json = isinstance(value, dict | list | bool | int | float | None)
    text = (
        repr(value)
        if isinstance(value, str)
        else json.dumps(without_secrets(value), default=str)
        if is_json
        else str(value)
    )
    text = IN_TEXT.sub(rf"\g<1>{MASK}", mask_credentials(text))  # as a whole: a half of an address is not recognized
    return text if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH // 2]}...{text[-MAX_LENGTH // 4 :]}"


def allowed(field: FieldInfo) -> str:
    """Accepted values of a setting: its choices, or its type and bounds."""
    if field.annotation == bool | None:
        return "true, false or auto"
    optional = ", or none" if type(None) in get_args(field.annotation) else ""
    if choices := choices_of(field.annotation):
        return f"one of {', '.join(map(str, choices))}{optional}"
    bounds = bounds_of(field, BOUNDS)
    return TYPES[kind_of(field.annotation)] + (f" {' and '.join(bounds)}" if bounds else "") + optional


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Ask for the closest known word, if there is one."""
    close = closest(word, known)
    return f"did you mean `{close}`?" if close else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """The same question as the end of a sentence: `; did you mean ...?`, or nothing."""
    question = did_you_mean(word, known)
    return f"; {question}" if question else ""


def closest(word: str, known: Iterable[str]) -> str:
    """Return the known word that a word is most like, or nothing."""
    # 0.6 is difflib's own cutoff.
    close = difflib.get_close_matches(word.lstrip("-").replace("-", "_"), list(known), n=1, cutoff=0.6)
    return close[0] if close else ""


def broken(message: str, setting: str, *others: str, hint: str = "") -> BrokenRule:
    """A broken rule about some settings; the page shows it next to the first of them."""
    return BrokenRule(setting, message, hint=hint, others=others)
