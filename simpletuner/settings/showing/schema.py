"""Describe every setting: a JSON Schema for editors and pages, docs/options.md, and a config file to start from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic.fields import FieldInfo

from simpletuner.settings.declared.knob import bounds_of, extra_of, shown_default, type_name
from simpletuner.settings.declared.sections import SECTIONS
from simpletuner.settings.files.config_files import PREFIX
from simpletuner.settings.resolving.sources import ACCELERATE_CONFIG
from simpletuner.settings.values.spelling import choices_of


def json_schema(families: Iterable[str]) -> dict[str, Any]:
    """Return the JSON Schema of a config file, by which an editor completes and checks JSON, YAML and TOML.

    Bounds and choices are in JSON Schema's own words; `x-section` and `x-unit` hold what it has none for.
    """
    properties: dict[str, Any] = {"$schema": {"type": "string"}}
    shared: dict[str, Any] = {}
    for section in SECTIONS.values():
        described = section.model_json_schema()
        shared |= described.get("$defs", {})
        for name, value in described["properties"].items():
            properties[name] = value = property_of(value) | {"x-section": section.__doc__}
            older = {"description": f"Older name of {name}.", "deprecated": True}
            properties |= dict.fromkeys(extra_of(section.model_fields[name], "aliases"), value | older)
    properties["model_family"]["examples"] = list(families)
    properties[ACCELERATE_CONFIG] = {"type": "string", "description": "An accelerate file to read; `none`: no file."}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "simpletuner settings",
        "type": "object",
        "properties": properties,
        "patternProperties": {"^--": {}},  # leading dashes are accepted, too
        "additionalProperties": False,
        "$defs": shared,
    }


def property_of(described: dict[str, Any]) -> dict[str, Any]:
    """Convert pydantic's description of a setting; lists and JSON may be text, too, and some switches `auto`."""
    kept = {key: value for key, value in described.items() if key not in ("unit", "aliases", "title")}
    unit = described["unit"]
    text = {"type": "string"}
    if described.get("type") == "array":
        kept["anyOf"] = [{key: kept.pop(key) for key in ("type", "items")}, text]
    elif any(option.get("type") == "object" for option in described.get("anyOf", ())):
        kept["anyOf"] = [*kept["anyOf"], text]
    elif described.get("anyOf") == [{"type": "boolean"}, {"type": "null"}]:
        kept["anyOf"] = [*kept["anyOf"], {"const": "auto"}]
    if unit:
        kept |= {"x-unit": unit, "description": f"{described['description']} [{unit}]"}
    return kept


HEAD = f"""\
# Settings

Every setting is a flag (`--seed=1`), an environment variable (`{PREFIX}SEED=1`) and a key of a config file
(`seed = 1`). Weakest first: default, `config/config.env`, accelerate's file, config file, environment, flag.
Spelling is tolerant (any case, dashes for underscores, `yes`/`on`/`true`); everything else is strict.
`simpletuner config show` says where each value came from. This page is written by `simpletuner config docs`.
"""


def options_page() -> str:
    """docs/options.md: one table per section."""
    return HEAD + "".join(part for section in SECTIONS.values() for part in table_of(section.__doc__ or "", section))


def table_of(title: str, section: Any) -> Iterator[str]:
    yield f"\n## {title}\n\n| setting | default | values | what |\n|---|---|---|---|\n"
    for name, field in section.model_fields.items():
        aliases = ", ".join(f"`{alias}`" for alias in extra_of(field, "aliases") or [])
        also = f" Also: {aliases}." if aliases else ""
        default = shown_default(field)
        yield (f"| `{name}` | {f'`{default}`' if default else ''} | {values_of(field)} | {field.description}{also} |\n")


def values_of(field: FieldInfo) -> str:
    """Format a setting's type or choices, its bounds and its unit."""
    choices = choices_of(field.annotation)
    kind = ", ".join(f"`{choice}`" for choice in choices) or type_name(field.annotation).lower().replace("|", ", ")
    bounds = bounds_of(field, {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"})
    unit = extra_of(field, "unit")
    return ", ".join([kind, *bounds]) + (f" [{unit}]" if unit else "")
