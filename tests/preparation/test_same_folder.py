from __future__ import annotations

from disk_calls import recorded_calls

from simpletuner.preparation.same_data import create_probe


def test_a_probe_is_synced_before_others_look_for_it(tmp_path):
    """s3fs 1.90 creates no object for a file that is held open until it is synced: others looked for 12 s."""
    with recorded_calls() as calls, create_probe(tmp_path) as name:
        assert ("sync", str(tmp_path / name), 0) in calls
