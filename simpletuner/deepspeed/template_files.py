"""Named DeepSpeed configurations: those shipped with simpletuner, and the user's own in SIMPLETUNER_HOME."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.settings.declared.errors import nearest
from simpletuner.system.files.cache_files import user_home
from simpletuner.system.files.regular_files import read_file

SHIPPED_FOLDER = Path(__file__).with_name("templates")
USER_FOLDER = "deepspeed"
SUFFIX = ".toml"
DESCRIPTION = "description"


@dataclass(frozen=True)
class DeepSpeedTemplate:
    """A named configuration; `config` is DeepSpeed's JSON, in which `auto` and missing keys are filled in."""

    name: str
    path: Path
    description: str
    config: Mapping[str, Any]

    @property
    def is_shipped(self) -> bool:
        return self.path.parent == SHIPPED_FOLDER


def load_templates(environment: Mapping[str, str] = os.environ) -> dict[str, DeepSpeedTemplate]:
    """Read all templates, by name; the user's own replace shipped ones of the same name."""
    folders = (SHIPPED_FOLDER, user_folder(environment))
    paths = [path for folder in folders for path in sorted(folder.glob(f"*{SUFFIX}"))]
    return {path.stem: read_template(path) for path in paths}


def user_folder(environment: Mapping[str, str]) -> Path:
    return user_home(environment) / USER_FOLDER


def find_template(name: str, environment: Mapping[str, str] = os.environ) -> DeepSpeedTemplate:
    """Return the template of that name. Raises SettingsError if there is none."""
    known = load_templates(environment)
    if name not in known:
        raise SettingsError(f"there is no template `{name}`{nearest(name, known)}", "`simpletuner deepspeed templates`")
    return known[name]


def read_template(path: Path) -> DeepSpeedTemplate:
    """Read a template. Raises SettingsError for a file that is not one."""
    try:
        values = tomllib.loads(read_file(path).decode())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(f"{path} is not a template: {reason}", "correct the file, or remove it") from None
    description = str(values.pop(DESCRIPTION, ""))
    return DeepSpeedTemplate(path.stem, path, description, values)


def user_template_path(name: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the file of a user's own template. Raises SettingsError for an invalid name."""
    # Neither separators nor a leading dot: the name becomes a path below the user's folder.
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise SettingsError(f"`{name}` cannot name a template", "use letters, digits, `-`, `_` and `.`")
    return user_folder(environment) / f"{name}{SUFFIX}"


def format_template(config: Mapping[str, Any]) -> str:
    import tomli_w

    return tomli_w.dumps(config)
