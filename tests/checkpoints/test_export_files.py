"""Files of a base model that an export copies: regular ones, inside of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from simpletuner.checkpoints.export import check_copyable
from simpletuner.errors import EnvironmentNotReady


def test_what_is_no_file_of_the_base_model_is_not_copied(tmp_path: Path):
    base, outside = tmp_path / "base", tmp_path / "outside"
    base.mkdir()
    outside.write_text("secret")
    (base / "config.json").write_text("{}")
    (base / "alias.json").symlink_to("config.json")
    for name in ("config.json", "alias.json"):
        check_copyable(base / name, (base,))
    os.mkfifo(base / "pipe")
    (base / "leak").symlink_to(outside)
    (base / "gone").symlink_to("nowhere")
    for name, said in (("pipe", "is not a regular file"), ("leak", "is outside"), ("gone", "leads nowhere")):
        with pytest.raises(EnvironmentNotReady, match=said):
            check_copyable(base / name, (base,))
