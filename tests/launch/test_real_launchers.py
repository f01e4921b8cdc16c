"""Hydra, of the launchers that others wrote, of which the campaign runs more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "campaigns" / "real"))

from installing import NotHere
from launchers import examine


def test_hydra_trains_on_all_ranks_and_sigterm_to_it_saves(sdxl, tmp_path):
    model = [f"--pretrained_model_name_or_path={sdxl}", "--gradient_checkpointing=false"]
    try:
        found = examine("hydra", tmp_path, install=False, rows=["SIGTERM to it"], model=model)
    except NotHere as error:
        pytest.skip(str(error))
    assert found == {"ranks": "2", "SIGTERM to it": "saved, 143"}
