"""Names of trackers as text: `none`, one, or several that are separated by commas."""

from __future__ import annotations

from importlib.util import find_spec

from simpletuner.errors import EnvironmentNotReady
from simpletuner.extras import install_command
from simpletuner.settings.values.spelling import normalize_name

TRACKERS = {
    "tensorboard": "pip install tensorboard",
    "wandb": install_command("wandb"),
    "trackio": "pip install trackio",
    "swanlab": "pip install swanlab",
}
"""Commands that install each tracker."""

OTHERS = ("comet_ml", "mlflow", "custom_tracker", "simpletuner", "clearml", "aim")
"""Trackers of other tools, which users have in their files."""


def normalize_trackers(text: str) -> str:
    """Return the trackers in one spelling, each once. Raises ValueError for what is no tracker."""
    names = [normalize_name(word) for word in text.split(",") if word.strip()]
    if names in ([], ["none"]):
        return "none"
    for name in names:
        if name in OTHERS:
            raise ValueError(f"{name} is not supported; use one or several of {','.join(TRACKERS)}")
        if name not in TRACKERS:
            raise ValueError(f"use none, or one or several of {','.join(TRACKERS)}")
    return ",".join(dict.fromkeys(names))


def check_installed(text: str) -> None:
    """Raise EnvironmentNotReady for a tracker whose package is not installed."""
    for name in parse_trackers(text):
        if find_spec(name) is None:
            raise EnvironmentNotReady(f"report_to={name} needs a package that is not installed", TRACKERS[name])


def parse_trackers(text: str) -> list[str]:
    """Return the names in a normalized text."""
    return [name for name in text.split(",") if name in TRACKERS]
