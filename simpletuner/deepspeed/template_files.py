"""DeepSpeed configurations by name: those that come with simpletuner, and the user's own in SIMPLETUNER_HOME."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.settings.errors import nearest
from simpletuner.system.cache_files import user_home

SHIPPED = Path(__file__).with_name("templates")
FOLDER = "deepspeed"
SUFFIX = ".toml"
DESCRIPTION = "description"


@dataclass(frozen=True)
class Template:
    """A configuration with a name; `config` is DeepSpeed's JSON, where `auto` and what is missing is filled in."""

    name: str
    path: Path
    description: str
    config: Mapping[str, Any]

    @property
    def is_own(self) -> bool:
        """Return whether it is the user's."""
        return self.path.parent != SHIPPED


def templates(environment: Mapping[str, str] = os.environ) -> dict[str, Template]:
    """Return all templates by name; a user's own comes before a shipped one of the same name."""
    paths = [path for folder in (SHIPPED, own_folder(environment)) for path in sorted(folder.glob(f"*{SUFFIX}"))]
    return {path.stem: read(path) for path in paths}


def own_folder(environment: Mapping[str, str]) -> Path:
    """Return where a user's own templates lie."""
    return user_home(environment) / FOLDER


def find(name: str, environment: Mapping[str, str] = os.environ) -> Template:
    """Return the template of a name. Raises SettingsError if there is none."""
    known = templates(environment)
    if name not in known:
        raise SettingsError(f"there is no template `{name}`{nearest(name, known)}", "`simpletuner deepspeed templates`")
    return known[name]


def read(path: Path) -> Template:
    """Read a template. Raises SettingsError for a file that is none."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(f"{path} is no template: {reason}", "correct the file, or remove it") from None
    description = str(values.pop(DESCRIPTION, ""))
    return Template(path.stem, path, description, values)


def own_path(name: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the file of a template of the user's own. Raises SettingsError for what cannot name one."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise SettingsError(f"`{name}` cannot name a template", "use letters, digits, `-`, `_` and `.`")
    return own_folder(environment) / f"{name}{SUFFIX}"


def as_toml(config: Mapping[str, Any]) -> str:
    """Return a configuration as the text of a template."""
    import tomli_w

    return tomli_w.dumps(config)
