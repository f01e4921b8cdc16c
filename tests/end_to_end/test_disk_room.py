"""A run that will not fit on its disk is refused before anything is encoded; one that just fits ends well."""

from __future__ import annotations

import os
import re

MB = 1_000_000
STEPS = ("--train_batch_size=4", "--max_train_steps=4", "--checkpoint_step_interval=1", "--checkpoints_total_limit=3")


def test_the_disk_is_counted_before_the_first_step_and_the_count_is_right(sdxl_flags, train, tmpfs, tmp_path):
    caches = (f"--cache_dir_vae={tmp_path / 'latents'}", f"--cache_dir_text={tmp_path / 'text'}")
    flags = (*sdxl_flags, *STEPS, *caches)
    small = tmpfs("size=22m") / "run"
    said = " ".join(train(small, *flags, code=3).said.split())
    found = re.search(r"has ([\d.]+) MB free, and this run has yet to write ([\d.]+) MB there: at most 4 x", said)
    assert found is not None and "making" not in said and not [*tmp_path.rglob("*.shard")], said
    assert not (small / "checkpoints").exists() and "make room, or give another output_dir" in said
    need = float(found[2]) * MB
    just = tmpfs(f"size={round(need + 2 * MB)}") / "run"  # status, log, metrics, report
    train(just, *flags)
    state = os.statvfs(just)
    assert (just / "pipeline").is_dir() and len([*(just / "checkpoints").iterdir()]) == 3
    assert state.f_bavail * state.f_frsize < 0.5 * need, "the count is not far above what is written"
    again = tmpfs(f"size={round(need - 2 * MB)}") / "run"
    assert "checkpoints_total_limit=2 fits" in " ".join(train(again, *flags, code=3).said.split())
