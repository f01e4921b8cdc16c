"""The cheapest rows of tests/campaigns/real/mounts.py, on real mounts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from real_mounts import or_skipped

sys.path.append(str(Path(__file__).parents[2] / "campaigns" / "real"))
import mounts


@pytest.mark.parametrize(("name", "said"), [("overlay", "of a lower layer EXDEV"), ("bindfs", "2 names, one inode")])
def test_a_row_is_as_in_the_table_and_no_reader_of_ours_misses_a_file(name, said, tmp_path, monkeypatch):
    monkeypatch.setattr(mounts, "REPLACING_SECONDS", 0.5)
    faults: list[str] = []
    try:
        with or_skipped():
            row = mounts.rows(name, tmp_path, False, faults)
    except mounts.NotHere as why:
        pytest.skip(str(why))
    assert faults == []
    assert row[0].startswith(name) and said in " ".join(row)
    assert "new by name at once, listed at once, removed by name at once, from the list at once" in row
    table = (Path(__file__).parents[3] / "docs" / "nfs.md").read_text()
    assert f"\n| {name}" in table
