from __future__ import annotations

from simpletuner.settings.declared.sections import SECTION_OF, SECTIONS, setting_fields
from simpletuner.settings.declared.table import TABLE
from simpletuner.settings.showing.scaffold import settings_table


def test_the_list_of_settings_is_the_reviewed_one():
    assert settings_table() == TABLE.read_text(encoding="utf-8"), (
        "the settings changed. If that is meant, run `python tests/settings/test_setting_list.py`, "
        "and review and commit the difference of simpletuner/settings/declared/table.json"
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
    TABLE.write_text(settings_table(), encoding="utf-8")
