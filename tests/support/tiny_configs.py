"""Configs of the components of tiny models, to build variants of them."""

from __future__ import annotations

from typing import Any

from simpletuner.models.catalog.registry import load_preset


def tiny_config(family: str, component: str) -> dict[str, Any]:
    preset = load_preset(family)
    assert preset is not None and preset.tiny is not None
    return {name: value for name, value in preset.tiny.components[component].items() if name != "class_name"}
