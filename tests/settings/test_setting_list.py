from __future__ import annotations

import types
from pathlib import Path
from typing import Union, get_args, get_origin

from simpletuner.settings.declared.sections import SECTION_OF, SECTIONS, setting_fields

GOLDEN = Path(__file__).with_name("setting_list.txt")


def listed() -> str:
    """One line per setting: name: type: default."""
    return "".join(
        f"{name}: {type_name(field.annotation)}: {shown(field.default)}\n" for name, field in setting_fields().items()
    )


def shown(default: object) -> str:
    return str(default) if isinstance(default, Path) else repr(default)


def type_name(annotation: object) -> str:
    if get_origin(annotation) in (Union, types.UnionType):
        return " | ".join(type_name(part) for part in get_args(annotation))
    if annotation is type(None):
        return "None"
    return (
        annotation.__name__
        if type(annotation) is type
        else str(annotation).removeprefix("typing.").replace("pathlib._local.", "pathlib.")
    )


def test_the_list_of_settings_is_the_reviewed_one():
    assert listed() == GOLDEN.read_text(encoding="utf-8"), (
        "the settings changed. If that is meant, run `python tests/settings/test_setting_list.py`, "
        "and review and commit the difference of tests/settings/setting_list.txt"
    )


def test_a_setting_lies_in_one_section_and_explains_itself_in_one_sentence():
    assert len(SECTION_OF) == sum(len(section.model_fields) for section in SECTIONS.values())
    for name, field in setting_fields().items():
        assert field.description, name
        assert field.description.endswith("."), name
        assert field.description[0].isupper() or field.description[0] == "`", name


def test_every_default_is_accepted_by_its_own_setting():
    for section in SECTIONS.values():
        section(**{name: field.default for name, field in section.model_fields.items()})


if __name__ == "__main__":
    GOLDEN.write_text(listed(), encoding="utf-8")
