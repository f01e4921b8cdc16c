from __future__ import annotations

from pathlib import Path

from simpletuner.settings.declared.sections import setting_fields
from simpletuner.settings.showing.scaffold import options_page

PAGE = Path(__file__).parents[2] / "docs" / "options.md"


def test_the_page_of_all_settings_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == options_page(), "run `simpletuner config docs > docs/options.md`"


def test_the_page_has_a_row_for_every_setting():
    page = options_page()
    assert [name for name in setting_fields() if f"| `{name}` |" not in page] == []
