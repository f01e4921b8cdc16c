"""Datasets that come, go and weigh less, on real ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest


def test_a_run_whose_datasets_come_and_go_resumes_on_other_ranks_as_if_undisturbed(sdxl_flags, shapes, train, tmp_path):
    values = {"instance_data_dir": str(shapes), "resolution": 64, "cache_dir_vae": str(tmp_path / "latents/{id}")}
    first, late = (
        {"id": "first", "end_step": 4, **values},
        {"id": "late", "start_step": 1, "probability": 0.5, **values},
    )
    (tmp_path / "datasets.json").write_text(json.dumps([first, late]))
    file = f"--data_backend_config={tmp_path / 'datasets.json'}"

    def run(output: str, size: int, steps: int, **how) -> Any:
        caches = f"--cache_dir_text={tmp_path / 'text'}"
        flags = (*sdxl_flags[:2], caches, file, f"--train_batch_size={size}", f"--max_train_steps={steps}")
        return train(tmp_path / output, *flags, **how)

    straight = run("straight", 4, 6)
    run("halves", 2, 2, world=2)
    run("halves", 4, 5)
    halves = run("halves", 2, 6, world=2)
    assert halves.losses == pytest.approx(straight.losses, rel=1e-5) and len(halves.losses) == 6
    (tmp_path / "datasets.json").write_text(json.dumps([first]))
    refused = " ".join(run("straight", 4, 7, code=2).said.split())
    assert "no dataset takes part in step 5 (epoch 2)" in refused and "lower max_train_steps" in refused
