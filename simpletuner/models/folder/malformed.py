"""Malformed model folders: every error of a library becomes one sentence that names the component."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from simpletuner.errors import EnvironmentNotReady, is_out_of_memory, out_of_memory, without_errno
from simpletuner.system.files.regular_files import read_file

RAISED = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(RuntimeError, ImportError, AssertionError, MemoryError),  # RecursionError is a RuntimeError
    *(SafetensorError, StrictDataclassError),
)
"""Exceptions of json, diffusers, transformers, safetensors and torch for a malformed folder."""

MODULE_COUNT = re.compile(r"(^|_)(layers?|blocks|depth)(_|$)")
"""Keys of a config that say how many modules are built."""

# The deepest published models have some hundreds of layers; a loop over 1e9 would never end.
MAX_MODULES = 10_000

WIDTH = re.compile(r"(^|_)(dims?|axes|channels|heads|size|width)(_|$)")
"""Keys of a config that say how large something is that is built, such as axes_dims_rope."""

# The largest vocabularies have some 100,000 entries; tables of 1e9 take minutes and all memory.
MAX_WIDTH = 2_000_000

MAX_REASON_LENGTH = 300
CHECK_COPY = "copy or download the model again, or check pretrained_model_name_or_path"


@contextmanager
def translate_load_errors(component: Path) -> Iterator[None]:
    """Turn any error of a library in the block into an EnvironmentNotReady naming the component."""
    try:
        yield
    except Exception as error:
        # tokenizers raises plain Exception, without a class of its own. Any other error is a bug of ours.
        if type(error) is not Exception and not isinstance(error, RAISED):
            raise
        if is_out_of_memory(error):
            raise out_of_memory() from error
        hint = "install the package that it needs" if isinstance(error, ImportError) else CHECK_COPY
        raise EnvironmentNotReady(f"{component} cannot be opened: {reason(error)}", hint) from error


def reason(error: Exception) -> str:
    """The first line of a library's message."""
    if isinstance(error, KeyError):
        return f"there is no `{error.args[0] if error.args else ''}`"
    lines = [line.strip() for line in without_errno(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:MAX_REASON_LENGTH]


def read_json(path: Path) -> dict[str, Any]:
    """Read a component's JSON file. Raises EnvironmentNotReady if missing, damaged, or not an object."""
    hint = "pretrained_model_name_or_path must be a pipeline folder in diffusers format"
    try:
        content = json.loads(read_file(path))
    except OSError as error:
        raise EnvironmentNotReady(f"cannot read {path}: {error.strerror}", hint) from None
    except (ValueError, RecursionError) as error:
        raise EnvironmentNotReady(f"cannot read {path}: {reason(error)}", hint) from None
    if not isinstance(content, dict):
        raise EnvironmentNotReady(f"cannot read {path}: it holds no JSON object", hint)
    return content


def read_config(path: Path) -> dict[str, Any]:
    """Read a model's config.json. Raises EnvironmentNotReady, also for more modules than any model has."""
    config = read_json(path)
    refuse_too_many_modules(config, path)
    return config


def refuse_too_many_modules(config: Mapping[str, object], source: object) -> None:
    """Raise EnvironmentNotReady for a config with modules too many or too large ever to be built."""
    for name, value in numbers_in(config):
        too_many = MODULE_COUNT.search(name) and value > MAX_MODULES
        if too_many or (WIDTH.search(name) and value > MAX_WIDTH):
            raise EnvironmentNotReady(f"{source} is damaged: {name} = {value:g} is more than any model has", CHECK_COPY)


def numbers_in(value: object, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number in a config at any depth, with its key."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from numbers_in(item, str(key))
    elif isinstance(value, list):
        for item in value:
            yield from numbers_in(item, name)
    elif isinstance(value, int | float):
        yield name, value
