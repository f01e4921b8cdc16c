from __future__ import annotations

from pathlib import Path

from simpletuner.settings.schema import options_page
from simpletuner.settings.sections import setting_fields

PAGE = Path(__file__).parents[2] / "docs" / "options.md"


def test_the_page_of_all_settings_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == options_page(), "run `simpletuner config docs > docs/options.md`"


def test_the_page_has_a_row_for_every_setting():
    page = options_page()
    assert [name for name in setting_fields() if f"| `{name}` |" not in page] == []
