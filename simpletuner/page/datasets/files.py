"""The only way from the name of an image in a request to its file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.page.folders import Folders
from simpletuner.system.files.paths import ENVIRONMENT


def why_hidden(folders: Folders, facts: Mapping[str, Any]) -> str:
    """Return why nothing that a dataset holds is shown: it is read from outside of the page's folders."""
    outside = [place for place in facts["places"] if not folders.holds(place)]
    return f"{outside[0]} is not in the folders of the page: start it with --folder to see more." if outside else ""


def why_no_pictures(facts: Mapping[str, Any]) -> str:
    """Return why a dataset is shown without pictures; empty where it has some."""
    if facts["noun"] != "image":
        return f"Of {facts['noun']}s no pictures are shown."
    return "" if facts["folder"] else "Its images are in no folder of this machine: they are listed without pictures."


def file_in(folders: Folders, facts: Mapping[str, Any], name: str) -> Path:
    """Return the real path of a file of a dataset. Raises SettingsError outside the page's folders."""
    if not facts["folder"]:
        raise SettingsError(f"{name} is in no folder of this machine", "its dataset is read from elsewhere")
    if ENVIRONMENT.search(name):  # which `resolve` would take for a variable
        raise SettingsError(f"{name} has the form of a variable", "rename it")
    return folders.resolve(Path(facts["folder"]) / name)
