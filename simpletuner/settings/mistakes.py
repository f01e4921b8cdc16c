"""Say what is wrong with a value: the value, its source, what is allowed, and the nearest name."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from pydantic.fields import FieldInfo

from simpletuner.settings.knob import bounds_of, kind_of
from simpletuner.settings.spelling import choices_of, normalize_name

KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text in quotes",
    Path: "a path in quotes",
    list: "text or a list of texts",
    dict: "a JSON object",
}
BOUNDS = {"ge": "of at least", "gt": "above", "le": "at most", "lt": "below"}
EIGHT_BIT = "this version has no 8-bit optimizers: it shares out float32 state over the ranks instead (fsdp_enable)"
ONLINE = "this version has no online trackers; tensorboard writes files that `tensorboard --logdir` shows"
NOT_HERE = {
    **{("optimizer", name): EIGHT_BIT for name in ("adamw8bit", "adam8bit", "adamw_8bit", "lion8bit", "bnb_adamw8bit")},
    **{("report_to", name): ONLINE for name in ("wandb", "comet_ml", "mlflow", "swanlab", "all")},
}
"""Values that users of other tools have in their files, and why they are refused."""

LONGEST = 80
"""Letters of a value that are shown."""


def sentence(item: Any, field: FieldInfo, given: Any, place: object) -> str:
    """Turn one of pydantic's findings about what was given for a knob into a sentence."""
    said = f"{item['loc'][0]} = {shortened(given)} ({place})"
    if item["type"] == "value_error":
        return f"{said}: {item['ctx']['error']}"
    if why := NOT_HERE.get((str(item["loc"][0]), normalize_name(str(given)))):
        return f"{said}: {why}; use {allowed(field)}"
    return f"{said}: use {allowed(field)}{nearest(str(given), map(str, choices_of(field.annotation)))}"


def shortened(value: Any) -> str:
    """Return a value as it was written, the middle left out where it is long."""
    is_json = isinstance(value, dict | list | bool | int | float | None)
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=str) if is_json else str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}...{text[-LONGEST // 4 :]}"


def allowed(field: FieldInfo) -> str:
    """Return what a knob accepts: its choices, or its kind and bounds."""
    optional = ", or none" if type(None) in get_args(field.annotation) else ""
    if choices := choices_of(field.annotation):
        return f"one of {', '.join(map(str, choices))}{optional}"
    bounds = bounds_of(field, BOUNDS)
    return KINDS[kind_of(field.annotation)] + (f" {' and '.join(bounds)}" if bounds else "") + optional


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean ...?` for the closest known word, or nothing."""
    close = closest(word, known)
    return f"; did you mean `{close}`?" if close else ""


def closest(word: str, known: Iterable[str]) -> str:
    """Return the known word that a word is most like, or nothing."""
    close = difflib.get_close_matches(word.lstrip("-").replace("-", "_"), list(known), n=1, cutoff=0.6)
    return close[0] if close else ""
