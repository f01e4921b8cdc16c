"""Ranks of two machines that have mounts of their own of one folder, which hear late of what the other one changes."""

from __future__ import annotations

import shutil

from conftest import SMALL
from flags import last_wins
from real_mounts import in_own_view, or_skipped, sshfs_views

from simpletuner.checkpoints.layout import load_checkpoint

LATE = ("dcache_timeout=2", "dcache_stat_timeout=2", "dcache_dir_timeout=2", "dcache_link_timeout=2")
"""Seconds for which a listing and sizes are kept, 20 by default."""


def test_ranks_find_what_others_have_written_although_it_is_listed_late(starter, sdxl_flags, shapes, tmp_path):
    share = tmp_path / "share"
    share.mkdir()
    with or_skipped(), sshfs_views(tmp_path, *LATE) as views:
        shutil.copytree(shapes, tmp_path / "below" / "data")
        places = [f"--output_dir={share / 'out'}", f"--instance_data_dir={share / 'data'}"]
        flags = last_wins([*SMALL, *sdxl_flags, *places, "--max_train_steps=2", "--train_batch_size=2"])
        run = starter.start(in_own_view, 2, [str(view) for view in views], str(share), ["train", *flags])
        assert run.wait() == [0, 0], run.said
    out = tmp_path / "below" / "out"
    assert load_checkpoint(out / "checkpoints" / "checkpoint-000002").step == 2
    assert (out / "pipeline" / "model_index.json").exists()
