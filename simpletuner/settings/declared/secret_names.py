"""Names of settings with secret values, and the dots that replace these."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import SecretStr

from simpletuner.credentials import MASK, mask_credentials
from simpletuner.settings.declared.knob import kind_of
from simpletuner.settings.declared.sections import setting_fields
from simpletuner.settings.files.secret_values import is_reference
from simpletuner.settings.values.spelling import normalize_name

# Not `tokenizer`, nor sd-scripts' class_tokens, keep_tokens and max_token_length.
SECRET = re.compile(r"(?<!class_)(?<!keep_)token(?!izer|_length)|secret|access_key|password|webhook", re.IGNORECASE)
"""Names of what is never shown, among those that are no settings."""


def is_secret(name: object) -> bool:
    """Return whether what has this name is never shown: a setting of a secret type, or a name of others that says
    so."""
    field = setting_fields().get(str(name))
    return kind_of(field.annotation) is SecretStr if field else SECRET.search(str(name)) is not None


def without_secrets(value: Any) -> Any:
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
