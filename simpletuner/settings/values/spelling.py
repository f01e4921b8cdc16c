"""Tolerant spelling, applied to every source before validation, and names in braces in the paths of cache
folders.

`{env:NAME}` is replaced in every path, where `~` is (`system/files/paths.py`).
"""

from __future__ import annotations

import json
import math
import re
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

WORDS_FOR_TRUE = ("true", "yes", "on", "1", "y", "t")
WORDS_FOR_FALSE = ("false", "no", "off", "0", "n", "f")
# Words that reset an optional setting, so that a flag can undo a file's value.
WORDS_FOR_NOTHING = ("none", "null", "")

TEXTS = (str, str | None)
SWITCH_WORDS = (*WORDS_FOR_TRUE, *WORDS_FOR_FALSE, "auto")

# Types of settings that a flag without a value sets; optional ones are then decided by the run.
SWITCHES = (bool, bool | None)

SYNONYMS: dict[str, dict[str, str]] = {
    "fsdp_version": {"v1": "1", "1.0": "1", "v2": "2", "2.0": "2", "fsdp1": "1", "fsdp2": "2"},
    "fsdp_state_dict_type": {"sharded": "SHARDED_STATE_DICT", "full": "FULL_STATE_DICT"},
    "fsdp_auto_wrap_policy": {
        "transformer": "TRANSFORMER_BASED_WRAP",
        "transformer_based_wrap": "TRANSFORMER_BASED_WRAP",
        "size": "SIZE_BASED_WRAP",
        "size_based_wrap": "SIZE_BASED_WRAP",
        "none": "NO_WRAP",
        "no_wrap": "NO_WRAP",
    },
    "fsdp_reshard_after_forward": {"full_shard": "true", "shard_grad_op": "false"},
    "context_parallel_comm_strategy": {"all_to_all": "alltoall", "ulysses": "alltoall", "all_gather": "allgather"},
    "dynamo_backend": {"none": "no", "false": "no"},
    "dynamo_mode": {"": "default", "none": "default"},
    "mixed_precision": {"bfloat16": "bf16", "fp32": "no", "float32": "no", "none": "no", "false": "no"},
    "vae_dtype": {"default": "fp32", "float32": "fp32", "bfloat16": "bf16"},
    "prediction_type": {"v": "v_prediction", "eps": "epsilon"},
    "caption_strategy": {"instance_prompt": "instanceprompt", "text_file": "textfile"},
    "model_type": {"full_rank": "full"},
    "base_model_precision": {
        "int8_torchao": "int8",
        "int8_quanto": "int8",
        "fp8_torchao": "float8",
        "fp8": "float8",
        "none": "no_change",
    },
    "resume_from_checkpoint": {"latest": "latest", "none": "none"},
}


def choices_of(annotation: object) -> tuple[object, ...]:
    """The accepted values of a Literal annotation, looking through Optional; empty for other types."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(choice for argument in get_args(annotation) for choice in choices_of(argument))
    return ()


def normalize_name(value: object) -> str:
    """Canonical form to compare spellings: lower case, dashes as underscores."""
    return str(value).strip().lower().replace("-", "_")


def normalize_value(name: str, field: FieldInfo, value: object) -> Any:
    """Canonical spelling of `value`, or `value` itself if unknown, for validation to refuse."""
    word = SYNONYMS.get(name, {}).get(normalize_name(value), value)
    if field.annotation == bool | None and normalize_name(value) == "auto":
        return None
    if field.annotation in SWITCHES and normalize_name(value) not in WORDS_FOR_NOTHING:
        return (
            True
            if normalize_name(word) in WORDS_FOR_TRUE
            else False
            if normalize_name(word) in WORDS_FOR_FALSE
            else value
        )
    if type(None) in get_args(field.annotation) and normalize_name(value) in WORDS_FOR_NOTHING:
        return None
    if get_origin(field.annotation) is list and isinstance(value, str | list):
        return parse_list(value) if isinstance(value, str) else value
    choices = choices_of(field.annotation)
    # str(True) would turn a mistake into the text "True".
    if isinstance(value, bool) and not choices:
        return value
    # YAML and TOML read `variant: 16` as a number.
    if isinstance(value, int) and field.annotation in TEXTS:
        return str(value)
    if isinstance(value, str | int | float):
        return next((choice for choice in choices if normalize_name(choice) == normalize_name(word)), word)
    return value


def parse_list(text: str) -> list[object]:
    """Parse a JSON list; any other text is the only item."""
    if text.lstrip().startswith("["):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return [text]
    return [text]


def as_text(value: object) -> str:
    """Write a value as a flag or variable holds it; `normalize_value` reads it back."""
    if isinstance(value, list) and len(value) == 1 and value[0] and not value[0].lstrip().startswith("["):
        return value[0]
    if isinstance(value, bool | list | dict):
        return json.dumps(value, ensure_ascii=False)
    return "none" if value is None else str(value)


def is_equal(one: Any, other: Any) -> bool:
    # A learning rate may be the product of two others.
    both_numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return math.isclose(one, other, rel_tol=1e-9) if both_numbers else one == other


PLACEHOLDER = re.compile(r"\{([\w:]+)\}")
OF_A_RUN = ("model_family", "output_dir")
OF_A_DATASET = (*OF_A_RUN, "id")


def only_placeholders(*known: str) -> Callable[[Any], Any]:
    """Return a validator that raises ValueError for a path with any other name in braces."""

    def check(path: Path | None) -> Path | None:
        if unknown := next((name for name in PLACEHOLDER.findall(str(path or "")) if name not in known), ""):
            names = " and ".join(f"{{{name}}}" for name in known)
            raise ValueError(f"{{{unknown}}} stands for nothing here; {names} do: write the path itself")
        return path

    return check


def fill(path: Path, values: Mapping[str, object]) -> Path:
    """Replace names in braces by their values; other names stay."""
    return Path(PLACEHOLDER.sub(lambda found: str(values.get(found[1], found[0])), str(path)))
