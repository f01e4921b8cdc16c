"""A config file to start from, a JSON Schema and docs/options.md, all made of the declarations of settings.

Every line of the file says what it does and may be, and where a recipe's number is from.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_origin

from pydantic.fields import FieldInfo

from simpletuner.settings.declared.knob import bounds_of, extra_of, shown_default, type_name
from simpletuner.settings.declared.sections import SECTION_OF, SECTIONS, Settings, setting_fields
from simpletuner.settings.declared.table import GROUPS, Row
from simpletuner.settings.files.config_files import ACCELERATE_CONFIG, PREFIX
from simpletuner.settings.files.formats import toml_line
from simpletuner.settings.values.spelling import SWITCHES, SYNONYMS, choices_of


def json_schema(families: Iterable[str]) -> dict[str, object]:
    """JSON Schema of a config file, for completion and checks in editors of JSON, YAML and TOML.

    Bounds and choices are in JSON Schema's own words; `x-section` and `x-unit` hold what it has none for.
    """
    properties: dict[str, Any] = {"$schema": {"type": "string"}}
    shared: dict[str, object] = {}
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


def property_of(described: dict[str, Any]) -> dict[str, object]:
    """Convert pydantic's schema of a setting; lists and JSON may also be text, and some switches `auto`."""
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
    return HEAD + "".join(part for section in SECTIONS.values() for part in table_of(section.__doc__ or "", section))


def table_of(title: str, section: Any) -> Iterator[str]:
    yield f"\n## {title}\n\n| setting | default | values | what |\n|---|---|---|---|\n"
    for name, field in section.model_fields.items():
        aliases = ", ".join(f"`{alias}`" for alias in extra_of(field, "aliases") or [])
        also = f" Also: {aliases}." if aliases else ""
        default = shown_default(field)
        yield (f"| `{name}` | {f'`{default}`' if default else ''} | {values_of(field)} | {field.description}{also} |\n")


def settings_table() -> str:
    """Return the text of `declared/table.json`: a line per setting."""
    lines = []
    for name, field in setting_fields().items():
        said = {key: value for key, value in row_of(name, field)._asdict().items() if value}
        lines.append(f'"{name}": {json.dumps(said, ensure_ascii=False)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def row_of(name: str, field: FieldInfo) -> Row:
    choices = choices_of(field.annotation)
    is_switch = field.annotation in SWITCHES
    words = ["true", "false", *["auto"] * (field.annotation == bool | None)] if is_switch else list(map(str, choices))
    return Row(
        section=SECTIONS[SECTION_OF[name]].__doc__ or "",
        sentence=field.description or "",
        unit=extra_of(field, "unit"),
        default=shown_default(field),
        metavar="|".join(map(str, choices)) or type_name(field.annotation),
        kind="list" if get_origin(field.annotation) is list else "switch" if is_switch else "",
        # A setting of free text may still have well-known values: those that its synonyms stand for.
        words=words or list(dict.fromkeys(SYNONYMS.get(name, {}).values())),
        aliases=extra_of(field, "aliases"),
    )


def values_of(field: FieldInfo) -> str:
    """Format a setting's type or choices, its bounds and its unit."""
    choices = choices_of(field.annotation)
    kind = ", ".join(f"`{choice}`" for choice in choices) or type_name(field.annotation).lower().replace("|", ", ")
    bounds = bounds_of(field, {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"})
    unit = extra_of(field, "unit")
    return ", ".join([kind, *bounds]) + (f" [{unit}]" if unit else "")


# Groups of settings not listed by name; other sections are about how long and how fast.
GROUP_OF_SECTION = {
    **dict.fromkeys(("model", "lora"), "What to train"),
    "data": "On what",
    **dict.fromkeys(("parallel", "launch"), "On how many GPUs"),
    **dict.fromkeys(("checkpoints", "validation", "logging", "hub"), "What to save and to look at"),
}

# Settings, each with the one that cannot stand beside it or would outrank it.
RIVALS = {"global_batch_size": "gradient_accumulation_steps", "num_train_epochs": "max_train_steps"}

CONFIG_HEAD = """\
#:schema simpletuner.schema.json
# Start with `simpletuner train`; the same command resumes where it stopped. All settings: docs/options.md.
# An editor completes and checks this file after `simpletuner config schema > simpletuner.schema.json` in this folder.

"""


def scaffold_toml(
    settings: Settings, chosen: Mapping[str, object] = {}, notes: Mapping[str, str] = {}, head: Sequence[str] = ()
) -> str:
    """Write a TOML file for a family, a flavour and a number of GPUs.

    `chosen` are further values, `notes` says of some where they are from, and `head` are comments on top.
    """
    num_processes = settings.launch.num_processes
    values = {
        "model_family": settings.model.model_family,
        "model_flavour": settings.model.model_flavour,
        "instance_data_dir": "pictures",
        "max_train_steps": 1000,
        "lr_warmup_steps": 0.05,
        "num_processes": num_processes,
        "fsdp_enable": num_processes > 1 and settings.parallel.zero_stage is None,
        "validation_prompt": ["a photo of a lighthouse at dusk"],
        **{own: None for name, own in RIVALS.items() if name in chosen},
        **chosen,
    }
    top = "".join(f"# {line}".rstrip() + "\n" for line in head)
    groups = [
        f"# {title}\n\n{''.join(lines_of(name, values, notes) for name in names)}"
        for title, names in grouped(values).items()
    ]
    return CONFIG_HEAD + top + "\n" * bool(top) + "\n".join(groups)


def grouped(values: Mapping[str, object]) -> dict[str, list[str]]:
    groups = {title: list(names) for title, names in GROUPS.items()}
    if "data_backend_config" in values:  # names the images in place of the folder
        groups["On what"][0] = "data_backend_config"
    known = {name for names in groups.values() for name in names} | {"instance_data_dir"}
    if values.get("model_type", "full") == "full" and "lora_rank" not in values:
        groups["What to train"].remove("lora_rank")
    for name in (each for each in values if each not in known):
        groups[GROUP_OF_SECTION.get(SECTION_OF[name], "How long, how large, how fast")].append(name)
    return groups


def lines_of(name: str, values: Mapping[str, object], notes: Mapping[str, str]) -> str:
    """A setting with description and note; as a comment where it is empty, unless its default is not."""
    field = setting_fields()[name]
    value = values.get(name, field.default)
    if isinstance(value, Mapping):  # as text: a table would take in what stands below it
        value = json.dumps(value)
    plain = "" if value is None else value if isinstance(value, str | int | float | list) else str(value)
    line = toml_line(name, plain)
    note = f"# {notes[name]}\n" if name in notes else ""
    is_comment = value is None or (plain == "" and field.default == "")  # gpu_ids="" was typed: its default is `all`
    return f"# {field.description} ({values_of(field).replace('`', '')})\n{note}{'# ' * is_comment}{line}\n\n"
