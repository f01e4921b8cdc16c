"""What all ranks of a machine compute alike is held once."""

from __future__ import annotations

import json

import sharing


def test_ranks_of_a_machine_map_one_file_and_others_keep_their_own(starter, tmp_path):
    (tmp_path / "tmp").mkdir()
    report = tmp_path / "report.json"
    run = starter.start(sharing.share_in, 2, str(tmp_path / "tmp"), str(report))
    assert run.wait() == [0, 0], run.said
    first, second = json.loads(report.read_text())
    assert first["equal"] == second["equal"] != "own"
    assert first["other"] != "own" and second["other"] == "own", "another rank's numbers are never taken for one's own"
    assert "own" not in (first["apart"], second["apart"]) and first["apart"] != second["apart"]
    assert first["small"] == second["small"] == "own"
    assert first["left"] == []
